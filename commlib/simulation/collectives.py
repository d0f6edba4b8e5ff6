"""What a collective takes: its algorithm's latency and bytes, and who else uses the links.

[Note: the links] Every node has one adapter, shared by its ranks, every rank a link to the others of its node; both
carry each direction at once. A collective of p nodes with q ranks each, N = p q, is described by the seconds that it
keeps the adapter and the ranks' links busy, and by a latency that keeps nothing busy. With B the bytes of a rank's
tensor (of the result for an all-gather), w and i the bytes a second of adapter and local link, L and l their latencies:

    ring all-reduce        max(2 (N-1)/N B / w, 2 (N-1)/N B / i) + 2 ((p-1) L + (N-p) l)
    ring all-gather        half of that
    tree all-reduce        max(2 B / w (B / w for p = 2), 2 B / i) + 2 (ceil(log2 p) L + (q-1) l)
    hierarchical           2 (q-1)/q B / i + 2 (q-1) l, and 2 (p-1)/p B / w + 2 (p-1) L
    through leaders        2 B / i + 2 (q-1) l, and 2 (p-1)/p B / w + 2 (p-1) L
    all-to-all             max(q (N-q)/N B / w, (q-1)/N B / i) + max(L, l)
    chain broadcast        max(B / w, B / i) + (p-1) L + (N-p) l
    binomial broadcast     ceil(log2 p) (B / w + L) + ceil(log2 q) (B / i + l)
    exchange               max(sum of c B / w, sum of (1 - c/q) B / i) + max(L, l), over the messages of a rank

Terms in w and L are there where p > 1, those in i and l where q > 1. A ring passes through the nodes one after the
other, so one of its edges leaves each adapter. Groups of ranks with the same place in every node ("across") share the
adapters: w is divided by their number. An exchange between neighbours is taken to be the same shift at every rank: of
the q messages of a node's ranks to those d places on, c = min(d, q) cross the adapter.

A library that sends the next bytes while the last ones are on their way hides a part of the latency behind them
(`hidden_of`): a collective takes its bytes and its latency, less that part of the shorter of the two.

Collectives of one communicator start in the order in which they were issued, at most `in_flight` at once; a link
carries one after the other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

import numpy as np

from commlib.errors import ConfigError
from commlib.network.model import Device, Network
from commlib.transport.base import AllGather, AllReduce, AllToAll, Broadcast, Exchange, Request


@dataclass(frozen=True)
class TransportProfile:
    """How a library carries collectives out.

    Attributes:
        name: What it is called.
        all_reduce: Its algorithms, of which the fastest is taken: "ring", "tree", "hierarchical", "leaders".
        broadcast: The same: "chain", "binomial".
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
    broadcast: tuple[str, ...] = ("chain",)
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
        for name, known in (("all_reduce", _ALL_REDUCES), ("broadcast", _BROADCASTS)):
            unknown = set(getattr(self, name)) - set(known)
            if unknown or not getattr(self, name):
                raise ConfigError(
                    f"TransportProfile.{name}: expected some of {sorted(known)}, got {getattr(self, name)}"
                )
        efficiencies = (self.efficiency, *self.efficiency_of.values())
        if (
            any(not 0 < value <= 1 for value in efficiencies)
            or any(not 0 <= value <= 1 for value in self.hidden_of.values())
            or self.in_flight < 1
            or min(self.op_us, self.message_us, *self.op_us_of.values()) < 0
        ):
            raise ConfigError(
                "TransportProfile: expected efficiencies above 0 and at most 1, hidden_of of 0 to 1, in_flight of 1 or "
                f"more, op_us and message_us of 0 or more, got {self}"
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


@dataclass(frozen=True)
class _Group:
    """The links of a group of p nodes with q ranks each."""

    p: int
    q: int
    w: float
    i: float
    latency_s: float
    local_latency_s: float

    @property
    def size(self) -> int:
        return self.p * self.q

    def move(self, adapter: float, local: float, hops: tuple[float, float], messages: float) -> _Move:
        """Return a transfer of so many bytes through a node's adapter and a rank's link, and its latency."""
        adapter, local = (adapter if self.p > 1 else 0.0), (local if self.q > 1 else 0.0)
        latency_s = hops[0] * self.latency_s + hops[1] * self.local_latency_s
        return _Move(adapter, adapter / self.w, local / self.i, latency_s, messages)


@dataclass(frozen=True)
class _Move:
    """Bytes out of an adapter, how long links are busy, the latency, and how many messages a rank sends.

    Stages that follow one another instead of overlapping (`is_serial`) keep their links busy in turn.
    """

    adapter_bytes: float
    adapter_s: float
    local_s: float
    latency_s: float
    messages: float
    is_serial: bool = False

    @property
    def busy_s(self) -> float:
        return self.adapter_s + self.local_s if self.is_serial else max(self.adapter_s, self.local_s)

    @property
    def seconds(self) -> float:
        return self.busy_s + self.latency_s


def _ring(group: _Group, nbytes: float, passes: int) -> _Move:
    share = passes * (group.size - 1) / group.size * nbytes
    hops = (passes * (group.p - 1), passes * (group.size - group.p))
    return group.move(share, share, hops, passes * (group.size - 1))


def _tree(group: _Group, nbytes: float) -> _Move:
    adapter = nbytes if group.p == 2 else 2 * nbytes
    hops = (2 * _log2(group.p), 2 * (group.q - 1))
    return group.move(adapter, 2 * nbytes, hops, 4)


def _within_and_across(group: _Group, nbytes: float) -> _Move:
    p, q = group.p, group.q
    move = group.move(
        2 * (p - 1) / p * nbytes, 2 * (q - 1) / q * nbytes, (2 * (p - 1), 2 * (q - 1)), 2 * (p - 1 + q - 1)
    )
    return _in_series(move)


def _leaders(group: _Group, nbytes: float) -> _Move:
    p, q = group.p, group.q
    return _in_series(group.move(2 * (p - 1) / p * nbytes, 2 * nbytes, (2 * (p - 1), 2 * (q - 1)), 2 * (p - 1 + q - 1)))


def _in_series(move: _Move) -> _Move:
    return _Move(move.adapter_bytes, move.adapter_s, move.local_s, move.latency_s, move.messages, is_serial=True)


def _chain(group: _Group, nbytes: float) -> _Move:
    return group.move(nbytes, nbytes, (group.p - 1, group.size - group.p), 1)


def _binomial(group: _Group, nbytes: float) -> _Move:
    rounds, local_rounds = _log2(group.p), _log2(group.q)
    return _in_series(group.move(rounds * nbytes, local_rounds * nbytes, (rounds, local_rounds), rounds + local_rounds))


def _all_to_all(group: _Group, nbytes: float) -> _Move:
    p, q, size = group.p, group.q, group.size
    return group.move(q * (size - q) / size * nbytes, (q - 1) / size * nbytes, (1, 0) if p > 1 else (0, 1), size - 1)


def _exchange(group: _Group, request: Exchange, rank: int) -> _Move:
    messages = [(_distance(group, rank, peer), tensor.nbytes) for peer, tensor in request.sends]
    crossing = [min(distance, group.q) if group.p > 1 else 0 for distance, _ in messages]
    adapter = sum(c * nbytes for c, (_, nbytes) in zip(crossing, messages, strict=True))
    local = sum((1 - c / group.q) * nbytes for c, (_, nbytes) in zip(crossing, messages, strict=True))
    return group.move(adapter, local, (1, 0) if any(crossing) else (0, 1), len(messages))


def _distance(group: _Group, rank: int, peer: int) -> int:
    """Return how many places two ranks are apart on the circle."""
    return min((peer - rank) % group.size, (rank - peer) % group.size)


def _log2(count: int) -> int:
    return math.ceil(math.log2(count))


_ALL_REDUCES: dict[str, Callable[[_Group, float], _Move]] = {
    "ring": lambda group, nbytes: _ring(group, nbytes, passes=2),
    "tree": _tree,
    "hierarchical": _within_and_across,
    "leaders": _leaders,
}
_BROADCASTS: dict[str, Callable[[_Group, float], _Move]] = {"chain": _chain, "binomial": _binomial}

#: NCCL's rings and trees, and a reduction inside the node first; its kernels are launched from the host.
NCCL = TransportProfile("nccl", all_reduce=("ring", "tree", "hierarchical"), op_us=10.0, source="docs/simulator.md")

#: Gloo's ring, its binomial broadcast, and its two threads.
GLOO = TransportProfile("gloo", broadcast=("binomial",), op_us=50.0, in_flight=2, source="docs/simulator.md")

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

    def _move(self, group: _Group, request: Request, nbytes: float) -> _Move:
        match request:
            case AllReduce():
                moves = [_ALL_REDUCES[name](group, nbytes) for name in self._profile.all_reduce]
            case Broadcast():
                moves = [_BROADCASTS[name](group, nbytes) for name in self._profile.broadcast]
            case AllGather():
                moves = [_ring(group, nbytes, passes=1)]
            case AllToAll():
                moves = [_all_to_all(group, nbytes)]
            case Exchange():
                moves = [_exchange(group, request, rank=0)]
            case _:
                raise ConfigError(f"the simulator knows no {request.verb}")
        return min(moves, key=lambda move: move.seconds)

    @property
    def _sharers(self) -> int:
        return 1 if self._profile.leaders_only else self._network.gpus_per_node

    def _group(self, request: Request) -> _Group:
        network, profile, name = self._network, self._profile, request.group
        p, q = {
            "all": (network.nodes, network.gpus_per_node),
            "local": (1, network.gpus_per_node),
            "across": (network.nodes, 1),
        }[name]
        w = network.bytes_per_s * profile.efficiency * profile.efficiency_of.get(request.verb, 1.0)
        w /= self._sharers if name == "across" else 1
        return _Group(p, q, w, network.intra_bytes_per_s, network.latency_us * 1e-6, network.intra_latency_us * 1e-6)

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
    """Return B of [Note: the links]."""
    match request:
        case AllReduce(tensor=tensor) | Broadcast(tensor=tensor):
            return tensor.nbytes
        case AllGather(output=output):
            return output.nbytes
        case AllToAll(input=input):
            return input.nbytes
    return request.wire_bytes()
