"""The planner against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlib.engine.planning.plan import Parameter, candidates
from commlib.engine.planning.sizes import TOLERANCE, BucketTimes, by_size, by_time, predict

pieces = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 100)), min_size=1, max_size=8)


def line(latency_s: float, s_per_byte: float) -> BucketTimes:
    """Return the cost that grows with size from the first byte."""
    return BucketTimes(((0, latency_s), (1000, latency_s + 1000 * s_per_byte)))


@given(pieces, st.floats(0, 0.1), st.floats(0, 0.01))
def test_no_other_boundaries_are_predicted_to_be_faster(
    gradients: list[tuple[float, int]], latency_s: float, s_per_byte: float
) -> None:
    ready = sorted(at for at, _ in gradients)
    nbytes = [size for _, size in gradients]
    cost = line(latency_s, s_per_byte)
    ends = by_time(ready, nbytes, cost, backward_s=1.0)
    assert ends[-1] == len(nbytes)
    assert ends == sorted(set(ends))
    cuts = itertools.chain.from_iterable(
        itertools.combinations(range(1, len(nbytes)), count) for count in range(len(nbytes))
    )
    best = min(predict(ready, nbytes, cost, 1.0, [*cut, len(nbytes)]) for cut in cuts)
    predicted = predict(ready, nbytes, cost, 1.0, ends)
    assert best * (1 - 1e-12) <= predicted <= best * (1 + TOLERANCE) * (1 + 1e-12)


def test_a_free_latency_gives_many_buckets_and_a_dear_one_few() -> None:
    ready, nbytes = np.linspace(0.01, 0.1, 50), [1000] * 50
    assert len(by_time(ready, nbytes, line(0.0, 1e-6), 0.1)) > 5
    assert by_time(ready, nbytes, line(1.0, 1e-6), 0.1) == [50]


def test_thousands_of_gradients_are_planned_within_a_second() -> None:
    ends = by_time(np.linspace(0, 0.1, 5000), [4000] * 5000, line(1e-3, 1e-9), 0.1)
    assert ends[-1] == 5000
    assert len(ends) < 65


def test_a_bucket_that_gains_next_to_nothing_is_not_made() -> None:
    assert by_time([0.0, 0.1, 0.2], [1, 1_000_000, 1_000_000], line(1e-6, 1e-6), 0.2) == [2, 3]


def test_plans_that_hardly_differ_are_tried_once() -> None:
    sizes = [8 << 20, 512 << 10, 4000, 1 << 20, 512 << 10]
    parameters = [Parameter(str(size), torch.nn.Parameter(torch.empty(size // 4)), False) for size in sizes]
    ready_s, cost = [0.024, 0.028, 0.044, 0.068, 0.08], line(1e-3, 3e-9)
    # The two predictions differ by where the 4,000 bytes go.
    predicted = [by_time([at * stretch for at in ready_s], sizes, cost, 0.08 * stretch) for stretch in (1.0, 1.5)]
    assert predicted == [[2, 4, 5], [3, 4, 5]]
    found = [plan.buckets for plan in candidates(parameters, ready_s, 0.08, cost)]
    assert ((0, 1), (2, 3), (4,)) in found
    assert ((0, 1, 2), (3,), (4,)) not in found


def test_nothing_to_plan() -> None:
    assert by_time([], [], line(1.0, 1.0), 0.0) == []
    assert by_size([], 10) == []


def test_buckets_by_size_are_full_and_a_small_rest_joins_the_last_one() -> None:
    assert by_size([4, 4, 4, 20, 1, 9, 5], 10) == [3, 4, 6, 7]
    assert by_size([4, 4, 4, 20, 1, 9, 4], 10) == [3, 4, 7]
    assert by_size([4, 4, 0], 10) == [3]
    assert by_size([12, 0, 0], 10) == [3]


def test_sizes_between_samples_are_interpolated_and_beyond_the_last_extrapolated() -> None:
    cost = BucketTimes(((10, 5.0), (20, 5.0), (40, 9.0)))
    assert list(map(cost.seconds, [0, 10, 15, 30, 40, 60])) == [5.0, 5.0, 5.0, 7.0, 9.0, 13.0]
    assert (cost.latency_s, cost.s_per_byte) == (5.0, pytest.approx(0.2))


def test_a_larger_bucket_is_never_cheaper() -> None:
    cost = BucketTimes(((1, 1.0), (100, 3.0), (1000, 2.0)))
    assert list(map(cost.seconds, [1, 100, 1000, 5000])) == [1.0, 3.0, 3.0, 3.0]
