"""Medians of paired ratios with bootstrap intervals."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A median ratio and the ends of its 95 % bootstrap interval."""

    median: float
    lo: float
    hi: float


def median_interval(values: Sequence[float], num_resamples: int = 10_000, seed: int = 0) -> Ratio:
    """Return the median of `values` and its 95 % percentile-bootstrap interval."""
    samples = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(samples), (num_resamples, len(samples)))
    lo, hi = np.quantile(np.median(samples[picks], axis=1), [0.025, 0.975])
    return Ratio(float(np.median(samples)), float(lo), float(hi))


def paired_ratio(times: Sequence[float], base: Sequence[float]) -> Ratio:
    """Return the median of times[i] / base[i], where block i of both ran next to each other."""
    return median_interval(np.divide(times, base).tolist())


def ratio_to_best(times: Sequence[float], candidates: Mapping[str, Sequence[float]]) -> tuple[str, Ratio]:
    """Compare with the best of several candidates without flattering or wronging it.

    The lowest of many noisy medians is too low. So the best is picked on the even blocks and compared with on the odd
    ones, and the other way round, and the ratios of both halves are pooled.

    Returns:
        The candidate with the lowest median over all blocks, and the pooled ratio of `times` to the best.
    """
    ratios: list[float] = []
    for picked, compared in ((0, 1), (1, 0)):
        best = min(candidates.values(), key=lambda blocks: float(np.median(blocks[picked::2])))
        ratios += np.divide(times[compared::2], best[compared::2]).tolist()
    return min(candidates, key=lambda name: float(np.median(candidates[name]))), median_interval(ratios)


def rotation(num_systems: int, repetition: int) -> list[int]:
    """Return the order of the systems in a repetition.

    Every order is followed by its reverse, then all move on by one place: over 2 * num_systems repetitions each system
    has had each place twice, and each neighbour equally often on both sides.
    """
    order = [(idx + repetition // 2) % num_systems for idx in range(num_systems)]
    return order[::-1] if repetition % 2 else order
