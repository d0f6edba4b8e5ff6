"""Plans that are timed in real steps, until one is left."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

from commlib.engine.planning.plan import Plan
from commlib.engine.planning.readiness import Clock

#: Roughly how long one visit of a trial lasts.
_VISIT_S = 0.3
#: A plan drops out of the trials once it is slower than the fastest by more than so many times what is in doubt; and
#: how many passes there are at most. Of the rules tried on recorded steps, this left no slower plan
#: (`benchmarks/trials.py`).
_CLEAR = 2
_MOST_PASSES = 12
#: Plans that are still in the race at its end are level within this, or within what is in doubt where it is less.
_TIE = 0.01


class Figure(NamedTuple):
    """How long a plan's steps take.

    Attributes:
        seconds: Their median.
        doubt_s: Twice its standard error.
    """

    seconds: float
    doubt_s: float

    def behind(self, fastest: Figure) -> Figure:
        """Return by how much this is slower, and what is in doubt of that."""
        return Figure(self.seconds - fastest.seconds, math.hypot(self.doubt_s, fastest.doubt_s))


def figure_of(steps_s: Sequence[float]) -> Figure:
    """Return the figure of some steps, as if they were normally distributed but for a few outliers."""
    middle = median(steps_s)
    deviation = 1.4826 * median(abs(step_s - middle) for step_s in steps_s)
    return Figure(middle, 2 * math.sqrt(math.pi / 2) * deviation / math.sqrt(len(steps_s)))


class Trials:
    """Plans that are timed in real steps, until one is left.

    [Note: trials] A model of communication leaves much out (free cores, caches, the backend's threads), so a few plans
    are tried, there and back (A B C C B A), so that drifts of the machine cancel. A plan's figure is the median of all
    its steps so far. After each such pass those clearly slower than the fastest drop out: by more than `_CLEAR` times
    what the steps leave in doubt. So a close or noisy race is timed longer, and on a slow link, where steps hardly
    vary, it ends soon: when one plan is left, or all that are left are clearly within `_TIE`, and after `_MOST_PASSES`
    at the latest. Of plans that are then level with the fastest, by at most `_TIE` and by no more than is in doubt, the
    one of fewest buckets stays: these cost the least beside their time, and in four recordings of all plans in rotation
    (`benchmarks/trials.py`) they were the better choice too.

    Each visit takes one step that is not timed (its buffers are new) and some that are, from the end of one backward to
    the end of the next.

    Args:
        plans: The plans; the same on all ranks.
        steps_per_visit: How many steps are timed in one visit; the same on all ranks.
        clock: Whose moments `step_ended` is given.
    """

    def __init__(self, plans: Sequence[Plan], steps_per_visit: int, clock: Clock | None = None) -> None:
        self._clock = clock or Clock(torch.device("cpu"))
        self._steps_per_visit = steps_per_visit
        self._steps_s: dict[Plan, list[float]] = {plan: [] for plan in plans}
        self._num_passes = 0
        self._visits = self._there_and_back()
        self._ends: list[Any] = []

    @property
    def plans(self) -> list[Plan]:
        """The plans that are still in the race."""
        return list(self._steps_s)

    @property
    def current(self) -> Plan | None:
        """The plan to try now; None when a pass is over."""
        return self._visits[0] if self._visits else None

    @property
    def figures(self) -> list[Figure]:
        """The figure of each plan in the race, on this rank."""
        return list(map(figure_of, self._steps_s.values()))

    def step_ended(self, now: Any) -> bool:
        """Take note that a synchronised backward has ended; return whether a visit ended with it."""
        self._ends.append(now)
        if len(self._ends) <= self._steps_per_visit:
            return False
        self._clock.arrive(now)
        steps_s = [self._clock.seconds(start, end) for start, end in itertools.pairwise(self._ends)]
        self._steps_s[self._visits.pop(0)] += steps_s
        self._ends = []
        return True

    def end_pass(self, of_plans: Sequence[tuple[float, float]]) -> None:
        """Drop the plans that are slow by the given figures (the same on all ranks), and begin the next pass."""
        figures = [Figure(*figure) for figure in of_plans]
        self._num_passes += 1
        fastest = min(figures)
        tie_s = fastest.seconds * _TIE
        left = [(plan, figure.behind(fastest)) for plan, figure in zip(self._steps_s, figures, strict=True)]
        left = [(plan, lag) for plan, lag in left if lag.seconds <= _CLEAR * lag.doubt_s]
        is_decided = all(lag.seconds + _CLEAR * lag.doubt_s <= tie_s for _, lag in left)
        if is_decided or self._num_passes == _MOST_PASSES:
            level = [(plan, lag) for plan, lag in left if lag.seconds <= min(tie_s, lag.doubt_s)]
            left = [min(level, key=lambda entry: (len(entry[0].buckets), entry[1].seconds))]
        self._steps_s = {plan: self._steps_s[plan] for plan, _ in left}
        self._visits = self._there_and_back() if len(self._steps_s) > 1 else []

    def _there_and_back(self) -> list[Plan]:
        return [*self._steps_s, *reversed(self._steps_s)]


def steps_per_visit(backward_s: float) -> int:
    """Return how many steps to time in one visit: about a third of a second, at least 3, at most 6."""
    return min(6, max(3, round(_VISIT_S / max(2 * backward_s, 1e-6))))
