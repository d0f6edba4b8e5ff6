"""TCP connections between all pairs of ranks, established once and authenticated by tokens."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import select
import selectors
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from commlib import locks
from commlib.errors import TransportError
from commlib.transport.addresses import address_towards, is_loopback
from commlib.weak import WeakMembers

_log = logging.getLogger("commlib")

_HELLO = struct.Struct("<4s16sI")  # magic, the accepting rank's token, the connecting rank
_MAGIC = b"CMC1"

#: How long a peer whose connection closed may still be found among the connections that it opened, in seconds.
_GONE_S = 0.5

#: How long an accepted connection may take to identify itself, in seconds.
_HELLO_S = 5.0
#: The maximum number of connections that have not identified themselves; beyond it, the oldest is dropped.
_MOST_UNKNOWN = 256

#: The number of bytes that must be available before a thread is woken. The kernel's buffer grows to twice this size.
_WAKE_BYTES = 1 << 20

_made: WeakMembers[Closable] = WeakMembers(locks.lock("connections", is_of_process=True))


class Introduction(Protocol):
    """Exchange of addresses between ranks that have no connections yet."""

    rank: int
    world_size: int
    timeout_s: float

    def local_address(self) -> str:
        """Return the address of this host for connections from other ranks."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's plain `value`, in rank order. Blocks."""
        ...

    def diagnose(self, error: Exception, what: str, suspects: Sequence[int] = ()) -> Exception:
        """Return the error that names the ranks to blame, or the `suspects` if nothing better is known."""
        ...


class PeersMissing(Exception):
    """Peers that did not connect in time (`is_late`), or whose connection closed."""

    def __init__(self, ranks: Sequence[int], is_late: bool, why: str) -> None:
        super().__init__(why)
        self.ranks = ranks
        self.is_late = is_late


