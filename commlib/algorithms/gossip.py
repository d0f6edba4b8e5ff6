"""Averaging of weights in random pairs."""

from __future__ import annotations

from commlib.algorithms.neighbours import NeighbourAveraging
from commlib.codecs.base import BlockCodec
from commlib.codecs.registry import block_codec
from commlib.primitives.mixers import FullPrecisionMixer, QuantizedMixer
from commlib.primitives.topology import RandomMatching


class Gossip(NeighbourAveraging):
    """Pairs the ranks at random every `period` steps; the two ranks of each pair average their weights.

    With i and j a pair (with an odd number of ranks, one has no partner):

        x_i, x_j <- (x_i + x_j) / 2                          without a codec
        x_i <- x_i + (C(x_j) - C(x_i)) / 2, x_j likewise     with codec C: the mean of the two is preserved

    Args:
        period: Optimizer steps between averages.
        seed: Seed of the pairs; the same on all ranks.
        codec: Block codec or its name. It encodes values, not differences, and its error limits how close replicas
            become; use an accurate codec such as `Int8` or `BF16`.
        overlap: Whether a round runs during the next step's forward and backward. Its effect is added at the end of
            that step.
        hierarchical: Whether weights are first averaged inside each node, and nodes are paired.

    Paper: Boyd et al., "Randomized gossip algorithms" (2006), with as many pairs at once as possible and local steps in
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
