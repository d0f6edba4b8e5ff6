"""One-sided messages between ranks, answered by threads of the peer independently of its training thread.

Every rank has a TCP connection to every other rank. Connections are created once, at set-up, and authenticated by a
random token that the ranks exchanged over their communicator. A rank *asks* on the connections that it opened and
*answers* on those that its peers opened:

    asking rank                                   answering rank
    ask(peer, message, on_reply)                  answer(rank, message, reply)
      its asking thread sends, waits       --->     that connection's thread calls `answer`, which calls `reply`
      on_reply(message) on that thread     <---

Questions to one peer are sent one after the other. Each waits for its reply without a timeout, because a stopped
process may continue later. While idle, all threads block in receives.

[Note: how a peer ends] A rank that closes its mailbox first sends a goodbye on the connections that it opened. The
connection that a peer opened determines the peer's state: *here*; *left* (a goodbye); *failed* (a goodbye while an
exception ends the process); *lost* (the connection closed without a goodbye: the process was killed). TCP keepalive
probes detect a host that is down. A rank that ends because another rank died first reports this over the transport and
is not blamed (`Transport.blame`).

Payloads are host memory; the caller copies CUDA tensors. A question may be created on the asking thread, so that
copies from a device are waited for there.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

from commlib import locks
from commlib.errors import PeerFailure, TransportError
from commlib.transport.base import Transport
from commlib.transport.closing import Finalizer
from commlib.transport.connections import connect_all, fill
from commlib.transport.lifelines import TOGETHER_S
from commlib.transport.rendezvous import name_of

_log = logging.getLogger("commlib")

_HEADER = struct.Struct("<4sBqIQ")  # magic, kind, number, number of terms, bytes of payload
#: Bytes of a message without its payload.
HEADER_BYTES = _HEADER.size
_MAGIC = b"CMM1"
_LEFT, _FAILED = 254, 255  # kinds of goodbye; algorithms use kinds below

#: How long closing waits for a message in transmission, so that a goodbye can follow it, in seconds.
_GOODBYE_S = 2.0
#: How long closing waits for its threads, in seconds.
_JOIN_S = 1.0
#: How long an asker whose connection broke waits for a goodbye on the connection that the peer opened, in seconds.
_VERDICT_S = 1.0


class Message(NamedTuple):
    """A question or a reply.

    Attributes:
        kind: Defined by the algorithm, 0 to 253.
        number: Defined by the algorithm, such as a version or a round; a signed 64-bit integer.
        payload: Bytes. In a received message, a view of a buffer that the next message on that connection overwrites.
        num_terms: Defined by the algorithm, the number of values summed in the payload; an unsigned 32-bit integer.
    """

    kind: int
    number: int = 0
    payload: Any = b""
    num_terms: int = 0


#: Answers a question of `rank` by one call of `reply`. The reply's payload may be modified once `reply` returns.
Answer = Callable[[int, Message, Callable[[Message], None]], None]


class Presence(Enum):
    """The known state of a peer; see [Note: how a peer ends]."""

    HERE = "here"
    LEFT = "left"
    FAILED = "failed"
    LOST = "lost"


class Mailbox:
    """This rank's connections for one-sided messages. The constructor is collective.

    Args:
        transport: Defines the ranks and exchanges their addresses.
        answer: A bound method that answers questions; held weakly, so that a mailbox never keeps a model alive. Called
            on one thread per asking peer, concurrently.
        max_request: The largest payload of a question, in bytes.

    Raises:
        PeerTimeout: A rank did not connect within the transport's timeout.
        TransportError: A connection could not be established.
    """

    def __init__(self, transport: Transport, answer: Answer, max_request: int = 0) -> None:
        self.rank = transport.rank
        self._transport = transport
        self._state = _State(transport.rank, transport.world_size, answer, max_request)
        end = functools.partial(_close, self._state, None)
        self._finalizer = Finalizer(self, end, f"the mailbox of rank {transport.rank}")
        try:
            _connect(self._state, transport)
        except BaseException:
            self._finalizer.detach()
            _close(self._state, _FAILED)
            raise

    def ask(
        self, peer: int, message: Message | Callable[[], Message], on_reply: Callable[[Message], None], into: Any = None
    ) -> None:
        """Send a question to `peer`. Does not block. Has no effect if the peer has ended.

        Args:
            peer: A rank. This rank answers its own questions on a separate thread.
            message: The question, or a function that creates it on the asking thread just before it is sent. Its
                payload must not change until the reply has arrived.
            on_reply: Called on the asking thread with the reply; never called if the peer ends first.
            into: A writable buffer of bytes that fits the reply's payload; None for replies without a payload.
        """
        state = self._state
        if peer == self.rank and peer not in state.askers:
            state.askers[peer] = _OwnAsker(state)
        if state.presence[peer] is Presence.HERE:
            state.askers[peer].jobs.put((message, on_reply, into))

    def global_rank(self, rank: int) -> int:
        """Return the rank in the default group of a rank of this group, for error messages."""
        return self._transport.global_ranks[rank]

    def presence(self, peer: int) -> Presence:
        """Return the current state of a peer."""
        return self._state.presence[peer]

    def present(self) -> list[int]:
        """Return the other ranks that have not ended."""
        return [r for r, state in enumerate(self._state.presence) if r != self.rank and state is Presence.HERE]

    def check(self) -> None:
        """Raise the first error of the background threads, or the failure of a peer.

        Raises:
            PeerFailure: A peer died or failed.
            TransportError: This rank could not answer a peer.
        """
        if self._state.error is not None:
            raise TransportError(f"rank {self.rank}: answering a peer failed: {self._state.error!r}") from (
                self._state.error
            )
        if self._ended():
            time.sleep(TOGETHER_S)  # for reports of other ranks, and for ranks that died at the same time
            raise self._failure()

    def _ended(self) -> list[int]:
        return [r for r, state in enumerate(self._state.presence) if state in _HOW]

    def _failure(self) -> PeerFailure:
        """Return the error that names the ranks that ended first, excluding ranks that ended because of others."""
        state, transport = self._state, self._transport
        gone = set(self._ended()) - transport.bystanders() or set(self._ended())
        first_s = min(state.ended_s[rank] for rank in gone)
        gone = sorted(rank for rank in gone if state.ended_s[rank] <= first_s + TOGETHER_S)
        transport.blame()
        how = ", ".join(f"rank {transport.global_ranks[rank]} {_HOW[state.presence[rank]]}" for rank in gone)
        return PeerFailure(
            f"{name_of(self.rank, transport.global_ranks)}: {how}; the other ranks cannot continue",
            [transport.global_ranks[rank] for rank in gone],
        )

    @property
    def bytes_sent(self) -> float:
        """Bytes of payloads sent so far, in questions and replies."""
        return self._state.bytes_sent

    def close(self) -> None:
        """Send a goodbye and end all connections and threads. Idempotent."""
        if self._finalizer.detach():
            _close(self._state, _LEFT)


_HOW = {
    Presence.FAILED: "ended with an exception",
    Presence.LOST: "disconnected without a goodbye: it was killed, or its host does not answer",
}


class _State:
    """State shared by the threads; separate from the mailbox, so that the threads do not keep the mailbox alive."""

    def __init__(self, rank: int, world_size: int, answer: Answer, max_request: int) -> None:
        self.rank = rank
        self.answer: Callable[[], Answer | None] = weakref.WeakMethod(answer)
        self.max_request = max_request
        self.presence = [Presence.HERE] * world_size
        self.ended_s = [0.0] * world_size  # when this rank noticed the end of each peer that has ended
        self.pid = os.getpid()
        self.askers: dict[int, _Asker | _OwnAsker] = {}
        self.servers: list[tuple[socket.socket, threading.Thread]] = []
        self.is_closing = False
        self.error: BaseException | None = None
        self.bytes_sent = 0.0
        self._counting = locks.lock("mailbox.counting")

    def send(self, connection: socket.socket, message: Message) -> None:
        """Send a message. Its payload is counted first, so that the count includes every message received by a peer."""
        with self._counting:
            self.bytes_sent += len(message.payload)
        _send(connection, message)

    def set_presence(self, peer: int, presence: Presence, why: str = "") -> None:
        """Record how a peer ended; the first call counts."""
        if self.presence[peer] is Presence.HERE and not self.is_closing:
            self.ended_s[peer] = time.monotonic()
            self.presence[peer] = presence
            _log.info("rank %d: rank %d %s%s", self.rank, peer, presence.value, why and f" ({why})")


class _Asker:
    """The connection for questions to one peer, and its thread."""

    def __init__(self, state: _State, peer: int, connection: socket.socket) -> None:
        self.peer = peer
        self.connection = connection
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.sending = locks.lock("mailbox.sending")
        self.thread = _thread(f"commlib-ask-{peer}", self._run, state)

    def _run(self, state: _State) -> None:
        try:
            while (job := self.jobs.get()) is not None:
                message, on_reply, into = job
                with self.sending:
                    if state.is_closing:  # the goodbye is the last message
                        return
                    state.send(self.connection, _made(message))
                on_reply(_receive(self.connection, lambda nbytes, into=into: _room(into, nbytes)))
                del job, message, on_reply, into  # an idle thread must not keep a model alive
        except (OSError, EOFError, _Malformed) as error:
            deadline = time.monotonic() + _VERDICT_S
            while state.presence[self.peer] is Presence.HERE and not state.is_closing and time.monotonic() < deadline:
                time.sleep(0.01)
            state.set_presence(self.peer, Presence.LOST, str(error))
        except BaseException as error:
            state.error = error


class _OwnAsker:
    """A thread that answers this rank's own questions; created on first use."""

    def __init__(self, state: _State) -> None:
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.thread = _thread("commlib-ask-self", self._run, state)
        self.thread.start()

    def _run(self, state: _State) -> None:
        try:
            while (job := self.jobs.get()) is not None and not state.is_closing:
                message, on_reply, into = job
                answer = state.answer()
                if answer is None:
                    return
                made = _made(message)
                answer(state.rank, made, lambda reply, into=into, on_reply=on_reply: on_reply(_handed(reply, into)))
                del job, message, made, on_reply, into, answer
        except BaseException as error:
            state.error = error


