"""Drivers: they run the rounds that the engine opens, in the order that the policy gives.

A *round* is one synchronisation: a task per bucket. On the CPU one thread per process runs every model's rounds; on
CUDA the collectives are issued from the thread that runs backward, onto one stream per bucket in flight, and the host
never waits.

[Note: rounds in a row] Rounds of one communicator run one after the other, in the order in which they were opened,
which is the program's order and so the same on all ranks. Every model has one, its rounds in the background another.

[Note: prompt tasks] Where more threads than cores want to run, waking a thread can take milliseconds, and an idle link
waits for it on the slowest rank. So a task that asks for its first collective without working on the data is handled by
the thread that makes it ready, under the driver's lock, unless the communication thread is at work; the order of the
collectives is the policy's, whichever thread issues them. A task of a single collective is finished by the thread that
waits for the round, once it waits: until then nothing of Python runs for it, which backward would share its lock with.
The broadcast of buffers before a forward is done by its caller altogether.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from typing_extensions import override

from commlib.engine.policy import Do, Event, IssueOrder
from commlib.errors import CommlibError, PeerTimeout
from commlib.transport.base import Communication, Request, Transport, Work

#: How much longer than the transport's timeout a waiter waits, so that the transport's own error comes first.
_GRACE_S = 15.0


class Task:
    """One bucket's communication in a round.

    Args:
        describe: Names the bucket in errors.
        begin: Makes the generator; called once the task's input is ready.
        is_prompt: Whether the generator asks for its first collective without working on the data.
        is_single: Whether the thread that waits for the round goes on with it: because it asks for that one only and
            has next to nothing to do after it, or because that thread waits from the start.
    """

    __slots__ = (
        "began_s",
        "begin",
        "describe",
        "ended_s",
        "generator",
        "input_event",
        "is_prompt",
        "is_single",
        "request",
        "sent_bytes",
        "work",
    )

    def __init__(
        self,
        describe: Callable[[], str],
        begin: Callable[[], Communication],
        is_prompt: bool = False,
        is_single: bool = False,
    ) -> None:
        self.describe = describe
        self.begin = begin
        self.is_prompt = is_prompt
        self.is_single = is_single
        self.generator: Communication | None = None
        self.request: Request | None = None
        self.work: Work | None = None
        self.input_event: Any = None
        self.began_s = self.ended_s = self.sent_bytes = 0.0


class Round:
    """One synchronisation: its tasks, their order, and how it ended.

    Args:
        transport: The communicator that carries it.
        tasks: One per bucket, in plan order.
        window: See `Traits.window`.
    """

    def __init__(self, transport: Transport, tasks: Sequence[Task], window: int) -> None:
        self.transport = transport
        self.tasks = list(tasks)
        self.order = IssueOrder(len(self.tasks), window)
        self.error: BaseException | None = None
        self.done = threading.Event()
        self.backlog: deque[tuple[Event, int]] = deque()
        self.is_awaited = False
        #: Tasks for the waiting thread to finish; in the end None.
        self.arrivals: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._seen = -1
        if not self.tasks:
            self.end()

    def end(self) -> None:
        """Say that it is over."""
        self.done.set()
        self.arrivals.put(None)

    def progressed(self) -> bool:
        """Return whether the round came on since this was asked last."""
        before, self._seen = self._seen, self.order.num_fed
        return before != self._seen

    def describe(self) -> str:
        """Name what the round waits for."""
        turn = self.order.waits_for
        return "the round" if turn is None else self.tasks[turn].describe()


class Driver(ABC):
    """Runs rounds. `open`, `ready` and `wait` are called by the engine's threads."""

    def __init__(self) -> None:
        self._lanes: dict[int, deque[Round]] = {}  # by communicator; there while it has rounds
        self._lanes_lock = threading.Lock()  # for a moment only; never held while a round advances

    def open(self, round_: Round) -> None:
        """Take a round whose tasks become ready later."""
        if round_.tasks:
            with self._lanes_lock:
                self._lanes.setdefault(id(round_.transport), deque()).append(round_)

    @abstractmethod
    def ready(self, round_: Round, task: int) -> None:
        """Say that a task's input is there. Returns at once."""

    @abstractmethod
    def wait(self, round_: Round) -> None:
        """Wait until the round is complete (on CUDA: make the current stream wait for it).

        Raises:
            TransportError: A collective failed or timed out.
        """

    @abstractmethod
    def has_arrived(self, round_: Round) -> bool:
        """Return whether `wait` would return, or raise, at once."""

    def cancel(self, round_: Round, error: BaseException) -> None:
        """End a round that cannot go on. Harmless when it has ended."""
        if not round_.done.is_set():
            round_.error = error
            round_.transport.abort()
            round_.end()
            self._leave(round_)

    def discard(self, round_: Round) -> None:
        """Forget a round of which no task was ready: nothing has been sent for it."""
        round_.end()
        self._leave(round_)

    @abstractmethod
    def close(self) -> None:
        """Give the driver up. Harmless when called twice."""

    def _handle(self, round_: Round, event: Event, task: int) -> None:
        """Take one event, and go on with every round that has come to the head of its lane."""
        if not round_.done.is_set():
            round_.backlog.append((event, task))
        while (head := self._head(round_.transport)) is not None and self._drain(head):
            self._leave(head)

    def _head(self, transport: Transport) -> Round | None:
        with self._lanes_lock:
            lane = self._lanes.get(id(transport))
            return lane[0] if lane else None

    def _leave(self, round_: Round) -> None:
        """Take an ended round out of its lane, if it is there still: nothing may keep its buckets alive."""
        with self._lanes_lock:
            lane = self._lanes.get(id(round_.transport), deque())
            if round_ in lane:
                lane.remove(round_)
                if not lane:
                    del self._lanes[id(round_.transport)]

    def _drain(self, round_: Round) -> bool:
        """Work through the backlog of the round at the head of its lane; return whether the round has ended."""
        try:
            while round_.backlog and not round_.done.is_set():
                self._advance(round_, *round_.backlog.popleft())
            if round_.order.complete:
                round_.end()
        except BaseException as error:
            self._fail(round_, error)
        return round_.done.is_set()

    def _advance(self, round_: Round, event: Event, task_idx: int) -> None:
        """Feed one event to the policy and carry out what follows from it."""
        events = deque([(event, task_idx)])
        while events:
            for action in round_.order.feed(*events.popleft()):
                task = round_.tasks[action.task]
                if action.do is Do.ISSUE:
                    self._issue(round_, action.task, task, events)
                else:
                    events.append((self._resume(task, action.task), action.task))

    def _resume(self, task: Task, task_idx: int) -> Event:
        if task.generator is None:
            task.began_s = time.perf_counter()
            task.generator = task.begin()
        if task.work is not None:
            try:
                task.work.wait()
            except Exception as error:
                raise _CollectiveError(error, task) from error
            task.work = None
        try:
            task.request = next(task.generator)
        except StopIteration:
            task.ended_s = time.perf_counter()
            task.generator = task.request = None  # nothing keeps a buffer alive that the engine lets go of
            return Event.FINISHED
        return Event.YIELDED

    @abstractmethod
    def _issue(self, round_: Round, task_idx: int, task: Task, events: deque[tuple[Event, int]]) -> None:
        """Start the task's request; when it completes, the task's ARRIVED event must come."""

    def _start(self, round_: Round, task: Task) -> Work:
        """Give the task's request to the transport."""
        assert task.request is not None
        task.sent_bytes += task.request.wire_bytes()
        try:
            task.work = work = round_.transport.issue(task.request)
        except Exception as error:
            raise _CollectiveError(error, task) from error
        return work

    def _fail(self, round_: Round, error: BaseException) -> None:
        """End the round: with an error that names the collective, or with the algorithm's own."""
        if isinstance(error, _CollectiveError):
            waited_for = round_.describe()  # a lost peer ends several collectives, and any of them may be noticed first
            beside = "" if waited_for in error.what else f", beside {waited_for},"
            error = round_.transport.diagnose(error.cause, error.what + beside)
        self.cancel(round_, error)


