"""Measurements behind a plan: when gradients become ready, and what a bucket costs."""

from __future__ import annotations

import copy
import itertools
import math
import time
from array import array
from collections.abc import Callable, Hashable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

from commlib.algorithms.base import Algorithm, Context, Part
from commlib.engine.plan import Plan
from commlib.engine.planner import Cost
from commlib.engine.scheduler import Driver, Round, Task
from commlib.transport.base import Communicator, Transport

#: Bytes of the scratch buckets, and how many of them are in flight at once.
PROBES = ((32 << 10, 8), (256 << 10, 6), (1 << 20, 4), (4 << 20, 2))
#: A small model's scratch buckets are smaller, but not below this in the first of `PROBES`, and twice in each further.
_LEAST_BYTES = 16 << 10
#: Their sizes are multiples of this, so that each begins as a bucket of its own would.
_ALIGNMENT = 64
_REPETITIONS = 5
#: Roughly how long one visit of a trial lasts.
_VISIT_S = 0.3
#: A plan drops out of the trials once it is slower than the fastest by more than so many times what is in doubt; and
#: how many passes there are at most. Of the rules tried on recorded steps, this left no slower plan
#: (docs/benchmarks.md).
_CLEAR = 2
_MOST_PASSES = 12
#: Plans that are still in the race at its end are level within this, or within what is in doubt where it is less.
_TIE = 0.01
#: Rounds slower than this are timed twice only.
_SLOW_S = 0.1


