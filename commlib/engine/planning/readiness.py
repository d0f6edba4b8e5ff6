"""When gradients become ready, and the clock that says so: the host's, or events on the device's stream."""

from __future__ import annotations

import math
import time
from array import array
from typing import Any

import torch


class Clock:
    """Moments of the training thread: of the host, or on CUDA of the model's stream, which the host does not wait for.

    Args:
        device: The model's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"

    def now(self) -> Any:
        """Return this moment."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def arrive(self, moment: Any) -> None:
        """Wait until a moment is over, so that it can be compared."""
        if self._is_cuda:
            moment.synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two moments that are over."""
        return start.elapsed_time(end) / 1e3 if self._is_cuda else end - start


class Readiness:
    """When each gradient became ready, over a few backwards; the earliest of each counts, as delays are noise.

    Args:
        num_parameters: How many there are.
        device: Where they are; on CUDA the times are events on the stream, read once at the end.
    """

    def __init__(self, num_parameters: int, device: torch.device) -> None:
        self._clock = Clock(device)
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
        self._start = self._clock.now()
        self._marks = [None] * len(self._marks)  # also where the last backward never ended

    def mark(self, idx: int) -> None:
        """Record that the gradient of parameter `idx` is ready now."""
        self._marks[idx] = self._clock.now()

    def end(self) -> None:
        """End the backward."""
        clock, start, end = self._clock, self._start, self._clock.now()
        clock.arrive(end)
        self._times.append(array("d", (math.inf if at is None else clock.seconds(start, at) for at in self._marks)))
        self._end_s.append(clock.seconds(start, end))

    def result(self) -> tuple[list[float], float]:
        """Return the seconds of each gradient and of the whole backward, without the first, cold one if possible."""
        times, ends = (self._times[1:], self._end_s[1:]) if len(self._end_s) > 1 else (self._times, self._end_s)
        backward_s = min(ends)
        return [min(backward_s, *column) for column in zip(*times, strict=True)], backward_s
