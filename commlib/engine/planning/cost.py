"""Measures the cost of a bucket with the algorithm's own communication of scratch buckets."""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Hashable, Sequence
from statistics import median

import torch

from commlib.algorithms.base import Algorithm
from commlib.algorithms.channels import Gradients
from commlib.algorithms.context import Context
from commlib.engine.planning.sizes import BucketTimes
from commlib.engine.rounds.task import Task
from commlib.engine.session import Session
from commlib.primitives.parts import Part

#: Bytes of the scratch buckets, and number of them in flight at once.
SCRATCH_SIZES = ((32 << 10, 8), (256 << 10, 6), (1 << 20, 4), (4 << 20, 2))
#: A small model's scratch buckets are smaller, but at least this many bytes in the first size, doubling with each size.
_LEAST_BYTES = 16 << 10
#: Bucket sizes are multiples of this many bytes, so that each bucket is aligned like a real one.
_ALIGNMENT = 64
_REPETITIONS = 5
#: Rounds slower than this are timed only twice, in seconds.
_SLOW_S = 0.1


def as_square(nbytes: int) -> list[tuple[int, ...]]:
    """Return the shape of one 2-D fp32 parameter of `nbytes`, as square as possible."""
    numel = nbytes // 4
    rows = 1 << max(0, numel.bit_length() // 2 - 1)
    return [(rows, numel // rows) if numel % rows == 0 else (1, numel)]


class Scratch:
    """A bucket for measurements (a `BucketView`). `flat` holds the gradients of fp32 parameters of the given shapes."""

    def __init__(
        self, index: int, shapes: Sequence[tuple[int, ...]], flat: torch.Tensor, group: Hashable = None
    ) -> None:
        self.index = index
        self.group = group
        self._shapes = shapes
        self.flat = self.payload = flat

    @property
    def parts(self) -> list[Part]:
        """The positions of the parameters."""
        numels = list(map(math.prod, self._shapes))
        starts = itertools.accumulate(numels, initial=0)
        before = self.index * self.flat.numel()
        return [
            Part(f"scratch.{place}", shape, start, numel, before + start)
            for place, (shape, start, numel) in enumerate(zip(self._shapes, starts, numels, strict=False))
        ]

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Always empty."""
        return []


def scratch_buckets(
    count: int, shapes: Sequence[tuple[int, ...]], device: torch.device, group: Hashable = None
) -> list[Scratch]:
    """Return buckets of zeros in one allocation, since the heap rarely reuses small ones."""
    numel = sum(map(math.prod, shapes))
    flat = torch.zeros(count * numel, dtype=torch.float32, device=device)
    # Slices, like real buckets. Other operations would load further code into memory.
    return [Scratch(idx, shapes, flat[idx * numel : (idx + 1) * numel], group) for idx in range(count)]


def measure_cost(
    algorithm: Algorithm, session: Session, device: torch.device, max_bytes: int, group: Hashable = None
) -> BucketTimes:
    """Measure the cost of a bucket, with a copy of the algorithm that communicates scratch buckets.

    Collective: every rank must call it. Several buckets are in flight at once, as in backward.

    Args:
        algorithm: An algorithm on gradients, as before its first `setup`. It is copied, not changed.
        session: Carries the rounds.
        device: The device of the buckets.
        max_bytes: Approximate limit on the total bytes of scratch buckets, so that peak memory stays in backward.
        group: The group of the scratch buckets' parameters.
    """
    gather = session.transport.gather_objects
    wall: list[tuple[int, float]] = []
    for place, (nbytes, count) in enumerate(SCRATCH_SIZES):
        nbytes = min(nbytes, max(max_bytes // count, _LEAST_BYTES << place)) & -_ALIGNMENT
        buckets = scratch_buckets(count, as_square(nbytes), device, group)
        trial = copy.deepcopy(algorithm)
        trial.setup(Context(session.comm, buckets, device))
        first_s = max(gather(_seconds(trial, buckets, session, device)))
        repetitions = _REPETITIONS if first_s < _SLOW_S else 2
        seconds = median(gather(median(_seconds(trial, buckets, session, device) for _ in range(repetitions))))
        wall.append((nbytes, seconds / count))
        del buckets, trial  # before the next, larger ones are created
    return BucketTimes(tuple(wall))


def _seconds(algorithm: Algorithm, buckets: Sequence[Scratch], session: Session, device: torch.device) -> float:
    """Return the seconds of one round of scratch buckets."""
    channel = algorithm.channel
    assert isinstance(channel, Gradients)
    begin = lambda bucket: lambda: algorithm.communicate(bucket, session.comm)  # noqa: E731
    start = time.perf_counter()
    tasks = [Task(_scratch_name, begin(bucket), channel.prompt, channel.single) for bucket in buckets]
    session.driver.run(session.transport, tasks, channel.window)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _scratch_name() -> str:
    return "a scratch bucket of the cost measurement"
