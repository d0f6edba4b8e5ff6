"""Which collective is next: decided without a clock.

Events in, actions out, no threads and no time. A thread, a CUDA stream and a simulator's virtual clock drive the same
object, so what is issued, and in which order, is a function of the plan alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple


class Event(Enum):
    """What can happen to a task (one bucket's communication) within a round."""

    READY = "ready"  # its input is there
    YIELDED = "yielded"  # its generator asks for a collective
    ARRIVED = "arrived"  # the collective that it asked for has completed
    FINISHED = "finished"  # its generator has returned


class Do(Enum):
    """What a driver is told to do with a task."""

    RESUME = "resume"  # run the generator until it yields or returns
    ISSUE = "issue"  # start the collective that it asked for


class Action(NamedTuple):
    """Do `do` with task `task`."""

    do: Do
    task: int


class IssueOrder:
    """The static order of the collectives of one round.

    Collective s of task k has the key (k + s * (window - 1), s): with a window of 2 the second collective of bucket k
    follows the first of bucket k + 1. How many collectives a task has is found out on the way, alike on all ranks: a
    place in the order whose task has finished is passed over. Local work (resuming a generator) is not ordered: it is
    done as soon as its data is there.
    """

    def __init__(self, num_tasks: int, window: int) -> None:
        window = min(window, num_tasks + 1)  # no second collective comes before a first one then
        self._asked: list[int] = [0] * num_tasks  # collectives asked for so far
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
        """The task whose next step the order waits for, or None when complete."""
        return None if self.complete or self._turn is None else self._turn[0]

    def feed(self, event: Event, task: int) -> list[Action]:
        """Take one event and return what to do now, in this order."""
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
            self._places = iter(())  # the generator refers to this object: a cycle of every round for the collector
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
