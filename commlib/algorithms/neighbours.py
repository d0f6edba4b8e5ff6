"""Algorithms that average weights with neighbours in a graph: `NeighbourAveraging`, composed of a mixer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from commlib.algorithms.base import Algorithm, by_place
from commlib.algorithms.channels import Weights
from commlib.algorithms.context import BucketView, Context
from commlib.algorithms.state import State
from commlib.primitives import topology as topologies
from commlib.primitives.hierarchical import NodeStage, hierarchical
from commlib.primitives.mixers import Mixer
from commlib.primitives.parts import Part
from commlib.primitives.topology import Neighbours, Topology
from commlib.transport.base import Communication, Communicator


class Mixing(State):
    """Averages buckets with the neighbours of this rank, or of its node; holds the mixer's state.

    Args:
        mixer: Exchanges values with the neighbours.
        topology: The graph.
    """

    is_shared = True

    def __init__(self, mixer: Mixer[Any], topology: Topology) -> None:
        self._mixer = mixer
        self._topology = topology
        self._workspaces: dict[int, Any] = {}
        self._stages: dict[int, NodeStage] = {}
        self._parts: dict[int, Sequence[Part]] = {}
        self._comm: Communicator | None = None

    @override
    def setup(self, context: Context) -> None:
        saved = self.save() if context.comm is self._comm else {}
        self._comm = context.comm
        nodes = context.comm.nodes
        peers = context.comm if nodes is None else nodes.across
        self._stages.clear()
        self._workspaces.clear()
        self._parts = {bucket.index: bucket.parts for bucket in context.buckets}
        for bucket in context.buckets:
            like, begin = bucket.flat, 0
            if nodes is not None:
                stage = NodeStage(bucket.flat.numel(), bucket.flat.dtype, context.device, nodes.local)
                like, begin = stage.sum[: stage.count], stage.begin
                self._stages[bucket.index] = stage
            neighbours = self._neighbours(peers, 0)  # raises if the graph does not exist for this world size
            self._workspaces[bucket.index] = self._mixer.workspace(like, begin, neighbours)
        self.load(saved)

    def average(self, bucket: BucketView, comm: Communicator) -> Communication:
        """Replace `bucket.flat` by its weighted mean over this rank and its neighbours in round `comm.step`."""
        workspace, stage = self._workspaces[bucket.index], self._stages.get(bucket.index)
        if stage is None:
            yield from self._mixer.mix(bucket.flat, workspace, self._neighbours(comm, comm.step), comm)
            return
        assert comm.nodes is not None
        local, across = comm.nodes
        neighbours = self._neighbours(across, comm.step)

        def mix_nodes(own: torch.Tensor) -> Communication:
            own.div_(local.world_size)
            yield from self._mixer.mix(own, workspace, neighbours, across)

        yield from hierarchical(bucket.flat, stage, local, mix_nodes)

    def _neighbours(self, peers: Communicator, step: int) -> Neighbours:
        return self._topology.neighbours(peers.rank, peers.world_size, step)

    @override
    def forget(self) -> None:
        self.load({})  # the next round sends the new weights uncompressed

    @override
    def save(self) -> dict[str, Any]:
        saved: dict[str, Any] = {kind: {} for kind in self._mixer.kinds}
        for index, workspace in self._workspaces.items():
            for kind in self._mixer.kinds:
                saved[kind].update(workspace.save(self._parts[index])[kind])
        return saved

    @override
    def load(self, state: dict[str, Any]) -> None:
        if not self._mixer.kinds:
            return
        state = {**{kind: {} for kind in self._mixer.kinds}, **state}
        for index, workspace in self._workspaces.items():
            workspace.load(state, self._parts[index])

    @property
    def weights(self) -> dict[int, float]:
        """This rank's row of the mixing matrix, by neighbour; empty before `setup` and without state."""
        workspace = next(iter(self._workspaces.values()), None)
        return {} if workspace is None or not self._mixer.kinds else dict(workspace.neighbours.sources)


class NeighbourAveraging(Algorithm):
    """Averages weights with the neighbours in a graph, every `period` optimizer steps.

    Args:
        topology: Name of the graph, or a `Topology`.
        mixer: Exchanges values with the neighbours, in full precision or compressed.
        period: Optimizer steps between rounds.
        overlap: Whether a round runs on a copy of the weights during the next step's forward and backward, and its
            change of the copy is added at the end of that step. Otherwise the optimizer step waits for it.
        hierarchical: Whether weights are first averaged inside each node, in full precision, and the graph connects
            nodes; every local rank exchanges a part.
    """

    can_repeat = False  # ranks exchange with some others only

    def __init__(
        self, topology: str | Topology, mixer: Mixer[Any], *, period: int, overlap: bool, hierarchical: bool
    ) -> None:
        self.topology = topologies.create(topology)
        self.overlap = overlap
        self.hierarchical = hierarchical
        self.channel = Weights(
            period=period, delay=int(overlap), varies=not self.topology.is_static, hierarchical=hierarchical
        )
        self.mixing = Mixing(mixer, self.topology)
        self.states = (self.mixing,)

    @override
    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        yield from self.mixing.average(bucket, comm)

    @override
    def representatives(self, comm: Communicator) -> Sequence[int]:
        if comm.nodes is None:
            return self.topology.representatives(comm.world_size)
        return by_place(self.topology.representatives(comm.nodes.across.world_size), comm.nodes.local.world_size)
