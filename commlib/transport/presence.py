"""Detection of ranks that die while the ranks of a group meet, before their lifelines exist.

[Note: presence] A rank in a meeting listens on a port before it writes anything to the store, and its mark in the store
holds the address. A rank that has waited for `MOMENT_S` connects to the ranks that are present; faster set-ups open no
such connections. An open connection means that the peer is alive: the kernel accepts connections also for a busy or
stopped process, and closes them when the process ends. A rank withdraws its mark, or writes why it gave up, before it
stops listening. So a peer has died if its connection closed or was refused while its mark is unchanged. The evidence
must be conclusive:

- A peer that does not answer, or an address that cannot be reached, proves nothing.
- The address may belong to another process, from an earlier run of the job or on a host with the same address. A peer
  therefore sends its attempt, a random number, on each connection. The end of a connection that received it counts.
- A refused connection counts in two cases only. The first is a mark of this run of the job in the same network
  namespace, where the address cannot be another host's. Such a mark was written after this process started, because a
  launcher ends all processes of one run before it starts the next. The second is after all ranks have agreed that they
  are present, when the next step of the set-up would fail on a refused connection anyway.
- The state has to persist for `CERTAIN_S`, during which the peer does not return.

A loopback address is used in its own network namespace only. Each rank watches the `WATCHED` ranks after it, so the
number of connections and queries per rank does not grow with the group. A rank that finds a death notifies the others
through the store. A rank that is alone on its host and dies before any other rank has connected to it is reported as
late once all other ranks have arrived and the timeout has passed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import time
from collections.abc import Mapping
from typing import NamedTuple

from commlib.transport.connections import close_in_children, keep_alive

#: How long a rank waits before it connects to the ranks that are present, in seconds.
MOMENT_S = 0.5
#: The polling interval, in seconds.
LOOK_S = 0.1
#: How long a peer has to be unreachable before it counts as dead, in seconds.
CERTAIN_S = 0.7
#: The number of ranks that each rank watches.
WATCHED = 16

_RETRY_S = 0.2
#: Margin for the start times of processes, which the kernel reports in hundredths of a second.
_TICK_S = 0.05


class Mark(NamedTuple):
    """The entry that a rank writes to the store when it joins a meeting.

    Attributes:
        attempt: A random number, hexadecimal.
        written_s: When it was written, in seconds since the boot of its host.
        place: The rank's network namespace, host and boot of the host; "-" if unknown.
        address: The address that the rank listens on; "-" if it does not listen.
        port: The port that the rank listens on.
    """

    attempt: str
    written_s: float = 0.0
    place: str = "-"
    address: str = "-"
    port: int = 0

    def words(self) -> str:
        """Return the text for the store."""
        return f"{self.attempt} {self.written_s:.2f} {self.place} {self.address} {self.port}"

    @classmethod
    def parse(cls, words: str) -> Mark | None:
        """Parse a text from the store; return None if it is malformed."""
        try:
            attempt, written_s, place, address, port = words.split(" ")
            return cls(attempt, float(written_s), place, address, int(port))
        except ValueError:
            return None

    @property
    def is_here(self) -> bool:
        """Whether it was written in this process's network namespace, on the current boot of the host."""
        return self.place != "-" and self.place == own_place()

    @property
    def is_of_this_life(self) -> bool:
        """Whether it was written after this process started; see [Note: presence]."""
        return self.is_here and self.written_s > _started_s() + _TICK_S

    @property
    def is_reachable(self) -> bool:
        """Whether this process may connect to its address."""
        return self.address != "-" and (self.is_here or not self.address.startswith(("127.", "::1")))


