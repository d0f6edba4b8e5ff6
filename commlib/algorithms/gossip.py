"""Averaging of weights in random pairs."""

from __future__ import annotations

from commlib.algorithms.neighbours import NeighbourAveraging
from commlib.codecs.base import BlockCodec
from commlib.codecs.registry import block_codec
from commlib.primitives.mixers import FullPrecisionMixer, QuantizedMixer
from commlib.primitives.topology import RandomMatching


class Gossip(NeighbourAveraging):
    """Every `period` steps the ranks are paired at random, and the two of each pair average their weights.

    With i and j a pair; of an odd number of ranks one rests:

        x_i, x_j <- (x_i + x_j) / 2                          without a codec
        x_i <- x_i + (C(x_j) - C(x_i)) / 2, x_j likewise     with codec C: the mean of the two stays what it was

    Args:
        period: Optimizer steps from one average to the next.
        seed: Of the pairs; the same on all ranks.
        codec: Any block codec or its name. Replicas come no nearer to each other than its error; fine codecs of values,
            not of differences, are asked for: `Int8`, `BF16`.
        overlap: Whether a round runs while the next step's forward and backward do; its effect is added at that step's
            end.
        hierarchical: Whether weights are averaged inside each node first, and nodes are paired.

    Paper: Boyd et al., "Randomized gossip algorithms" (2006), as many pairs at once as there can be, and local steps
    between; with a codec the compensating rule of Carli et al., "Gossip consensus algorithms via quantized
    communication" (2010).
    Deviations: pairs are drawn from a shared seed, not by each rank.
    """

    made_for = "sgd"
    keeps_mean = True

    def __init__(
        self,
        period: int = 1,
        seed: int = 0,
        codec: BlockCodec | str | None = None,
        overlap: bool = True,
        hierarchical: bool = False,
    ) -> None:
        self.codec = None if codec is None else block_codec(codec)
        mixer = FullPrecisionMixer() if self.codec is None else QuantizedMixer(self.codec)
        super().__init__(RandomMatching(seed), mixer, period=period, overlap=overlap, hierarchical=hierarchical)
        self.portable = codec is None