class _CollectiveError(Exception):
    """A collective could not be started or did not complete; set apart from errors in an algorithm's own work."""

    def __init__(self, cause: Exception, task: Task) -> None:
        assert task.request is not None
        self.cause = cause
        self.what = f"{task.request.verb} of {task.describe()}"
        super().__init__(self.what)


class ThreadDriver(Driver):
    """One thread that issues every collective, for tensors on the CPU.

    Completions come from the backend's threads as events in the same queue, so the thread sleeps only where nothing is
    to be done. It is a daemon and holds no model while idle. See [Note: prompt tasks] for what callers do themselves.
    """

    def __init__(self) -> None:
        super().__init__()
        self._events: queue.SimpleQueue[tuple[Round, Event, int] | None] = queue.SimpleQueue()
        self._at_work = threading.Lock()  # held while a round advances
        self._thread = threading.Thread(target=self._run, name="commlib-comm", daemon=True)
        self._thread.start()

    @override
    def ready(self, round_: Round, task: int) -> None:
        if not round_.tasks[task].is_prompt or self._at_work.locked():
            self._events.put((round_, Event.READY, task))
            return
        with self._at_work:
            self._handle(round_, Event.READY, task)

    @override
    def wait(self, round_: Round) -> None:
        with self._at_work:
            round_.is_awaited = True
            for idx, task in enumerate(round_.tasks):
                if task.is_single and task.work is not None:
                    self._announce(round_, idx, task.work)
        limit_s = round_.transport.timeout_s + _GRACE_S
        while not round_.done.is_set():
            try:
                arrived = round_.arrivals.get(timeout=limit_s)
            except queue.Empty:
                if not round_.progressed():
                    self.cancel(round_, PeerTimeout(f"no end of {round_.describe()} within {limit_s:g} s"))
                continue
            if arrived is not None:
                with self._at_work:
                    self._handle(round_, Event.ARRIVED, arrived)
        if round_.error is not None:
            raise round_.error

    @override
    def has_arrived(self, round_: Round) -> bool:
        return round_.done.is_set()

    @override
    def close(self) -> None:
        self._events.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=_GRACE_S)

    def _run(self) -> None:
        while (item := self._events.get()) is not None:
            with self._at_work:
                self._handle(*item)
            del item  # an idle thread must not keep a round, and through it a model, alive

    def _issue(self, round_: Round, task_idx: int, task: Task, events: deque[tuple[Event, int]]) -> None:
        work = self._start(round_, task)
        if round_.is_awaited or not task.is_single:
            self._announce(round_, task_idx, work)

    def _announce(self, round_: Round, task_idx: int, work: Work) -> None:
        """Let the end of a work come as an event, to the thread that waits for the round or to this driver's own."""
        if round_.tasks[task_idx].is_single:
            work.add_done_callback(lambda: round_.arrivals.put(task_idx))
        else:
            work.add_done_callback(lambda: self._events.put((round_, Event.ARRIVED, task_idx)))


