"""Averaging of weights with neighbours instead of gradients with everyone: D-PSGD."""

from __future__ import annotations

import torch
from typing_extensions import override

from commlib.algorithms.families.neighbours import NeighbourAveraging
from commlib.primitives.decentralized import FullWorkspace, decentralized_full_precision
from commlib.primitives.topology import Neighbours, Topology
from commlib.transport.base import Communication, Communicator


class Decentralized(NeighbourAveraging[FullWorkspace]):
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
        super().__init__(topology, period=period, overlap=overlap, hierarchical=hierarchical)

    @override
    def _make_workspace(self, like: torch.Tensor, begin: int, peers: Communicator) -> FullWorkspace:
        return FullWorkspace(like.numel(), like.dtype, like.device)

    @override
    def _mix(
        self, tensor: torch.Tensor, workspace: FullWorkspace, neighbours: Neighbours, peers: Communicator
    ) -> Communication:
        yield from decentralized_full_precision(tensor, workspace, neighbours, peers)
