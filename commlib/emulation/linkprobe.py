"""Measure a link between two network namespaces with plain TCP sockets: payload goodput and round-trip time.

A socket stays in the namespace in which its thread created it. A short-lived thread therefore enters the namespace,
creates the socket and exits. The calling thread never changes its namespace, and no process is started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from commlib.emulation.netns import Namespace
from commlib.errors import TransportError

_CLONE_NEWNET = 0x40000000
_TIMEOUT_S = 15.0
_CHUNK_BYTES = 1 << 16
_MAX_SEND_BUFFER = 4 << 20
# Like SO_SNDBUF and SO_RCVBUF, but root may exceed the machine's limit; Python's socket module lacks the names.
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_SLOW_START_ROUNDS = 10

_T = TypeVar("_T")


def in_namespace(namespace: Namespace, function: Callable[[], _T]) -> _T:
    """Call `function` in a new thread inside the namespace and return its result.

    Raises:
        TransportError: If the namespace cannot be entered.
    """

    def enter() -> _T:
        descriptor = os.open(namespace.path, os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
                reason = os.strerror(ctypes.get_errno())
                raise TransportError(f"cannot enter the network namespace {namespace.name}: {reason}")
        finally:
            os.close(descriptor)
        return function()

    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(enter).result()


@contextlib.contextmanager
def connected_pair(
    source: Namespace, target: Namespace, address: str, receive_buffer: int = 0
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield two connected sockets, one in `source` and one in `target`, whose IPv4 address is `address`.

    `receive_buffer` sets the receive buffer of the socket in `target`, in bytes; 0 leaves the choice to the kernel.
    """
    with in_namespace(target, lambda: socket.create_server((address, 0))) as server:
        if receive_buffer:
            server.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, receive_buffer)
        port = server.getsockname()[1]
        client = in_namespace(source, lambda: socket.create_connection((address, port), timeout=_TIMEOUT_S))
        with client:
            peer, _ = server.accept()
            with peer:
                for end in (client, peer):
                    end.settimeout(_TIMEOUT_S)
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                yield client, peer


def measure_goodput(
    source: Namespace,
    target: Namespace,
    address: str,
    duration_s: float,
    send_buffer: int = _MAX_SEND_BUFFER,
    latency: tuple[float, int] = (0.0, 0),
) -> float:
    """Return the payload rate of one TCP stream from `source` to `target`, in bit/s.

    The stream runs for about `duration_s`, after ten round trips for slow start. Its first quarter, which contains the
    burst of an idle token bucket, is excluded.

    Args:
        source: Namespace of the sender.
        target: Namespace of the receiver.
        address: IPv4 address of `target`.
        duration_s: Sending time in seconds.
        send_buffer: Size of the sender's socket buffer, in bytes: large enough to keep the link busy while the sender
            waits for a processor, and small enough that a slow link drains it soon after the last send.
        latency: Round-trip time in seconds, and the bytes in flight during it, by which both ends' buffers grow.
    """
    rtt_s, in_flight = latency
    send_buffer = min(max(send_buffer, 2 * _CHUNK_BYTES), _MAX_SEND_BUFFER) + in_flight
    slow_start_s = _SLOW_START_ROUNDS * rtt_s
    receive_buffer = 2 * send_buffer if in_flight else 0
    pair = connected_pair(source, target, address, receive_buffer)
    with pair as (client, peer), ThreadPoolExecutor(max_workers=1) as pool:
        client.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, send_buffer)
        sender = pool.submit(_send_for, client, slow_start_s + duration_s)
        goodput = _receive(peer, warmup_s=slow_start_s + duration_s / 4)
        sender.result()
    return goodput


def _send_for(client: socket.socket, duration_s: float) -> None:
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    end = time.perf_counter() + duration_s
    while time.perf_counter() < end:
        client.sendall(chunk)
    client.shutdown(socket.SHUT_WR)


def _receive(peer: socket.socket, warmup_s: float) -> float:
    """Receive until the end of the stream and return its rate after the warm-up, in bit/s.

    The rate is the slope of a linear regression over (time, bits received), which is less sensitive to a receiver that
    waits for a processor than the two end points are.
    """
    buffer = bytearray(_CHUNK_BYTES)
    times_s, bits, received = [], [], 0
    begin = time.perf_counter()
    while num_bytes := peer.recv_into(buffer):
        received += num_bytes
        now = time.perf_counter() - begin
        if now >= warmup_s:
            times_s.append(now)
            bits.append(8.0 * received)
    return statistics.linear_regression(times_s, bits).slope if len(bits) > 2 else 0.0


def measure_rtt(source: Namespace, target: Namespace, address: str, num_rounds: int = 200) -> float:
    """Return the median round-trip time of one byte between two threads' sockets, in seconds.

    The threads run with real-time priority if permitted, so that the result excludes the wait for a processor.
    """
    pool = ThreadPoolExecutor(max_workers=2, initializer=_run_first)
    with connected_pair(source, target, address) as (client, peer), pool:
        echo = pool.submit(_echo, peer, num_rounds)
        times_s = pool.submit(lambda: [_ping(client) for _ in range(num_rounds)]).result()
        echo.result()
    return statistics.median(times_s)


def _run_first() -> None:
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def _echo(peer: socket.socket, num_rounds: int) -> None:
    for _ in range(num_rounds):
        peer.sendall(peer.recv(1))


def _ping(client: socket.socket) -> float:
    begin = time.perf_counter()
    client.sendall(b"x")
    client.recv(1)
    return time.perf_counter() - begin
