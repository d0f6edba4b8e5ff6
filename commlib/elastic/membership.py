"""A member's side of the connection to the service: joins, follows the newest view, and returns after a break."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from commlib import locks
from commlib.elastic.store import ViewStore
from commlib.elastic.views import (
    BadMessage,
    Claim,
    Join,
    Joining,
    Leave,
    Member,
    Message,
    NewView,
    Put,
    Ready,
    Refused,
    Settled,
    Suspect,
    View,
    Welcome,
    packed,
    unpacked,
)
from commlib.elastic.wire import Wire, WireError, WrongToken
from commlib.errors import ConfigError, Excluded, StoreLost, TransportError
from commlib.kernels import native
from commlib.transport.addresses import address_towards
from commlib.transport.connections import close_in_children, keep_alive

_log = logging.getLogger("commlib")

_FROM_SERVICE = (Welcome, NewView, Joining, Put, Refused)
#: Heartbeats sent within the time after which the service counts a member as silent.
_BEATS = 4
#: The pauses between attempts to reach the service, in seconds.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_RECEIVED_BYTES = 1 << 16
#: A wait that takes longer is logged, in seconds.
SILENT_S = 3.0
#: How long `close` waits for the thread, in seconds.
_END_S = 5.0


class ViewOver(TransportError):
    """A newer view has been received."""


class Membership:
    """A member's connection to the service. One thread follows the newest view, and reconnects after a break.

    Args:
        address: The service's "host:port".
        token: The secret shared with it.
        join: The first message. Its address may be "": the one from which this host reaches the service.
        timeout_s: How long the constructor and a change of view wait for the service, in seconds.
        on_view: Called on the thread with each new view.
        on_joining: Called on the thread with the members that join the newest view.

    Attributes:
        me: This member, as the service knows it.
        reason: Why the newest view was made.

    Raises:
        ConfigError: The address is malformed, the token is wrong, or the service refuses the member.
        StoreLost: The service did not answer in time.
    """

    def __init__(
        self,
        address: str,
        token: bytes,
        join: Join,
        timeout_s: float,
        on_view: Callable[[View], None] = lambda view: None,
        on_joining: Callable[[Joining], None] = lambda joining: None,
    ) -> None:
        self.me = Member(-1, 0, join.name, join.address, join.data)
        self.reason = ""
        self.address, self._where = address, parsed(address)
        self._token, self._join, self._timeout_s = token, join, timeout_s
        self._on_view, self._on_joining = on_view, on_joining
        self._changed = locks.condition("membership")
        self._view: View | None = None
        self._min_members = 1
        self._joining: Joining | None = None
        self._store: ViewStore | None = None
        self._error: BaseException | None = None
        self._is_closed = self._has_left = False
        self._socket: socket.socket | None = None
        self._sender: Any = None
        self._wire: Wire | None = None
        self._thread = threading.Thread(target=self._follow, name="commlib membership", daemon=True)
        self._thread.start()
        try:
            self._wait(lambda: self.me.id >= 0, timeout_s, f"a reply of the service at {address}")
        except BaseException:
            self.close()
            raise

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def view(self) -> View | None:
        """The newest view received; None before the first one. Does not block."""
        return self._view

    def store_of(self, view: View) -> ViewStore:
        """Return the store of a view.

        Raises:
            ViewOver: A newer view has been received.
        """
        with self._changed:
            if self._view is None or self._store is None or self._view.number != view.number:
                raise ViewOver(f"view {view.number} is over")
            return self._store

    @property
    def joining(self) -> Joining | None:
        """The members that join the newest view, and their donors; None if unknown. Does not block."""
        return self._joining

    @property
    def min_members(self) -> int:
        """The number of members below which nobody trains."""
        return self._min_members

    @property
    def connection(self) -> str:
        """Whether the service is connected, for messages."""
        return "is connected" if self.is_connected else "is not connected"

    @property
    def is_connected(self) -> bool:
        """Whether the service is connected. Training goes on without it until the view has to change."""
        return self._wire is not None and self._wire.is_open

    def check(self) -> None:
        """Raise the error that ended this member's part, if any."""
        if self._error is not None:
            raise self._error

    def wait_newer(self, number: int, timeout_s: float | None = None) -> View:
        """Return the newest view once its number is larger than `number` and it has enough members.

        Raises:
            Excluded: This member is not in the newest view.
            StoreLost: The time is over. The message tells whether the service is connected.
        """
        found = lambda: self._view is not None and self._view.number > number and self._is_large_enough  # noqa: E731
        self._wait(found, self._timeout_s if timeout_s is None else timeout_s, f"a view after number {number}")
        assert self._view is not None
        return self._view

    @property
    def _is_large_enough(self) -> bool:
        return self._view is not None and len(self._view.members) >= self._min_members

    def _wait(self, is_done: Callable[[], object], timeout_s: float, what: str) -> None:
        is_over = lambda: is_done() or self._error is not None  # noqa: E731
        with self._changed:
            if not self._changed.wait_for(is_over, min(SILENT_S, timeout_s)) and timeout_s > SILENT_S:
                _log.warning("elastic: waiting for %s, at most %g s", what, timeout_s)
            if not self._changed.wait_for(is_over, max(0.0, timeout_s - SILENT_S)):
                raise StoreLost(f"waited {timeout_s:g} s for {what}; the service at {self.address} {self.connection}")
            self.check()

    # --- messages ---------------------------------------------------------------------------------------------------

    def ready(self, number: int) -> None:
        """Report that this joining member is in step with the view `number`."""
        self._send(Ready(number))

    def settled(self, number: int) -> None:
        """Report that this member has connected to all others of the view `number`."""
        self._send(Settled(number))

    def suspect(self, ids: tuple[int, ...], number: int) -> None:
        """Report that no data could be exchanged with these members of the view `number`."""
        self._send(Suspect(number, ids))

    def leave(self) -> None:
        """Leave for good. The others do not wait for this member any more. Safe in a signal handler."""
        self._has_left = True
        if self._changed.acquire(blocking=False):
            try:
                self._send(Leave())
            finally:
                self._changed.release()
        else:  # another thread sends a message, or waits
            self._end_connection()

    def close(self) -> None:
        """End the connection and the thread. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._store is not None:
            self._store.end()
        self._end_connection()
        if self._thread is not threading.current_thread():
            self._thread.join(_END_S)

    def _send(self, message: Message) -> None:
        """Send a message if the service is connected. If not, the claim after the next connect takes its place."""
        with self._changed:
            if self._wire is None or self._sender is None or not self._wire.is_open:
                return
            code = self._sender.send(self._wire.pack(packed(message)), self._timeout_s)
        if code:
            _log.warning("elastic: cannot send %s to the service: %s", type(message).__name__, os.strerror(code))
            self._end_connection()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        pause_s, warned = _FIRST_PAUSE_S, False
        while not self._is_closed and self._error is None:
            try:
                with self._connected() as connection:
                    for message in self._received(connection):
                        pause_s = _FIRST_PAUSE_S
                        self._take(message)
            except (OSError, WireError, BadMessage) as error:
                if isinstance(error, WrongToken):
                    if self.me.id < 0:
                        self._fail(ConfigError(f"the service at {self.address} has another token"))
                        return
                    if not warned:
                        _log.warning(
                            "elastic: the process at %s has another token: not the job's service", self.address
                        )
                    warned = True
                _log.debug("elastic: the connection to the service at %s ended: %s", self.address, error)
            if self._has_left:
                self._fail(Excluded("this member has left the job"))
                return
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        """Connect and introduce this member; the connection ends with the block."""
        with socket.create_connection(self._where, self._timeout_s) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(connection)
            wire = Wire("member", self._token)
            while not wire.is_open:
                connection.sendall(wire.take_bytes_to_send())
                if not (data := connection.recv(_RECEIVED_BYTES)):
                    raise OSError(errno.ECONNRESET, "the service closed the connection")
                wire.unpack(data)
            connection.sendall(wire.take_bytes_to_send())
            connection.settimeout(None)
            sender = native.load().Heartbeat(connection.fileno(), self._join.heartbeat_s / _BEATS)
            close_in_children(connection, sender)  # such as the workers of a DataLoader, which survive this process
            with self._changed:
                self._socket, self._wire, self._sender = connection, wire, sender
                self._changed.notify_all()
            try:
                self._send(self._introduction())
                yield connection
            finally:
                sender.close()
                with self._changed:
                    self._socket = self._wire = self._sender = None

    def _introduction(self) -> Join:
        address = self._join.address or address_towards(self._where[0])
        is_member = self._view is not None and self.me.id in self._view.ids
        claim = Claim(self.me.id, self.me.generation, self._view) if is_member and self._view else None
        return replace(self._join, name=self.me.name, address=address, claim=claim)

    def _received(self, connection: socket.socket) -> Iterator[Message]:
        assert self._wire is not None
        data = b""
        while True:
            for value in self._wire.unpack(data):
                yield unpacked(value, _FROM_SERVICE)
            if not (data := connection.recv(_RECEIVED_BYTES)):
                return

    def _take(self, message: Message) -> None:
        match message:
            case Welcome():
                with self._changed:
                    self.me = replace(self.me, id=message.id, generation=message.generation, name=message.name)
                    self._changed.notify_all()
            case NewView() if self._view is None or message.view.number >= self._view.number:
                self._take_view(message)
            case Joining():
                self._joining = message
                self._on_joining(message)
            case Put() if self._view is not None and self._store is not None and message.number == self._view.number:
                self._store.receive(message.key, message.value)
            case Refused() if self.me.id < 0 and "in use" in message.reason:
                pass  # the process that was started again waits until its predecessor's connection has ended
            case Refused():
                self._fail(ConfigError(f"the service at {self.address} refuses this member: {message.reason}"))
            case _:
                pass

    def _take_view(self, message: NewView) -> None:
        view = message.view
        if self._view is not None and view.number == self._view.number:
            if self._store is not None:  # the service was started again
                self._store.put_again()
            return
        if self._store is not None:
            self._store.end()
        if self.me.id not in view.ids:
            self._fail(
                Excluded(f"this member is not in view {view.number} of {len(view.ids)} members: {message.reason}")
            )
            return
        _log.debug("elastic: view %d of %d members: %s", view.number, len(view.ids), message.reason)
        self.reason = message.reason
        with self._changed:
            self._view, self._min_members = view, message.min_members
            self._store = ViewStore(lambda key, value: self._send(Put(view.number, key, value)), self._timeout_s)
            self._changed.notify_all()
        self._on_view(view)

    def _fail(self, error: BaseException) -> None:
        if self._store is not None:
            self._store.end()
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        self._end_connection()

    def _end_connection(self) -> None:
        """Let the thread's receive return."""
        if (connection := self._socket) is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def parsed(address: str) -> tuple[str, int]:
    """Return the host and the port of "host:port".

    Raises:
        ConfigError: It is something else.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"elastic: expected host:port, got {address!r}")
    return host.strip("[]"), int(port)
