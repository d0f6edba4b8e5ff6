"""Decisions without a clock: which collective is next, and which round a step begins or ends.

Both classes here are pure: events in, actions out, no threads and no time. A thread, a CUDA stream and a simulator's
virtual clock drive the same objects, so what is issued, and in which order, is a function of the plan alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from commlib.algorithms.base import Traits


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


@dataclass(frozen=True)
class StepActions:
    """What the end of an optimizer step brings, in this order.

    Attributes:
        take_background: Wait for the round in the background and take its result.
        start: Start a round over weights or state.
        in_background: Whether that round is waited for later.
    """

    take_background: bool = False
    start: bool = False
    in_background: bool = False


class Schedule:
    """Which rounds happen when, counted in optimizer steps."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits
        self.step = 0
        self._take_at: int | None = None  # the step at which the round in the background is taken, at the earliest
        self._started_at: int | None = None

    @property
    def warming_up(self) -> bool:
        """Whether gradients are still averaged in full precision before the algorithm starts."""
        return self.step < self.traits.warmup_steps

    @property
    def ever_gradients(self) -> bool:
        """Whether any step synchronises gradients."""
        return self.traits.on_gradients or self.traits.warmup_steps > 0

    @property
    def gradients(self) -> bool:
        """Whether the backward of this step synchronises gradients."""
        return self.traits.on_gradients or self.warming_up

    @property
    def in_background(self) -> bool:
        """Whether a round is under way in the background."""
        return self._take_at is not None

    def end_step(self, has_arrived: bool = False) -> StepActions:
        """Count one optimizer step and return what is due at its end.

        Args:
            has_arrived: Whether the result of the round in the background is there; matters to asynchronous ones.
        """
        was_warm_up = self.warming_up
        self.step += 1
        if self.traits.on_gradients or was_warm_up:
            return StepActions()
        is_late_enough = self._take_at is not None and self._take_at <= self.step
        take = is_late_enough and (has_arrived or not self.traits.asynchronous)
        if take:
            self._take_at = None
        start = self._take_at is None and self._is_due()
        if start:
            self.start()
        return StepActions(take, start, start and self.traits.in_background)

    def _is_due(self) -> bool:
        """Whether a round starts now, if none is under way. Asynchronous ones start when the last is over."""
        if self.traits.asynchronous:
            return self._started_at is None or self.step - self._started_at >= self.traits.period
        return (self.step - self.traits.warmup_steps) % self.traits.period == 0

    def start(self) -> None:
        """Take note that a round starts now."""
        self._started_at = self.step
        if self.traits.in_background:
            self._take_at = self.step + max(1, self.traits.delay)

    def drain(self) -> bool:
        """Return whether a background round must be taken now (before saving, evaluation or exit)."""
        pending, self._take_at = self._take_at is not None, None
        return pending
