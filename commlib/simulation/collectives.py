"""What a collective takes on a network (`moves`), and who else uses the links.

Of the algorithms that a library has for a verb, it takes the one that is the fastest by its own estimate.

A library that sends the next bytes while the last ones are on their way hides a part of the latency behind them
(`hidden_of`): a collective takes its bytes and its latency, less that part of the shorter of the two.

Collectives of one communicator start in the order in which they were issued, at most `in_flight` at once; a link
carries one after the other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from commlib.errors import ConfigError
from commlib.network.model import Device, Network
from commlib.simulation import moves
from commlib.simulation.moves import Group, Move
from commlib.transport.base import AllGather, AllReduce, AllToAll, Broadcast, Exchange, Request

_ALGORITHMS = {
    "all_reduce": moves.ALL_REDUCES,
    "all_gather": moves.ALL_GATHERS,
    "all_to_all": moves.ALL_TO_ALLS,
    "broadcast": moves.BROADCASTS,
}


@dataclass(frozen=True)
class TransportProfile:
    """How a library carries collectives out.

    Attributes:
        name: What it is called.
        all_reduce: Its algorithms (`moves.ALL_REDUCES`).
        all_gather: The same (`moves.ALL_GATHERS`).
        all_to_all: The same (`moves.ALL_TO_ALLS`).
        broadcast: The same (`moves.BROADCASTS`).
        assumed_latency_us: What it takes a message between nodes to take when it chooses among them; None: what it
            takes.
        connections: How many a ring or a tree has between two ranks; a message from point to point has one.
        handshakes: Whether a message waits for the receiver's word that it is ready.
        efficiency: The part of the adapter's rate that it reaches (times `Network.efficiency`).
        efficiency_of: The part of that which a verb reaches ("all_to_all", ...); 1 for those that are not there.
        hidden_of: The part of its latency that a verb hides behind its bytes, or of these behind the latency.
        op_us: Of each collective, before it starts.
        op_us_of: Instead of that, of a verb that is named.
        message_us: Of each message that a rank sends in a collective.
        in_flight: How many collectives of one communicator are under way at once.
        leaders_only: Whether collectives across nodes are made by one rank of each node, so that nobody shares its
            adapter; else by all of its ranks at once.
        waits: Whether the thread that issues a collective waits for its end before any other work of communication.
        bucket_cap_mb: The bucket size that it is used with; None means what the engine plans.
        source: Where the figures come from.
    """

    name: str
    all_reduce: tuple[str, ...] = ("ring",)
    all_gather: tuple[str, ...] = ("ring",)
    all_to_all: tuple[str, ...] = ("pairwise",)
    broadcast: tuple[str, ...] = ("chain",)
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
class Cost:
    """What one collective takes.

    Attributes:
        seconds: From its start to its end, alone.
        adapter_s: Of them, those in which the node's adapter is busy.
        local_s: Those in which a rank's link inside the node is busy.
        cpu_s: Processor seconds of a rank.
        adapter_bytes: Bytes that leave a node for it, those of all concurrent groups together.
    """

    seconds: float = 0.0
    adapter_s: float = 0.0
    local_s: float = 0.0
    cpu_s: float = 0.0
    adapter_bytes: float = 0.0


#: NCCL chooses by a table of its own, whatever the network's latency is: 14 us from node to node
#: (src/graph/tuning.cc). Its rings and trees come in pairs, with connections of their own (src/graph/connect.cc);
#: all-gathers have log2 p steps (PAT) where every node has one rank. Kernels are launched from the host.
NCCL = TransportProfile(
    "nccl",
    all_reduce=("ring", "tree", "hierarchical"),
    all_gather=("ring", "doubling"),
    assumed_latency_us=14.0,
    connections=2,
    op_us=10.0,
    source="docs/explanation/simulator.md",
)

#: Gloo's rings in segments, its binomial broadcast, and its two threads.
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
    """The network's links over time, as seen by vectors of clocks: one for all ranks, or one for each.

    Args:
        network: What there is.
        profile: How collectives are carried out.
        device: What the processor pays for them.
    """

    def __init__(self, network: Network, profile: TransportProfile, device: Device) -> None:
        self._network = network
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
        """Return when a collective that each rank issues at `at` starts and ends, and take note of it."""
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
        """Return what a request of rank 0 costs, whoever else uses the links."""
        nbytes = _bytes_of(request)
        peers = tuple((peer, t.nbytes) for peer, t in request.sends) if isinstance(request, Exchange) else ()
        key = (request.verb, request.group, nbytes, peers)
        if key not in self._costs:
            self._costs[key] = self._price(request, nbytes)
        return self._costs[key]

    def _price(self, request: Request, nbytes: float) -> Cost:
        group = self._group(request)
        if request.size != group.size:
            raise ConfigError(
                f"a {request.verb} of the group {request.group!r} says {request.size} ranks, expected {group.size}"
            )
        move = self._move(group, request, nbytes)
        device = self._device
        cpu_s = device.cpu_s_per_byte * request.wire_bytes() + device.cpu_s_per_message * move.messages
        least_s = cpu_s / device.share  # where the processor is slower than the link
        sharers = self._sharers if request.group == "across" else 1
        hidden_s = self._profile.hidden_of.get(request.verb, 0.0) * min(move.busy_s, move.latency_s)
        return Cost(
            seconds=max(move.seconds - hidden_s, least_s) + self._profile.message_us * 1e-6 * move.messages,
            adapter_s=max(move.adapter_s, least_s) if move.adapter_s else 0.0,
            local_s=move.local_s,
            cpu_s=cpu_s,
            adapter_bytes=move.adapter_bytes * sharers,
        )

    def _move(self, group: Group, request: Request, nbytes: float) -> Move:
        match request:
            case AllReduce() | AllGather() | AllToAll() | Broadcast():
                return self._chosen(group, request.verb, nbytes)
            case Exchange(sends=sends):
                return moves.exchange(group, [(_distance(group.size, peer), tensor.nbytes) for peer, tensor in sends])
        raise ConfigError(f"the simulator knows no {request.verb}")

    def _chosen(self, group: Group, verb: str, nbytes: float) -> Move:
        """Return what the library takes to be the fastest of its algorithms."""
        known, assumed_us = _ALGORITHMS[verb], self._profile.assumed_latency_us
        believed = group if assumed_us is None else replace(group, latency_s=assumed_us * 1e-6, f=math.inf)
        names = getattr(self._profile, verb)
        usable = [known[name] for name in names if name != "doubling" or group.q == 1]
        if not usable:
            raise ConfigError(
                f"TransportProfile.{verb}: {names} is for nodes of one rank, expected another one beside it"
            )
        return min(usable, key=lambda algorithm: algorithm(believed, nbytes).seconds)(group, nbytes)

    @property
    def _sharers(self) -> int:
        return 1 if self._profile.leaders_only else self._network.gpus_per_node

    def _group(self, request: Request) -> Group:
        network, profile, name = self._network, self._profile, request.group
        p, q = {
            "all": (network.nodes, network.gpus_per_node),
            "local": (1, network.gpus_per_node),
            "across": (network.nodes, 1),
        }[name]
        w = network.bytes_per_s * profile.efficiency * profile.efficiency_of.get(request.verb, 1.0)
        w /= self._sharers if name == "across" else 1
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
        """Return when those that a rank communicates with are there."""
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
        """Return when each one and those that it sends to and receives from are there."""
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
        case AllToAll(input=input):
            return input.nbytes
    return request.wire_bytes()


def _distance(size: int, peer: int) -> int:
    """Return how many places a rank is from rank 0 on the circle."""
    return min(peer % size, -peer % size)
