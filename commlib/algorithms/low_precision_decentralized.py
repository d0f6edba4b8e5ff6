"""Averaging of weights with neighbours by compressed differences: CHOCO-SGD and DCD-PSGD."""

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
    """Trains each rank on its own gradients and averages weights with its neighbours by compressed differences.

    With C the codec, W the mixing matrix, x_i the weights after the optimizer's step, and x^_j the replica of x_j that
    the neighbours of j share; after each step,

        choco:  x^_j <- x^_j + C(x_j - x^_j) for all j,    x_i <- x_i + s sum_j W_ij (x^_j - x^_i)
        dcd:    z_j = sum_k W_jk (x^_k - x^_j) + x_j - x^_j,  x^_j <- x^_j + C(z_j) for all j,  x_i <- x^_i

    A rank stores x^_i and the sum over j of W_ij (x^_j - x^_i), not a replica of each neighbour. The first differences,
    from x^ = 0, are sent uncompressed.

    Args:
        codec: Block codec or its name; `Int8` by default. `choco` supports coarse codecs with a smaller consensus step;
            `dcd` diverges with them.
        topology: A name or a `Topology` that is the same in every step: "ring", "exponential", "fully_connected",
            `Graph`, `MixingMatrix`.
        method: "choco" or "dcd".
        consensus_step: The consensus step s of choco, in (0, 1].
        period: Optimizer steps between averages.
        overlap: Whether a round runs during the next step's forward and backward. Its effect is added at the end of
            that step. Without overlap, the equations are those of the papers.
        hierarchical: Whether weights are first averaged inside each node in full precision, and the graph connects
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
                f"LowPrecisionDecentralized.topology: {self.topology} changes from step to step, but neighbours keep "
                "replicas of each other; expected a static topology, such as 'ring' or 'exponential'"
            )
        if method not in ("choco", "dcd") or not 0 < consensus_step <= 1 or (method == "dcd" and consensus_step != 1):
            raise ConfigError(
                "LowPrecisionDecentralized: expected method 'choco' with 0 < consensus_step <= 1, or 'dcd' with 1; got "
                f"{method!r} with {consensus_step}"
            )
        self.method = method
        self.keeps_mean = method == "choco"  # the updates of two neighbours cancel; in dcd both are rounded
        self.consensus_step = consensus_step

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "weights": self.mixing.weights}

    @override
    def check_state_dict(self, state: dict[str, Any]) -> None:
        super().check_state_dict(state)
        if state["replica"] and state["weights"] != self.mixing.weights:
            raise ConfigError(
                "LowPrecisionDecentralized: expected the graph of the saved state (topology, hierarchical), because "
                f"neighbours keep replicas of each other: weights {state['weights']}, got {self.mixing.weights}"
            )
