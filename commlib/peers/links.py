"""Measurement of the connection between two ranks: round-trip time, and the rate in each direction.

    first rank                           second rank
    measure(line, seconds)               answer(line)
      PING                       --->      one byte           <---
      TAKE n, n bytes            --->      one byte           <---
      GIVE n                     --->      n bytes            <---
      END                        --->      returns

The number of bytes grows until a transfer takes long enough, which fills the window of a long link and the bucket of a
shaper.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import statistics
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

from commlib.errors import PeerFailure, PeerTimeout, TransportError
from commlib.transport.addresses import interface_towards
from commlib.transport.connections import fill
from commlib.transport.plain import decode, encode

#: The number of pairs up to which all are measured; beyond it, each rank is measured with the next one.
MOST_PAIRS = 66
#: Approximate seconds for all pairs, and for one pair at most.
_BUDGET_S, _PAIR_S = 30.0, 0.6

_COMMAND = struct.Struct("<cQ")
_LENGTH = struct.Struct("<I")
_PING, _TAKE, _GIVE, _END = b"P", b"T", b"G", b"E"
_FIRST_BYTES, _MAX_BYTES, _CHUNK_BYTES = 64 << 10, 256 << 20, 1 << 20
_MAX_PINGS = 100


class Link(NamedTuple):
    """The connection between two ranks; all are plain values.

    Attributes:
        ranks: The two ranks.
        addresses: The address of each.
        interfaces: The interface by which each reaches the other; "?" if unknown.
        rtt_us: The median round-trip time of a message of a few bytes, in microseconds.
        mbps: The rate of one TCP stream from the first to the second and back, in Mbit/s.
    """

    ranks: tuple[int, int]
    addresses: tuple[str, str]
    interfaces: tuple[str, str]
    rtt_us: float
    mbps: tuple[float, float]


def pairs(world_size: int) -> list[tuple[int, int]]:
    """Return the pairs of ranks to measure, in order."""
    everyone = list(itertools.combinations(range(world_size), 2))
    return everyone if len(everyone) <= MOST_PAIRS else [*itertools.pairwise(range(world_size)), (0, world_size - 1)]


def seconds_per_pair(num_pairs: int) -> float:
    """Return the approximate duration of the measurement of each of so many pairs."""
    return min(_PAIR_S, _BUDGET_S / num_pairs)


class Line:
    """A connection to a peer on which every wait ends at a deadline.

    Args:
        connection: The connected socket.
        rank: This rank.
        peer: The peer's rank, which errors name.
        doing: The activity, for errors.
    """

    def __init__(self, connection: socket.socket, rank: int, peer: int, doing: str) -> None:
        self.connection = connection
        self.peer = peer
        self._rank = rank
        self._doing = doing
        self._deadline = self._limit_s = 0.0

    def limit(self, seconds: float) -> None:
        """Let all waits end `seconds` from now."""
        self._limit_s, self._deadline = seconds, time.monotonic() + seconds

    def send(self, data: bytes | memoryview) -> None:
        """Send bytes.

        Raises:
            PeerTimeout: The peer did not receive them before the deadline.
            PeerFailure: The peer ended.
        """
        with self._waiting():
            self.connection.sendall(data)

    def receive(self, num_bytes: int) -> bytes:
        """Receive so many bytes.

        Raises:
            PeerTimeout: They did not arrive before the deadline.
            PeerFailure: The peer ended.
        """
        data = bytearray(num_bytes)
        self.receive_into(memoryview(data))
        return bytes(data)

    def receive_into(self, view: memoryview) -> None:
        """Receive as many bytes as `view` holds; see `receive`."""
        with self._waiting():
            fill(self.connection, view)

    def say(self, value: object) -> None:
        """Send a plain value."""
        data = encode(value)
        self.send(_LENGTH.pack(len(data)) + data)

    def hear(self) -> object:
        """Receive a plain value."""
        return decode(self.receive(_LENGTH.unpack(self.receive(_LENGTH.size))[0]))

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self.connection.settimeout(max(1e-3, self._deadline - time.monotonic()))
        try:
            yield
        except TimeoutError:
            why = f"no answer from rank {self.peer} within {self._limit_s:g} s while {self._doing}"
            raise PeerTimeout(f"rank {self._rank}: {why}", [self.peer]) from None
        except (EOFError, OSError) as error:
            why = f"rank {self.peer} ended while {self._doing}: {error}"
            raise PeerFailure(f"rank {self._rank}: {why}", [self.peer]) from None


def measure(line: Line, ranks: tuple[int, int], seconds: float) -> Link:
    """Measure a connection as the first of two ranks, while the second one answers.

    Args:
        line: The connection.
        ranks: The two ranks.
        seconds: Approximate duration; longer if 64 KiB take longer.
    """
    other = line.receive(line.receive(1)[0]).decode()
    rtt_s = _round_trip_s(line, seconds / 5)
    mbps = tuple(_mbps(line, kind, rtt_s, seconds * 2 / 5) for kind in (_TAKE, _GIVE))
    line.send(_COMMAND.pack(_END, 0))
    own, peer = line.connection.getsockname()[0], line.connection.getpeername()[0]
    return Link(ranks, (own, peer), (_interface(line), other), 1e6 * rtt_s, (mbps[0], mbps[1]))


def answer(line: Line) -> None:
    """Take part in a measurement as the second of two ranks."""
    name = _interface(line).encode()
    line.send(bytes([len(name)]) + name)
    while True:
        kind, num_bytes = _COMMAND.unpack(line.receive(_COMMAND.size))
        if kind == _END:
            return
        if kind == _GIVE:
            _give(line, num_bytes)
        elif kind in (_PING, _TAKE):
            _take(line, num_bytes)
            line.send(b"!")
        else:
            raise TransportError(f"rank {line.peer} sent an unknown command {kind!r}; it may have another version")


def _interface(line: Line) -> str:
    try:
        return interface_towards(line.connection.getpeername()[0])
    except OSError:
        return "?"


def _round_trip_s(line: Line, seconds: float) -> float:
    times_s: list[float] = []
    while len(times_s) < _MAX_PINGS and sum(times_s) < seconds:
        begin_s = time.perf_counter()
        line.send(_COMMAND.pack(_PING, 0))
        line.receive(1)
        times_s.append(time.perf_counter() - begin_s)
    return statistics.median(times_s)


def _mbps(line: Line, kind: bytes, rtt_s: float, seconds: float) -> float:
    """Return the rate of the faster of two transfers (a lost packet delays one) that take a quarter of the time."""
    num_bytes = _FIRST_BYTES
    while (taken_s := _transfer_s(line, kind, num_bytes)) < seconds / 4 and num_bytes < _MAX_BYTES:
        num_bytes *= 2 if taken_s > seconds / 16 else 4
    taken_s = min(taken_s, _transfer_s(line, kind, num_bytes))
    return 8e-6 * num_bytes / max(taken_s - rtt_s, taken_s / 10)


def _transfer_s(line: Line, kind: bytes, num_bytes: int) -> float:
    begin_s = time.perf_counter()
    line.send(_COMMAND.pack(kind, num_bytes))
    if kind == _TAKE:
        _give(line, num_bytes)
        line.receive(1)
    else:
        _take(line, num_bytes)
    return time.perf_counter() - begin_s


def _give(line: Line, num_bytes: int) -> None:
    chunk = memoryview(bytes(min(num_bytes, _CHUNK_BYTES)))
    for at in range(0, num_bytes, _CHUNK_BYTES):
        line.send(chunk[: num_bytes - at])


def _take(line: Line, num_bytes: int) -> None:
    chunk = memoryview(bytearray(min(num_bytes, _CHUNK_BYTES)))
    for at in range(0, num_bytes, _CHUNK_BYTES):
        line.receive_into(chunk[: num_bytes - at])
