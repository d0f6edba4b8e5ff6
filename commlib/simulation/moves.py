"""How libraries carry collectives out: the bytes that their algorithms move over which links, and what they wait for.

[Note: the links] Every node has one adapter, shared by its ranks, every rank a link to the others of its node; both
carry each direction at once. A collective of p nodes with q ranks each, N = p q, is described by the seconds that it
keeps the adapter and the ranks' links busy, by the seconds that its busiest connection takes, and by a latency that
keeps nothing busy. With B the bytes of a rank's tensor (of the result for an all-gather), w, i and f the bytes a second
of adapter, local link and connection, L and l the latencies of adapter and local link:

    all-reduce  ring          max(2 (N-1)/N B / w, the same / i, the same / f) + 2 ((p-1) L + (N-p) l)
                tree          max(2 B / w (B / w for p = 2), 2 B / i, B / f) + 2 (ceil(log2 p) L + (q-1) l)
                hierarchical  2 (q-1)/q B / i + 2 (q-1) l, and 2 (p-1)/p B / w (B / q / f) + 2 (p-1) L
                leaders       2 B / i + 2 (q-1) l, and 2 (p-1)/p B / w (or f) + 2 (p-1) L
                segmented     a ring in segments of at most 1 MiB, two under way: see `_segmented`
    all-gather  ring          half of an all-reduce's
                doubling      (N-1)/N B / w (or f) + ceil(log2 p) L, where q = 1
                segmented     a ring in two segments
    all-to-all  pairwise      max(q (N-q)/N B / w, (q-1)/N B / i, B / N / f) + max(L, l)
                sequential    the same with (N-q)/N B / f
    broadcast   chain         max(B / w, B / i, B / f) + (p-1) L + (N-p) l
                binomial      S(log2 p) B / w + S(log2 q) B / i + log2 p L + log2 q l, S(k) = 1 + 2 + ... + k
    exchange                  max(sum of c B / w, sum of (1 - c/q) B / i, B / f) + max(L, l), over a rank's messages

Logarithms are rounded up. Terms in w, f and L are there where p > 1, those in i and l where q > 1. A ring passes
through the nodes one after the other, so one of its edges leaves each adapter. Groups of ranks with the same place in
every node ("across") share the adapters: w is divided by their number. An exchange between neighbours is taken to be
the same shift at every rank: of the q messages of a node's ranks to those d places on, c = min(d, q) cross the adapter.
In a binomial tree the root sends to all its children at once, which share its link, then theirs do.

[Note: connections] A TCP connection has at most a window under way, and the word that it has arrived takes a round
trip: f = window / (2 L), times the connections between two ranks of a ring or a tree.

[Note: handshakes] Where the receiver's word that it is ready must arrive before the data leaves, a message takes the
time of two, so L and l count twice. The receivers of a broadcast wait from the beginning: only the first message comes
after their word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

#: The largest segment of Gloo's ring, and how much of two segments' time a pair of them takes beside its round trip:
#: the second is on its way while the first is acknowledged. Fitted to benchmarks/latency.py.
_SEGMENT_BYTES = 1 << 20
_SEGMENT_SHARE = 0.65


@dataclass(frozen=True)
class Group:
    """The links of a group of p nodes with q ranks each.

    Attributes:
        p: Nodes.
        q: Ranks of each.
        w: Bytes a second of an adapter.
        i: Of a rank's link inside its node.
        f: Of a connection from node to node.
        latency_s: One way, from node to node.
        local_latency_s: The same inside a node.
        connections: How many a ring or a tree has between two ranks; a message from point to point has one.
        delays: How many one-way latencies a message takes: 2 where the receiver says first that it is ready.
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
        """The number of ranks."""
        return self.p * self.q

    @property
    def slowest_s(self) -> float:
        """The latency of the slowest link."""
        return self.latency_s if self.p > 1 else self.local_latency_s

    def move(
        self, adapter: float, local: float, hops: tuple[float, float], messages: float, flow: float | None = None
    ) -> Move:
        """Return a transfer of so many bytes through a node's adapter and a rank's link, and its latency.

        Args:
            adapter: Bytes out of a node.
            local: Bytes out of a rank that stay in its node.
            hops: Messages that follow one another, between nodes and inside.
            messages: That a rank sends.
            flow: Bytes of the busiest pair of ranks in different nodes; None are those of the adapter.
        """
        adapter, local = (adapter if self.p > 1 else 0.0), (local if self.q > 1 else 0.0)
        flow = (adapter if flow is None else flow) if self.p > 1 else 0.0
        latency_s = self.delays * (hops[0] * self.latency_s + hops[1] * self.local_latency_s)
        return Move(adapter, adapter / self.w, local / self.i, flow / (self.connections * self.f), latency_s, messages)


@dataclass(frozen=True)
class Move:
    """What one collective moves, and waits for.

    Attributes:
        adapter_bytes: Out of a node's adapter.
        adapter_s: How long they keep it busy.
        local_s: How long a rank's link inside the node is busy.
        flow_s: How long the busiest connection takes.
        latency_s: What messages take that follow one another, without their bytes.
        messages: That a rank sends.
        stall_s: What is waited for besides, whatever bytes are on their way.
        is_serial: Whether stages follow one another instead of overlapping, so that they keep the links busy in turn.
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
        """What its bytes take."""
        between_s = max(self.adapter_s, self.flow_s)
        return between_s + self.local_s if self.is_serial else max(between_s, self.local_s)

    @property
    def seconds(self) -> float:
        """What it takes alone."""
        return self.busy_s + self.latency_s + self.stall_s


def _ring(group: Group, nbytes: float, passes: int) -> Move:
    share = passes * (group.size - 1) / group.size * nbytes
    hops = (passes * (group.p - 1), passes * (group.size - group.p))
    return group.move(share, share, hops, passes * (group.size - 1))


def _segmented(group: Group, nbytes: float, passes: int, segments: int = 2) -> Move:
    """Gloo's rings: each of N chunks in two segments or more, of which two are under way at once.

    A pair takes its bytes, or the round trip and a part of them (`_SEGMENT_SHARE`), whichever is more.
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
    """Every rank sends to all others at once."""
    return _all_to_all(group, nbytes, flow=nbytes / group.size)


def _sequential(group: Group, nbytes: float) -> Move:
    """Every rank sends to one after the other, without waiting for the last one's arrival."""
    return _all_to_all(group, nbytes, flow=(group.size - group.q) / group.size * nbytes)


def _all_to_all(group: Group, nbytes: float, flow: float) -> Move:
    p, q, size = group.p, group.q, group.size
    adapter, local = q * (size - q) / size * nbytes, (q - 1) / size * nbytes
    return group.move(adapter, local, (1, 0) if p > 1 else (0, 1), size - 1, flow=flow * group.connections)


def exchange(group: Group, messages: Sequence[tuple[int, float]]) -> Move:
    """Every rank sends messages of some bytes to the ranks so many places on, all at once."""
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
BROADCASTS: Algorithms = {"chain": _chain, "binomial": _binomial}