class Presence:
    """One rank's listener during a meeting, and its connections to the listeners of other ranks.

    Args:
        attempt: The rank's attempt.
        address: The address to listen on.
        backlog: The number of connections that may be pending at once.
    """

    def __init__(self, attempt: str, address: str, backlog: int) -> None:
        self._attempt = attempt
        self._listener: socket.socket | None = None
        self._guests: list[socket.socket] = []
        self._sights: dict[int, _Sight] = {}
        self.mark = Mark(attempt, _clock_s(), own_place())
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError):  # then no rank watches this one; `connect_all` reports the error
            self._listener = socket.create_server((address, 0), family=family, backlog=backlog)
            self._listener.setblocking(False)
            close_in_children(self._listener)
            self.mark = self.mark._replace(address=address, port=self._listener.getsockname()[1])

    def greet(self) -> None:
        """Accept the pending connections and send this rank's attempt on them."""
        while self._listener is not None:
            try:
                guest, _ = self._listener.accept()
            except OSError:  # no connection is pending
                return
            close_in_children(guest)
            self._guests.append(guest)
            with contextlib.suppress(OSError):
                guest.setblocking(False)
                guest.send(self._attempt.encode(), socket.MSG_NOSIGNAL)

    def gone(self, marks: Mapping[int, Mark], is_agreed: bool) -> dict[int, str]:
        """Return the peers that have died, each with the evidence.

        Args:
            marks: The current marks in the store of the peers to check.
            is_agreed: Whether all ranks have agreed that they are present, with these marks.
        """
        for peer in [peer for peer, sight in self._sights.items() if sight.mark != marks.get(peer)]:
            self._sights.pop(peer).close()
        for peer, mark in marks.items():
            if mark.is_reachable:
                self._sights.setdefault(peer, _Sight(mark)).look()
        return {peer: sight.why for peer, sight in self._sights.items() if sight.is_gone(is_agreed)}

    def ended(self) -> dict[int, str]:
        """Return the peers whose connection has closed, each with the error. For use when the store does not answer."""
        for sight in self._sights.values():
            sight.look()
        return {peer: sight.why for peer, sight in self._sights.items() if sight.has_greeted and sight.is_down}

    def close(self) -> None:
        """Close the listener and all connections."""
        for sight in self._sights.values():
            sight.close()
        for each in (*self._guests, *filter(None, [self._listener])):
            each.close()
        self._listener = None
        self._guests.clear()
        self._sights.clear()


class _Sight:
    """This rank's connection to one peer's listener, and the conclusions from it about the peer."""

    def __init__(self, mark: Mark) -> None:
        self.mark = mark
        self.has_greeted = False
        self.why = ""
        self._connection: socket.socket | None = None
        self._heard = b""
        self._was_refused = False
        self._down_s: float | None = None  # since when there has been no established connection
        self._next_s = 0.0

    @property
    def is_down(self) -> bool:
        """Whether there has been no connection for `CERTAIN_S`; a pending connection may still be established."""
        is_over = self._down_s is not None and time.monotonic() > self._down_s + CERTAIN_S
        return is_over and self._connection is None

    def is_gone(self, is_agreed: bool) -> bool:
        """Return whether the peer has died; see [Note: presence]."""
        is_certain = self._was_refused and (is_agreed or self.mark.is_of_this_life)
        return self.is_down and (self.has_greeted or is_certain)

    def look(self) -> None:
        """Connect if a retry is due, and receive pending data."""
        if self._connection is None:
            if time.monotonic() < self._next_s:
                return
            self._connect()
        while self._connection is not None:
            try:
                heard = self._connection.recv(64)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.ENOTCONN:  # not connected yet
                    return
                self._fail(error)
            else:
                self._hear(heard)

    def _connect(self) -> None:
        family = socket.AF_INET6 if ":" in self.mark.address else socket.AF_INET
        self._heard = b""
        try:
            self._connection = socket.socket(family, socket.SOCK_STREAM)
            close_in_children(self._connection)
            self._connection.setblocking(False)
            keep_alive(self._connection)
            with contextlib.suppress(BlockingIOError):
                self._connection.connect((self.mark.address, self.mark.port))
        except OSError as error:
            self._fail(error)

    def _hear(self, heard: bytes) -> None:
        if not heard:
            self._fail(ConnectionError("the connection ended"))
            return
        self._heard += heard
        if self._heard == self.mark.attempt.encode():
            self.has_greeted, self._down_s = True, None
        elif len(self._heard) >= len(self.mark.attempt):
            self._fail(ConnectionError("another process answers"))

    def _fail(self, error: OSError) -> None:
        now_s = time.monotonic()
        self._was_refused = isinstance(error, ConnectionRefusedError)
        self._down_s = self._down_s or now_s
        self._next_s = now_s + _RETRY_S
        had_stood = "its connection closed; last error: " if self.has_greeted else ""
        self.why = f"{had_stood}{self.mark.address}:{self.mark.port}: {error}"
        self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _clock_s() -> float:
    """Return the seconds since the boot of the host, on the clock by which the kernel records process starts."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@functools.cache
def _started_s() -> float:
    """Return when this process started, by `_clock_s`; infinity if unknown."""
    try:
        with open(f"/proc/{os.getpid()}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return float("inf")


@functools.cache
def own_place() -> str:
    """Return an identifier of the network namespace, time namespace, host and boot of the host; "-" if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        spaces = [str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("net", "time")]
    except OSError:
        return "-"
    return ".".join([boot, *spaces])


def _forget() -> None:
    """Clear the caches in a forked child, which started later and may enter another namespace."""
    _started_s.cache_clear()
    own_place.cache_clear()


os.register_at_fork(after_in_child=_forget)
