"""Bucket boundaries: which gradients travel together.

[Note: the model] Gradients become ready one after the other while backward runs; a bucket can leave once its last
gradient is ready; the wire carries one bucket after the other, a bucket of n bytes for `latency + n * s_per_byte`. The
last gradient is taken to be ready when backward ends, and the step to end with its bucket; the boundaries that minimise
that time are found exactly, by dynamic programming over their number.

The model leaves out that communication takes processor time from backward where no core is free. So it only proposes:
its boundaries are tried in real steps beside plain sizes, and the fastest stays (`Engine`, [Note: trials]).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: More bucket boundaries than this are not considered.
_MAX_BUCKETS = 64
#: Neighbouring gradients are first joined into at most this many pieces, each below 1/_MAX_PIECES of all bytes.
_MAX_PIECES = 128

INITIAL_CAP_BYTES = 25 << 20


@dataclass(frozen=True)
class Cost:
    """What a bucket's communication costs, as measured.

    Attributes:
        latency_s: Seconds of a bucket with nothing in it.
        s_per_byte: Seconds for each byte of gradients.
    """

    latency_s: float
    s_per_byte: float

    def seconds(self, nbytes: float) -> float:
        """Return the predicted seconds of a bucket of `nbytes`."""
        return self.latency_s + self.s_per_byte * nbytes


def fit(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fit `seconds = a + b * nbytes` to (nbytes, seconds) in growing order of size; a and b are not negative.

    The slope is that of the two largest: shaped links let small messages pass above their rate. The smallest then gives
    the latency.
    """
    (smallest, smallest_s), *_ = samples
    (middle, middle_s), (largest, largest_s) = samples[-2:]
    slope = max(0.0, (largest_s - middle_s) / (largest - middle))
    return max(0.0, smallest_s - slope * smallest), slope


def by_size(nbytes: Sequence[int], cap_bytes: int) -> list[int]:
    """Return the end of each bucket when gradients are joined in order until `cap_bytes` is reached.

    A gradient larger than the cap makes a bucket of its own.
    """
    ends, held = [], 0
    for idx, size in enumerate(nbytes):
        if held and held + size > cap_bytes:
            ends.append(idx)
            held = 0
        held += size
    return [*ends, len(nbytes)] if len(nbytes) else []


def by_time(ready_s: Sequence[float], nbytes: Sequence[int], cost: Cost, backward_s: float) -> list[int]:
    """Return the end of each bucket that minimises the predicted end of the step.

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
        finish = max(finish, latest[end - 1]) + cost.seconds(total[end] - total[start])
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
    best, best_s, choices = 0, np.inf, []
    is_empty = np.arange(num_pieces)[None, :] > np.arange(num_pieces)[:, None]  # a bucket holds at least one piece
    for count in range(min(num_pieces, _MAX_BUCKETS)):
        # finish[j]: the earliest end of `count + 1` buckets that hold the first j pieces; earlier is never worse.
        starts = np.maximum(finish[None, :-1], ready[:, None])
        ends = starts + cost.latency_s + cost.s_per_byte * (total[1:, None] - total[None, :-1])
        ends[is_empty] = np.inf
        choice = ends.argmin(axis=1)
        choices.append(choice)
        finish = np.concatenate([[np.inf], ends[np.arange(num_pieces), choice]])
        if finish[-1] < best_s:
            best, best_s = count, finish[-1]
    cut, piece = [], num_pieces
    for count in range(best, -1, -1):
        cut.append(piece)
        piece = int(choices[count][piece - 1])
    return cut[::-1]
