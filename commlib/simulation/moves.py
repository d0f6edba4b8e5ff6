"""The algorithms of collectives: the bytes that they move over each link, and their latency.

[Note: the links] Every node has one adapter, shared by its ranks. Every rank has a link to the other ranks of its node.
Both are full duplex. A collective of p nodes with q ranks each, N = p q, is described by the seconds in which the
adapter and the ranks' links are busy, the seconds of its busiest connection, and a latency during which no link is
busy. B is the number of bytes of a rank's tensor (of the result for an all-gather); w, i and f are the bytes per second
of adapter, local link and connection; L and l are the latencies of adapter and local link:

    all-reduce  ring          max(2 (N-1)/N B / w, the same / i, the same / f) + 2 ((p-1) L + (N-p) l)
                tree          max(2 B / w (B / w for p = 2), 2 B / i, B / f) + 2 (ceil(log2 p) L + (q-1) l)
                hierarchical  2 (q-1)/q B / i + 2 (q-1) l, and 2 (p-1)/p B / w (B / q / f) + 2 (p-1) L
                leaders       2 B / i + 2 (q-1) l, and 2 (p-1)/p B / w (or f) + 2 (p-1) L
                segmented     a ring in segments of at most 1 MiB, two in flight: see `_segmented`
    all-gather  ring          half of an all-reduce's
                doubling      (N-1)/N B / w (or f) + ceil(log2 p) L, where q = 1
                segmented     a ring in two segments
    all-to-all  pairwise      max(q (N-q)/N B / w, (q-1)/N B / i, B / N / f) + max(L, l)
                sequential    the same with (N-q)/N B / f
    reduce-scatter            as the all-gather's ring
    broadcast   chain         max(B / w, B / i, B / f) + (p-1) L + (N-p) l
                binomial      S(log2 p) B / w + S(log2 q) B / i + log2 p L + log2 q l, S(k) = 1 + 2 + ... + k
    exchange                  max(sum of c B / w, sum of (1 - c/q) B / i, B / f) + max(L, l), over a rank's messages

Logarithms are rounded up. Terms in w, f and L apply if p > 1, terms in i and l if q > 1. A ring visits the nodes one
after the other, so one of its edges leaves each adapter. Groups of the ranks at the same position in every node
("across") share the adapters: w is divided by their number. An exchange between neighbours is modelled as the same
shift on every rank: of the q messages of a node's ranks to the ranks at distance d, c = min(d, q) cross the adapter. In
a binomial tree, the root sends to all its children at once over its link, then each child does the same.

[Note: connections] A TCP connection has at most one window in flight, and its acknowledgement takes a round trip: f =
window / (2 L), times the number of connections between two ranks of a ring or a tree.

[Note: handshakes] If the receiver must signal that it is ready before the data leaves, a message takes the time of two,
so L and l count twice. The receivers of a broadcast wait from the beginning, so only its first message follows a
signal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

#: Largest segment of Gloo's ring, and the share of a pair of segments' transfer time that adds to its round trip: the
#: second segment is in flight while the first is acknowledged. Fitted to benchmarks/latency.py.
_SEGMENT_BYTES = 1 << 20
_SEGMENT_SHARE = 0.65


@dataclass(frozen=True)
class Group:
    """The links of a group of p nodes with q ranks each.

    Attributes:
        p: Number of nodes.
        q: Number of ranks per node.
        w: Bytes per second of an adapter.
        i: Bytes per second of a rank's link inside its node.
        f: Bytes per second of a connection between nodes.
        latency_s: One-way latency between nodes.
        local_latency_s: One-way latency inside a node.
        connections: Number of connections between two ranks of a ring or a tree; point-to-point messages use one.
        delays: Number of one-way latencies per message: 2 if the receiver first signals that it is ready.
    """

    p: int
    q: int
    w: float
    i: float
    f: float
    latency_s: float
    local_latency_s: float
    connections: int
    delays: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.p * self.q

    @property
    def slowest_s(self) -> float:
        """Latency of the slowest link."""
        return self.latency_s if self.p > 1 else self.local_latency_s

    def move(
        self, adapter: float, local: float, hops: tuple[float, float], messages: float, flow: float | None = None
    ) -> Move:
        """Return the transfer of bytes through a node's adapter and a rank's link, with its latency.

        Args:
            adapter: Bytes that leave a node.
            local: Bytes that leave a rank and stay in its node.
            hops: Number of sequential messages between nodes and inside a node.
            messages: Number of messages that a rank sends.
            flow: Bytes of the busiest pair of ranks in different nodes; None uses `adapter`.
        """
        adapter, local = (adapter if self.p > 1 else 0.0), (local if self.q > 1 else 0.0)
        flow = (adapter if flow is None else flow) if self.p > 1 else 0.0
        latency_s = self.delays * (hops[0] * self.latency_s + hops[1] * self.local_latency_s)
        return Move(adapter, adapter / self.w, local / self.i, flow / (self.connections * self.f), latency_s, messages)


@dataclass(frozen=True)
class Move:
    """The bytes and waiting times of one collective.

    Attributes:
        adapter_bytes: Bytes that leave a node's adapter.
        adapter_s: Seconds in which the adapter is busy.
        local_s: Seconds in which a rank's link inside the node is busy.
        flow_s: Seconds of the busiest connection.
        latency_s: Latency of the sequential messages, without their bytes.
        messages: Number of messages that a rank sends.
        stall_s: Additional waiting time, independent of the bytes in flight.
        is_serial: Whether the links are busy in turn because stages do not overlap.
    """

    adapter_bytes: float
    adapter_s: float
    local_s: float
    flow_s: float
    latency_s: float
    messages: float
    stall_s: float = 0.0
    is_serial: bool = False

    @property
    def busy_s(self) -> float:
        """Seconds of the transfer."""
        between_s = max(self.adapter_s, self.flow_s)
        return between_s + self.local_s if self.is_serial else max(between_s, self.local_s)

    @property
    def seconds(self) -> float:
        """Seconds of the collective on idle links."""
        return self.busy_s + self.latency_s + self.stall_s


def _ring(group: Group, nbytes: float, passes: int) -> Move:
    share = passes * (group.size - 1) / group.size * nbytes
    hops = (passes * (group.p - 1), passes * (group.size - group.p))
    return group.move(share, share, hops, passes * (group.size - 1))


def _segmented(group: Group, nbytes: float, passes: int, segments: int = 2) -> Move:
    """Return Gloo's rings: each of N chunks has two segments or more, of which two are in flight at once.

    A pair of segments takes its transfer time, or the round trip plus a fraction of it (`_SEGMENT_SHARE`), whichever is
    longer.
    """
    move = replace(_ring(group, nbytes, passes), latency_s=0.0)
    pairs = passes * (group.size - 1) * segments / 2
    waits_s = pairs * group.delays * group.slowest_s
    return replace(move, stall_s=max(0.0, waits_s - (1 - _SEGMENT_SHARE) * move.busy_s))


def _segmented_all_reduce(group: Group, nbytes: float) -> Move:
    return _segmented(group, nbytes, passes=2, segments=max(2, math.ceil(nbytes / group.size / _SEGMENT_BYTES)))


def _doubling(group: Group, nbytes: float) -> Move:
    share = (group.size - 1) / group.size * nbytes
    return group.move(share, share, (_log2(group.p), _log2(group.q)), _log2(group.size))


def _tree(group: Group, nbytes: float) -> Move:
    adapter = nbytes if group.p == 2 else 2 * nbytes
    hops = (2 * _log2(group.p), 2 * (group.q - 1))
    return group.move(adapter, 2 * nbytes, hops, 4, flow=nbytes)


def _within_and_across(group: Group, nbytes: float) -> Move:
    p, q = group.p, group.q
    across, hops = 2 * (p - 1) / p * nbytes, (2 * (p - 1), 2 * (q - 1))
    return _in_series(group.move(across, 2 * (q - 1) / q * nbytes, hops, sum(hops), flow=across / q))


def _leaders(group: Group, nbytes: float) -> Move:
    p, q = group.p, group.q
    hops = (2 * (p - 1), 2 * (q - 1))
    return _in_series(group.move(2 * (p - 1) / p * nbytes, 2 * nbytes, hops, sum(hops)))


def _in_series(move: Move) -> Move:
    return replace(move, is_serial=True)


def _chain(group: Group, nbytes: float) -> Move:
    return group.move(nbytes, nbytes, (group.p - 1, group.size - group.p), 1)


def _binomial(group: Group, nbytes: float) -> Move:
    rounds, local_rounds = _log2(group.p), _log2(group.q)
    sent, local = (k * (k + 1) / 2 * nbytes for k in (rounds, local_rounds))
    hops = (rounds / group.delays, local_rounds / group.delays)
    move = group.move(sent, local, hops, rounds + local_rounds, flow=rounds * nbytes)
    word_s = (group.delays - 1) * group.slowest_s  # [Note: handshakes]
    return _in_series(replace(move, latency_s=move.latency_s + word_s))


def _pairwise(group: Group, nbytes: float) -> Move:
    """Return an all-to-all in which every rank sends to all others at once."""
    return _all_to_all(group, nbytes, flow=nbytes / group.size)


def _sequential(group: Group, nbytes: float) -> Move:
    """Return an all-to-all in which every rank sends to one rank after the other, without waiting for arrivals."""
    return _all_to_all(group, nbytes, flow=(group.size - group.q) / group.size * nbytes)


def _all_to_all(group: Group, nbytes: float, flow: float) -> Move:
    p, q, size = group.p, group.q, group.size
    adapter, local = q * (size - q) / size * nbytes, (q - 1) / size * nbytes
    return group.move(adapter, local, (1, 0) if p > 1 else (0, 1), size - 1, flow=flow * group.connections)


def exchange(group: Group, messages: Sequence[tuple[int, float]]) -> Move:
    """Return an exchange in which every rank sends (distance, bytes) messages, all at once."""
    crossing = [min(distance, group.q) if group.p > 1 else 0 for distance, _ in messages]
    adapter = sum(c * nbytes for c, (_, nbytes) in zip(crossing, messages, strict=True))
    local = sum((1 - c / group.q) * nbytes for c, (_, nbytes) in zip(crossing, messages, strict=True))
    largest = max((nbytes for c, (_, nbytes) in zip(crossing, messages, strict=True) if c), default=0.0)
    hops = (1, 0) if any(crossing) else (0, 1)
    return group.move(adapter, local, hops, len(messages), flow=largest * group.connections)


def _log2(count: int) -> int:
    return math.ceil(math.log2(count))


Algorithms = Mapping[str, Callable[[Group, float], Move]]

ALL_REDUCES: Algorithms = {
    "ring": lambda group, nbytes: _ring(group, nbytes, passes=2),
    "tree": _tree,
    "hierarchical": _within_and_across,
    "leaders": _leaders,
    "segmented": _segmented_all_reduce,
}
ALL_GATHERS: Algorithms = {
    "ring": lambda group, nbytes: _ring(group, nbytes, passes=1),
    "doubling": _doubling,
    "segmented": lambda group, nbytes: _segmented(group, nbytes, passes=1),
}
ALL_TO_ALLS: Algorithms = {"pairwise": _pairwise, "sequential": _sequential}
REDUCE_SCATTERS: Algorithms = {"ring": lambda group, nbytes: _ring(group, nbytes, passes=1)}
BROADCASTS: Algorithms = {"chain": _chain, "binomial": _binomial}
