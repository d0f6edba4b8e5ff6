"""The process that delays packets: it accepts each packet of the netfilter queues after a fixed time.

Runs as a file, without importing commlib or torch: ``python -I -S forwarder.py NAMESPACE...``. In each network
namespace, an iptables rule puts incoming packets into queue 0. They stay in the kernel, unmodified, until this process
returns a verdict; the netlink socket carries only packet ids. Each line of standard input sets the delay in
microseconds, and the process answers ``ready``; it exits at end of file. Any condition that would lose or reorder
packets is an error: the process exits, which stops all traffic.

[Note: a delay's precision] The process runs under SCHED_FIFO, before all training processes, because its lateness adds
to every packet's delay. A wake-up costs more than handling a packet. If two wake-ups follow within `_QUANTUM_S`, the
process sleeps for that long and handles all packets that arrived meanwhile in one batch. A single message is therefore
on time, and a stream at most slightly late.
"""

from __future__ import annotations

import collections
import ctypes
import errno
import gc
import os
import select
import socket
import struct
import sys
import time

_QUANTUM_S = 1e-4
_PRIORITY = 10
_CLONE_NEWNET = 0x40000000
_SO_RCVBUFFORCE = 33  # Python's socket module lacks the name
_RECEIVE_BYTES = 64 << 20
_MAX_PACKETS = 1 << 20

# linux/netlink.h, linux/netfilter/nfnetlink.h and nfnetlink_queue.h
_NETLINK_NETFILTER = 12
_NLMSG_ERROR = 2
_NLM_F_REQUEST, _NLM_F_ACK = 1, 4
_SUBSYSTEM_QUEUE = 3 << 8
_PACKET, _CONFIG, _VERDICT_BATCH = _SUBSYSTEM_QUEUE | 0, _SUBSYSTEM_QUEUE | 2, _SUBSYSTEM_QUEUE | 3
_CFG_CMD, _CFG_PARAMS, _CFG_QUEUE_MAXLEN, _CFG_MASK, _CFG_FLAGS = 1, 2, 3, 4, 5
_CMD_BIND, _COPY_META, _FLAG_GSO = 1, 1, 4
_ATTR_PACKET_HDR, _ATTR_VERDICT_HDR = 1, 2
_ACCEPT = 1

_HEADER = struct.Struct("=IHHIIBBH")  # length, type, flags, sequence, port; then family, version, queue
_ATTRIBUTE = struct.Struct("=HH")
_ID = struct.Struct("!I")
_TYPE_AT, _ID_AT = 4, _HEADER.size + _ATTRIBUTE.size  # a packet's first attribute begins with its id


def _message(kind: int, flags: int, *attributes: tuple[int, bytes]) -> bytes:
    body = b"".join(
        _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), name) + value + bytes(-len(value) % 4)
        for name, value in attributes
    )
    return _HEADER.pack(_HEADER.size + len(body), kind, _NLM_F_REQUEST | flags, 0, 0, 0, 0, 0) + body


