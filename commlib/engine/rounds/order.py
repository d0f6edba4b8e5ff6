"""The policy that orders collectives, independent of clocks.

It turns events into actions, without threads or time. A thread, a CUDA stream and a simulator's virtual clock drive the
same object, so the issued collectives and their order depend on the plan alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple


class Event(Enum):
    """An event of a task (one bucket's communication) within a round."""

    READY = "ready"  # its input is ready
    YIELDED = "yielded"  # its generator requests a collective
    ARRIVED = "arrived"  # the requested collective has completed
    FINISHED = "finished"  # its generator has returned


class Do(Enum):
    """An action of a driver on a task."""

    RESUME = "resume"  # run the generator until it yields or returns
    ISSUE = "issue"  # start the requested collective


class Action(NamedTuple):
    """Do `do` with task `task`."""

    do: Do
    task: int


class IssueOrder:
    """The static order of the collectives of one round.

    Collective s of task k has the key (k + s * (window - 1), s). With a window of 2, the second collective of bucket k
    follows the first of bucket k + 1. The number of collectives of a task is discovered during the round, identically
    on all ranks: places of a finished task are skipped. Local work (resuming a generator) is not ordered. It is done as
    soon as its data is ready.
    """

    def __init__(self, num_tasks: int, window: int) -> None:
        window = min(window, num_tasks + 1)  # so large that every first collective precedes every second one
        self._asked: list[int] = [0] * num_tasks  # collectives requested so far
        self._finished = [False] * num_tasks
        self._num_left = num_tasks
        self.num_fed = 0  # events so far
        self._places: Iterator[tuple[int, int]] = self._one_by_one() if window == 1 else self._interleaved(window)
        self._turn = next(self._places, None)

    @property
    def complete(self) -> bool:
        """Whether every task has finished."""
        return self._num_left == 0

    @property
    def waits_for(self) -> int | None:
        """The task whose next step the order waits for. None when complete."""
        return None if self.complete or self._turn is None else self._turn[0]

    def feed(self, event: Event, task: int) -> list[Action]:
        """Process one event. Returns the actions to carry out now, in order."""
        self.num_fed += 1
        if event in (Event.READY, Event.ARRIVED):
            return [Action(Do.RESUME, task)]
        if event is Event.YIELDED:
            self._asked[task] += 1
        else:
            self._finished[task] = True
            self._num_left -= 1
        return self._take_turns()

    def _take_turns(self) -> list[Action]:
        actions = []
        while self._num_left and self._turn is not None:
            task, stage = self._turn
            if self._asked[task] > stage:
                actions.append(Action(Do.ISSUE, task))
            elif not self._finished[task]:
                break
            self._turn = next(self._places, None)
        if not self._num_left:
            self._places = iter(())  # breaks the reference cycle between this object and its generator
        return actions

    def _interleaved(self, window: int) -> Iterator[tuple[int, int]]:
        for diagonal in itertools.count():
            if not self._num_left:
                return
            for stage in range(diagonal // (window - 1) + 1):
                task = diagonal - stage * (window - 1)
                if task < len(self._asked):
                    yield task, stage

    def _one_by_one(self) -> Iterator[tuple[int, int]]:
        for task in range(len(self._asked)):
            for stage in itertools.count():
                if self._finished[task] and self._asked[task] <= stage:
                    break
                yield task, stage
