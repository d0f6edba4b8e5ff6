"""What becomes of works that only a stream waits for, on a stand-in of NCCL whose works end when the test says so."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commlib.transport import nccl
from commlib.transport.backends import Connections
from commlib.transport.base import EndedError, Exchange
from commlib.transport.closing import Finalizer, drain
from commlib.transport.lifelines import Peer, Word
from commlib.transport.nccl import NcclConnection, NcclWork
from commlib.transport.watch import Watch
from tests.waiting import ENDLESS_S, LIMIT_S, Clock, eventually, in_time

DEVICE = torch.device("cuda", 0)


class Work:
    """A kernel; `wait` makes a stream wait, which the test sees in `Stream`."""

    def __init__(self) -> None:
        self.has_ended = False
        self.error: Exception | None = None

    def wait(self) -> None:
        if self.error is not None:
            raise self.error
        Stream.waits.append(self)

    def is_completed(self) -> bool:
        return self.has_ended or self.error is not None


class Mark:
    def __init__(self, before: list[Work]) -> None:
        self.before = before

    def query(self) -> bool:
        return all(work.has_ended for work in self.before)

    def wait(self) -> None:
        Stream.waits.extend(self.before)


class Stream:
    """The current stream: `waits` lists the things that it waits for."""

    waits: list[Any] = []  # noqa: RUF012


class Backend:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.works: list[Work] = []
        self.fails_at: int | None = None  # which send raises

    def _made(self, what: str) -> Work:
        self.calls.append(what)
        self.works.append(Work())
        return self.works[-1]

    def allreduce(self, *_: Any) -> Work:
        return self._made("allreduce")

    def _start_coalescing(self) -> None:
        self.calls.append("start")

    def _end_coalescing(self) -> Work:
        return self._made("end")

    def recv(self, *_: Any) -> None:
        self.calls.append("recv")

    def send(self, tensors: list[torch.Tensor], rank: int, _: int) -> None:
        if rank == self.fails_at:
            raise ValueError("a tensor that cannot be sent")
        self.calls.append("send")

    def abort(self) -> None:
        self.calls.append("abort")
        for work in self.works:
            work.has_ended = True  # as a kernel that is aborted ends

    def shutdown(self) -> None:
        self.calls.append("shutdown" if all(work.has_ended for work in self.works) else "shutdown too early")


class Lines:
    """What `Connections` asks of lifelines."""

    def __init__(self, **peers: Peer) -> None:
        self.peers = {int(name[1:]): peer for name, peer in peers.items()}
        self.said: list[Word] = []

    @property
    def has_broken(self) -> bool:
        return any(peer.has_reported for peer in self.peers.values())

    def lost(self) -> dict[int, Peer]:
        return {rank: peer for rank, peer in self.peers.items() if peer.ending not in (None, "left")}

    def ring(self) -> None: ...

    def close(self, word: Word) -> None:
        self.said.append(word)


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    Stream.waits = []
    monkeypatch.setattr(nccl, "_mark", lambda device: Mark(list(Stream.waits)))


@pytest.fixture
def connections() -> Iterator[Connections]:
    made = Connections()
    made.lifelines = Lines(r1=Peer(), r2=Peer())  # type: ignore[assignment]
    yield made
    if made.watch is not None:
        made.watch.close()
    assert not [each for each in threading.enumerate() if each.name == "commlib-watch"]


def connect(connections: Connections, name: str = "all") -> tuple[NcclConnection, Backend]:
    connection = NcclConnection(range(3), DEVICE)
    connection.backend = backend = Backend()
    connections.by_group[name] = connection
    return connection, backend


def issue(connection: NcclConnection, what: str = "all_reduce", waits: bool = True) -> Work:
    work = NcclWork(connection.backend.allreduce(), connection, range(3), what)
    if waits:
        work.wait()
    return connection.backend.works[-1]


class Failures:
    """Records the reports of a watch."""

    def __init__(self) -> None:
        self.seen: list[tuple[Exception, str]] = []
        self.came = threading.Event()

    def __call__(self, error: Exception, what: str) -> None:
        self.seen.append((error, what))
        self.came.set()


def watched(connections: Connections, timeout_s: float) -> tuple[NcclConnection, Backend, Failures]:
    connection, backend = connect(connections)
    failures = Failures()
    connections.watch = watch = Watch(connections, timeout_s, failures)
    watch.add(connection)
    return connection, backend, failures


# --- closing ----------------------------------------------------------------------------------------------------------


def test_a_kernel_that_runs_ends_before_its_communicator_is_shut_down(connections: Connections) -> None:
    connection, backend = connect(connections)
    work = issue(connection)
    threading.Timer(0.2, setattr, (work, "has_ended", True)).start()
    connections.end(Word.LEFT)
    assert backend.calls == ["allreduce", "shutdown"]
    assert connection.backend is None


def test_goodbye_is_said_once_the_kernels_have_ended(connections: Connections) -> None:
    """A peer that has heard it takes it that this rank has done its part."""
    connection, _ = connect(connections)
    work, lines = issue(connection), connections.lifelines
    said_early: list[bool] = []

    def end() -> None:
        said_early.append(bool(lines.said))  # type: ignore[union-attr]
        work.has_ended = True

    threading.Timer(0.1, end).start()
    connections.end(Word.LEFT)
    assert said_early == [False]
    assert lines.said == [Word.LEFT]  # type: ignore[union-attr]


@pytest.mark.parametrize("why", ["peer", "limit", "own failure"])
def test_a_communicator_that_is_broken_is_aborted(
    connections: Connections, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(nccl, "_FINISH_S", 0.1 if why == "limit" else ENDLESS_S)
    connection, backend = connect(connections)
    issue(connection)
    if why == "peer":
        connections.lifelines.peers[2].end("killed")  # type: ignore[union-attr]
    in_time(lambda: connections.end(Word.FAILED if why == "own failure" else Word.LEFT))
    assert backend.calls == ["allreduce", "abort"]


def test_a_backend_that_hangs_while_it_is_shut_down_is_left_behind(
    connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_SHUT_DOWN_S", 0.1)
    connection, backend = connect(connections)
    over = threading.Event()
    backend.shutdown = lambda: over.wait(ENDLESS_S)  # type: ignore[method-assign]
    alive = weakref.ref(backend)
    try:
        in_time(lambda: connections.end(Word.LEFT))
    finally:
        over.set()
    del backend, connection
    gc.collect()
    assert alive() is not None, "its destructor would have waited for it"


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_end_starts_no_thread(connections: Connections, monkeypatch: pytest.MonkeyPatch, is_whole: bool) -> None:
    """As none can be started at the interpreter's exit (Python 3.12)."""
    connection, backend = connect(connections)
    issue(connection).has_ended = is_whole
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail(f"{thread.name} was started"))
    connections.end(Word.LEFT if is_whole else Word.FAILED)
    assert backend.calls == ["allreduce", "shutdown" if is_whole else "abort"]
    assert not [each for each in threading.enumerate() if each.name == "commlib-nccl-end"]


