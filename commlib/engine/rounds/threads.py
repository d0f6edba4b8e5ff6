"""The driver of a CPU: one thread per process runs every model's rounds.

[Note: prompt tasks] If more threads than cores are runnable, waking a thread can take milliseconds, and the link idles
while it waits for the slowest rank. So a task that requests its first collective without processing the data is handled
by the thread that makes it ready, under the driver's lock, unless the communication thread is busy. The policy fixes
the order of the collectives, whichever thread issues them. A task of a single collective is finished by the thread that
waits for the round, once it waits. Until then no Python code runs for it, so it does not compete with backward for the
interpreter lock. The caller runs the broadcast of buffers before a forward entirely.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque

from typing_extensions import override

from commlib import locks
from commlib.engine.rounds.driver import Driver
from commlib.engine.rounds.order import Event
from commlib.engine.rounds.task import Round, Task
from commlib.errors import PeerTimeout
from commlib.transport.base import Work

#: Seconds that a waiter waits beyond the transport's timeout, so that the transport's own error comes first.
_GRACE_S = 15.0


class ThreadDriver(Driver):
    """One thread that issues every collective, for tensors on the CPU.

    Completions arrive from the backend's threads as events in the same queue, so the thread sleeps only when there is
    nothing to do. It is a daemon and holds no model while idle. See [Note: prompt tasks] for the work of callers.
    """

    def __init__(self) -> None:
        super().__init__()
        self._events: queue.SimpleQueue[tuple[weakref.ref[Round], Event, int] | None] = queue.SimpleQueue()
        self._at_work = locks.lock("driver.at_work")  # held while a round advances
        self._thread = threading.Thread(target=self._run, name="commlib-comm", daemon=True)
        self._thread.start()

    @override
    def ready(self, round_: Round, task: int) -> None:
        if not round_.tasks[task].is_prompt or self._at_work.locked():
            self._events.put((weakref.ref(round_), Event.READY, task))
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
                    self.cancel(round_, PeerTimeout(f"{round_.describe()} did not complete within {limit_s:g} s"))
                continue
            if arrived is not None:
                with self._at_work:
                    self._handle(round_, Event.ARRIVED, arrived)
        self._raise_error(round_)

    @override
    def has_arrived(self, round_: Round) -> bool:
        return round_.done.is_set()

    @override
    def close(self) -> None:
        self._events.put(None)
        self._thread.join(timeout=_GRACE_S)
        self._lanes.clear()

    def _run(self) -> None:
        while (item := self._events.get()) is not None:
            found, event, task = item
            with self._at_work:
                if (round_ := found()) is not None:
                    self._handle(round_, event, task)
                else:  # the round was cancelled, and others may follow it
                    for place in self._places():
                        self._go_on(place)
            del round_  # an idle thread must not keep a round, and through it a model, alive

    def _issue(self, round_: Round, task_idx: int, task: Task, events: deque[tuple[Event, int]]) -> None:
        work = self._start(round_, task)
        if round_.is_awaited or not task.is_single:
            self._announce(round_, task_idx, work)

    def _announce(self, round_: Round, task_idx: int, work: Work) -> None:
        """Deliver the completion of a work as an event, to the thread that waits for the round or to the driver's own.

        The object that ends a communicator holds its works. So no work may hold the round, which holds the
        communicator.
        """
        arrivals, events, found = round_.arrivals, self._events, weakref.ref(round_)
        if round_.tasks[task_idx].is_single:
            work.add_done_callback(lambda: arrivals.put(task_idx))
        else:
            work.add_done_callback(lambda: events.put((found, Event.ARRIVED, task_idx)))
