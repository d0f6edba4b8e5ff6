"""Rounds and tasks. A *round* is one synchronisation. A *task* is one bucket's communication in a round."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from commlib.engine.rounds.order import Event, IssueOrder
from commlib.transport.base import Communication, Request, Transport, Work


class Task:
    """One bucket's communication in a round.

    Args:
        describe: Names the bucket in errors.
        begin: Creates the generator. Called once the task's input is ready.
        is_prompt: Whether the generator requests its first collective without processing the data.
        is_single: Whether the thread that waits for the round resumes the task. Set if the generator requests a single
            collective and does little work after it, or if that thread waits from the start.
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
        "span",
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
        self.span: Any = None  # the current collective's span in a profile
        self.began_s = self.ended_s = self.sent_bytes = 0.0


class Round:
    """One synchronisation: its tasks, their order, and its result or error.

    Args:
        transport: The communicator of the round.
        tasks: One task per bucket, in plan order.
        window: See `Gradients.window`.
    """

    def __init__(self, transport: Transport, tasks: Sequence[Task], window: int) -> None:
        self.transport = transport
        self.tasks = list(tasks)
        self.order = IssueOrder(len(self.tasks), window)
        self.error: BaseException | None = None
        self.done = threading.Event()
        self.backlog: deque[tuple[Event, int]] = deque()
        self.is_awaited = False
        #: Tasks for the waiting thread to finish, then None.
        self.arrivals: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._seen = -1
        if not self.tasks:
            self.end()

    def end(self) -> None:
        """Mark the round as ended."""
        self.done.set()
        self.arrivals.put(None)

    def progressed(self) -> bool:
        """Return whether the round has made progress since the last call."""
        before, self._seen = self._seen, self.order.num_fed
        return before != self._seen

    def describe(self) -> str:
        """Return the name of the task that the round waits for."""
        turn = self.order.waits_for
        return "the round" if turn is None else self.tasks[turn].describe()
