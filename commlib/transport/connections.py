"""Connections from every rank to every other over TCP, made once, between ranks that know each other by tokens."""

from __future__ import annotations

import hmac
import logging
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence

from commlib.errors import PeerTimeout, TransportError
from commlib.transport.base import Transport
from commlib.transport.torch_dist import address_towards

_log = logging.getLogger("commlib")

_HELLO = struct.Struct("<4s16sI")  # magic, the accepting rank's token, the connecting rank
_MAGIC = b"CMC1"

#: How long a foreign connection may take to say who it is, in seconds.
_HELLO_S = 5.0

#: What has to be there before a thread is woken. The kernel's buffer grows to twice as much.
_WAKE_BYTES = 1 << 20


def connect_all(transport: Transport) -> tuple[dict[int, socket.socket], dict[int, socket.socket]]:
    """Connect to every peer, and take every peer's connection. Collective; nothing listens after it.

    Addresses and a random token of each rank go over the transport. A connection that does not prove to be of a peer
    by this rank's token is dropped with a log line.

    Returns:
        The connections that this rank made, and those that its peers made, by peer.

    Raises:
        PeerTimeout: A rank did not connect within the transport's timeout.
        TransportError: This rank or a peer cannot listen, or a connection could not be made.
    """
    if transport.world_size == 1:
        return {}, {}
    rank, deadline = transport.rank, time.monotonic() + transport.timeout_s
    address, token = _reachable(transport.local_address(), transport), secrets.token_bytes(16)
    try:
        listener = socket.create_server((address, 0), family=_family(address), backlog=transport.world_size + 16)
    except OSError as error:
        transport.gather_objects(f"{error}")
        raise TransportError(f"rank {rank}: cannot listen on {address}: {error}") from error
    with listener:
        everyone = transport.gather_objects((*listener.getsockname()[:2], token))
        failed = [peer for peer, where in enumerate(everyone) if isinstance(where, str)]
        if failed:
            raise TransportError(f"rank {rank}: ranks {failed} cannot listen; rank {failed[0]}: {everyone[failed[0]]}")
        peers = [peer for peer in range(transport.world_size) if peer != rank]
        made = {peer: _dial(everyone[peer], rank, deadline) for peer in peers}
        return made, dict(_accept(listener, token, peers, rank, deadline))


def fill(connection: socket.socket, view: memoryview) -> None:
    """Receive exactly as many bytes as `view` holds.

    The thread is woken when `_WAKE_BYTES` or the rest are there, not for every few packets: each time it would take the
    core from training, and ask for the interpreter's lock. It waits in `poll`: a blocking receive takes what is there
    and then waits for as much again, which may never come.

    Raises:
        EOFError: The connection ended before.
        TimeoutError: The connection has a timeout, and nothing came for so long.
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


def _reachable(address: str, transport: Transport) -> str:
    """Return an address of this rank that the others reach, by first asking where they are.

    A host's own name often means a loopback address on that host alone.
    """
    far = [other for other in transport.gather_objects(address) if not _is_loopback(other)]
    if not far or not _is_loopback(address):
        return address
    return address_towards(far[0])


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _dial(where: tuple[str, int, bytes], rank: int, deadline: float) -> socket.socket:
    host, port, token = where
    try:
        connection = socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic()))
        connection.sendall(_HELLO.pack(_MAGIC, token, rank))
    except OSError as error:
        raise TransportError(f"rank {rank}: cannot connect to a peer at {host}:{port}: {error}") from error
    return _prepared(connection)


def _accept(
    listener: socket.socket, token: bytes, expected: Sequence[int], rank: int, deadline: float
) -> list[tuple[int, socket.socket]]:
    """Return the connections of the expected ranks. Any other that comes is dropped with a log line.

    Raises:
        PeerTimeout: Not all came before the deadline; those that did are closed.
    """
    found: dict[int, socket.socket] = {}
    while len(found) < len(expected):
        missing = sorted(set(expected) - set(found))
        left_s = deadline - time.monotonic()
        try:
            if left_s <= 0:
                raise TimeoutError
            listener.settimeout(left_s)
            connection, where = listener.accept()
        except TimeoutError:
            for connection in found.values():
                connection.close()
            raise PeerTimeout(f"rank {rank}: ranks {missing} did not connect to the mailbox in time") from None
        peer = _hello(connection, token, min(_HELLO_S, left_s))
        if peer in missing:
            found[peer] = _prepared(connection)
        else:
            _log.warning("rank %d: dropped a foreign connection from %s", rank, where)
            connection.close()
    return list(found.items())


def _hello(connection: socket.socket, token: bytes, limit_s: float) -> int | None:
    """Return the rank that a new connection proves to be of, or None."""
    hello = bytearray(_HELLO.size)
    connection.settimeout(limit_s)
    try:
        fill(connection, memoryview(hello))
    except (OSError, EOFError):
        return None
    magic, got, peer = _HELLO.unpack(hello)
    return peer if magic == _MAGIC and hmac.compare_digest(got, token) else None


def _prepared(connection: socket.socket) -> socket.socket:
    """Let small messages leave at once, and TCP find out that a machine is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return connection