class _Queue:
    """The packets that wait in one namespace: for each due time, the id of the last packet due then."""

    def __init__(self, namespace: str) -> None:
        self.socket = _in_namespace(namespace)
        self.socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BYTES)
        self.socket.bind((0, 0))
        self._buffer = bytearray(1 << 12)
        self._waiting: collections.deque[tuple[float, int]] = collections.deque()
        self._configure((_CFG_CMD, struct.pack("!BBH", _CMD_BIND, 0, 0)))
        self._configure((_CFG_PARAMS, struct.pack("!IB", 0, _COPY_META)))
        self._configure((_CFG_QUEUE_MAXLEN, struct.pack("!I", _MAX_PACKETS)))
        flag = struct.pack("!I", _FLAG_GSO)
        self._configure((_CFG_FLAGS, flag), (_CFG_MASK, flag))
        self.socket.setblocking(False)

    def _configure(self, *attributes: tuple[int, bytes]) -> None:
        self.socket.send(_message(_CONFIG, _NLM_F_ACK, *attributes))
        self._receive()

    def _receive(self) -> int | None:
        """Return the id of the next packet, or None for an acknowledgement from the kernel."""
        self.socket.recv_into(self._buffer)
        kind = int.from_bytes(self._buffer[_TYPE_AT : _TYPE_AT + 2], sys.byteorder)
        if kind == _NLMSG_ERROR:
            code = -struct.unpack_from("=i", self._buffer, 16)[0]
            if code:
                raise OSError(code, f"the kernel rejected a request to the packet queue: {os.strerror(code)}")
            return None
        if kind != _PACKET or _ATTRIBUTE.unpack_from(self._buffer, _HEADER.size)[1] != _ATTR_PACKET_HDR:
            raise OSError(errno.EPROTO, f"expected a packet from the queue, got a netlink message of type {kind}")
        return _ID.unpack_from(self._buffer, _ID_AT)[0]

    def take(self, due_s: float) -> None:
        """Record the packets that have arrived; they are due at `due_s`, but never before earlier packets."""
        last = None
        try:
            while True:
                last = self._receive()
        except BlockingIOError:
            pass
        if last is not None:
            self._waiting.append((max(due_s, self._waiting[-1][0]) if self._waiting else due_s, last))

    @property
    def next_s(self) -> float:
        """Due time of the first packet, in seconds of the monotonic clock; infinity if the queue is empty."""
        return self._waiting[0][0] if self._waiting else float("inf")

    def release(self, until_s: float) -> None:
        """Accept the packets that are due by `until_s`."""
        last = None
        while self._waiting and self._waiting[0][0] <= until_s:
            last = self._waiting.popleft()[1]
        if last is not None:
            self.socket.send(_message(_VERDICT_BATCH, 0, (_ATTR_VERDICT_HDR, struct.pack("!II", _ACCEPT, last))))


def _in_namespace(name: str) -> socket.socket:
    """Create a netlink socket inside the namespace, then return to the original namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    home, there = (os.open(path, os.O_RDONLY) for path in ("/proc/self/ns/net", f"/run/netns/{name}"))
    try:
        if libc.setns(there, _CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot enter the network namespace {name}: {os.strerror(code)}")
        made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
        libc.setns(home, _CLONE_NEWNET)
        return made
    finally:
        os.close(home)
        os.close(there)


def _forward(queues: list[_Queue]) -> None:
    """Delay packets until end of file on standard input."""
    commands, delay_s = sys.stdin.fileno(), 0.0
    by_descriptor = {queue.socket.fileno(): queue for queue in queues}
    descriptors = [commands, *by_descriptor]
    now_s = before_s = time.monotonic()
    while True:
        next_s = min(queue.next_s for queue in queues)
        readable, _, _ = select.select(
            descriptors, [], [], None if next_s == float("inf") else max(0.0, next_s - now_s)
        )
        now_s = time.monotonic()
        for descriptor in readable:
            if descriptor in by_descriptor:
                by_descriptor[descriptor].take(now_s + delay_s)
                continue
            line = os.read(commands, 64)
            if not line:
                return
            delay_s = float(line) * 1e-6
            print("ready", flush=True)
        for queue in queues:
            queue.release(now_s)
        if now_s - before_s < _QUANTUM_S:
            time.sleep(_QUANTUM_S)
        before_s, now_s = now_s, time.monotonic()


def main() -> None:
    """Delay packets that arrive in the namespaces given on the command line."""
    gc.disable()
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    except OSError as error:
        sys.exit(f"real-time priority (SCHED_FIFO: {error.strerror}; it requires CAP_SYS_NICE)")
    try:
        queues = [_Queue(name) for name in sys.argv[1:]]
        _forward(queues)
    except OSError as error:
        if error.errno == errno.ENOBUFS:
            sys.exit("packets arrived faster than they could be handled, and some were lost (ENOBUFS)")
        sys.exit(str(error))


if __name__ == "__main__":
    main()
