"""The planner against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.engine.planner import Cost, by_size, by_time, fit, predict

pieces = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 100)), min_size=1, max_size=8)


@given(pieces, st.floats(0, 0.1), st.floats(0, 0.01))
def test_no_other_boundaries_are_predicted_to_be_faster(
    gradients: list[tuple[float, int]], latency_s: float, s_per_byte: float
) -> None:
    ready = sorted(at for at, _ in gradients)
    nbytes = [size for _, size in gradients]
    cost = Cost(latency_s, s_per_byte)
    ends = by_time(ready, nbytes, cost, backward_s=1.0)
    assert ends[-1] == len(nbytes)
    assert ends == sorted(set(ends))
    cuts = itertools.chain.from_iterable(
        itertools.combinations(range(1, len(nbytes)), count) for count in range(len(nbytes))
    )
    best = min(predict(ready, nbytes, cost, 1.0, [*cut, len(nbytes)]) for cut in cuts)
    assert predict(ready, nbytes, cost, 1.0, ends) == pytest.approx(best, rel=1e-12)


def test_a_free_latency_gives_many_buckets_and_a_dear_one_few() -> None:
    ready, nbytes = np.linspace(0.01, 0.1, 50), [1000] * 50
    assert len(by_time(ready, nbytes, Cost(0.0, 1e-6), 0.1)) > 5
    assert by_time(ready, nbytes, Cost(1.0, 1e-6), 0.1) == [50]


def test_thousands_of_gradients_are_planned_within_a_second() -> None:
    ends = by_time(np.linspace(0, 0.1, 5000), [4000] * 5000, Cost(1e-3, 1e-9), 0.1)
    assert ends[-1] == 5000
    assert len(ends) < 65


def test_nothing_to_plan() -> None:
    assert by_time([], [], Cost(1.0, 1.0), 0.0) == []
    assert by_size([], 10) == []


def test_buckets_by_size_are_full_but_never_over() -> None:
    assert by_size([4, 4, 4, 20, 1, 1], 10) == [2, 3, 4, 6]


@given(st.floats(1e-6, 1), st.floats(1e-12, 1e-6))
def test_a_line_is_fitted_through_measurements(latency_s: float, s_per_byte: float) -> None:
    samples = [(nbytes, latency_s + s_per_byte * nbytes) for nbytes in (1 << 10, 1 << 20, 1 << 23)]
    assert fit(samples) == pytest.approx((latency_s, s_per_byte), rel=1e-5, abs=1e-15)


def test_times_that_do_not_grow_with_size_are_all_latency() -> None:
    assert fit([(1, 1.0), (100, 3.0), (1000, 2.0)]) == (1.0, 0.0)


def test_the_slope_is_that_of_large_messages() -> None:
    assert fit([(0, 0.0), (100, 1.0), (200, 3.0)]) == (0.0, 0.02)