def connect_all(
    introduction: Introduction, last_word: bytes = b""
) -> tuple[dict[int, socket.socket], dict[int, socket.socket]]:
    """Connect to every peer, and accept every peer's connection. Collective; the listener closes afterwards.

    The introduction exchanges the addresses and a random token per rank. An accepted connection that does not present
    this rank's token is dropped with a warning in the log.

    Args:
        introduction: Exchanges the ranks' addresses.
        last_word: Bytes sent on every connection before this rank closes all of them because a peer did not connect.
            A rank that is already connected to all peers has left this function, and learns there why the connection
            closes.

    Returns:
        The connections that this rank opened and those that its peers opened, by peer.

    Raises:
        PeerTimeout: A rank did not connect within the introduction's timeout.
        PeerFailure: A rank died meanwhile.
        TransportError: This rank or a peer cannot listen.
    """
    if introduction.world_size == 1:
        return {}, {}
    rank, began_s, limit_s = introduction.rank, time.monotonic(), introduction.timeout_s
    address, token = _reachable(introduction.local_address(), introduction), secrets.token_bytes(16)
    try:
        listener = socket.create_server((address, 0), family=_family(address), backlog=introduction.world_size + 16)
    except OSError as error:
        introduction.gather_objects(f"{error}")
        raise TransportError(f"rank {rank}: cannot listen on {address}: {error}") from error
    with listener, contextlib.ExitStack() as opened:
        everyone = introduction.gather_objects((*listener.getsockname()[:2], token))
        failed = [peer for peer, where in enumerate(everyone) if isinstance(where, str)]
        if failed:
            raise TransportError(f"rank {rank}: ranks {failed} cannot listen; rank {failed[0]}: {everyone[failed[0]]}")
        peers = [peer for peer in range(introduction.world_size) if peer != rank]
        door = opened.enter_context(contextlib.closing(_Door(listener, token, peers, rank)))
        made: dict[int, socket.socket] = {}
        try:
            for peer in peers:
                # A rank that cannot reach another fails before those that wait for its connection.
                made[peer] = opened.enter_context(_dial(peer, everyone[peer], rank, began_s + limit_s / 2))
            accepted = _accept(door, began_s + limit_s, made)
        except PeersMissing as missing:  # report before the connections close, so that this rank is not blamed
            error = TimeoutError(str(missing)) if missing.is_late else ConnectionError(str(missing))
            failure = introduction.diagnose(error, "connecting the ranks", missing.ranks)
            for connection in (*made.values(), *door.all()):
                with contextlib.suppress(OSError):
                    connection.send(last_word, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            raise failure from missing
        opened.pop_all()
    door.selector.close()
    close_in_children(*made.values(), *accepted.values())
    return made, accepted


class Closable(Protocol):
    """A socket, or an object that holds one."""

    def close(self) -> None:
        """Close it."""


def close_in_children(*connections: Closable) -> None:
    """Let forked children close their copies of sockets, which would keep them open after this process ends."""
    _made.add(*connections)


def _close_in_child() -> None:
    """Close a forked child's copies, so that peers notice the end of the parent."""
    for connection in _made.alive():
        connection.close()
    _made.clear()


os.register_at_fork(after_in_child=_close_in_child)


def fill(connection: socket.socket, view: memoryview) -> None:
    """Receive exactly as many bytes as `view` holds.

    The thread is woken when `_WAKE_BYTES` or the remaining bytes are available, not for every few packets: each wake-up
    takes the core from training and requests the interpreter lock. The wait uses `poll`, because a blocking receive
    takes the available bytes and then waits for the low-water mark again, which may never be reached.

    Raises:
        EOFError: The connection closed early.
        TimeoutError: The connection has a timeout, and not enough data arrived within it.
    """
    limit_s = connection.gettimeout()
    ready = select.poll()
    ready.register(connection, select.POLLIN)
    while len(view):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(len(view), _WAKE_BYTES))
        if not ready.poll(None if limit_s is None else 1000 * limit_s):
            raise TimeoutError("nothing was received in time")
        try:
            received = connection.recv_into(view, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            continue
        if received == 0:
            raise EOFError("the connection ended")
        view = view[received:]


def _reachable(address: str, introduction: Introduction) -> str:
    """Return an address of this rank that the other ranks can reach, after gathering the addresses of all ranks.

    A host's own name often resolves to a loopback address, which is valid on that host alone.
    """
    far = [other for other in introduction.gather_objects(address) if not is_loopback(other)]
    if not far or not is_loopback(address):
        return address
    return address_towards(far[0])


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _dial(peer: int, where: tuple[str, int, bytes], rank: int, deadline: float) -> socket.socket:
    host, port, token = where
    try:
        connection = socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic()))
        connection.sendall(_HELLO.pack(_MAGIC, token, rank))
    except OSError as error:
        is_late = isinstance(error, TimeoutError)
        is_gone = is_late or isinstance(error, ConnectionError)  # else there is no route; the peer may be alive
        why = f"cannot connect to {host}:{port}: {error}; GLOO_SOCKET_IFNAME chooses the interface"
        raise PeersMissing([peer] if is_gone else [], is_late, why) from error
    return _prepared(connection)


def _accept(door: _Door, deadline: float, made: Mapping[int, socket.socket]) -> dict[int, socket.socket]:
    """Return the connections of all expected peers. Any other connection is dropped with a warning in the log.

    All accepted connections are read concurrently, so that a slow or silent one does not block the others.

    Raises:
        PeersMissing: A peer did not connect before the deadline, or its connection in `made` closed.
    """
    for peer, connection in made.items():
        door.selector.register(connection, selectors.EVENT_READ, peer)
    while missing := door.missing:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise PeersMissing(missing, True, f"ranks {missing} did not connect in time")
        if gone := door.gone(missing):
            raise PeersMissing(gone, False, f"the connections to ranks {gone} ended")
        door.turn(min(left_s, _GONE_S if door.has_gone else _HELLO_S))
    door.drop_unknown()
    return {peer: _prepared(connection) for peer, connection in door.found.items()}


class _Unknown:
    """An accepted connection that has not identified its peer."""

    def __init__(self, where: Any) -> None:
        self.where = where
        self.said = b""
        self.deadline = time.monotonic() + _HELLO_S


