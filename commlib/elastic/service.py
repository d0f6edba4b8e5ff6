"""The service of `commlib rendezvous`: one thread that keeps a connection to each member and numbers views."""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from commlib.elastic.journal import Journal
from commlib.elastic.registry import FROM_MEMBERS, Registry, Rules
from commlib.elastic.views import BadMessage, Join, Message, Status, StatusReply, packed, unpacked
from commlib.elastic.wire import Wire, WireError, WrongToken
from commlib.errors import ConfigError
from commlib.transport.addresses import is_loopback
from commlib.transport.connections import keep_alive

_log = logging.getLogger("commlib")

#: How long a connection may take to prove that it knows the token and to send its first message, in seconds.
HANDSHAKE_S = 5.0
#: The largest number of such connections; beyond it, the oldest is closed.
MOST_UNKNOWN = 256
#: The largest number of bytes that wait for a member; one that reads more slowly is dropped.
_MOST_WAITING = 8 << 20
_RECEIVED_BYTES = 1 << 16


@dataclass(eq=False)
class _Connection:
    """One accepted connection.

    Attributes:
        where: The peer's address.
        until_s: When it is closed; None if it has joined.
        waiting: Bytes that wait until the socket takes them.
        is_ending: Whether it is closed once they are sent.
    """

    socket: socket.socket
    where: str
    until_s: float | None
    wire: Wire
    waiting: bytearray = field(default_factory=bytearray)
    is_ending: bool = False