def _made(question: Message | Callable[[], Message]) -> Message:
    return question if isinstance(question, Message) else question()


def _handed(message: Message, into: Any) -> Message:
    payload = _room(into, len(message.payload))
    payload[:] = message.payload
    return message._replace(payload=payload)


def _serve(state: _State, peer: int, connection: socket.socket) -> None:
    """Answer one peer until it sends a goodbye. The body of a thread."""
    buffer = None

    def room(nbytes: int) -> memoryview:
        nonlocal buffer
        if nbytes > state.max_request:
            raise _Malformed(f"a payload of {nbytes} bytes; expected at most {state.max_request}")
        buffer = buffer or bytearray(state.max_request)
        return memoryview(buffer)[:nbytes]

    def reply(message: Message) -> None:
        with contextlib.suppress(OSError):  # the peer has ended; its goodbye, if it sent one, is still to be read
            state.send(connection, message)

    try:
        while (message := _receive(connection, room)).kind < _LEFT:
            answer = state.answer()
            if answer is None:
                return
            answer(peer, message, reply)
            del answer, message
        state.set_presence(peer, Presence.LEFT if message.kind == _LEFT else Presence.FAILED)
    except (OSError, EOFError) as error:
        state.set_presence(peer, Presence.LOST, str(error))
    except _Malformed as error:
        _log.warning("rank %d: dropped the connection of rank %d: %s", state.rank, peer, error)
        state.set_presence(peer, Presence.LOST, str(error))
    except BaseException as error:
        state.error = error
    finally:
        connection.close()


