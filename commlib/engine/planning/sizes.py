"""Bucket boundaries: which gradients are communicated together.

[Note: the model] Gradients become ready one after the other while backward runs. A bucket can be sent once its last
gradient is ready. The link carries one bucket after the other, each for as long as buckets of its size took when
several were in flight. (The latency of one bucket then overlaps with the bytes of another, so the time is not the sum
of both.) The last gradient is assumed to be ready when backward ends, and the step to end with its bucket. Dynamic
programming finds the boundaries that minimise that time exactly.

The model ignores that communication takes processor time from backward if no core is free. So it only proposes plans.
Its boundaries, for gradients that are as early as without communication and for later ones, are tried in real steps
together with plain sizes, and the fastest plan is kept (`trials.py`, [Note: trials]).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Maximum number of buckets that is considered.
_MAX_BUCKETS = 64
#: Adjacent gradients are first joined into at most this many pieces, each below 1/_MAX_PIECES of all bytes.
_MAX_PIECES = 128
#: Among boundaries within this fraction of the least predicted time, the fewest buckets are chosen.
TOLERANCE = 1e-3

INITIAL_CAP_BYTES = 25 << 20


@dataclass(frozen=True)
class BucketTimes:
    """The communication cost of a bucket, as measured with several in flight.

    Attributes:
        samples: (bytes of gradients, seconds for each bucket of that size), at least two, in ascending order of size.
    """

    samples: tuple[tuple[int, float], ...]

    @property
    def latency_s(self) -> float:
        """Seconds of the smallest measured bucket. Smaller ones are assumed to take as long."""
        return self.samples[0][1]

    @property
    def s_per_byte(self) -> float:
        """Seconds of each additional byte beyond the largest measured bucket."""
        (smaller, smaller_s), (largest, largest_s) = self.samples[-2:]
        return max(0.0, (largest_s - smaller_s) / (largest - smaller))

    def seconds(self, nbytes: float) -> float:
        """Return the predicted seconds of a bucket of `nbytes`: linear between samples and beyond the last one."""
        (size, seconds), *larger = self.samples
        if nbytes <= size:
            return seconds
        for larger_size, larger_s in larger:
            larger_s = max(larger_s, seconds)  # a larger bucket that took less time is noise
            if nbytes <= larger_size:
                return seconds + (larger_s - seconds) * (nbytes - size) / (larger_size - size)
            size, seconds = larger_size, larger_s
        return seconds + self.s_per_byte * (nbytes - size)


def by_size(nbytes: Sequence[int], cap_bytes: int) -> list[int]:
    """Return the end of each bucket when gradients are joined in order until `cap_bytes` is reached or exceeded.

    A remainder of less than half of that joins the previous bucket, since a small bucket has a large one's latency.
    """
    ends, held = [], 0
    for idx, size in enumerate(nbytes):
        held += size
        if held >= cap_bytes:
            ends.append(idx + 1)
            held = 0
    if not ends:
        return [len(nbytes)] if len(nbytes) else []
    if 2 * held < cap_bytes:
        ends[-1] = len(nbytes)
    elif held:
        ends.append(len(nbytes))
    return ends


def by_time(ready_s: Sequence[float], nbytes: Sequence[int], cost: BucketTimes, backward_s: float) -> list[int]:
    """Return the end of each bucket, for the fewest buckets with a predicted step within `TOLERANCE` of the fastest.

    Args:
        ready_s: Seconds after the start of backward at which each gradient is ready, in order.
        nbytes: Bytes of each gradient.
        cost: The measured cost of a bucket.
        backward_s: Seconds that backward takes without communication.
    """
    if not len(nbytes):
        return []
    ends = _pieces(nbytes)
    latest, total = _latest(ready_s, backward_s), list(itertools.accumulate(nbytes, initial=0))
    cut = _best_cut([latest[end - 1] for end in ends], [total[end] for end in (0, *ends)], cost)
    return [ends[piece - 1] for piece in cut]


def predict(
    ready_s: Sequence[float], nbytes: Sequence[int], cost: BucketTimes, backward_s: float, ends: Sequence[int]
) -> float:
    """Return the predicted seconds from the start of backward to the end of the last bucket, for given boundaries."""
    latest = _latest(ready_s, backward_s)
    total = list(itertools.accumulate(nbytes, initial=0))
    finish, start = 0.0, 0
    for end in ends:
        finish = max(finish, latest[end - 1]) + cost.seconds(total[end] - total[start])
        start = end
    return finish


def _latest(ready_s: Sequence[float], backward_s: float) -> list[float]:
    """Return when each gradient and all before it are ready. The last one is ready at the end of backward."""
    latest = list(itertools.accumulate(ready_s, max))
    latest[-1] = max(latest[-1], backward_s)
    return latest


def _pieces(nbytes: Sequence[int]) -> list[int]:
    """Return the ends of at most about `_MAX_PIECES` runs of gradients, the only candidates for boundaries."""
    if len(nbytes) <= _MAX_PIECES:
        return list(range(1, len(nbytes) + 1))
    return by_size(nbytes, max(1, 2 * sum(nbytes) // _MAX_PIECES))


def _best_cut(ready: Sequence[float], total: Sequence[int], cost: BucketTimes) -> list[int]:
    """Return the ends of the buckets, in pieces. `total[j]` is the bytes of the first j pieces."""
    num_pieces = len(ready)
    pieces = range(num_pieces)
    seconds = [[cost.seconds(total[end + 1] - total[start]) for start in range(end + 1)] for end in pieces]

    def after(finish: Sequence[float], end: int) -> tuple[float, int]:
        """Return the earliest end of a further bucket whose last piece is `end`, and its first piece."""
        at = ready[end]
        finish_s = [(before if before > at else at) + more for before, more in zip(finish, seconds[end], strict=False)]
        return (best := min(finish_s)), finish_s.index(best)

    # finish[j]: the earliest end of all buckets when they hold the first j pieces. An earlier end is never worse. The
    # first pass allows any number of buckets, to find the target time. Then the number grows by one until it is
    # reached.
    finish = [0.0]
    for end in pieces:
        finish.append(after(finish, end)[0])
    latest_s = finish[-1] * (1 + TOLERANCE)
    finish, starts = [0.0] + [math.inf] * num_pieces, []
    while finish[-1] > latest_s and len(starts) < _MAX_BUCKETS:
        found = [after(finish, end) for end in pieces]
        finish = [math.inf, *(finish_s for finish_s, _ in found)]
        starts.append([start for _, start in found])
    cut, piece = [], num_pieces
    for start in reversed(starts):
        cut.append(piece)
        piece = start[piece - 1]
    return cut[::-1]
