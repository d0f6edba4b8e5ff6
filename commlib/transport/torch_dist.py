"""Requests on torch.distributed: the one place that knows torch's process groups and their versions."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import pickle
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # see [Note: exit]
from torch.distributed import distributed_c10d as c10d
from typing_extensions import override

from commlib.errors import ConfigError, PeerFailure, PeerTimeout, TransportError
from commlib.transport.base import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Communicator,
    Exchange,
    Request,
    Transport,
    Work,
)
from commlib.transport.point_to_point import GlooExchanges, is_better_exchanged

_log = logging.getLogger("commlib")

NODE_VARIABLE = "COMMLIB_NODE"
"""The environment variable that names this rank's node, where host name and launcher do not tell nodes apart."""

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

#: How long a rank that saw a collective fail waits for the others to report, in seconds.
_DIAGNOSIS_S = 2.0


def resolve_group(process_group: Any) -> dist.ProcessGroup:
    """Return the `ProcessGroup` meant by `process_group`: None (the default group), a group, or a 1-D `DeviceMesh`.

    Raises:
        ConfigError: No default group exists, the mesh has several dimensions, or this process is not in the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "commlib.wrap needs a process group, and none is initialised. Call "
            "torch.distributed.init_process_group('gloo' or 'nccl') first, under torchrun for example."
        )
    if process_group is None:
        return c10d._get_default_group()
    if hasattr(process_group, "get_group") and hasattr(process_group, "ndim"):
        if process_group.ndim != 1:
            raise ConfigError(
                f"process_group is a DeviceMesh of {process_group.ndim} dimensions; commlib.wrap takes one dimension. "
                f"Slice it, for example mesh[{(process_group.mesh_dim_names or ('dp',))[0]!r}]."
            )
        process_group = process_group.get_group()
    if not isinstance(process_group, dist.ProcessGroup):
        raise ConfigError(
            f"process_group: expected a ProcessGroup, a 1-D DeviceMesh or None, got {type(process_group).__name__}. "
            "If new_group() gave it, this process is not a member and must not wrap a model on it."
        )
    return process_group


def as_timedelta(timeout: float | timedelta | None, group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return `timeout` (seconds, a timedelta, or None for the group's own) as a timedelta.

    Raises:
        ConfigError: It is not a positive duration.
    """
    if timeout is None:
        return _parent_backend(group, device).options._timeout
    value = timeout if isinstance(timeout, timedelta) else timedelta(seconds=float(timeout))
    if value <= timedelta(0):
        raise ConfigError(f"timeout: expected a positive number of seconds or timedelta, got {timeout!r}")
    return value


class _TorchWork:
    """A torch `Work` whose completion can call back."""

    def __init__(self, work: Any, connection: _Connection) -> None:
        self._work = work
        self._connection = connection

    def wait(self) -> None:
        try:
            self._work.wait()
        finally:
            self._connection.pending.pop(id(self._work), None)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self._work.get_future().add_done_callback(lambda _: callback())


class _Done:
    """A work with nothing to do."""

    def wait(self) -> None: ...

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        callback()


DONE: Work = _Done()


#: How long aborted works may take to end, in seconds.
_DRAIN_S = 5.0


class _Connection:
    """The backend object, its works and its end, apart from the transport so that a finalizer can hold it.

    [Note: exit] Backend threads drop tensors and call back into Python when a work ends. At interpreter exit that
    aborts the process ("terminate called without an active exception"), so every connection is ended before: works
    are aborted and waited for, then the backend is destroyed, which joins its threads. The same holds of the user's own
    group: `destroy_process_group` ends its threads only where nobody else holds the group. So transports refer to it
    weakly; and the functions of `torch.distributed.nn.functional`, whose default arguments hold the group that exists
    when they are first imported (by torch._dynamo, in the first forward), are imported here. Where this module is
    itself imported after the group was made, they hold it all the same.
    """

    def __init__(self) -> None:
        self.backend: Any = None
        self.exchanges: GlooExchanges | None = None  # made at the first one
        self.pending: dict[int, Any] = {}  # works that nobody has waited for yet, by identity

    @property
    def is_nccl(self) -> bool:
        return self.backend.name().lower() == "nccl"

    def has_pending(self) -> bool:
        return any(not work.is_completed() for work in list(self.pending.values()))

    def abort(self) -> None:
        if self.exchanges is not None:
            self.exchanges.abort()
        if self.backend is not None:
            with contextlib.suppress(Exception):
                self.backend.abort()

    def exchange(self, request: Exchange) -> Any:
        if self.is_nccl:
            self.backend._start_coalescing()
            for rank, tensor in request.receives:
                self.backend.recv([tensor], rank, 0)
            for rank, tensor in request.sends:
                self.backend.send([tensor], rank, 0)
            return self.backend._end_coalescing()
        return self._gloo().issue(request)

    def all_to_all(self, request: AllToAll) -> Any:
        if is_better_exchanged(request) and not self.is_nccl:
            return self._gloo().all_to_all(request)
        return self.backend.alltoall_base(request.output, request.input, [], [], _options(c10d.AllToAllOptions))

    def _gloo(self) -> GlooExchanges:
        if self.exchanges is None:
            self.exchanges = GlooExchanges(self.backend)
        return self.exchanges

    def end(self) -> None:
        if self.has_pending():
            self.abort()
            deadline = time.monotonic() + _DRAIN_S
            while self.has_pending() and time.monotonic() < deadline:
                time.sleep(0.005)
            if self.has_pending():
                _log.warning("aborted collectives had not ended after %g s; closing the connection anyway", _DRAIN_S)
        if self.exchanges is not None:
            self.exchanges.end(_DRAIN_S)
            self.exchanges = None
        self.pending.clear()
        self.backend = None


