"""Times candidate plans in real steps until one remains."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

from commlib.engine.planning.plan import Plan
from commlib.engine.planning.readiness import DeviceTimer

#: Approximate duration of one visit of a trial, in seconds.
_VISIT_S = 0.3
#: A plan drops out of the trials once it is slower than the fastest by more than this many times the uncertainty; and
#: the maximum number of passes. Among the rules tried on recorded steps, this one kept no slower plan
#: (`benchmarks/trials.py`).
_CLEAR = 2
_MOST_PASSES = 12
#: Plans that remain at the end are tied if they differ by at most this fraction, or by the uncertainty if it is
#: smaller.
_TIE = 0.01


class Figure(NamedTuple):
    """The measured step time of a plan.

    Attributes:
        seconds: The median of its steps.
        doubt_s: Its uncertainty: twice the standard error.
    """

    seconds: float
    doubt_s: float

    def behind(self, fastest: Figure) -> Figure:
        """Return how much slower this is than `fastest`, with the uncertainty of the difference."""
        return Figure(self.seconds - fastest.seconds, math.hypot(self.doubt_s, fastest.doubt_s))


def figure_of(steps_s: Sequence[float]) -> Figure:
    """Return the figure of some steps, assumed to be normally distributed except for a few outliers."""
    middle = median(steps_s)
    deviation = 1.4826 * median(abs(step_s - middle) for step_s in steps_s)
    return Figure(middle, 2 * math.sqrt(math.pi / 2) * deviation / math.sqrt(len(steps_s)))


class Trials:
    """Times candidate plans in real steps until one remains.

    [Note: trials] A model of communication ignores many effects (free cores, caches, the backend's threads). So a few
    plans are tried, forwards and backwards (A B C C B A), so that drifts of the machine cancel. A plan's figure is the
    median of all its steps so far. After each such pass, plans that are clearly slower than the fastest drop out: by
    more than `_CLEAR` times the uncertainty of the measurement. So a close or noisy race is timed longer. On a slow
    link, where step times hardly vary, it ends soon. The trials end when one plan remains, when all remaining plans are
    clearly within `_TIE`, and after `_MOST_PASSES` at the latest. Plans are then tied with the fastest if they differ
    by at most `_TIE` and by no more than the uncertainty. Of these, the one with the fewest buckets is kept: it uses
    the fewest other resources, and in four recordings of all plans in rotation (`benchmarks/trials.py`) it was also the
    better choice.

    Each visit takes one step that is not timed (its buffers are new) and several that are, from the end of one backward
    to the end of the next.

    Args:
        plans: The plans. Identical on all ranks.
        steps_per_visit: Number of steps timed in one visit. Identical on all ranks.
        timer: The timer of the moments passed to `step_ended`.
    """

    def __init__(self, plans: Sequence[Plan], steps_per_visit: int, timer: DeviceTimer | None = None) -> None:
        self._timer = timer or DeviceTimer(torch.device("cpu"))
        self._steps_per_visit = steps_per_visit
        self._steps_s: dict[Plan, list[float]] = {plan: [] for plan in plans}
        self._num_passes = 0
        self._visits = self._there_and_back()
        self._ends: list[Any] = []

    @property
    def plans(self) -> list[Plan]:
        """The plans that remain."""
        return list(self._steps_s)

    @property
    def current(self) -> Plan | None:
        """The plan to try now. None when a pass has ended."""
        return self._visits[0] if self._visits else None

    @property
    def figures(self) -> list[Figure]:
        """The figure of each remaining plan, on this rank."""
        return list(map(figure_of, self._steps_s.values()))

    def step_ended(self, now: Any) -> bool:
        """Record the end of a synchronised backward. Returns whether a visit ended with it."""
        self._ends.append(now)
        if len(self._ends) <= self._steps_per_visit:
            return False
        self._timer.arrive(now)
        steps_s = [self._timer.seconds(start, end) for start, end in itertools.pairwise(self._ends)]
        self._steps_s[self._visits.pop(0)] += steps_s
        self._ends = []
        return True

    def end_pass(self, of_plans: Sequence[tuple[float, float]]) -> None:
        """Drop slow plans according to the given figures (identical on all ranks), and begin the next pass."""
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
    """Return the number of steps to time in one visit: about 0.3 seconds, at least 3, at most 6."""
    return min(6, max(3, round(_VISIT_S / max(2 * backward_s, 1e-6))))
