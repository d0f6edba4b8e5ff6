"""Records when gradients become ready, with the host's clock or with events on the device's stream."""

from __future__ import annotations

import math
import time
from array import array
from typing import Any

import torch


class DeviceTimer:
    """Measures moments of the training thread: on the host or, on CUDA, on the model's stream, without host waits.

    Args:
        device: The model's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"

    def now(self) -> Any:
        """Return the current moment."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def arrive(self, moment: Any) -> None:
        """Wait until a moment has passed, so that it can be compared."""
        if self._is_cuda:
            moment.synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two moments that have passed."""
        return start.elapsed_time(end) / 1e3 if self._is_cuda else end - start


class Readiness:
    """Records when each gradient becomes ready, over a few backwards. Uses the earliest time, since delays are noise.

    Args:
        num_parameters: Number of parameters.
        device: Their device. On CUDA, times are events on the stream, read once at the end.
    """

    def __init__(self, num_parameters: int, device: torch.device) -> None:
        self._timer = DeviceTimer(device)
        self._start: Any = None
        self._marks: list[Any] = [None] * num_parameters  # of the current backward, unused after its end
        self._times: list[array[float]] = []  # seconds, of each completed backward
        self._end_s: list[float] = []

    @property
    def num_backwards(self) -> int:
        """Number of completely recorded backwards."""
        return len(self._end_s)

    def start(self) -> None:
        """Begin a backward."""
        self._start = self._timer.now()
        self._marks = [None] * len(self._marks)  # also if the last backward never ended

    def mark(self, idx: int) -> None:
        """Record that the gradient of parameter `idx` is ready now."""
        self._marks[idx] = self._timer.now()

    def end(self) -> None:
        """End the backward."""
        timer, start, end = self._timer, self._start, self._timer.now()
        timer.arrive(end)
        self._times.append(array("d", (math.inf if at is None else timer.seconds(start, at) for at in self._marks)))
        self._end_s.append(timer.seconds(start, end))

    def result(self) -> tuple[list[float], float]:
        """Return the seconds of each gradient and of the whole backward. Skips the first, cold one if possible."""
        times, ends = (self._times[1:], self._end_s[1:]) if len(self._end_s) > 1 else (self._times, self._end_s)
        backward_s = min(ends)
        return [min(backward_s, *column) for column in zip(*times, strict=True)], backward_s