class _Malformed(Exception):
    """Bytes that are not a message."""


def _send(connection: socket.socket, message: Message) -> None:
    connection.sendall(_HEADER.pack(_MAGIC, message.kind, message.number, message.num_terms, len(message.payload)))
    if len(message.payload):
        connection.sendall(message.payload)


def _receive(connection: socket.socket, room: Callable[[int], memoryview]) -> Message:
    """Receive one message; `room(nbytes)` returns the buffer for its payload.

    Raises:
        EOFError: The connection closed.
        _Malformed: The received bytes are not a message.
    """
    header = bytearray(_HEADER.size)
    fill(connection, memoryview(header))
    magic, kind, number, num_terms, nbytes = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise _Malformed(f"a message that begins with {bytes(magic)!r}")
    payload = room(nbytes) if nbytes else memoryview(b"")
    if nbytes:
        fill(connection, payload)
    return Message(kind, number, payload, num_terms)


def _room(into: Any, nbytes: int) -> memoryview:
    view = memoryview(b"" if into is None else into).cast("B")
    if nbytes > len(view):
        raise _Malformed(f"a reply of {nbytes} bytes; expected at most {len(view)}")
    return view[:nbytes]


# --- the end ---------------------------------------------------------------------------------------------------------


def _connect(state: _State, transport: Transport) -> None:
    """Open the connections and start their threads."""
    connections, servers = connect_all(transport)
    state.askers.update({peer: _Asker(state, peer, connection) for peer, connection in connections.items()})
    for peer, connection in servers.items():
        state.servers.append((connection, _thread(f"commlib-answer-{peer}", _serve, state, peer, connection)))
    for thread in [*(asker.thread for asker in state.askers.values()), *(thread for _, thread in state.servers)]:
        thread.start()


def _thread(name: str, target: Callable[..., None], *args: Any) -> threading.Thread:
    return threading.Thread(target=target, args=args, name=name, daemon=True)


def _close(state: _State, goodbye: int | None) -> None:
    """Send a goodbye to every peer, then end the connections and their threads.

    Args:
        state: The mailbox's state.
        goodbye: The kind of goodbye. None, at the interpreter's exit, selects it by whether an exception ends the
            process.
    """
    if os.getpid() != state.pid:  # a forked child; its parent owns the connections
        return
    if goodbye is None:
        goodbye = _LEFT if getattr(sys, "last_value", None) is None else _FAILED
    state.is_closing = True
    deadline = time.monotonic() + _GOODBYE_S
    askers = [asker for asker in state.askers.values() if isinstance(asker, _Asker)]
    for asker in state.askers.values():
        asker.jobs.put(None)
    for asker in askers:
        if asker.sending.acquire(timeout=max(0.0, deadline - time.monotonic())):
            with contextlib.suppress(OSError):
                asker.connection.settimeout(max(0.1, deadline - time.monotonic()))
                _send(asker.connection, Message(goodbye))
            asker.sending.release()
    for connection in [*(asker.connection for asker in askers), *(connection for connection, _ in state.servers)]:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
    threads = [*(asker.thread for asker in state.askers.values()), *(thread for _, thread in state.servers)]
    deadline = time.monotonic() + _JOIN_S
    for thread in threads:
        if thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))
    for asker in askers:
        asker.connection.close()
