"""Execution of requests on torch.distributed. Only this module and `backends` depend on process groups of torch."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from typing_extensions import override

from commlib.errors import CommlibError, ConfigError, PeerFailure, PeerTimeout, TransportError, kept
from commlib.transport import lifelines as lifelines_
from commlib.transport import nccl
from commlib.transport.addresses import local_address
from commlib.transport.backends import DONE, Connection, Connections, TorchWork, attend, options
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
from commlib.transport.closing import Finalizer
from commlib.transport.groups import NODE_VARIABLE, name_of_node
from commlib.transport.island import join_island
from commlib.transport.lifelines import Lifelines, Verdict, Word
from commlib.transport.plain import MalformedError, decode, encode
from commlib.transport.ranks import Ranks, RanksOfGroup
from commlib.transport.rendezvous import GRACE_S, all_said, name_of, named
from commlib.transport.staging import Staged, StagedWork, staging_of
from commlib.transport.watch import Watch

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

#: How long a rank that noticed a broken collective waits for the reports of other ranks, in seconds.
_DIAGNOSIS_S = 2.0
#: The Gloo group of all ranks for host-side agreement when tensors use NCCL. NCCL does not report which rank is missing
#: and would make a device wait for data that only hosts need.
_CONTROL = "control"
#: The largest encoded value that a rank may contribute at set-up, in bytes.
_MOST_BYTES = 1 << 30


class TorchTransport(Transport):
    """A separate communicator over the ranks of a process group.

    It never shares the user's communicator: the user's thread and the issuing thread could otherwise interleave their
    collectives differently on two ranks. The backend object is constructed directly, on a fresh prefix of the group's
    store: `new_group` is also collective over ranks outside `group`, and reuses names after a group is destroyed.

    Args:
        group: The user's process group, or other `Ranks`, which define the backend and how the ranks meet.
        device: The device of the tensors.
        timeout: How long a collective may wait for its peers.
        setup_timeout: How long the set-up waits for ranks, which may arrive at different times; None: `timeout`.

    Raises:
        ConfigError: The group's backend for the device is neither Gloo nor NCCL.
        PeerTimeout: A rank did not arrive to create the communicator.
        PeerFailure: A rank died meanwhile.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | Ranks,
        device: torch.device,
        timeout: timedelta,
        setup_timeout: timedelta | None = None,
    ) -> None:
        self._ranks = group if isinstance(group, Ranks) else RanksOfGroup(group)
        self.rank, self.global_ranks = self._ranks.rank, self._ranks.global_ranks
        self.world_size = len(self.global_ranks)
        self._longest_s = self.timeout_s = (setup_timeout or timeout).total_seconds()  # until all ranks are connected
        self.bytes_sent = 0.0
        self._device = device
        self.members_of_nodes: list[list[int]] = []  # the ranks of each node, once split_by_node has found them
        self._connections = Connections()
        self._finalizer = Finalizer(self, self._connections.end, f"the communicator of {self._name}")
        self._timeout = timeout
        self._unseen: Exception | None = None  # the failure that the watch detected
        self._watch: Watch | None = None  # on NCCL
        self._staging = staging_of(device)
        self._on_failure: list[weakref.WeakMethod[Any]] = []
        self._store: dist.Store | None = None
        self._place, self._turns = "", itertools.count()  # its name in the group's store; numbers of `gather_apart`
        self._spare: list[socket.socket] = []
        try:
            self._meet()
            self._connect("all", self._store, range(self.world_size))
            if self._connections.by_group["all"].is_nccl:
                self._connect(_CONTROL, self._part(_CONTROL), range(self.world_size))
            self._await_all()
            self._limit_exchanges()
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

    def _meet(self) -> None:
        """Find the other ranks, agree with them on a prefix of the store, and create the lifelines."""
        if self.world_size == 1:
            return
        self._place, self._store, made, accepted = self._ranks.meet(self.timeout_s, Word.LOST.value)
        ends = {peer: (made if self.rank < peer else accepted)[peer] for peer in made}
        # Closed once all ranks have connected. Until then, a closed connection means that its rank died.
        self._spare = [each for each in (*made.values(), *accepted.values()) if each not in ends.values()]
        self._connections.lifelines = Lifelines(ends, self._connections.react)

    def _await_all(self) -> None:
        """Wait until every rank has connected: a rank that left earlier would break the set-up of the others."""
        sent_before = self.bytes_sent
        self.gather_objects(None)
        self.bytes_sent = sent_before  # it counts user traffic only

    def join_island(self, ranks: Sequence[int]) -> None:
        """Connect this rank with the ranks (of the default group) that hold other shards of its model. Collective."""
        store, rank = c10d._get_process_group_store(c10d._get_default_group()), self.global_ranks[self.rank]
        self._connections.island = join_island(store, rank, ranks, self._longest_s, self._connections.abort)

    def _limit_exchanges(self) -> None:
        """Apply `timeout`, now that all ranks are connected."""
        self.timeout_s = self._timeout.total_seconds()
        for connection in self._connections.by_group.values():
            connection.limit(self._timeout)

    def _connect(self, name: str, store: dist.Store | None, members: Sequence[int]) -> None:
        """Create the backend of a group of ranks; a single rank needs none."""
        if len(members) == 1:
            self._connections.by_group[name] = Connection(members)
            return
        rank = members.index(self.rank)
        is_nccl = name != _CONTROL and self._ranks.kind_of_backend(self._device) == "nccl"
        connection = nccl.NcclConnection(members, self._device) if is_nccl else Connection(members)
        self._connections.by_group[name] = connection
        assert store is not None

        limit = self._timeout if is_nccl else timedelta(seconds=self.timeout_s)  # `_checks` limits NCCL's set-up
        where = _Place(store, limit, rank, [self.global_ranks[member] for member in members])
        make = lambda: _make_backend(where, self._device if is_nccl else None, f"{self._place}.{name}")  # noqa: E731
        with self.explaining("creating the communicator in commlib.wrap"):
            connection.backend = attend(make, self._checks(is_nccl))
        if isinstance(connection, nccl.NcclConnection):
            self._follow(connection)

    def _follow(self, connection: nccl.NcclConnection) -> None:
        """Let the watch monitor the works of an NCCL backend."""
        if self._watch is None:
            fail = weakref.WeakMethod(self._fail)
            tell = lambda *failed: (own := fail()) and own(*failed)  # noqa: E731
            self._watch = self._connections.watch = Watch(self._connections, self._timeout.total_seconds(), tell)
        self._watch.add(connection)

    def _checks(self, has_limit: bool) -> Callable[[], None]:
        """Return a function that raises if a rank has ended or given up, or, with `has_limit`, after the timeout."""
        deadline = time.monotonic() + self.timeout_s

        def check() -> None:
            self._check_all()
            if has_limit and time.monotonic() > deadline:
                raise TimeoutError(f"timed out: not connected within {self.timeout_s:g} s")

        return check

    def _check_all(self) -> None:
        """Raise if a rank has ended or given up."""
        if self._lifelines is not None and (self._lifelines.has_broken or self._lifelines.lost()):
            raise EndedError("a peer has ended")

    @override
    def split_by_node(self) -> Nodes | None:
        nodes: dict[str, list[int]] = {}
        for rank, node in enumerate(self.gather_objects(name_of_node())):
            nodes.setdefault(node, []).append(rank)
        sizes = {len(ranks) for ranks in nodes.values()}
        if len(sizes) > 1:
            self.part()
            raise ConfigError(
                f"hierarchical: expected as many ranks on every node, got {sorted(map(len, nodes.values()))}. "
                f"Nodes are told apart by {NODE_VARIABLE} if it is set, else by host name and GROUP_RANK"
            )
        if len(nodes) == 1 or sizes == {1}:
            return None
        members = self.members_of_nodes = list(nodes.values())
        node, place = next((idx, ranks.index(self.rank)) for idx, ranks in enumerate(members) if self.rank in ranks)
        local, across = Communicator(place, max(sizes), "local"), Communicator(node, len(nodes), "across")
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
        staged: Staged | None = None
        if isinstance(connection, nccl.NcclConnection):
            made = self._launch(connection, request, partners)
        else:
            staged = self._staging and self._staging.stage(request, connection.members.index(self.rank))
            made = TorchWork(self._issue(connection, staged.request if staged else request), connection, partners)
        lines = self._connections.lifelines
        if lines is not None and lines.has_news:  # may have arrived since `_check`
            lines.ring()
        return StagedWork(made, staged) if staged else made

    def _launch(self, connection: nccl.NcclConnection, request: Request, partners: Sequence[int]) -> TorchWork:
        """Issue a request on NCCL, in order with all others on the device."""
        what = f"{request.verb} number {connection.num_issued} of the communicator's group {request.group!r}"
        make = lambda: nccl.NcclWork(self._issue(connection, request), connection, partners, what)  # noqa: E731
        return nccl.launches.issue(connection, make, self.in_order)

    def _check(self, partners: Sequence[int]) -> None:
        """Raise if a collective with these ranks cannot complete."""
        is_failing = self._watch is not None and self._watch.is_failing
        if self._connections.aborted_s is not None or is_failing:
            raise EndedError("it was not started, as this communicator had ended before")
        lines = self._connections.lifelines
        if lines is None or not lines.has_news:
            return
        if lines.has_broken or not lines.lost().keys().isdisjoint(partners):
            raise EndedError("it was not started, as a peer had ended or given up before")

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
        try:
            said, unsendable = encode((True, value)), None
        except ConfigError as error:  # sent to the other ranks, which wait for this one
            said, unsendable = encode((False, str(error))), error
        rows = self._gather(said)
        try:
            if unsendable is not None:
                raise unsendable
            return [self._told(rank, row) for rank, row in enumerate(rows)]
        except CommlibError:  # raised on all ranks, because all have the same rows
            with contextlib.suppress(CommlibError):  # like `part`, without decoding the result
                self._gather(said)
            raise

    @override
    def gather_apart(self, value: Any, what: str) -> list[Any]:
        store, ranks = self._part(f"apart/{next(self._turns)}"), range(self.world_size)
        said = encode((True, value)).decode("ascii")
        with self.explaining(what):
            told = all_said(store, self.rank, self.global_ranks, said, self.timeout_s, lambda: self._check(ranks))
        return list(map(self._told, ranks, told))

    def _gather(self, said: bytes) -> list[bytes]:
        """Return the bytes of every rank, in rank order. Collective; blocks."""
        what = "the exchange of set-up information"
        own = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        comm = Communicator(self.rank, self.world_size, _CONTROL if _CONTROL in self._connections.by_group else "all")
        sizes = torch.empty(self.world_size, dtype=torch.int64, device="cpu")
        self.complete(comm.all_gather(sizes, torch.tensor([own.numel()], device="cpu")), what)
        numels = sizes.tolist()
        for rank, numel in enumerate(numels):
            if not 0 < numel <= _MOST_BYTES:
                raise self._malformed(rank, f"it announced {numel} bytes; expected 1 to {_MOST_BYTES}")
        padded = own.new_zeros(max(numels))
        padded[: own.numel()] = own
        everyone = own.new_empty(self.world_size * padded.numel())
        self.complete(comm.all_gather(everyone, padded), what)
        rows = zip(everyone.view(self.world_size, -1).numpy(), numels, strict=True)
        return [row[:numel].tobytes() for row, numel in rows]

    def _told(self, rank: int, data: bytes) -> Any:
        """Decode the bytes that a rank contributed."""
        try:
            is_value, value = decode(data)
        except (MalformedError, TypeError, ValueError) as error:
            raise self._malformed(rank, str(error)) from error
        if not is_value:
            raise TransportError(f"{self._name}: rank {self.global_ranks[rank]} could not send its value: {value}")
        return value

    def _malformed(self, rank: int, why: str) -> TransportError:
        return TransportError(
            f"{self._name}: rank {self.global_ranks[rank]} sent malformed set-up information: {why}. Run the same "
            "version of commlib on every rank"
        )

    @override
    def diagnose(self, error: Exception, what: str, suspects: Sequence[int] = ()) -> Exception:
        """Report a broken collective to the other ranks, and blame ranks by their reports; see [Note: lifelines]."""
        if is_own(error):
            return error
        if isinstance(error, EndedError) and self._unseen is not None:
            return kept(self._unseen)
        lines, text = self._lifelines, str(error).strip().partition("\n")[0] or type(error).__name__
        timed_out = "timed out" in text.lower() or "timeout" in text.lower() or isinstance(error, TimeoutError)
        if isinstance(error, EndedError):
            timed_out = False
        elif self._connections.aborted_s is not None and getattr(error, "after_s", 0.0) < self.timeout_s:
            timed_out, text = False, "it was aborted on this rank"  # the backend's text may mention a timeout
        if lines is None:
            return PeerFailure(f"{self._name}: {what} failed. Cause: {text}")
        lines.report(timed_out)
        self.abort()
        island = self._connections.island
        if island is not None and island.failure is not None and not lines.lost():
            return kept(island.failure)
        verdict = lines.verdict(_DIAGNOSIS_S)
        if not verdict.ranks and suspects:
            verdict = verdict._replace(ranks=list(suspects))
        elif not verdict.ranks and verdict.timed_out and Word.TIMED_OUT not in lines.said:
            verdict = Verdict(True, [self.rank], "it came after the other ranks had given up waiting for it")
        return self._failure(verdict, what, text)

    def _failure(self, verdict: Verdict, what: str, text: str) -> TransportError:
        ranks = sorted(self.global_ranks[rank] for rank in verdict.ranks)
        if verdict.timed_out:
            reason = f"no answer within {self.timeout_s:g} s"
            who = f"{named(ranks)} did not arrive in time{verdict.why and f': {verdict.why}'}" if ranks else verdict.why
        else:
            reason, who = "a peer was lost", f"{named(ranks)} {verdict.why}" if ranks else verdict.why
        kind = PeerTimeout if verdict.timed_out else PeerFailure
        blamed = ranks if verdict.blames else []
        return kind(f"{self._name}: {what} failed: {reason}; {who}. Cause: {text}", blamed)

    @property
    @override
    def failure(self) -> Exception | None:
        if self._watch is not None:
            self._watch.settle(_DIAGNOSIS_S + GRACE_S)
        return self._unseen

    @override
    def on_failure(self, callback: Callable[[Exception], None]) -> None:
        self._on_failure.append(weakref.WeakMethod(callback))
        if self._unseen is not None:
            self._tell(self._unseen)

    def _fail(self, error: Exception, what: str) -> None:
        """Store the failure that the watch detected, and call the callbacks. Runs on the watch's thread."""
        self._unseen = self.diagnose(error, what)
        self._tell(self._unseen)

    def _tell(self, failure: Exception) -> None:
        while self._on_failure:
            if (callback := self._on_failure.pop()()) is not None:
                callback(failure)

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

    def wait_for_ends(self) -> None:
        """Wait until no work writes to its tensors any more, after `abort`."""
        self._connections.wait_for_ends()

    @override
    def close(self) -> None:
        if self._finalizer.detach():
            self._connections.end(Word.LEFT)


class _Place(NamedTuple):
    """The arguments of a backend: its store prefix, the transport's timeout, this rank in it, and its global ranks."""

    store: dist.Store
    timeout: timedelta
    rank: int
    ranks: Sequence[int]


def _make_backend(where: _Place, device: torch.device | None, name: str) -> Any:
    """Create an NCCL backend on `device`, or a Gloo backend for None."""
    if device is None:
        return dist.ProcessGroupGloo(where.store, where.rank, len(where.ranks), where.timeout)
    return nccl.make(where.store, where.rank, device, where.timeout, f"commlib.{name}", where.ranks)
