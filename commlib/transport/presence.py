"""Who dies while the ranks of a group meet, before they have lifelines.

[Note: presence] A rank in a meeting listens from its first word on, and its mark in the store says where. A rank that
has waited for a moment connects to the ranks that are here; set-ups that take no longer make no such connection. The
connection says by being open that the peer is alive: the kernel accepts it also for a process that is busy or stopped,
and ends it with the process. A rank takes back its mark, or writes why it gave up, before it stops listening. So a peer
has died if its connection ended, or was refused, and its mark is unchanged. Nobody is accused on less than that:

- Silence proves nothing: neither a peer that does not answer nor an address that cannot be reached.
- The address may be another's: that of an earlier life of the job, or one that two hosts share. A peer that is alive
  sends its attempt, a random number, on each connection. The end of a connection on which it came counts.
- A refused connection counts in two cases only. In the same network namespace the address cannot be another host's;
  the mark must be of this life of the job: written since this process started, as a launcher ends all processes of one
  life before it starts the next. And once all ranks have agreed that they are here, where the next step of the set-up
  would fail on a refused connection anyway.
- It has to stay so for `CERTAIN_S`, in which the peer does not come back.

An address on the loopback interface is used in its own network namespace only. Each rank watches the `WATCHED` ranks
after it, so a large group makes no more connections and questions per rank than a small one; who finds a death tells
the others through the store. A rank that is alone on its host, and dies before any other rank has seen it, is found
when all others are here and its absence is over the limit: it is then one that did not come.
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

#: How long a rank waits before it connects to those that are here, in seconds.
MOMENT_S = 0.5
#: How often it looks at them, in seconds.
LOOK_S = 0.1
#: How long a peer has to be gone before it counts as dead, in seconds.
CERTAIN_S = 0.7
#: How many ranks each rank watches.
WATCHED = 16

_RETRY_S = 0.2
#: The kernel's clock of process starts ticks in hundredths of a second.
_TICK_S = 0.05


class Mark(NamedTuple):
    """What a rank says of itself when it comes to a meeting.

    Attributes:
        attempt: A random number, hexadecimal.
        written_s: When, by its host's clock since the boot.
        place: Its network namespace, on which boot of which host; "-" where that is not known.
        address: Where it listens; "-" where it does not.
        port: And the port.
    """

    attempt: str
    written_s: float = 0.0
    place: str = "-"
    address: str = "-"
    port: int = 0

    def words(self) -> str:
        """Return it as text for the store."""
        return f"{self.attempt} {self.written_s:.2f} {self.place} {self.address} {self.port}"

    @classmethod
    def parse(cls, words: str) -> Mark | None:
        """Return the mark that a text is; None: it is none with which this version can do anything."""
        try:
            attempt, written_s, place, address, port = words.split(" ")
            return cls(attempt, float(written_s), place, address, int(port))
        except ValueError:
            return None

    @property
    def is_here(self) -> bool:
        """Whether it was written in this process's network namespace, on this boot of the host."""
        return self.place != "-" and self.place == _place()

    @property
    def is_of_this_life(self) -> bool:
        """Whether it was written after this process had started; see [Note: presence]."""
        return self.is_here and self.written_s > _started_s() + _TICK_S

    @property
    def is_reachable(self) -> bool:
        """Whether its address can be that of the rank, as this process sees it."""
        return self.address != "-" and (self.is_here or not self.address.startswith(("127.", "::1")))


