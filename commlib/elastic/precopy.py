"""State that joining members receive in the background, before they enter a view.

[Note: pre-copy] A joining member connects to its donor, the member of the view that the service names, with the
handshake of [Note: wire], and introduces itself. The donor sends passes of tensors. Each pass has the tensors that the
joining member lacks at that time; the last one is empty. The members of the view train meanwhile. When the joining
member then enters a view, the donor sends the tensors that have changed since, and the others wait only for those.

    joining member -> donor    its id and generation
    donor -> joining member    for each tensor: its path, shape and dtype, then its bytes
                               after some bytes, and at the end of each pass: a request to acknowledge
    joining member -> donor    the acknowledgement
    donor -> joining member    the end

After each acknowledgement, the donor pauses for as long as it had waited for it, so each joining member takes at most
half of the rate of its link. If the pre-copy fails, the member receives all of the state when it enters.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from commlib import locks
from commlib.elastic.views import Member
from commlib.elastic.wire import MOST_BYTES, Wire, WireError
from commlib.transport.addresses import address_towards
from commlib.transport.connections import close_in_children, keep_alive

_log = logging.getLogger("commlib")

#: The largest number of joining members that a donor serves at the same time.
_MOST_JOINING = 16
#: The largest number of passes: with more of them, the rounds change the state faster than it is sent.
_MOST_PASSES = 4
#: How many bytes are sent before an acknowledgement.
_ACKNOWLEDGED_BYTES = 4 << 20
_RECEIVED_BYTES = 1 << 16
#: How long a connection has to identify itself, in seconds.
_HANDSHAKE_S = 5.0
#: How long `close` waits for the thread, in seconds.
_END_S = 5.0

#: Identifies a process that joins: its id and generation.
Joiner = tuple[int, int]


class Source(Protocol):
    """The state of a job on a donor."""

    def copy_for(self, joiner: Joiner, limit_s: float) -> Mapping[str, torch.Tensor]:
        """Return copies of the tensors that a joining member lacks, and remember them as received.

        Args:
            joiner: The member.
            limit_s: How long to wait for the training thread, in seconds.

        Raises:
            TimeoutError: The training thread made no step in this time.
        """
        ...

    def forget(self, joiner: Joiner) -> None:
        """Forget the tensors that a member has received."""
        ...


class _Connection:
    """One side of a connection between a donor and a joining member."""

    def __init__(self, connection: socket.socket, wire: Wire) -> None:
        self.socket, self._wire = connection, wire
        self._arrived: list[Any] = []
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(connection)
        close_in_children(connection)

    def open(self) -> None:
        """Shake hands.

        Raises:
            OSError, WireError: The other side does not, or does not know the token.
        """
        self.socket.settimeout(_HANDSHAKE_S)
        self.socket.sendall(self._wire.take_bytes_to_send())
        while not self._wire.is_open:
            self._arrived += self._wire.unpack(self._some())
            self.socket.sendall(self._wire.take_bytes_to_send())

    def send(self, message: Any) -> None:
        """Send a plain value."""
        self.socket.sendall(self._wire.pack(message))

    def send_data(self, data: memoryview) -> None:
        """Send at most `MOST_BYTES` bytes."""
        self.socket.sendall(self._wire.pack_data(data))

    def receive(self) -> Any:
        """Return the next message, or data.

        Raises:
            OSError: The connection has ended, or nothing came in time.
            WireError: Something else came.
        """
        while not self._arrived:
            self._arrived += self._wire.unpack(self._some())
        return self._arrived.pop(0)

    def _some(self) -> bytes:
        if not (data := self.socket.recv(_RECEIVED_BYTES)):
            raise ConnectionResetError("the connection was closed")
        return data


class Donor:
    """Sends the state to joining members: a thread that accepts them, and one for each.

    Args:
        service: The host of the service. Joining members connect to the address from which this host reaches it.
        token: The secret of the job.
        timeout_s: How long an acknowledgement, a step of the training thread, and the entry of a member that has
            received all passes may take, in seconds.

    Attributes:
        port: The port on which it listens, as text for the other members; "" if this host does not reach the service.
    """

    def __init__(self, service: str, token: bytes, timeout_s: float) -> None:
        self._token, self._timeout_s = token, timeout_s
        self._lock = locks.lock("elastic donor")
        self._connections: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._listener: socket.socket | None = None
        self.port = ""
        try:
            address = address_towards(service)
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._listener = socket.create_server((address, 0), family=family, backlog=_MOST_JOINING)
        except OSError as error:
            _log.info("elastic: no state is sent in the background: %s", error)
            return
        close_in_children(self._listener)
        self.port = str(self._listener.getsockname()[1])

    def begin(self, source: Source) -> None:
        """Serve joining members from now on."""
        if self._listener is not None:
            self._start("commlib donor", self._accept, self._listener, source)

    def _start(self, name: str, run: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=run, args=args, name=name, daemon=True)
        self._threads = {each for each in self._threads if each.is_alive()} | {thread}
        thread.start()

    def close(self) -> None:
        """End all connections. Idempotent."""
        with self._lock:
            listener, self._listener = self._listener, None
            connections, self._connections = self._connections, set()
        for each in ([listener] if listener else []) + list(connections):
            _end(each)
        if listener is not None:
            listener.close()
        for thread in self._threads:
            thread.join(_END_S)

    def _accept(self, listener: socket.socket, source: Source) -> None:
        while True:
            try:
                accepted, where = listener.accept()
            except OSError:
                if self._listener is None:
                    return
                time.sleep(0.1)  # the connection was reset in the meantime, or no descriptors are left
                continue
            with self._lock:
                is_served = self._listener is not None and len(self._connections) < _MOST_JOINING
                if is_served:
                    self._connections.add(accepted)
            if is_served:
                self._start("commlib pre-copy", self._serve, accepted, where, source)
            else:
                accepted.close()

    def _serve(self, accepted: socket.socket, where: Any, source: Source) -> None:
        joiner: Joiner | None = None
        try:
            connection = _Connection(accepted, Wire("service", self._token))
            connection.open()
            joiner = _joiner_of(connection.receive())
            accepted.settimeout(self._timeout_s)
            for _ in range(_MOST_PASSES):
                if not self._send_pass(connection, source.copy_for(joiner, self._timeout_s)):
                    break
            connection.send(("end",))
            connection.receive()  # until the member has entered; after the limit, it would receive all of the state
        except (OSError, WireError) as error:
            _log.debug("elastic: the connection of a joining member from %s ended: %s", where, error)
        except Exception as error:  # such as no memory for the copies
            _log.warning("elastic: cannot send the state in the background: %s: %s", type(error).__name__, error)
        finally:
            if joiner is not None:
                source.forget(joiner)
            with self._lock:
                self._connections.discard(accepted)
            accepted.close()

    @staticmethod
    def _send_pass(connection: _Connection, tensors: Mapping[str, torch.Tensor]) -> int:
        """Send tensors at half of the link's rate; return their number."""
        began_s, unacknowledged = time.monotonic(), 0
        for path, tensor in tensors.items():
            connection.send(("tensor", path, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
            for piece in _pieces(tensor):
                connection.send_data(piece)
                unacknowledged += len(piece)
                if unacknowledged >= _ACKNOWLEDGED_BYTES:
                    _acknowledged(connection)
                    time.sleep(time.monotonic() - began_s)
                    began_s, unacknowledged = time.monotonic(), 0
        _acknowledged(connection)
        return len(tensors)


class PreCopy:
    """Receives the state from a donor, before this member enters a view.

    Args:
        token: The secret of the job.
        timeout_s: How long to wait for the donor, in seconds.
        ready: Called with a view's number when this member may enter the next one.

    Attributes:
        donor: The member from which all passes were received; None before.
        tensors: The received tensors, by path.
    """

    def __init__(self, token: bytes, timeout_s: float, ready: Callable[[int], None]) -> None:
        self.donor: Member | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self._token, self._timeout_s, self._ready = token, timeout_s, ready
        self._lock = locks.lock("elastic pre-copy")
        self._source: Member | None = None
        self._connection: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._number = 0
        self._is_over = False

    @property
    def is_under_way(self) -> bool:
        """Whether a donor sends its state now."""
        with self._lock:
            return self._source is not None and not self._is_over

    def follow(self, number: int, me: Joiner, donor: Member) -> None:
        """Receive the state of a donor, unless this is under way or done. Does not block.

        Args:
            number: The number of the newest view.
            me: This member.
            donor: The member of that view whose state it receives.
        """
        with self._lock:
            self._number = number
            is_known, is_over = donor == self._source, self._is_over
            before = None
            if not is_known:
                before, self._source = self._take_connection(), donor
        _close(before)
        if not is_known:
            self._thread = threading.Thread(target=self._run, args=(me, donor), name="commlib pre-copy", daemon=True)
            self._thread.start()
        elif is_over:
            self._ready(number)

    def close(self) -> None:
        """End the connection, and drop the received tensors. Idempotent."""
        with self._lock:
            connection = self._take_connection()
        _close(connection)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_END_S)

    def _take_connection(self) -> socket.socket | None:
        connection, self._connection = self._connection, None
        self._source = self.donor = None
        self._is_over, self.tensors = False, {}
        return connection

    def _run(self, me: Joiner, donor: Member) -> None:
        tensors: dict[str, torch.Tensor] | None = {}
        try:
            self._receive(me, donor, tensors)
        except Exception as error:  # of any kind: the state is then sent when this member enters
            _log.info("elastic: %s did not send its state in the background: %s", donor.name, error)
            tensors = None
        with self._lock:
            if donor is not self._source:
                return
            self._is_over = True
            if tensors:
                self.donor, self.tensors = donor, tensors
            number = self._number
        self._ready(number)

    def _receive(self, me: Joiner, donor: Member, tensors: dict[str, torch.Tensor]) -> None:
        if not donor.data:
            return
        connection = socket.create_connection((donor.address, int(donor.data)), self._timeout_s)
        with self._lock:
            if donor is self._source:
                self._connection = connection
        if self._connection is not connection:
            connection.close()
            return
        wired = _Connection(connection, Wire("member", self._token))
        wired.open()
        connection.settimeout(self._timeout_s)
        wired.send(me)
        while True:
            match _acknowledging(wired):
                case ("tensor", str(path), list(shape), str(dtype)):
                    tensors[path] = _empty(shape, dtype)
                    for piece in _pieces(tensors[path]):
                        data = _acknowledging(wired)
                        if not isinstance(data, bytes) or len(data) != len(piece):
                            raise WireError(f"expected {len(piece)} bytes of {path}")
                        piece[:] = data
                case ("end",):
                    return
                case other:
                    raise WireError(f"expected a tensor, got {str(other)[:200]}")


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the memory of a contiguous tensor in pieces that fit into frames."""
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    memory = flat.reshape(-1).view(torch.uint8).numpy().data
    return (memory[at : at + MOST_BYTES] for at in range(0, len(memory), MOST_BYTES))


def _empty(shape: list[Any], dtype: str) -> torch.Tensor:
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not all(isinstance(each, int) and each >= 0 for each in shape):
        raise WireError(f"expected a shape and a dtype, got {shape} and {dtype!r}")
    return torch.empty(shape, dtype=kind)


def _acknowledged(connection: _Connection) -> None:
    connection.send(("acknowledge",))
    if connection.receive() is not True:
        raise WireError("expected an acknowledgement")


def _acknowledging(connection: _Connection) -> Any:
    """Return the next message, or data, and acknowledge earlier data on request."""
    while (message := connection.receive()) == ("acknowledge",):
        connection.send(True)
    return message


def _joiner_of(message: Any) -> Joiner:
    match message:
        case (int(member_id), int(generation)):
            return member_id, generation
    raise WireError(f"expected an id and a generation, got {str(message)[:200]}")


def _end(connection: socket.socket) -> None:
    """Let blocked calls of other threads on a socket return."""
    with contextlib.suppress(OSError):  # it is not connected
        connection.shutdown(socket.SHUT_RDWR)


def _close(connection: socket.socket | None) -> None:
    if connection is not None:
        _end(connection)
        connection.close()
