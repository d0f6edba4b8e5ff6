"""What a step takes on average: bytes, seconds, and seconds in which communication was waited for."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

#: Steps that a mean is of, at most; and where a cycle of the algorithm is longer, at most so many of it.
_STEPS, _MOST_STEPS = 64, 4096


class Mark(NamedTuple):
    """The state of the counters at the end of a step."""

    at_s: float
    sent_bytes: float
    waited_s: float


class Means(NamedTuple):
    """Means over the last steps, in whole cycles of the algorithm.

    Attributes:
        num_steps: How many steps; 0 before there are two.
        bytes: Sent per step.
        seconds: From the end of one step to the end of the next.
        waited_s: Of these, how long the thread that trains waited for communication (on CUDA: the host).
    """

    num_steps: int = 0
    bytes: float = 0.0
    seconds: float = 0.0
    waited_s: float = 0.0


class Pace:
    """Keeps the counters of the last steps.

    Args:
        cycle: Steps after which the algorithm's communication begins anew (`Channel.cycle`).
    """

    def __init__(self, cycle: int) -> None:
        self._cycle = min(cycle, _MOST_STEPS)
        self._marks: deque[Mark] = deque(maxlen=max(1, _STEPS // self._cycle) * self._cycle + 1)

    def note(self, sent_bytes: float, waited_s: float) -> None:
        """A step has ended; the counters are what they are since `wrap`."""
        self._marks.append(Mark(time.perf_counter(), sent_bytes, waited_s))

    def means(self) -> Means:
        """Return the means; of less than a cycle where there were no more steps."""
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