class TorchTransport(Transport):
    """A communicator of its own over the ranks of a process group.

    It never shares the user's communicator: the user's thread and the issuing thread could otherwise interleave their
    collectives differently on two ranks. The backend object is made directly, on a fresh prefix of the group's store:
    `new_group` is collective over ranks that are not in `group`, and its names repeat once a group is destroyed.

    Args:
        group: The user's process group; the ranks, the kind of backend and the store are taken from it.
        device: Where the tensors will be.
        timeout: How long a collective may wait for its peers.

    Raises:
        ConfigError: The group's backend for the device is neither Gloo nor NCCL.
        PeerTimeout: A rank did not come to make the communicator.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> None:
        self.rank = group.rank()
        self.world_size = group.size()
        self.timeout_s = timeout.total_seconds()
        self.bytes_sent = 0.0
        self._device = device
        self._connections = {"all": _Connection()}
        self._finalizer = weakref.finalize(self, _end_all, self._connections)
        self._parent = weakref.ref(group)
        self._store = _fresh_store(group)
        self._timeout = timeout
        self._connect("all", self._store, self.rank, self.world_size)
        self._await_all()

    def _await_all(self) -> None:
        """Wait until every rank has connected: one that left before would break the connecting of the others."""
        sent_before = self.bytes_sent
        self.gather_objects(None)
        self.bytes_sent = sent_before  # which counts what users send

    def _connect(self, name: str, store: dist.Store, rank: int, size: int) -> None:
        """Make the backend of a group of ranks; nothing for one rank alone."""
        connection = self._connections.setdefault(name, _Connection())
        try:
            if size > 1:
                group = self._parent()
                if group is None:
                    raise TransportError(f"rank {self.rank}: the process group of the model has been destroyed")
                connection.backend = _make_backend(group, self._device, store, self._timeout, rank, size)
        except RuntimeError as error:
            raise self.diagnose(error, "making the communicator in commlib.wrap") from error

    @override
    def split_by_node(self) -> tuple[Communicator, Communicator] | None:
        nodes: dict[str, list[int]] = {}
        for rank, node in enumerate(self.gather_objects(_name_of_node())):
            nodes.setdefault(node, []).append(rank)
        sizes = {len(ranks) for ranks in nodes.values()}
        if len(sizes) > 1:
            raise ConfigError(
                f"hierarchical: expected as many ranks on every node, got {sorted(map(len, nodes.values()))}. "
                f"Nodes are told apart by {NODE_VARIABLE} if it is set, else by host name and GROUP_RANK"
            )
        if len(nodes) == 1 or sizes == {1}:
            return None
        node = next(idx for idx, ranks in enumerate(nodes.values()) if self.rank in ranks)
        place = list(nodes.values())[node].index(self.rank)
        local, across = Communicator(place, max(sizes), "local"), Communicator(node, len(nodes), "across")
        self._connect("local", dist.PrefixStore(f"local/{node}", self._store), local.rank, local.world_size)
        self._connect("across", dist.PrefixStore(f"across/{place}", self._store), across.rank, across.world_size)
        self._await_all()
        return local, across

    @override
    def local_address(self) -> str:
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        with contextlib.suppress(OSError):
            if interface:
                return _address_of(interface)
        store: Any = self._store
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        if isinstance(store, dist.TCPStore):
            with contextlib.suppress(OSError):
                return address_towards(store.host)
        with contextlib.suppress(OSError):
            return socket.gethostbyname(socket.gethostname())
        return super().local_address()

    @override
    def issue(self, request: Request) -> Work:
        if request.size == 1:
            return self._issue_alone(request)
        if request.is_empty():
            return DONE
        connection = self._connections[request.group]
        if connection.backend is None:
            raise TransportError(f"rank {self.rank}: the communicator is closed; the model was unwrapped")
        self.bytes_sent += request.wire_bytes()
        work = self._issue(connection, request)
        connection.pending[id(work)] = work
        return _TorchWork(work, connection)

    def _issue(self, connection: _Connection, request: Request) -> Any:
        backend = connection.backend
        match request:
            case Exchange():
                return connection.exchange(request)
            case AllReduce(tensor=tensor, op=op):
                return backend.allreduce([tensor], _options(c10d.AllreduceOptions, reduceOp=_REDUCE_OPS[op]))
            case AllGather(output=output, input=input):
                return backend._allgather_base(output, input, _options(c10d.AllgatherOptions))
            case AllToAll():
                return connection.all_to_all(request)
            case Broadcast(tensor=tensor, source=source):
                return backend.broadcast([tensor], _options(c10d.BroadcastOptions, rootRank=source, rootTensor=0))
        raise TypeError(f"{type(request).__name__} is not a request that torch.distributed can run")

    def _issue_alone(self, request: Request) -> Work:
        if isinstance(request, AllGather | AllToAll):
            request.output.copy_(request.input)
        return DONE

    @override
    def gather_objects(self, value: Any) -> list[Any]:
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self._device)
        comm = Communicator(self.rank, self.world_size)
        sizes = torch.empty(self.world_size, dtype=torch.int64, device=self._device)
        try:
            self.issue(comm.all_gather(sizes, torch.tensor([own.numel()], device=self._device))).wait()
            numels = sizes.tolist()
            padded = own.new_zeros(max(numels))
            padded[: own.numel()] = own
            everyone = own.new_empty(self.world_size * padded.numel())
            self.issue(comm.all_gather(everyone, padded)).wait()
        except RuntimeError as error:
            raise self.diagnose(error, "the exchange of set-up information") from error
        rows = everyone.view(self.world_size, -1).cpu().numpy()
        return [pickle.loads(row[:numel].tobytes()) for row, numel in zip(rows, numels, strict=True)]

    def diagnose(self, error: BaseException, what: str) -> TransportError:
        """Name the ranks that did not report.

        Every rank that sees a failure writes so into the store, then aborts its communicator, which makes the others
        see it too; a rank that is dead, stopped or busy elsewhere writes nothing.
        """
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        silent = self._silent_ranks()
        timed_out = "timed out" in text.lower() or "timeout" in text.lower()
        who = "the ranks that did not answer are unknown (the store did not answer: its host may be gone)"
        if silent is not None:
            who = f"ranks that did not answer: {silent}" if silent else "every rank reported this failure"
        reason = f"no answer within {self.timeout_s:g} s" if timed_out else "the connection to a peer was lost"
        kind = PeerTimeout if timed_out else PeerFailure
        return kind(f"rank {self.rank} of {self.world_size}: {what} failed: {reason}; {who}. Cause: {text}")

    def _silent_ranks(self) -> list[int] | None:
        """Return the ranks that reported no failure, or None where the store cannot be asked."""
        result: list[list[int]] = []

        def ask() -> None:
            store = dist.PrefixStore("failed", self._store)
            store.set(str(self.rank), "1")
            self.abort()
            deadline = time.monotonic() + _DIAGNOSIS_S
            silent = [rank for rank in range(self.world_size) if rank != self.rank]
            while silent and time.monotonic() < deadline:
                silent = [rank for rank in silent if not store.check([str(rank)])]
                time.sleep(0.02)
            result.append(silent)

        thread = threading.Thread(target=_quietly, args=(ask,), name="commlib-diagnosis", daemon=True)
        thread.start()
        thread.join(2 * _DIAGNOSIS_S)
        return result[0] if result else None

    @override
    def abort(self) -> None:
        for connection in self._connections.values():
            connection.abort()

    @override
    def close(self) -> None:
        self._finalizer()


def _end_all(connections: dict[str, _Connection]) -> None:
    for connection in connections.values():
        connection.end()


def _name_of_node() -> str:
    """Return what this rank's node is called: alike for its ranks, different from other nodes."""
    launcher = f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '0')}"
    return os.environ.get(NODE_VARIABLE) or launcher


