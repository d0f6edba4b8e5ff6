"""Averaging of weights with neighbours: D-PSGD."""

from __future__ import annotations

from commlib.algorithms.neighbours import NeighbourAveraging
from commlib.primitives.mixers import FullPrecisionMixer
from commlib.primitives.topology import Topology


class Decentralized(NeighbourAveraging):
    """Trains each rank on its own gradients and averages weights with its neighbours in full precision.

    With overlap and W the doubly stochastic mixing matrix of the topology, which may change from step to step:

        x_i,k+1 = sum_j W_ij x_j,k + (the optimizer's update for the gradient at x_i,k)

    The weights from before the step are averaged while its forward and backward run. Without overlap, the weights are
    averaged after the step: x_i,k+1 = sum_j W_ij (x_j,k + step_j). Replicas differ; `commlib.synchronize(model)` sets
    all weights to their mean.

    Args:
        topology: A name of `commlib.primitives.topology.TOPOLOGIES` or a `Topology`: `Graph(edges)`, `MixingMatrix(W)`.
        period: Optimizer steps between averages.
        overlap: Whether a round runs during the next step's forward and backward; see above.
        hierarchical: Whether weights are first averaged inside each node, and the graph connects nodes.

    Paper: Lian et al., "Can decentralized algorithms outperform centralized algorithms?" (NeurIPS 2017), algorithm 1
    (D-PSGD); without overlap the adapt-then-combine form. BAGUA's decentralized full precision.
    Deviations: any optimizer instead of plain SGD; its state stays local.
    """

    made_for = "sgd"
    portable = True
    keeps_mean = True

    def __init__(
        self,
        topology: str | Topology = "exponential",
        period: int = 1,
        overlap: bool = True,
        hierarchical: bool = False,
    ) -> None:
        super().__init__(topology, FullPrecisionMixer(), period=period, overlap=overlap, hierarchical=hierarchical)
