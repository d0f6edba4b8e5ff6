"""Times of calls on a CUDA device: the device's own, by events, and the host's, to queue a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from intervals import rotation

#: Elements from which on the goals hold: a tensor is then many times the cache.
LARGE = 50_000_000
_GOALS = {"encode": 0.85, "decode": 0.85, "decode-sum-encode": 0.75}
_FEEDBACK_GOALS = {"int8": 0.8, "topk": 0.5}

_LEAST_S = 4e-4  # a shorter call is repeated until the device is busy for that long
_MOST_CALLS = 32  # queued at once; more could fill the queue, and the host would wait
_LEAST_REPS = 3
_CYCLES_PER_S = 2.0e9  # about; a sleep is to outlast the queueing
_MARGIN_S = 1e-4


class Timed(Protocol):
    """A function that is measured."""

    @property
    def run(self) -> Callable[[], object]:
        """Queues the work of one call."""
        ...


def goal_of(kernel: str, codec: str) -> float | None:
    """Return which fraction of the copy's rate a kernel is to reach at LARGE elements; None where none is set."""
    if kernel == "encode + feedback":
        return _FEEDBACK_GOALS.get(codec)
    is_dense = codec not in ("topk", "randomk", "threshold", "blocktopk", "hadamard", "-")
    return _GOALS.get(kernel) if is_dense else None


def measure(made: Sequence[Timed], reps: int, seconds: float) -> tuple[list[float], list[float]]:
    """Return the median seconds of a call of each on the device, and those that the host needs to queue one.

    They take turns, in rotating order. Before each turn comes a call that is not timed.
    """
    calls = [_calls(each) for each in made]
    device_s: list[list[float]] = [[] for _ in made]
    host_s: list[list[float]] = [[] for _ in made]
    begin = time.perf_counter()
    for repetition in range(reps):
        if repetition >= _LEAST_REPS and time.perf_counter() - begin > seconds:
            break
        for place in rotation(len(made), repetition):
            on_device, on_host = _turn(made[place], *calls[place])
            device_s[place].append(on_device)
            host_s[place].append(on_host)
    return [float(np.median(values)) for values in device_s], [float(np.median(values)) for values in host_s]


def _calls(timed: Timed) -> tuple[int, float]:
    """Return how often to call it in a turn, and about how long the host needs to queue one call."""
    timed.run()  # compiles
    torch.cuda.synchronize()
    start = time.perf_counter()
    timed.run()
    queued_s = time.perf_counter() - start
    torch.cuda.synchronize()
    return min(_MOST_CALLS, max(1, int(_LEAST_S / max(time.perf_counter() - start, 1e-9)) * 4)), queued_s


def _turn(timed: Timed, count: int, queued_s: float) -> tuple[float, float]:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    timed.run()
    torch.cuda.synchronize()
    torch.cuda._sleep(int((2 * count * queued_s + _MARGIN_S) * _CYCLES_PER_S))
    first.record()
    start = time.perf_counter()
    for _ in range(count):
        timed.run()
    host_s = time.perf_counter() - start
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3 / count, host_s / count