def address_towards(host: str) -> str:
    """Return the address from which this machine reaches `host` (a name or an address). Nothing is sent.

    Raises:
        OSError: There is no way to it.
    """
    family, kind, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)  # of a datagram socket: only chooses the way
        return probe.getsockname()[0]


def _address_of(interface: str) -> str:
    """Return a network interface's IPv4 address, as the system's `SIOCGIFADDR` gives it."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24])


def _fresh_store(group: dist.ProcessGroup) -> dist.Store:
    """Return a part of the group's store that no earlier communicator has used.

    Each rank counts its communicators in the store itself, so the counts are as old as the store's other keys.
    """
    store = c10d._get_process_group_store(group)
    count = store.add(f"commlib/made/{group.rank()}", 1)
    return dist.PrefixStore(f"commlib/{count}", store)


def _make_backend(
    group: dist.ProcessGroup, device: torch.device, store: dist.Store, timeout: timedelta, rank: int, size: int
) -> Any:
    kind = _parent_backend(group, device).name().lower()
    if kind == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    if kind == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    raise ConfigError(f"the process group's backend for {device.type} tensors is {kind!r}; expected Gloo or NCCL")


def _parent_backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    try:
        return group._get_backend(device)
    except RuntimeError as error:
        raise ConfigError(
            f"the process group has no backend for {device.type} tensors, and the model is on {device}. Initialise "
            f"it with one, for example 'cpu:gloo,cuda:nccl', or move the model: {error}"
        ) from None


@functools.cache
def _options(cls: type, **fields: Any) -> Any:
    """Return the options object of a collective that runs on the backend's own thread or stream; it is not changed."""
    options = cls()
    for name, value in fields.items():
        setattr(options, name, value)
    options.asyncOp = True
    return options


def _quietly(function: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):
        function()
