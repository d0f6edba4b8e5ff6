"""What the algorithms that average weights with neighbours share: nodes, buffers, state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from typing_extensions import override

from commlib.algorithms.base import Algorithm, BucketView, Context, Part, by_place
from commlib.algorithms.channels import Weights
from commlib.primitives import topology as topologies
from commlib.primitives.hierarchical import NodeStage, hierarchical
from commlib.primitives.topology import Neighbours, Topology
from commlib.transport.base import Communication, Communicator

E = TypeVar("E")


class NeighbourAveraging(Algorithm, Generic[E]):
    """Averages weights with the neighbours in a graph, every `period` optimizer steps.

    Args:
        topology: Who averages with whom: a name or a `Topology`.
        period: Optimizer steps from one round to the next.
        overlap: Whether a round runs while the next step's forward and backward do: its effect on a copy of the weights
            is added at that step's end. Otherwise the optimizer step waits for it.
        hierarchical: Whether weights are averaged inside each node first, in full precision, and the graph is one of
            nodes; every local rank carries a part.
    """

    def __init__(self, topology: str | Topology, *, period: int, overlap: bool, hierarchical: bool) -> None:
        self.topology = topologies.create(topology)
        self.overlap = overlap
        self.channel = Weights(
            period=period, delay=int(overlap), varies=not self.topology.is_static, hierarchical=hierarchical
        )
        self._workspaces: dict[int, E] = {}
        self._stages: dict[int, NodeStage] = {}
        self._parts: dict[int, Sequence[Part]] = {}

    @abstractmethod
    def _make_workspace(self, like: torch.Tensor, begin: int, peers: Communicator) -> E:
        """Make what is kept of a tensor like `like` [numel], which begins at `begin` in its bucket."""

    @abstractmethod
    def _mix(self, tensor: torch.Tensor, workspace: E, neighbours: Neighbours, peers: Communicator) -> Communication:
        """Average `tensor` with the neighbours among `peers`, in place."""

    @override
    def setup(self, context: Context) -> None:
        saved = self.state_dict()
        nodes = context.comm.nodes
        self._stages.clear()
        self._workspaces.clear()
        self._parts = {bucket.index: bucket.parts for bucket in context.buckets}
        for bucket in context.buckets:
            like, begin, peers = bucket.flat, 0, context.comm
            if nodes is not None:
                stage = NodeStage(bucket.flat.numel(), bucket.flat.dtype, context.device, nodes.local)
                like, begin, peers = stage.sum[: stage.count], stage.begin, nodes.across
                self._stages[bucket.index] = stage
            self.topology.neighbours(peers.rank, peers.world_size)  # one that does not exist for so many ranks says so
            self._workspaces[bucket.index] = self._make_workspace(like, begin, peers)
        self.load_state_dict(saved)

    @override
    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        workspace, stage = self._workspaces[bucket.index], self._stages.get(bucket.index)
        if stage is None:
            yield from self._mix(bucket.flat, workspace, self._neighbours(comm, comm.step), comm)
            return
        assert comm.nodes is not None
        local, across = comm.nodes
        neighbours = self._neighbours(across, comm.step)

        def mix_nodes(own: torch.Tensor) -> Communication:
            own.div_(local.world_size)
            yield from self._mix(own, workspace, neighbours, across)

        yield from hierarchical(bucket.flat, stage, local, mix_nodes)

    @override
    def representatives(self, comm: Communicator) -> Sequence[int]:
        if comm.nodes is None:
            return self.topology.representatives(comm.world_size)
        return by_place(self.topology.representatives(comm.nodes.across.world_size), comm.nodes.local.world_size)

    def _neighbours(self, peers: Communicator, step: int) -> Neighbours:
        return self.topology.neighbours(peers.rank, peers.world_size, step)
