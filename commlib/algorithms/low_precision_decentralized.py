"""Averaging of weights with neighbours, by compressed differences: CHOCO-SGD and DCD-PSGD."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from commlib.algorithms.neighbours import NeighbourAveraging
from commlib.codecs.base import BlockCodec
from commlib.codecs.integer import Int8
from commlib.codecs.registry import block_codec
from commlib.errors import ConfigError
from commlib.primitives.mixers import DifferenceMixer
from commlib.primitives.topology import Topology


class LowPrecisionDecentralized(NeighbourAveraging):
    """Each rank trains on its own gradients and averages its weights with its neighbours', sending differences.

    With C the codec, W the mixing matrix, x_i the weights after the optimizer's step, and x^_j what the neighbours of j
    know of x_j; after each step,

        choco:  x^_j <- x^_j + C(x_j - x^_j) for all j,    x_i <- x_i + s sum_j W_ij (x^_j - x^_i)
        dcd:    z_j = sum_k W_jk (x^_k - x^_j) + x_j - x^_j,  x^_j <- x^_j + C(z_j) for all j,  x_i <- x^_i

    A rank keeps x^_i and the sum over j of W_ij (x^_j - x^_i), not a replica of each neighbour. The first differences,
    from x^ = 0, are sent uncompressed.

    Args:
        codec: Any block codec or its name; `Int8` by default. `choco` takes coarse ones too, with a smaller consensus
            step; `dcd` diverges with them.
        topology: A name or a `Topology`, the same in every step: "ring", "exponential", "fully_connected", `Graph`,
            `MixingMatrix`.
        method: "choco" or "dcd".
        consensus_step: s above, for choco: from 0 (excluded) to 1.
        period: Optimizer steps from one average to the next.
        overlap: Whether a round runs while the next step's forward and backward do; its effect is added at that step's
            end. Without it the equations are the papers'.
        hierarchical: Whether weights are averaged inside each node first, in full precision, and the graph is one of
            nodes.

    Paper: Koloskova et al., "Decentralized stochastic optimization and gossip algorithms with compressed communication"
    (ICML 2019), CHOCO-SGD; Tang et al., "Communication compression for decentralized training" (NeurIPS 2018),
    algorithm 1; BAGUA's decentralized low precision is dcd on a ring.
    Deviations: any optimizer instead of plain SGD; the uncompressed start; overlap.
    """

    made_for = "sgd"

    def __init__(
        self,
        codec: BlockCodec | str | None = None,
        topology: str | Topology = "ring",
        method: str = "choco",
        consensus_step: float = 1.0,
        period: int = 1,
        overlap: bool = True,
        hierarchical: bool = False,
    ) -> None:
        self.codec = block_codec(codec or Int8())
        mixer = DifferenceMixer(self.codec, consensus_step if method == "choco" else None)
        super().__init__(topology, mixer, period=period, overlap=overlap, hierarchical=hierarchical)
        if not self.topology.is_static:
            raise ConfigError(
                f"LowPrecisionDecentralized.topology: {self.topology} changes from step to step, and neighbours keep "
                "replicas of each other; expected one that does not, such as 'ring' or 'exponential'"
            )
        if method not in ("choco", "dcd") or not 0 < consensus_step <= 1 or (method == "dcd" and consensus_step != 1):
            raise ConfigError(
                "LowPrecisionDecentralized: expected method 'choco' with 0 < consensus_step <= 1, or 'dcd', which has "
                f"none; got {method!r} with {consensus_step}"
            )
        self.method = method
        self.keeps_mean = method == "choco"  # what one is given the other gives; in dcd both are rounded
        self.consensus_step = consensus_step

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "weights": self.mixing.weights}

    @override
    def check_state_dict(self, state: dict[str, Any]) -> None:
        super().check_state_dict(state)
        if state["replica"] and state["weights"] != self.mixing.weights:
            raise ConfigError(
                "LowPrecisionDecentralized: expected the graph with which the state was saved (topology, "
                "hierarchical), as neighbours keep replicas of each other: weights "
                f"{state['weights']}, got {self.mixing.weights}"
            )