class Owner:
    """Owns connections, as a transport does."""

    def __init__(self, connections: Connections) -> None:
        self.owner = self  # so that it goes when the collector comes
        Finalizer(self, connections.end, "connections of a test")


def test_connections_may_be_collected_while_a_collective_is_launched(connections: Connections) -> None:
    """Their end releases the works launched in order, under the lock that is held during a launch."""
    connection, _ = connect(connections)
    dropped = Connections()
    other, backend = connect(dropped)
    owners = [Owner(dropped)]

    def act() -> NcclWork:
        owners.clear()
        gc.collect()
        return NcclWork(connection.backend.allreduce(), connection, range(3), "all_reduce")

    launched: list[NcclWork] = []
    thread = threading.Thread(target=lambda: launched.append(nccl.launches.issue(connection, act, True)), daemon=True)
    thread.start()
    thread.join(30)
    assert launched, "the launch waits for its own lock"
    drain()
    assert backend.calls == ["shutdown"]
    assert other.backend is None
    connection.backend.works[0].has_ended = True
    connections.end(Word.LEFT)


def test_an_idle_communicator_is_shut_down_at_once(connections: Connections) -> None:
    connection, backend = connect(connections)
    issue(connection).has_ended = True
    connections.end(Word.LEFT)
    assert backend.calls == ["allreduce", "shutdown"]


# --- the watch --------------------------------------------------------------------------------------------------------