class Presence:
    """One rank's listener during a meeting, and its connections to those of the others.

    Args:
        attempt: The rank's attempt.
        address: Where to listen.
        backlog: How many connections may come at once.
    """

    def __init__(self, attempt: str, address: str, backlog: int) -> None:
        self._attempt = attempt
        self._listener: socket.socket | None = None
        self._guests: list[socket.socket] = []
        self._sights: dict[int, _Sight] = {}
        self.mark = Mark(attempt, _clock_s(), _place())
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError):  # then nobody watches this rank; connecting will say why
            self._listener = socket.create_server((address, 0), family=family, backlog=backlog)
            self._listener.setblocking(False)
            close_in_children(self._listener)
            self.mark = self.mark._replace(address=address, port=self._listener.getsockname()[1])

    def greet(self) -> None:
        """Send this rank's attempt on the connections that have come."""
        while self._listener is not None:
            try:
                guest, _ = self._listener.accept()
            except OSError:  # none is there
                return
            close_in_children(guest)
            self._guests.append(guest)
            with contextlib.suppress(OSError):
                guest.setblocking(False)
                guest.send(self._attempt.encode(), socket.MSG_NOSIGNAL)

    def gone(self, marks: Mapping[int, Mark], is_agreed: bool) -> dict[int, str]:
        """Return the peers that have died, and how that is known.

        Args:
            marks: Of the peers to look at, as they are in the store now.
            is_agreed: Whether all ranks have agreed that they are here, with these marks.
        """
        for peer in [peer for peer, sight in self._sights.items() if sight.mark != marks.get(peer)]:
            self._sights.pop(peer).close()
        for peer, mark in marks.items():
            if mark.is_reachable:
                self._sights.setdefault(peer, _Sight(mark)).look()
        return {peer: sight.why for peer, sight in self._sights.items() if sight.is_gone(is_agreed)}

    def ended(self) -> dict[int, str]:
        """Return the peers whose connection has ended, and how, where the store cannot say what their marks are now."""
        for sight in self._sights.values():
            sight.look()
        return {peer: sight.why for peer, sight in self._sights.items() if sight.has_greeted and sight.is_down}

    def close(self) -> None:
        """End the listener and all connections."""
        for sight in self._sights.values():
            sight.close()
        for each in (*self._guests, *filter(None, [self._listener])):
            each.close()
        self._listener = None
        self._guests.clear()
        self._sights.clear()


class _Sight:
    """What this rank sees of one peer."""

    def __init__(self, mark: Mark) -> None:
        self.mark = mark
        self.has_greeted = False
        self.why = ""
        self._connection: socket.socket | None = None
        self._heard = b""
        self._was_refused = False
        self._down_s: float | None = None  # since when no connection has stood
        self._next_s = 0.0

    @property
    def is_down(self) -> bool:
        """Whether for `CERTAIN_S` no connection has stood; one that is not answered yet may stand."""
        is_over = self._down_s is not None and time.monotonic() > self._down_s + CERTAIN_S
        return is_over and self._connection is None

    def is_gone(self, is_agreed: bool) -> bool:
        """Return whether the peer has died; see [Note: presence]."""
        is_certain = self._was_refused and (is_agreed or self.mark.is_of_this_life)
        return self.is_down and (self.has_greeted or is_certain)

    def look(self) -> None:
        """Connect, if it is time to; take what has come."""
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
                if error.errno == errno.ENOTCONN:  # not yet
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
        had_stood = "its connection ended, and now: " if self.has_greeted else ""
        self.why = f"{had_stood}{self.mark.address}:{self.mark.port}: {error}"
        self.close()

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _clock_s() -> float:
    """Return the time since the host's boot, in seconds: the clock by which the kernel notes starts of processes."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@functools.cache
def _started_s() -> float:
    """Return when this process started, by `_clock_s`; infinity where that is not known."""
    try:
        with open(f"/proc/{os.getpid()}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return float("inf")


@functools.cache
def _place() -> str:
    """Return which network namespace this is, with which clock, on which boot of the host; "-" if that is not known."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        spaces = [str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("net", "time")]
    except OSError:
        return "-"
    return ".".join([boot, *spaces])


def _forget() -> None:
    """In a forked child: it started later, and may change its namespace."""
    _started_s.cache_clear()
    _place.cache_clear()


os.register_at_fork(after_in_child=_forget)
