"""Bucket boundaries: which gradients travel together.

[Note: the model] Gradients become ready one after the other while backward runs; a bucket can leave once its last
gradient is ready; the wire carries one bucket after the other, each for as long as buckets of its size took when
several were in flight (the latency of one then hides behind the bytes of another, so it is no sum of both). The last
gradient is taken to be ready when backward ends, and the step to end with its bucket; the boundaries that minimise that
time are found exactly, by dynamic programming over their number.

The model leaves out that communication takes processor time from backward where no core is free. So it only proposes:
its boundaries, for gradients as early as they were without communication and for later ones, are tried in real steps
beside plain sizes, and the fastest stays (`profile`, [Note: trials]).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: More bucket boundaries than this are not considered.
_MAX_BUCKETS = 64
#: Neighbouring gradients are first joined into at most this many pieces, each below 1/_MAX_PIECES of all bytes.
_MAX_PIECES = 128
#: Of the boundaries within this fraction of the least predicted time, those with the fewest buckets are taken.
TOLERANCE = 1e-3

INITIAL_CAP_BYTES = 25 << 20


@dataclass(frozen=True)
class Cost:
    """What a bucket's communication costs, as measured with several in flight.

    Attributes:
        samples: (bytes of gradients, seconds for each bucket of that size), in growing order of size, at least two.
    """

    samples: tuple[tuple[int, float], ...]

    @property
    def latency_s(self) -> float:
        """Seconds of the smallest bucket that was measured; a smaller one is taken to cost the same."""
        return self.samples[0][1]

    @property
    def s_per_byte(self) -> float:
        """Seconds of each further byte, beyond the largest bucket that was measured."""
        (smaller, smaller_s), (largest, largest_s) = self.samples[-2:]
        return max(0.0, (largest_s - smaller_s) / (largest - smaller))

    def seconds(self, nbytes: float | Sequence[float] | np.ndarray) -> np.ndarray:
        """Return the predicted seconds of buckets of `nbytes`: linear between the samples and beyond the last one."""
        sizes, seconds = np.array(self.samples).T
        seconds = np.maximum.accumulate(seconds)  # a larger bucket that took less is noise
        return np.interp(nbytes, sizes, seconds) + self.s_per_byte * np.maximum(0.0, np.subtract(nbytes, sizes[-1]))


def by_size(nbytes: Sequence[int], cap_bytes: int) -> list[int]:
    """Return the end of each bucket when gradients are joined in order until `cap_bytes` is reached or passed.

    A rest of less than half of that joins the bucket before it: a small bucket costs a large one's latency.
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


def by_time(ready_s: Sequence[float], nbytes: Sequence[int], cost: Cost, backward_s: float) -> list[int]:
    """Return the end of each bucket: the fewest buckets whose predicted step is within `TOLERANCE` of the fastest.

    Args:
        ready_s: Seconds after the start of backward at which each gradient is ready, in order.
        nbytes: Bytes of each gradient.
        cost: The measured cost of a bucket.
        backward_s: Seconds that backward takes without communication.
    """
    if not len(nbytes):
        return []
    ends = _pieces(nbytes)
    ready = _latest(ready_s, backward_s)[np.array(ends) - 1]
    total = np.concatenate([[0.0], np.cumsum(nbytes, dtype=float)[np.array(ends) - 1]])
    return [ends[piece - 1] for piece in _best_cut(ready, total, cost)]


def predict(
    ready_s: Sequence[float], nbytes: Sequence[int], cost: Cost, backward_s: float, ends: Sequence[int]
) -> float:
    """Return the predicted seconds from the start of backward to the end of the last bucket, for given boundaries."""
    latest = _latest(ready_s, backward_s)
    total = np.concatenate([[0.0], np.cumsum(nbytes, dtype=float)])
    finish, start = 0.0, 0
    for end in ends:
        finish = max(finish, latest[end - 1]) + float(cost.seconds(total[end] - total[start]))
        start = end
    return float(finish)


def _latest(ready_s: Sequence[float], backward_s: float) -> np.ndarray:
    """Return when each gradient and all before it are ready; the last one at the end of backward."""
    latest = np.maximum.accumulate(np.asarray(ready_s, dtype=float))
    latest[-1] = max(latest[-1], backward_s)
    return latest


def _pieces(nbytes: Sequence[int]) -> list[int]:
    """Return the ends of at most about `_MAX_PIECES` runs of gradients, the only places considered for boundaries."""
    if len(nbytes) <= _MAX_PIECES:
        return list(range(1, len(nbytes) + 1))
    return by_size(nbytes, max(1, 2 * sum(nbytes) // _MAX_PIECES))


def _best_cut(ready: np.ndarray, total: np.ndarray, cost: Cost) -> list[int]:
    """Minimise over the number of buckets and their ends; `total[j]` is the bytes of the first j pieces."""
    num_pieces = len(ready)
    finish = np.full(num_pieces + 1, np.inf)
    finish[0] = 0.0
    finish_s, choices = [], []
    seconds = cost.seconds(total[1:, None] - total[None, :-1])
    is_empty = np.arange(num_pieces)[None, :] > np.arange(num_pieces)[:, None]  # a bucket holds at least one piece
    for _ in range(min(num_pieces, _MAX_BUCKETS)):
        # finish[j]: the earliest end of one more bucket, when they hold the first j pieces; earlier is never worse.
        starts = np.maximum(finish[None, :-1], ready[:, None])
        ends = starts + seconds
        ends[is_empty] = np.inf
        choice = ends.argmin(axis=1)
        choices.append(choice)
        finish = np.concatenate([[np.inf], ends[np.arange(num_pieces), choice]])
        finish_s.append(finish[-1])
    fewest = next(count for count, end_s in enumerate(finish_s) if end_s <= min(finish_s) * (1 + TOLERANCE))
    cut, piece = [], num_pieces
    for count in range(fewest, -1, -1):
        cut.append(piece)
        piece = int(choices[count][piece - 1])
    return cut[::-1]
