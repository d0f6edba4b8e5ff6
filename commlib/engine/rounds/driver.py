"""The base class of drivers, which run open rounds in the order that the policy gives.

[Note: rounds in a row] Rounds of one communicator run one after the other, in the order in which they were opened. This
is program order, and so identical on all ranks. Every model has one communicator, and another for background rounds.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from commlib import locks
from commlib.engine.rounds import marks
from commlib.engine.rounds.order import Do, Event
from commlib.engine.rounds.task import Round, Task
from commlib.errors import ConfigError, kept, without_frames
from commlib.transport.base import Request, Transport, Work


class Driver(ABC):
    """Runs rounds. `open`, `ready` and `wait` are called by the engine's threads."""

    def __init__(self) -> None:
        self._lanes: dict[int, deque[Round]] = {}  # by communicator, present while it has rounds
        self._lanes_lock = locks.lock("driver.lanes")  # held briefly, never while a round advances

    def run(self, transport: Transport, tasks: Sequence[Task], window: int = 1) -> None:
        """Run a round of tasks whose inputs are ready, and wait for its end. Cancels the round if it fails.

        Raises:
            TransportError: As in `wait`.
        """
        round_ = Round(transport, tasks, window)
        try:
            self.launch(round_)
            self.wait(round_)
        except BaseException as error:
            self.cancel(round_, kept(error))
            raise

    def launch(self, round_: Round) -> None:
        """Open a round and make all its tasks ready."""
        self.open(round_)
        for idx in range(len(round_.tasks)):
            self.ready(round_, idx)

    def note_inputs(self, round_: Round) -> None:  # noqa: B027 (without streams there is nothing to record)
        """Record that the inputs of all tasks are ready at this point of the current stream, before `ready`."""

    def open(self, round_: Round) -> None:
        """Add a round whose tasks become ready later."""
        if round_.tasks:
            with self._lanes_lock:
                self._lanes.setdefault(id(round_.transport), deque()).append(round_)

    @abstractmethod
    def ready(self, round_: Round, task: int) -> None:
        """Mark a task's input as ready. Returns at once."""

    @abstractmethod
    def wait(self, round_: Round) -> None:
        """Wait until the round is complete (on CUDA: make the current stream wait for it).

        Raises:
            TransportError: A collective failed or timed out.
        """

    @abstractmethod
    def has_arrived(self, round_: Round) -> bool:
        """Return whether `wait` would return or raise at once."""

    @staticmethod
    def _raise_error(round_: Round) -> None:
        """Raise the error that ended the round, if any."""
        if (error := round_.error) is not None:
            round_.error = kept(error)
            raise error

    def cancel(self, round_: Round, error: BaseException) -> None:
        """End a round with an error. Has no effect on a round that has ended.

        Args:
            round_: The round.
            error: The error that `wait` raises, without frames. See [Note: kept errors] in `errors.py`.
        """
        if not round_.done.is_set():
            round_.error = error
            round_.transport.abort()
            round_.end()
            self._leave(round_)

    def discard(self, round_: Round) -> None:
        """Drop a round with no ready task. Nothing has been sent for it."""
        round_.end()
        self._leave(round_)

    @abstractmethod
    def close(self) -> None:
        """Release the driver. Idempotent."""

    def _handle(self, round_: Round, event: Event, task: int) -> None:
        """Process one event."""
        if not round_.done.is_set():
            round_.backlog.append((event, task))
        self._go_on(id(round_.transport))

    def _go_on(self, place: int) -> None:
        """Advance every round that reaches the head of a lane."""
        while (head := self._head(place)) is not None and self._drain(head):
            self._leave(head)

    def _places(self) -> list[int]:
        """Return the keys of the current lanes."""
        with self._lanes_lock:
            return list(self._lanes)

    def _head(self, place: int) -> Round | None:
        with self._lanes_lock:
            lane = self._lanes.get(place)
            return lane[0] if lane else None

    def _leave(self, round_: Round) -> None:
        """Remove an ended round from its lane, if present, so that nothing keeps its buckets alive."""
        with self._lanes_lock:
            lane = self._lanes.get(id(round_.transport), deque())
            if round_ in lane:
                lane.remove(round_)
                if not lane:
                    del self._lanes[id(round_.transport)]

    def _drain(self, round_: Round) -> bool:
        """Process the backlog of the round at the head of its lane. Returns whether the round has ended."""
        try:
            while round_.backlog and not round_.done.is_set():
                self._advance(round_, *round_.backlog.popleft())
            if round_.order.complete:
                round_.end()
        except BaseException as error:
            self._fail(round_, error)
        return round_.done.is_set()

    def _advance(self, round_: Round, event: Event, task_idx: int) -> None:
        """Feed one event to the policy and carry out the resulting actions."""
        events = deque([(event, task_idx)])
        while events:
            for action in round_.order.feed(*events.popleft()):
                task = round_.tasks[action.task]
                if action.do is Do.ISSUE:
                    self._issue(round_, action.task, task, events)
                else:
                    events.append((self._resume(task, action.task), action.task))

    def _resume(self, task: Task, task_idx: int) -> Event:
        phase = "encode" if task.generator is None else "decode"
        if task.generator is None:
            task.began_s = time.perf_counter()
            task.generator = task.begin()
            if task.generator is None:  # pyright: ignore[reportUnnecessaryComparison]
                raise ConfigError(f"communicate of {task.describe()} returned None; expected a generator of requests")
        if task.work is not None:
            self._finish_work(task, task.work)
        try:
            with marks.phase(phase, task.describe):
                task.request = next(task.generator)
        except StopIteration:
            task.ended_s = time.perf_counter()
            task.generator = task.request = None  # keep no buffer alive that the engine has released
            return Event.FINISHED
        if not isinstance(task.request, Request):
            got = type(task.request).__name__
            raise ConfigError(
                f"communicate of {task.describe()} yielded {got}; expected a request, such as comm.all_reduce(tensor)"
            )
        return Event.YIELDED

    def _finish_work(self, task: Task, work: Work) -> None:
        try:
            work.wait()
        except Exception as error:
            raise _CollectiveError(error, task) from error
        finally:
            task.span = marks.end(task.span)
            task.work = None  # it may hold the error, now with the frames of the waiting thread

    @abstractmethod
    def _issue(self, round_: Round, task_idx: int, task: Task, events: deque[tuple[Event, int]]) -> None:
        """Start the task's request. Its completion must produce the task's ARRIVED event."""

    def _start(self, round_: Round, task: Task) -> Work:
        """Issue the task's request on the transport."""
        assert task.request is not None
        task.sent_bytes += task.request.wire_bytes()
        task.span = marks.begin(task.request.verb, task.describe)
        try:
            task.work = work = round_.transport.issue(task.request)
        except Exception as error:
            raise _CollectiveError(error, task) from error
        return work

    def _fail(self, round_: Round, error: BaseException) -> None:
        """End the round with an error that names the collective, or with the algorithm's own error."""
        if isinstance(error, _CollectiveError):
            waited_for = round_.describe()  # a lost peer ends several collectives, and any of them may fail first
            waiting = "" if waited_for in error.what else f", while waiting for {waited_for},"
            error = round_.transport.diagnose(error.cause, error.what + waiting)
        self.cancel(round_, without_frames(error))


class _CollectiveError(Exception):
    """A collective could not be started or did not complete. Distinguished from errors in an algorithm's own code."""

    def __init__(self, cause: Exception, task: Task) -> None:
        assert task.request is not None
        self.cause = cause
        self.what = f"{task.request.verb} of {task.describe()}"
        super().__init__(self.what)
