"""Requests on torch.distributed: with `backends`, the one place that knows torch's process groups and versions."""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from typing_extensions import override

from commlib.errors import ConfigError, PeerFailure, PeerTimeout, TransportError
from commlib.transport import lifelines as lifelines_
from commlib.transport.addresses import local_address
from commlib.transport.backends import Connection, Connections, TorchWork, attend, options
from commlib.transport.base import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Communicator,
    EndedError,
    Exchange,
    Nodes,
    Request,
    Transport,
    Work,
    is_own,
)
from commlib.transport.connections import connect_all
from commlib.transport.lifelines import Lifelines, Verdict, Word
from commlib.transport.plain import MalformedError, decode, encode
from commlib.transport.rendezvous import Meeting, name_of, named

NODE_VARIABLE = "COMMLIB_NODE"
"""The environment variable that names this rank's node, where host name and launcher do not tell nodes apart."""

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

#: How long a rank that saw a collective fail waits for the others to report, in seconds.
_DIAGNOSIS_S = 2.0
#: How long after the timeout the set-up may take in a store that hangs, in seconds.
_GRACE_S = 5.0
#: The most bytes that a rank may say of itself at set-up.
_MOST_BYTES = 1 << 30


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


class _Done:
    """A work with nothing to do."""

    def wait(self) -> None: ...

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        callback()


