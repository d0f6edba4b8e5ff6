"""The time of a collective on a network (`moves`), including contention for the links.

If a library has several algorithms for a verb, it uses the fastest by its own estimate.

A library that sends further bytes while earlier ones are in flight hides a part of the latency (`hidden_of`). The time
of a collective is that of its bytes plus its latency, minus this fraction of the shorter of the two.

Collectives of one communicator start in the order of issue, at most `in_flight` at once. A link executes them one after
the other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from typing_extensions import override

from commlib.errors import ConfigError
from commlib.network.model import Device, Network
from commlib.simulation import moves
from commlib.simulation.moves import Group, Move
from commlib.transport.base import AllGather, AllReduce, AllToAll, Broadcast, Exchange, Request

#: The group of the ranks that shard a model, in requests; followed by " local" or " across" for its nodes.
SHARDS = "shards"

_ALGORITHMS = {
    "all_reduce": moves.ALL_REDUCES,
    "all_gather": moves.ALL_GATHERS,
    "all_to_all": moves.ALL_TO_ALLS,
    "broadcast": moves.BROADCASTS,
    "reduce_scatter": moves.REDUCE_SCATTERS,
}


@dataclass(slots=True)
class ReduceScatter(Request):
    """Reduce chunk r of `input` [size * n] of all ranks to rank r, as the library itself does."""

    verb: ClassVar[str] = "reduce_scatter"
    input: torch.Tensor

    @override
    def wire_bytes(self) -> float:
        return (self.size - 1) / self.size * self.input.nbytes


@dataclass(frozen=True)
class TransportProfile:
    """The behaviour of a communication library.

    Attributes:
        name: Name of the library.
        all_reduce: Available algorithms (`moves.ALL_REDUCES`).
        all_gather: Available algorithms (`moves.ALL_GATHERS`).
        all_to_all: Available algorithms (`moves.ALL_TO_ALLS`).
        broadcast: Available algorithms (`moves.BROADCASTS`).
        reduce_scatter: Available algorithms (`moves.REDUCE_SCATTERS`).
        assumed_latency_us: Latency between nodes that the library assumes to choose an algorithm; None uses the actual
            latency.
        connections: Number of connections between two ranks of a ring or a tree; point-to-point messages use one.
        handshakes: Whether a message waits until the receiver has signalled that it is ready.
        efficiency: Fraction of the adapter's rate that the library reaches (times `Network.efficiency`).
        efficiency_of: Fraction of that rate that a verb reaches ("all_to_all", ...); 1 for verbs not listed.
        hidden_of: Fraction of the shorter of a verb's latency and transfer time that overlaps with the longer one.
        op_us: Time of each collective before it starts.
        op_us_of: Values that replace `op_us` for individual verbs.
        message_us: Time of each message that a rank sends in a collective.
        in_flight: Number of concurrent collectives of one communicator.
        leaders_only: Whether one rank per node executes the collectives across nodes, without sharing the adapter.
            Otherwise all ranks of a node do so at once.
        waits: Whether the thread that issues a collective waits for its end before any other communication work.
        bucket_cap_mb: Bucket size that the library uses, MiB; None uses the engine's plan.
        source: Source of the figures.
    """

    name: str
    all_reduce: tuple[str, ...] = ("ring",)
    all_gather: tuple[str, ...] = ("ring",)
    all_to_all: tuple[str, ...] = ("pairwise",)
    broadcast: tuple[str, ...] = ("chain",)
    reduce_scatter: tuple[str, ...] = ("ring",)
    assumed_latency_us: float | None = None
    connections: int = 1
    handshakes: bool = False
    efficiency: float = 1.0
    efficiency_of: Mapping[str, float] = field(default_factory=dict)
    hidden_of: Mapping[str, float] = field(default_factory=dict)
    op_us: float = 0.0
    op_us_of: Mapping[str, float] = field(default_factory=dict)
    message_us: float = 0.0
    in_flight: int = 1
    leaders_only: bool = False
    waits: bool = False
    bucket_cap_mb: float | None = None
    source: str = ""

    def __post_init__(self) -> None:
        for name, known in _ALGORITHMS.items():
            unknown = set(getattr(self, name)) - set(known)
            if unknown or not getattr(self, name):
                raise ConfigError(
                    f"TransportProfile.{name}: expected some of {sorted(known)}, got {getattr(self, name)}"
                )
        efficiencies = (self.efficiency, *self.efficiency_of.values())
        if (
            any(not 0 < value <= 1 for value in efficiencies)
            or any(not 0 <= value <= 1 for value in self.hidden_of.values())
            or min(self.in_flight, self.connections) < 1
            or min(self.op_us, self.message_us, *self.op_us_of.values()) < 0
        ):
            raise ConfigError(
                "TransportProfile: expected efficiencies above 0 and at most 1, hidden_of of 0 to 1, in_flight and "
                f"connections of 1 or more, op_us and message_us of 0 or more, got {self}"
            )


@dataclass(frozen=True)
class Islands:
    """The groups of a model that consecutive ranks shard.

    Attributes:
        shards: The ranks of one island, on their nodes.
        replicas: The ranks that hold the same shard, with their part of each adapter.
        num_concurrent: Number of such groups of replicas that share an adapter.
    """

    shards: Network
    replicas: Network
    num_concurrent: int

    @classmethod
    def of(cls, network: Network, num_shards: int) -> Islands:
        """Return the groups on a network.

        Raises:
            ConfigError: Islands are neither equal parts of a node nor whole nodes.
        """
        per_node, nodes = network.gpus_per_node, network.nodes
        is_inside = per_node % num_shards == 0
        if not is_inside and (num_shards % per_node or nodes % (num_shards // per_node)):
            raise ConfigError(
                f"shard: expected a divisor of {per_node} ranks per node, or of {nodes} nodes times {per_node}, got "
                f"{num_shards} ranks"
            )
        nodes_of_island = 1 if is_inside else num_shards // per_node
        shards = replace(network, nodes=nodes_of_island, gpus_per_node=num_shards // nodes_of_island)
        shared = min(num_shards, per_node)
        replicas = replace(
            network,
            nodes=nodes // nodes_of_island,
            gpus_per_node=per_node // shared,
            bandwidth_gbps=network.bandwidth_gbps / shared,
            ceiling_gbps=network.ceiling_gbps / shared,
        )
        return cls(shards, replicas, shared)


@dataclass(frozen=True)
class Cost:
    """The cost of one collective.

    Attributes:
        seconds: Duration on idle links.
        adapter_s: Seconds in which the node's adapter is busy.
        local_s: Seconds in which a rank's link inside the node is busy.
        cpu_s: Processor seconds of a rank.
        adapter_bytes: Bytes that leave a node, over all concurrent groups.
    """

    seconds: float = 0.0
    adapter_s: float = 0.0
    local_s: float = 0.0
    cpu_s: float = 0.0
    adapter_bytes: float = 0.0


#: NCCL chooses by a fixed table, which assumes a latency of 14 us between nodes (src/graph/tuning.cc). Its rings and
#: trees come in pairs, each with its own connections (src/graph/connect.cc). All-gathers have log2 p steps (PAT) if
#: every node has one rank. Kernels are launched from the host.
NCCL = TransportProfile(
    "nccl",
    all_reduce=("ring", "tree", "hierarchical"),
    all_gather=("ring", "doubling"),
    assumed_latency_us=14.0,
    connections=2,
    op_us=10.0,
    source="docs/explanation/simulator.md",
)

#: Gloo's segmented rings, its binomial broadcast, and its two threads.
GLOO = TransportProfile(
    "gloo",
    all_reduce=("segmented",),
    all_gather=("segmented",),
    broadcast=("binomial",),
    handshakes=True,
    op_us=50.0,
    in_flight=2,
    source="docs/explanation/simulator.md",
)

PROFILES = {profile.name: profile for profile in (NCCL, GLOO)}


class Links:
    """The links of the network over time, for vectors of clocks: one for all ranks, or one per rank.

    Args:
        network: The network.
        profile: The communication library.
        device: The device, which determines the processor time of collectives.
        islands: The islands of a sharded model. `network` is then that of the replicas.
    """

    def __init__(
        self, network: Network, profile: TransportProfile, device: Device, islands: Islands | None = None
    ) -> None:
        self._network = network
        self._islands = islands
        self._profile = profile
        self._device = device
        self._costs: dict[Hashable, Cost] = {}
        self._under_way: dict[Hashable, deque[np.ndarray]] = {}
        self._adapter_free: np.ndarray | float = -math.inf
        self._local_free: np.ndarray | float = -math.inf

    @property
    def blocks_worker(self) -> bool:
        """Whether local work waits for collectives to end (`TransportProfile.waits`)."""
        return self._profile.waits

    def carry(self, communicator: Hashable, request: Request, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Schedule a collective that each rank issues at `at`. Return when it starts and when it ends."""
        cost = self.cost(request)
        under_way = self._under_way.setdefault((communicator, request.group), deque(maxlen=self._profile.in_flight))
        start = at + self._profile.op_us_of.get(request.verb, self._profile.op_us) * 1e-6
        if len(under_way) == under_way.maxlen:
            start = np.maximum(start, under_way[0])
        if cost.adapter_s:
            start = np.maximum(start, self._adapter_free)
        if cost.local_s:
            start = np.maximum(start, self._local_free)
        start = self._together(request, start)
        end = start + cost.seconds
        if cost.adapter_s:
            self._adapter_free = start + cost.adapter_s
        if cost.local_s:
            self._local_free = start + cost.local_s
        under_way.append(end)
        return start, end

    def cost(self, request: Request) -> Cost:
        """Return the cost of a request of rank 0 on idle links."""
        nbytes = _bytes_of(request)
        peers = tuple((peer, t.nbytes) for peer, t in request.sends) if isinstance(request, Exchange) else ()
        key = (request.verb, request.group, request.size, nbytes, peers)
        if key not in self._costs:
            self._costs[key] = self._price(request, nbytes)
        return self._costs[key]

    def _price(self, request: Request, nbytes: float) -> Cost:
        group = self._group(request)
        if request.size != group.size:
            raise ConfigError(
                f"a {request.verb} of the group {request.group!r} has {request.size} ranks, expected {group.size}"
            )
        move = self._move(group, request, nbytes)
        device = self._device
        cpu_s = device.cpu_s_per_byte * request.wire_bytes() + device.cpu_s_per_message * move.messages
        least_s = cpu_s / device.share  # the bound if the processor is slower than the link
        hidden_s = self._profile.hidden_of.get(request.verb, 0.0) * min(move.busy_s, move.latency_s)
        return Cost(
            seconds=max(move.seconds - hidden_s, least_s) + self._profile.message_us * 1e-6 * move.messages,
            adapter_s=max(move.adapter_s, least_s) if move.adapter_s else 0.0,
            local_s=move.local_s,
            cpu_s=cpu_s,
            adapter_bytes=move.adapter_bytes * self._num_concurrent(request.group),
        )

    def _move(self, group: Group, request: Request, nbytes: float) -> Move:
        match request:
            case AllReduce() | AllGather() | AllToAll() | Broadcast() | ReduceScatter():
                return self._chosen(group, request.verb, nbytes)
            case Exchange(sends=sends):
                return moves.exchange(group, [(_distance(group.size, peer), tensor.nbytes) for peer, tensor in sends])
        raise ConfigError(f"the simulator does not support {request.verb}")

    def _chosen(self, group: Group, verb: str, nbytes: float) -> Move:
        """Return the move of the algorithm that the library estimates to be the fastest."""
        known, assumed_us = _ALGORITHMS[verb], self._profile.assumed_latency_us
        believed = group if assumed_us is None else replace(group, latency_s=assumed_us * 1e-6, f=math.inf)
        names = getattr(self._profile, verb)
        usable = [known[name] for name in names if name != "doubling" or group.q == 1]
        if not usable:
            raise ConfigError(
                f"TransportProfile.{verb}: {names} requires nodes of one rank, expected another algorithm as well"
            )
        return min(usable, key=lambda algorithm: algorithm(believed, nbytes).seconds)(group, nbytes)

    def _sharers(self, network: Network) -> int:
        return 1 if self._profile.leaders_only else network.gpus_per_node

    def _num_concurrent(self, group: str) -> int:
        """Return the number of groups of this kind that send through the same adapter at once."""
        network, group = self._network_of(group)
        of_replicas = 1 if self._islands is None or network is self._islands.shards else self._islands.num_concurrent
        return of_replicas * (self._sharers(network) if group == "across" else 1)

    def _network_of(self, group: str) -> tuple[Network, str]:
        """Return the network whose ranks form a group, and the group's name on it."""
        if self._islands is None or not group.startswith(SHARDS):
            return self._network, group
        return self._islands.shards, group.removeprefix(SHARDS).strip() or "all"

    def _group(self, request: Request) -> Group:
        profile, (network, name) = self._profile, self._network_of(request.group)
        known = {
            "all": (network.nodes, network.gpus_per_node),
            "local": (1, network.gpus_per_node),
            "across": (network.nodes, 1),
        }
        if name not in known:
            raise ConfigError(f"a {request.verb} of the group {name!r}: expected one of {', '.join(map(repr, known))}")
        p, q = known[name]
        w = network.bytes_per_s * profile.efficiency * profile.efficiency_of.get(request.verb, 1.0)
        w /= self._sharers(network) if name == "across" else 1
        latency_s = network.latency_us * 1e-6
        return Group(
            p=p,
            q=q,
            w=w,
            i=network.intra_bytes_per_s,
            f=network.connection_bytes_per_s,
            latency_s=latency_s,
            local_latency_s=network.intra_latency_us * 1e-6,
            connections=profile.connections,
            delays=2 if profile.handshakes else 1,
        )

    def _together(self, request: Request, at: np.ndarray) -> np.ndarray:
        """Return when a rank and all ranks that it communicates with have arrived."""
        if len(at) == 1:
            return at
        if isinstance(request, Exchange):
            return self._with_neighbours(request, at)
        if request.group == "all":
            return np.full_like(at, at.max())
        by_node = at.reshape(self._network.nodes, -1)
        axis = 1 if request.group == "local" else 0
        return np.broadcast_to(by_node.max(axis=axis, keepdims=True), by_node.shape).reshape(-1)

    def _with_neighbours(self, request: Exchange, at: np.ndarray) -> np.ndarray:
        """Return when each rank and the ranks that it sends to and receives from have arrived."""
        nodes = self._network.nodes
        # The ranks of a group lie along the last axis, in the order of their rank in it.
        of_groups = {"all": at[None], "local": at.reshape(nodes, -1), "across": at.reshape(nodes, -1).T}[request.group]
        peers = {peer for peer, _ in (*request.sends, *request.receives)}
        there = np.maximum.reduce([of_groups, *(np.roll(of_groups, -peer, axis=-1) for peer in peers)])
        return (there.T if request.group == "across" else there).reshape(-1)


def _bytes_of(request: Request) -> float:
    """Return B of `moves`' [Note: the links]."""
    match request:
        case AllReduce(tensor=tensor) | Broadcast(tensor=tensor):
            return tensor.nbytes
        case AllGather(output=output):
            return output.nbytes
        case AllToAll(input=input) | ReduceScatter(input=input):
            return input.nbytes
    return request.wire_bytes()


def _distance(size: int, peer: int) -> int:
    """Return the distance of a rank from rank 0 on the ring."""
    return min(peer % size, -peer % size)