class _Door:
    """The accepted connections of a listener, read concurrently; `found` holds those of authenticated peers.

    A caller that takes over `found` must not close the door.
    """

    def __init__(self, listener: socket.socket, token: bytes, expected: Sequence[int], rank: int) -> None:
        self.found: dict[int, socket.socket] = {}
        self.selector = selectors.DefaultSelector()
        self._listener, self._token, self._expected, self._rank = listener, token, expected, rank
        self._unknown: dict[socket.socket, _Unknown] = {}  # oldest first
        self._gone_s: dict[int, float] = {}  # when the connection that this rank opened to a peer was seen closed
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ)

    def turn(self, limit_s: float) -> None:
        """Process available data; wait for it at most `limit_s` seconds."""
        for key, _ in self.selector.select(limit_s):
            connection: Any = key.fileobj
            if connection is self._listener:
                self._open()
            elif key.data is not None:
                self._watch(connection, key.data)
            elif connection in self._unknown:
                self._read(connection)
        now = time.monotonic()
        for connection in [c for c, unknown in self._unknown.items() if unknown.deadline < now]:
            self._drop(connection)

    @property
    def missing(self) -> list[int]:
        """The peers that have not connected."""
        return [peer for peer in self._expected if peer not in self.found]

    def all(self) -> list[socket.socket]:
        """Return all accepted connections, including unidentified ones and those pending at the listener."""
        while self._open():
            pass
        return [*self.found.values(), *self._unknown]

    def drop_unknown(self) -> None:
        """Drop the connections that have not identified themselves."""
        for connection in list(self._unknown):
            self._drop(connection)

    def close(self) -> None:
        """Close all accepted connections."""
        for connection in (*self.found.values(), *self._unknown):
            connection.close()
        self.selector.close()

    def _open(self) -> bool:
        """Accept the next pending connection; return whether there was one."""
        try:
            connection, where = self._listener.accept()
        except OSError:  # the connection was reset in the meantime
            return False
        connection.setblocking(False)
        self.selector.register(connection, selectors.EVENT_READ)
        self._unknown[connection] = _Unknown(where)
        if len(self._unknown) > _MOST_UNKNOWN + len(self._expected):
            self._drop(next(iter(self._unknown)))
        return True

    def _read(self, connection: socket.socket) -> None:
        unknown = self._unknown[connection]
        try:
            got = connection.recv(_HELLO.size - len(unknown.said))
        except BlockingIOError:
            return
        except OSError:
            got = b""
        unknown.said += got
        if not got:
            self._drop(connection)
        elif len(unknown.said) == _HELLO.size:
            magic, token, peer = _HELLO.unpack(unknown.said)
            is_peer = magic == _MAGIC and hmac.compare_digest(token, self._token) and peer in self._expected
            if not is_peer or peer in self.found:
                self._drop(connection)
                return
            self.found[peer] = self._forget(connection)

    def _watch(self, connection: socket.socket, peer: int) -> None:
        """Check whether the connection to a peer has closed; data on it is left for later."""
        try:
            is_gone = connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return
        except OSError:
            is_gone = True
        if is_gone:
            self._gone_s[peer] = time.monotonic()
        self.selector.unregister(connection)

    @property
    def has_gone(self) -> bool:
        """Whether a connection that this rank opened has closed."""
        return bool(self._gone_s)

    def gone(self, missing: Sequence[int]) -> list[int]:
        """Return the missing peers that have ended and will not connect any more.

        A peer that connected, completed its own set-up and left still has a connection pending here.
        """
        now_s = time.monotonic()
        return [peer for peer in missing if now_s > self._gone_s.get(peer, now_s) + _GONE_S]

    def _forget(self, connection: socket.socket) -> socket.socket:
        self.selector.unregister(connection)
        del self._unknown[connection]
        return connection

    def _drop(self, connection: socket.socket) -> None:
        _log.warning("rank %d: dropped a foreign connection from %s", self._rank, self._unknown[connection].where)
        self._forget(connection).close()


def _prepared(connection: socket.socket) -> socket.socket:
    """Disable Nagle's algorithm, and let TCP detect a host that is down."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(connection)
    return connection


def keep_alive(connection: socket.socket) -> None:
    """Let TCP detect a host that is down."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