DONE: Work = _Done()


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
        self.global_ranks = _global_ranks(group)
        self.timeout_s = timeout.total_seconds()
        self.bytes_sent = 0.0
        self._device = device
        self._connections = Connections()
        self._finalizer = weakref.finalize(self, self._connections.end)
        self._parent = weakref.ref(group)
        self._timeout = timeout
        self._store: dist.Store | None = None
        self._spare: list[socket.socket] = []
        try:
            self._meet(c10d._get_process_group_store(group))
            self._connect("all", self._store, range(self.world_size))
            self._await_all()
        except BaseException:
            if self._connections.lifelines is not None:
                self._connections.lifelines.give_up()
            self.close()
            raise
        finally:
            for connection in self._spare:
                connection.close()

    @property
    def _lifelines(self) -> Lifelines | None:
        return self._connections.lifelines

    @property
    def _name(self) -> str:
        return name_of(self.rank, self.global_ranks)

    def _meet(self, store: dist.Store) -> None:
        """Find the other ranks, agree with them on a part of the store, and make the lifelines."""
        if self.world_size == 1:
            return
        deadline = time.monotonic() + self.timeout_s + _GRACE_S

        def connect() -> tuple[Meeting, dict[int, socket.socket], dict[int, socket.socket]]:
            meeting = Meeting(store, self.rank, self.global_ranks, self.timeout_s)
            return meeting, *connect_all(meeting)

        def check() -> None:
            if time.monotonic() > deadline:
                raise PeerTimeout(
                    f"{self._name}: making the communicator in commlib.wrap failed: the process group's store did not "
                    f"answer within {self.timeout_s:g} s; its host may hang"
                )

        meeting, made, accepted = attend(connect, check)
        self._store = meeting.store
        kept = {peer: (made if self.rank < peer else accepted)[peer] for peer in made}
        # Closed once all ranks have connected: until then a connection that ends is one of a rank that died.
        self._spare = [each for each in (*made.values(), *accepted.values()) if each not in kept.values()]
        self._connections.lifelines = Lifelines(kept, self._connections.react)

    def _await_all(self) -> None:
        """Wait until every rank has connected: one that left before would break the connecting of the others."""
        sent_before = self.bytes_sent
        self.gather_objects(None)
        self.bytes_sent = sent_before  # which counts what users send

    def _connect(self, name: str, store: dist.Store | None, members: Sequence[int]) -> None:
        """Make the backend of a group of ranks; nothing for one rank alone."""
        connection = self._connections.by_group.setdefault(name, Connection(members))
        if len(members) == 1:
            return
        group, rank = self._parent(), members.index(self.rank)
        if group is None:
            raise TransportError(f"{self._name}: the process group of the model has been destroyed")
        assert store is not None
        make = lambda: _make_backend(group, self._device, store, self._timeout, rank, len(members))  # noqa: E731
        with self.explaining("making the communicator in commlib.wrap"):
            connection.backend = attend(make, self._check_all)

    def _check_all(self) -> None:
        """Raise if a rank has ended or given up."""
        if self._lifelines is not None and (self._lifelines.has_broken or self._lifelines.lost()):
            raise EndedError("a peer has ended")

    @override
    def split_by_node(self) -> Nodes | None:
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
        members = list(nodes.values())
        self._connect("local", self._part(f"local/{node}"), members[node])
        self._connect("across", self._part(f"across/{place}"), [ranks[place] for ranks in members])
        self._await_all()
        return Nodes(local, across)

    def _part(self, name: str) -> dist.Store:
        assert self._store is not None
        return dist.PrefixStore(name, self._store)

    @override
    def local_address(self) -> str:
        return local_address(self._store)

    @override
    def issue(self, request: Request) -> Work:
        if request.size == 1:
            return self._issue_alone(request)
        if request.is_empty():
            return DONE
        connection = self._connections.by_group[request.group]
        if connection.backend is None:
            raise TransportError(f"{self._name}: the communicator is closed; the model was unwrapped")
        partners = connection.partners(request)
        self._check(partners)
        self.bytes_sent += request.wire_bytes()
        work = self._issue(connection, request)
        made = TorchWork(work, connection, partners)
        if self._lifelines is not None and self._lifelines.has_news:  # which may have come since it was looked at
            self._lifelines.ring()
        return made

    def _check(self, partners: Sequence[int]) -> None:
        """Raise if a collective with these ranks would be in vain."""
        if self._connections.aborted_s is not None:
            raise EndedError("it was not begun, as this communicator had ended before")
        lines = self._lifelines
        if lines is None or not lines.has_news:
            return
        if lines.has_broken or not lines.lost().keys().isdisjoint(partners):
            raise EndedError("it was not begun, as a peer had ended or given up before")

    def _issue(self, connection: Connection, request: Request) -> Any:
        backend = connection.backend
        match request:
            case Exchange():
                return connection.exchange(request)
            case AllReduce(tensor=tensor, op=op):
                return backend.allreduce([tensor], options(c10d.AllreduceOptions, reduceOp=_REDUCE_OPS[op]))
            case AllGather(output=output, input=input):
                return backend._allgather_base(output, input, options(c10d.AllgatherOptions))
            case AllToAll():
                return connection.all_to_all(request)
            case Broadcast(tensor=tensor, source=source):
                return backend.broadcast([tensor], options(c10d.BroadcastOptions, rootRank=source, rootTensor=0))
        raise TypeError(f"{type(request).__name__} is not a request that torch.distributed can run")

    def _issue_alone(self, request: Request) -> Work:
        if isinstance(request, AllGather | AllToAll):
            request.output.copy_(request.input)
        return DONE

    @override
    def gather_objects(self, value: Any) -> list[Any]:
        what = "the exchange of set-up information"
        try:
            said, unsendable = encode((True, value)), None
        except ConfigError as error:  # told to the others, who wait for this rank
            said, unsendable = encode((False, str(error))), error
        own = torch.frombuffer(bytearray(said), dtype=torch.uint8).to(self._device)
        comm = Communicator(self.rank, self.world_size)
        sizes = torch.empty(self.world_size, dtype=torch.int64, device=self._device)
        self.complete(comm.all_gather(sizes, torch.tensor([own.numel()], device=self._device)), what)
        numels = sizes.tolist()
        for rank, numel in enumerate(numels):
            if not 0 < numel <= _MOST_BYTES:
                raise self._malformed(rank, f"it announced {numel} bytes; expected 1 to {_MOST_BYTES}")
        padded = own.new_zeros(max(numels))
        padded[: own.numel()] = own
        everyone = own.new_empty(self.world_size * padded.numel())
        self.complete(comm.all_gather(everyone, padded), what)
        if unsendable is not None:
            raise unsendable
        rows = everyone.view(self.world_size, -1).cpu().numpy()
        return [self._told(rank, row[: numels[rank]].tobytes()) for rank, row in enumerate(rows)]

    def _told(self, rank: int, data: bytes) -> Any:
        """Return what a rank has said of itself."""
        try:
            is_value, value = decode(data)
        except (MalformedError, TypeError, ValueError) as error:
            raise self._malformed(rank, str(error)) from error
        if not is_value:
            raise TransportError(f"{self._name}: rank {self.global_ranks[rank]} could not say its part: {value}")
        return value

    def _malformed(self, rank: int, why: str) -> TransportError:
        return TransportError(
            f"{self._name}: rank {self.global_ranks[rank]} sent what is no set-up information: {why}. Run the same "
            "version of commlib on every rank"
        )

    @override
    def diagnose(self, error: Exception, what: str, suspects: Sequence[int] = ()) -> Exception:
        """Tell the others that a collective broke, and name who is to blame by what they say; see [Note: lifelines]."""
        if is_own(error):
            return error
        lines, text = self._lifelines, str(error).strip().partition("\n")[0] or type(error).__name__
        timed_out = "timed out" in text.lower() or "timeout" in text.lower() or isinstance(error, TimeoutError)
        if isinstance(error, EndedError):
            timed_out = False
        elif self._connections.aborted_s is not None and getattr(error, "after_s", 0.0) < self.timeout_s:
            timed_out, text = False, "it was ended here"  # which may say that it timed out
        if lines is None:
            return PeerFailure(f"{self._name}: {what} failed. Cause: {text}")
        lines.report(timed_out)
        self.abort()
        verdict = lines.verdict(_DIAGNOSIS_S)
        if not verdict.ranks and suspects:
            verdict = verdict._replace(ranks=list(suspects))
        elif not verdict.ranks and verdict.timed_out and Word.TIMED_OUT not in lines.said:
            verdict = Verdict(True, [self.rank], "it came when the others had given up waiting for it")
        return self._failure(verdict, what, text)

    def _failure(self, verdict: Verdict, what: str, text: str) -> TransportError:
        ranks = sorted(self.global_ranks[rank] for rank in verdict.ranks)
        if verdict.timed_out:
            reason = f"no answer within {self.timeout_s:g} s"
            who = f"{named(ranks)} did not come{verdict.why and f': {verdict.why}'}" if ranks else verdict.why
        else:
            reason, who = "a peer was lost", f"{named(ranks)} {verdict.why}" if ranks else verdict.why
        kind = PeerTimeout if verdict.timed_out else PeerFailure
        return kind(f"{self._name}: {what} failed: {reason}; {who}. Cause: {text}", ranks)

    @override
    def bystanders(self) -> set[int]:
        return set() if self._lifelines is None else self._lifelines.bystanders()

    @override
    def blame(self) -> None:
        lifelines_.blame_elsewhere()

    @override
    def abort(self) -> None:
        if self._lifelines is not None:
            self._lifelines.give_up()
        self._connections.abort()

    @override
    def close(self) -> None:
        if self._finalizer.detach() is not None:
            self._connections.end(Word.LEFT)


def _global_ranks(group: dist.ProcessGroup) -> Sequence[int]:
    """Return the group's ranks in the default group; its own ones where torch does not know them."""
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, RuntimeError, ValueError):
        return range(group.size())


def _name_of_node() -> str:
    """Return what this rank's node is called: alike for its ranks, different from other nodes."""
    launcher = f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '0')}"
    return os.environ.get(NODE_VARIABLE) or launcher


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