def as_square(nbytes: int) -> list[tuple[int, ...]]:
    """Return the shape of one fp32 parameter of two dimensions, as square as it may be."""
    numel = nbytes // 4
    rows = 1 << max(0, numel.bit_length() // 2 - 1)
    return [(rows, numel // rows) if numel % rows == 0 else (1, numel)]


class Scratch:
    """A bucket to measure with (a `BucketView`): `flat` as the gradients of fp32 parameters of these shapes."""

    def __init__(
        self, index: int, shapes: Sequence[tuple[int, ...]], flat: torch.Tensor, group: Hashable = None
    ) -> None:
        self.index = index
        self.group = group
        self._shapes = shapes
        self.flat = self.payload = flat

    @property
    def parts(self) -> list[Part]:
        """The parameters' places."""
        numels = list(map(math.prod, self._shapes))
        starts = itertools.accumulate(numels, initial=0)
        before = self.index * self.flat.numel()
        return [
            Part(f"scratch.{place}", shape, start, numel, before + start)
            for place, (shape, start, numel) in enumerate(zip(self._shapes, starts, numels, strict=False))
        ]

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """None."""
        return []


def scratch_buckets(
    count: int, shapes: Sequence[tuple[int, ...]], device: torch.device, group: Hashable = None
) -> list[Scratch]:
    """Return buckets of zeros, in one allocation: the heap rarely gives small ones back."""
    numel = sum(map(math.prod, shapes))
    flat = torch.zeros(count * numel, dtype=torch.float32, device=device)
    # Slices, as buckets have them: other operations bring code of their own into memory.
    return [Scratch(idx, shapes, flat[idx * numel : (idx + 1) * numel], group) for idx in range(count)]


class Readiness:
    """When each gradient became ready, over a few backwards; the earliest of each counts, as delays are noise.

    Args:
        num_parameters: How many there are.
        device: Where they are; on CUDA the times are events on the stream, read once at the end.
    """

    def __init__(self, num_parameters: int, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._start: Any = None
        self._marks: list[Any] = [None] * num_parameters  # of the backward under way; of no use after its end
        self._times: list[array[float]] = []  # seconds, of each backward that ended
        self._end_s: list[float] = []

    @property
    def num_backwards(self) -> int:
        """How many backwards were recorded whole."""
        return len(self._end_s)

    def start(self) -> None:
        """Begin a backward."""
        self._start = self._now()
        self._marks = [None] * len(self._marks)  # also where the last backward never ended

    def mark(self, idx: int) -> None:
        """Record that the gradient of parameter `idx` is ready now."""
        self._marks[idx] = self._now()

    def end(self) -> None:
        """End the backward."""
        end = self._now()
        if self._is_cuda:
            end.synchronize()
        start = self._start
        seconds = (math.inf if at is None else self._between(start, at) for at in self._marks)
        self._times.append(array("d", seconds))
        self._end_s.append(self._between(start, end))

    def result(self) -> tuple[list[float], float]:
        """Return the seconds of each gradient and of the whole backward, without the first, cold one if possible."""
        times, ends = (self._times[1:], self._end_s[1:]) if len(self._end_s) > 1 else (self._times, self._end_s)
        backward_s = min(ends)
        return [min(backward_s, *column) for column in zip(*times, strict=True)], backward_s

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1e3 if self._is_cuda else end - start


def measure_cost(
    algorithm: Algorithm,
    transport: Transport,
    comm: Communicator,
    driver: Driver,
    device: torch.device,
    max_bytes: int,
    group: Hashable = None,
) -> Cost:
    """Measure what a bucket costs, by the algorithm's own communication of scratch buckets on a copy of it.

    Collective: every rank must call it. Several buckets are in flight at once, as they are in backward.

    Args:
        algorithm: As it was before its first `setup`; copied, not changed.
        transport: Carries the rounds.
        comm: The group.
        driver: Drives them.
        device: Where the buckets are.
        max_bytes: Scratch buckets are not much larger together, so that the peak of memory stays in backward.
        group: The group of the scratch buckets' parameters.
    """
    wall: list[tuple[int, float]] = []
    for place, (nbytes, count) in enumerate(PROBES):
        nbytes = min(nbytes, max(max_bytes // count, _LEAST_BYTES << place)) & -_ALIGNMENT
        buckets = scratch_buckets(count, as_square(nbytes), device, group)
        trial = copy.deepcopy(algorithm)
        trial.setup(Context(comm, buckets, device))
        probe = _ScratchRounds(trial, buckets, transport, comm, driver, device)
        first_s = max(transport.gather_objects(probe.seconds()))
        repetitions = _REPETITIONS if first_s < _SLOW_S else 2
        seconds = median(transport.gather_objects(median(probe.seconds() for _ in range(repetitions))))
        wall.append((nbytes, seconds / count))
        del buckets, trial, probe  # before the next, larger ones are made
    return Cost(tuple(wall))


class _ScratchRounds:
    """Rounds of scratch buckets, timed."""

    def __init__(
        self,
        algorithm: Algorithm,
        buckets: Sequence[Scratch],
        transport: Transport,
        comm: Communicator,
        driver: Driver,
        device: torch.device,
    ) -> None:
        traits = algorithm.traits
        self._make = lambda: Round(
            transport,
            [Task(_probe_name, _begin(algorithm, bucket, comm), traits.prompt, traits.single) for bucket in buckets],
            traits.window,
        )
        self._driver = driver
        self._device = device

    def _start(self) -> Round:
        round_ = self._make()
        self._driver.open(round_)
        for idx in range(len(round_.tasks)):
            self._driver.ready(round_, idx)
        return round_

    def seconds(self) -> float:
        """Return how long one round takes."""
        start = time.perf_counter()
        self._driver.wait(self._start())
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - start


def _begin(algorithm: Algorithm, bucket: Scratch, comm: Communicator) -> Callable[[], Any]:
    return lambda: algorithm.communicate(bucket, comm)


def _probe_name() -> str:
    return "a scratch bucket of the cost measurement"


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
    (docs/benchmarks.md) they were the better choice too.

    Each visit takes one step that is not timed (its buffers are new) and some that are, from the end of one backward to
    the end of the next.

    Args:
        plans: The plans; the same on all ranks.
        steps_per_visit: How many steps are timed in one visit; the same on all ranks.
    """

    def __init__(self, plans: Sequence[Plan], steps_per_visit: int) -> None:
        self._steps_per_visit = steps_per_visit
        self._steps_s: dict[Plan, list[float]] = {plan: [] for plan in plans}
        self._num_passes = 0
        self._visits = self._there_and_back()
        self._ends_s: list[float] = []

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

    def step_ended(self, now_s: float) -> bool:
        """Take note that a synchronised backward has ended; return whether a visit ended with it."""
        self._ends_s.append(now_s)
        if len(self._ends_s) <= self._steps_per_visit:
            return False
        self._steps_s[self._visits.pop(0)] += [b - a for a, b in itertools.pairwise(self._ends_s)]
        self._ends_s = []
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