class Service:
    """Numbers the views of one job. `run` serves until `stop`.

    Args:
        host: The address to listen on. Without a token, only a loopback address.
        port: The port; 0 lets the system choose.
        token: The secret that members share with the service; b"" for none.
        journal: The file of the views.
        rules: The options of its decisions.

    Attributes:
        address: (host, port) that it listens on.
        registry: Its decisions.

    Raises:
        ConfigError: The address is not loopback and there is no token, it cannot listen, or the journal is unusable.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: bytes,
        journal: Path,
        rules: Rules = Rules(),  # noqa: B008 (it is frozen)
    ) -> None:
        self._token = token
        try:
            family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            if not token and not is_loopback(str(where[0])):
                raise ConfigError(f"rendezvous: {host} is not a loopback address; give a token with --token-file")
            self._listener = socket.create_server(where[:2], family=family, backlog=1024)
        except OSError as error:
            raise ConfigError(f"rendezvous: cannot listen on {host}:{port}: {error}") from error
        try:
            self._journal = Journal(journal)
        except ConfigError:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._connections: set[_Connection] = set()
        self._refused: set[str] = set()  # addresses whose wrong token is in the log
        self._wakes, self._waker = socket.socketpair()
        self._wakes.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._is_stopping = False
        self.registry: Registry[_Connection] = Registry(
            secrets.token_hex(8),
            self._journal.newest,
            rules,
            now_s=time.monotonic(),
            journal=self._journal.write,
            send=self._send,
        )

    def run(self) -> None:
        """Serve until `stop`.

        Raises:
            OSError: The journal cannot be written. No member has heard of the view that could not be.
        """
        with contextlib.ExitStack() as closing:
            closing.callback(self._close)
            while not self._is_stopping:
                for key, events in self._selector.select(self._limit_s()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data is not None and key.data in self._connections:
                        self._serve(key.data, events)
                self._tick()

    def stop(self) -> None:
        """Let `run` return. From any thread, or from a signal handler."""
        self._is_stopping = True
        with contextlib.suppress(OSError):
            self._waker.send(b"\x00")

    # --- connections ------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            accepted, where = self._listener.accept()
        except OSError:  # reset in the meantime, or no descriptors are left
            return
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(accepted)
        connection = _Connection(accepted, str(where[0]), time.monotonic() + HANDSHAKE_S, Wire("service", self._token))
        self._connections.add(connection)
        self._selector.register(accepted, selectors.EVENT_READ, connection)
        unknown = [each for each in self._connections if each.until_s is not None]
        if len(unknown) > MOST_UNKNOWN:
            self._drop(min(unknown, key=_until), "did not identify itself")

    def _serve(self, connection: _Connection, events: int) -> None:
        if events & selectors.EVENT_READ:
            self._read(connection)
        if events & selectors.EVENT_WRITE and connection in self._connections:
            self._write(connection)

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(_RECEIVED_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection, "ended")
            return
        now_s = time.monotonic()
        self.registry.hear(connection, now_s)
        try:
            values = connection.wire.unpack(data)
            connection.waiting += connection.wire.take_bytes_to_send()
            for value in values:
                message = unpacked(value, (*FROM_MEMBERS, Status))
                if not self._handle(connection, message, now_s):
                    self._end_soon(connection, now_s)
        except (WireError, BadMessage) as error:
            self._refuse(connection, error)
            return
        self._write(connection)

    def _handle(self, connection: _Connection, message: Message, now_s: float) -> bool:
        if isinstance(message, Status):
            self._send(connection, self._status(now_s))
            return False
        if isinstance(message, Join):
            connection.until_s = None
        return self.registry.handle(connection, message, now_s)

    def _status(self, now_s: float) -> StatusReply:
        records = sorted(self.registry.records.values(), key=lambda each: each.member)
        rows = tuple((r.member, r.stage.value, r.settled, now_s - r.heard_s) for r in records)
        return StatusReply(self.registry.view, rows)

    def _send(self, connection: _Connection, message: Message) -> None:
        """Queue a message. It is sent when the socket takes it."""
        if connection in self._connections:
            connection.waiting += connection.wire.pack(packed(message))
            self._selector.modify(connection.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)

    def _write(self, connection: _Connection) -> None:
        try:
            sent = connection.socket.send(connection.waiting) if connection.waiting else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(connection, "ended")
            return
        del connection.waiting[:sent]
        if connection.waiting and len(connection.waiting) <= _MOST_WAITING:
            self._selector.modify(connection.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)
        elif connection.waiting:
            self._drop(connection, "does not read its messages")
        elif connection.is_ending:
            self._drop(connection, "ended")
        else:
            self._selector.modify(connection.socket, selectors.EVENT_READ, connection)

    def _end_soon(self, connection: _Connection, now_s: float) -> None:
        """Close a connection once it has been sent everything, or after `HANDSHAKE_S`."""
        connection.is_ending, connection.until_s = True, now_s + HANDSHAKE_S

    def _refuse(self, connection: _Connection, error: Exception) -> None:
        if connection.where not in self._refused:
            self._refused.add(connection.where)
            why = "wrong token" if isinstance(error, WrongToken) else str(error)
            _log.warning(
                "rendezvous: refused a connection from %s: %s (logged once per address)", connection.where, why
            )
        self._drop(connection, "sent a malformed message")

    def _drop(self, connection: _Connection, why: str) -> None:
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self.registry.end(connection, why, time.monotonic())

    # --- time -------------------------------------------------------------------------------------------------------

    def _limit_s(self) -> float | None:
        times = [each.until_s for each in self._connections if each.until_s is not None]
        now_s = time.monotonic()
        if (due_s := self.registry.due_s(now_s)) is not None:
            times.append(due_s)
        return max(0.0, min(times) - now_s) if times else None

    def _tick(self) -> None:
        now_s = time.monotonic()
        for connection in self.registry.tick(now_s):
            self._drop(connection, "was silent")
        for connection in list(self._connections):
            if connection.until_s is not None and now_s >= connection.until_s:
                self._drop(connection, "did not identify itself")
            elif connection.until_s is None and connection not in self.registry.records:  # excluded
                self._end_soon(connection, now_s)

    def _close(self) -> None:
        for connection in self._connections:
            connection.socket.close()
        self._connections.clear()
        self._selector.close()
        for each in (self._listener, self._wakes, self._waker):
            each.close()
        self._journal.close()


def _until(connection: _Connection) -> float:
    return connection.until_s or 0.0