class StreamDriver(Driver):
    """Issues from the calling thread onto streams, for tensors on an accelerator.

    `work.wait()` makes a stream wait, not the host, so a task runs to its end as soon as the order lets it: encoding
    bucket k + 1 on its stream does not queue behind the wire of bucket k.

    Args:
        device: The accelerator. A CPU device gives streams that do nothing and works that block, for tests.
        num_streams: How many buckets have a stream of their own before streams are shared.
    """

    def __init__(self, device: torch.device, num_streams: int = 4) -> None:
        super().__init__()
        self._streams = _Streams(device, num_streams)

    @override
    def ready(self, round_: Round, task: int) -> None:
        round_.tasks[task].input_event = self._streams.record()
        self._handle(round_, Event.READY, task)

    @override
    def wait(self, round_: Round) -> None:
        if round_.error is not None:
            raise round_.error
        if not round_.done.is_set():
            raise CommlibError(f"{round_.describe()} never became ready; this is a defect of commlib")
        self._streams.join(range(len(round_.tasks)))

    @override
    def has_arrived(self, round_: Round) -> bool:
        return round_.done.is_set() and self._streams.are_idle(range(len(round_.tasks)))

    @override
    def close(self) -> None:
        self._lanes.clear()

    def _resume(self, task: Task, task_idx: int) -> Event:
        with self._streams.use(task_idx):
            if task.generator is None:
                self._streams.wait_for(task.input_event)
            return super()._resume(task, task_idx)

    def _issue(self, round_: Round, task_idx: int, task: Task, events: deque[tuple[Event, int]]) -> None:
        with self._streams.use(task_idx):
            self._start(round_, task)
        events.append((Event.ARRIVED, task_idx))


class _Streams:
    """High-priority streams and their events; without an accelerator, nothing."""

    def __init__(self, device: torch.device, num_streams: int) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._pool = [torch.cuda.Stream(device, priority=-1) for _ in range(num_streams)] if self._is_cuda else []

    def use(self, task_idx: int) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self._pool[task_idx % len(self._pool)]) if self._is_cuda else contextlib.nullcontext()

    def record(self) -> Any:
        return torch.cuda.current_stream(self._device).record_event() if self._is_cuda else None

    def wait_for(self, event: Any) -> None:
        if self._is_cuda:
            torch.cuda.current_stream(self._device).wait_event(event)

    def are_idle(self, tasks: range) -> bool:
        return all(stream.query() for stream in self._pool[: len(tasks)])

    def join(self, tasks: range) -> None:
        if self._is_cuda:
            for stream in self._pool[: len(tasks)]:
                torch.cuda.current_stream(self._device).wait_stream(stream)


class _Shared:
    """The drivers of this process: one per device, there as long as an engine uses it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._drivers: dict[torch.device, tuple[Driver, set[int]]] = {}
        self._tokens = itertools.count()

    def acquire(self, device: torch.device) -> tuple[Driver, Callable[[], None]]:
        """Return the device's driver, and the function that gives it up (once; later calls do nothing)."""
        with self._lock:
            token = next(self._tokens)
            if device not in self._drivers:
                driver: Driver = ThreadDriver() if device.type == "cpu" else StreamDriver(device)
                self._drivers[device] = (driver, set())
            driver, users = self._drivers[device]
            users.add(token)
        return driver, lambda: self._release(device, token)

    def _release(self, device: torch.device, token: int) -> None:
        with self._lock:
            driver, users = self._drivers.get(device, (None, set()))
            if token not in users:
                return
            users.discard(token)
            if users or driver is None:
                return
            del self._drivers[device]
        driver.close()


_shared = _Shared()
acquire = _shared.acquire
