"""Means per step: bytes sent, seconds, and seconds of waiting for communication."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

#: Maximum number of steps in a mean, and maximum for an algorithm with a longer cycle.
_STEPS, _MOST_STEPS = 64, 4096


class Mark(NamedTuple):
    """The state of the counters at the end of a step."""

    at_s: float
    sent_bytes: float
    waited_s: float


class Means(NamedTuple):
    """Means over the last steps, in whole cycles of the algorithm.

    Attributes:
        num_steps: Number of steps. 0 before there are two.
        bytes: Bytes sent per step.
        seconds: Seconds from the end of one step to the end of the next.
        waited_s: Seconds of these that the training thread waited for communication (on CUDA: the host).
    """

    num_steps: int = 0
    bytes: float = 0.0
    seconds: float = 0.0
    waited_s: float = 0.0


class Pace:
    """Keeps the counters of the last steps.

    Args:
        cycle: Steps after which the algorithm's communication repeats (`Channel.cycle`).
    """

    def __init__(self, cycle: int) -> None:
        self._cycle = min(cycle, _MOST_STEPS)
        self._marks: deque[Mark] = deque(maxlen=max(1, _STEPS // self._cycle) * self._cycle + 1)

    def note(self, sent_bytes: float, waited_s: float) -> None:
        """Record the counters, accumulated since `wrap`, at the end of a step."""
        self._marks.append(Mark(time.perf_counter(), sent_bytes, waited_s))

    def means(self) -> Means:
        """Return the means. Covers less than a cycle if fewer steps were recorded."""
        steps = len(self._marks) - 1
        steps -= steps % self._cycle if steps >= self._cycle else 0
        if steps < 1:
            return Means()
        first, last = self._marks[-1 - steps], self._marks[-1]
        return Means(
            steps,
            *(
                (after - before) / steps
                for before, after in zip(
                    (first.sent_bytes, first.at_s, first.waited_s),
                    (last.sent_bytes, last.at_s, last.waited_s),
                    strict=True,
                )
            ),
        )