def test_a_collective_that_does_not_end_is_late(connections: Connections) -> None:
    connection, _, failures = watched(connections, 0.3)
    began_s = time.monotonic()
    issue(connection, "the first").has_ended = True
    issue(connection, "the second")
    issue(connection, "the third")
    assert failures.came.wait(LIMIT_S)
    assert time.monotonic() - began_s > 0.3
    ((error, what),) = failures.seen
    assert isinstance(error, TimeoutError)
    assert what == "the second"
    assert connections.watch is not None
    assert connections.watch.is_failing  # type: ignore[attr-defined]


def test_a_queue_that_moves_is_not_late(connections: Connections, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for those before it, which is no fault of its peers."""
    clock = Clock(real_sleep_s=0.001)
    monkeypatch.setattr(nccl, "time", clock)
    connection, _, failures = watched(connections, 0.4)
    works = [issue(connection) for _ in range(5)]
    for num_left, work in reversed(list(enumerate(reversed(works)))):
        clock.now_s += 0.2
        looks_at(connection)
        work.has_ended = True
        assert eventually(lambda num_left=num_left: len(connection.outstanding) == num_left)
    assert not failures.seen


def looks_at(connection: NcclConnection) -> None:
    """Wait until the watch has looked whether anything is late, by the clock as it is now."""
    asked, late = threading.Semaphore(0), connection.late
    connection.late = lambda timeout_s: (late(timeout_s), asked.release())[0]  # type: ignore[method-assign]
    for _ in range(2):  # the first may have begun before
        assert asked.acquire(timeout=LIMIT_S)
    connection.late = late  # type: ignore[method-assign]


def test_works_that_the_lifelines_ended_have_failed_though_their_kernels_end_well(connections: Connections) -> None:
    connection, backend, failures = watched(connections, ENDLESS_S)
    issue(connection, "the sum")
    peer = connections.lifelines.peers[1]  # type: ignore[union-attr]
    peer.end("killed")
    connections.react(connections.lifelines)  # type: ignore[arg-type]
    assert connection.is_aborted, "at once, as NCCL's own error would come next"
    assert eventually(lambda: "abort" in backend.calls)
    assert failures.came.wait(LIMIT_S)
    ((error, what),) = failures.seen
    assert isinstance(error, EndedError)
    assert what == "the sum"


def test_an_error_of_nccls_own_is_found_after_its_work_was_waited_for(connections: Connections) -> None:
    connection, backend, failures = watched(connections, ENDLESS_S)
    issue(connection)
    backend.works[-1].error = RuntimeError("unhandled system error")
    assert failures.came.wait(LIMIT_S)
    assert "unhandled system error" in str(failures.seen[0][0])


def test_what_is_closed_has_not_failed(connections: Connections) -> None:
    connection, backend, failures = watched(connections, ENDLESS_S)
    issue(connection)
    connections.end(Word.FAILED)
    assert "abort" in backend.calls
    assert eventually(lambda: not any(each.name == "commlib-watch" for each in threading.enumerate()))
    assert not failures.seen


def test_the_watch_sleeps_while_nothing_is_outstanding(connections: Connections) -> None:
    connection, _, _ = watched(connections, ENDLESS_S)
    watch: Any = connections.watch
    looks: list[int] = []
    look = connection.look
    connection.look = lambda: (looks.append(1), look())[1]  # type: ignore[method-assign]
    assert eventually(lambda: watch._is_idle)
    time.sleep(0.2)  # in which it could look
    assert not looks
    work = issue(connection)
    assert eventually(lambda: bool(looks)), "it wakes"
    work.has_ended = True
    assert eventually(lambda: not connection.outstanding)
    num = len(looks)
    time.sleep(0.2)
    assert len(looks) == num


def test_only_the_newest_work_is_kept_and_that_until_it_ends(connections: Connections) -> None:
    """A work keeps its tensors alive, and the host may be far ahead of the device."""
    connection, backend, _ = watched(connections, ENDLESS_S)
    made = [NcclWork(backend.allreduce(), connection, range(3), "a sum") for _ in range(3)]
    for each in made:
        each.wait()
    newest = backend.works[-1]
    kept = [weakref.ref(work) for work in backend.works]
    backend.works.clear()
    Stream.waits.clear()  # marks hold copies
    for each in made:
        each._mark.before = []
    assert eventually(lambda: not any(each.is_under_way() for each in made[:-1]))
    gc.collect()
    assert [ref() for ref in kept] == [None, None, newest]
    newest.has_ended = True
    assert eventually(lambda: connection._witness is None and not connection.outstanding)


def test_torchs_watchdog_is_told_to_leave_the_process_alone_and_whom_it_watches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, Any] = {}

    class Options:
        def __init__(self, is_high_priority_stream: bool) -> None:
            seen["high"] = is_high_priority_stream

    class Made:
        Options: Any = None

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            environment = {key: os.environ.get(key) for key in nccl._QUIET}
            seen.update(rank=rank, size=size, options=vars(options), environment=environment)

        def eager_connect_single_device(self, device: torch.device) -> None:
            seen["device"] = device

    Made.Options = Options
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Made, raising=False)
    monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "7")  # the user's own
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    nccl.make(None, 1, torch.device("cuda", 3), timedelta(seconds=900), "commlib.x.all", [4, 6])  # type: ignore[arg-type]
    assert seen["options"] == {
        "_timeout": timedelta(seconds=9000),
        "group_name": "commlib.x.all",
        "global_ranks_in_group": [4, 6],
    }
    assert (seen["rank"], seen["size"], seen["device"]) == (1, 2, torch.device("cuda", 3))
    assert seen["environment"] == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "7",
    }
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ


# --- exchanges --------------------------------------------------------------------------------------------------------


def test_a_group_of_sends_and_receives_is_closed_when_one_raises(connections: Connections) -> None:
    connection, backend = connect(connections)
    backend.fails_at = 2
    one = torch.ones(1)
    with pytest.raises(ValueError, match="cannot be sent"):
        connection.exchange(Exchange([(1, one), (2, one)], [(1, one)], size=3))
    assert eventually(lambda: backend.calls == ["start", "recv", "send", "end", "abort"]), backend.calls
    assert connection.is_aborted, "no peer can match the part that was issued"


# --- order ------------------------------------------------------------------------------------------------------------


def launch(connection: NcclConnection, in_order: bool = True, waits: bool = True) -> Work:
    """Issue as the transport does, on a separate stream; `Stream.waits` then lists the waits of that stream."""
    Stream.waits = []
    act = lambda: NcclWork(connection.backend.allreduce(), connection, range(3), "a sum")  # noqa: E731
    made = nccl.launches.issue(connection, act, in_order)
    held = list(Stream.waits)
    if waits:
        made.wait()
    Stream.waits = held
    return connection.backend.works[-1]


def test_kernels_of_different_communicators_follow_each_other_in_the_order_of_their_issue(
    connections: Connections,
) -> None:
    (local, _), (across, _) = connect(connections, "local"), connect(connections, "across")
    first = launch(local)
    assert Stream.waits == []
    second = launch(local)
    assert Stream.waits == [], "one communicator has one stream"
    third = launch(across, waits=False)
    assert Stream.waits[-1] is second
    assert first not in Stream.waits[-1:]
    launch(local)
    assert Stream.waits == [third], "though nobody has waited for it yet"
    third.has_ended = True
    connections.end(Word.FAILED)
    assert not nccl.launches._last, "an ended connection is not kept"


def test_rounds_without_a_place_in_the_program_are_in_no_chain(connections: Connections) -> None:
    (gradients, _), (averages, _) = connect(connections, "gradients"), connect(connections, "averages")
    launch(gradients)
    launch(averages, in_order=False)
    assert Stream.waits == []
    launch(gradients)
    assert Stream.waits == []
    connections.end(Word.FAILED)


@pytest.mark.parametrize(("version", "is_chained"), [((2, 25, 1), True), ((2, 26, 2), False)])
def test_nccl_is_left_to_order_its_kernels_where_it_was_told_to(
    connections: Connections, monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...], is_chained: bool
) -> None:
    import torch.cuda.nccl as torch_nccl

    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    monkeypatch.setattr(torch_nccl, "version", lambda: version)
    (local, _), (across, _) = connect(connections, "local"), connect(connections, "across")
    launch(local)
    launch(across)
    assert bool(Stream.waits) == is_chained
    connections.end(Word.FAILED)
