"""Averaging of weights with neighbours instead of gradients with everyone: D-PSGD."""

from __future__ import annotations

from commlib.algorithms.neighbours import NeighbourAveraging
from commlib.primitives.mixers import FullPrecisionMixer
from commlib.primitives.topology import Topology


class Decentralized(NeighbourAveraging):
    """Each rank trains on its own gradients and averages its weights with its neighbours', in full precision.

    With W the doubly stochastic mixing matrix of the topology, which may change from step to step, and overlap:

        x_i,k+1 = sum_j W_ij x_j,k + (what the optimizer does with the gradient at x_i,k)

    The average of the weights before the step is made while its forward and backward run. Without overlap the average
    comes after the step, of what the steps have made: x_i,k+1 = sum_j W_ij (x_j,k + step_j).
    Replicas differ; `commlib.synchronize(model)` gives their mean.

    Args:
        topology: A name of `commlib.primitives.topology.TOPOLOGIES` or a `Topology`: `Graph(edges)`, `MixingMatrix(W)`.
        period: Optimizer steps from one average to the next.
        overlap: See above.
        hierarchical: Whether weights are averaged inside each node first, and the graph is one of nodes.

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
