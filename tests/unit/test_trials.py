"""Which plan the trials choose, from scripted step times."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from commlib.engine.plan import Plan
from commlib.engine.profile import Figure, Readiness, Trials, figure_of, steps_per_visit


def plan(idx: int) -> Plan:
    return Plan(((idx,),), "trial")


def run(step_s: list[float], disturbed: set[int], steps: int) -> tuple[Trials, list[int], list[list[float]]]:
    """Run trials in which a step of plan k takes `step_s[k]`, and those numbered in `disturbed` a second more."""
    trials = Trials([plan(idx) for idx in range(len(step_s))], steps)
    now, count, visited, figures = 0.0, 0, [], []
    while (current := trials.current) is not None:
        visited.append(current.buckets[0][0])
        ended = False
        while not ended:
            now += step_s[current.buckets[0][0]] + (1.0 if count in disturbed else 0.0)
            count += 1
            ended = trials.step_ended(now)
        if trials.current is None:
            figures.append([figure.seconds for figure in trials.figures])
            trials.end_pass(trials.figures)
    return trials, visited, figures


def test_plans_are_visited_there_and_back_and_the_slow_ones_drop_out() -> None:
    trials, visited, _ = run([1.04, 1.0, 1.05, 1.018, 1.07], set(), 2)
    first = [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]  # within 6 % of the fastest
    second = [0, 1, 2, 3, 3, 2, 1, 0]  # within 3 %
    third = [1, 3, 3, 1]  # within 2 %, 1.5 % after the next
    assert visited == first + second + third + third
    assert trials.plans == [plan(1)]


def test_a_clear_race_ends_at_once() -> None:
    _, visited, _ = run([1.1, 1.0, 1.2], set(), 3)
    assert visited == [0, 1, 2, 2, 1, 0]


def test_a_close_race_ends_too() -> None:
    trials, visited, _ = run([1.002, 1.0], set(), 3)
    assert visited == [0, 1, 1, 0] * 6
    assert trials.plans == [plan(1)]


def test_of_level_plans_the_one_of_fewest_buckets_stays() -> None:
    three = Plan(((0,), (1,), (2,)), "trial")
    two = Plan(((0,), (1, 2)), "trial")
    slower = Plan(((0, 1, 2),), "trial")
    for doubt_s, expected in ((0.02, two), (0.0065, two), (0.006, three)):  # 0.0065 for each of two is 0.0092
        trials = Trials([three, two, slower], 1)
        for _ in range(6):
            trials.end_pass([Figure(seconds, doubt_s) for seconds in (1.0, 1.009, 1.0101)][: len(trials.plans)])
        assert trials.plans == [expected]


def test_the_doubt_is_twice_the_standard_error_of_the_median() -> None:
    """Also where a few steps were disturbed."""
    rng = np.random.default_rng(1)
    samples = rng.normal(1.0, 0.03, (4000, 36))
    doubt_s = 2 * float(np.std(np.median(samples, axis=1)))
    samples[:, :3] += 5.0
    found_s = np.median([figure_of(sample.tolist()).doubt_s for sample in samples])
    assert found_s == pytest.approx(doubt_s, rel=0.15)
    assert figure_of([0.2, 0.2, 0.2]) == (0.2, 0.0)


def test_of_equal_plans_the_first_stays() -> None:
    trials, _, _ = run([1.0, 1.0], set(), 3)
    assert trials.plans[0] == plan(0)


def test_the_figure_is_the_steps_own_time() -> None:
    _, _, figures = run([0.206, 0.2, 0.3], set(), 3)
    assert figures == [pytest.approx([0.206, 0.2, 0.3]), pytest.approx([0.206, 0.2])]


def test_disturbed_steps_do_not_count() -> None:
    trials, _, figures = run([0.3, 0.1, 0.2], {5, 6, 13, 20}, 4)
    assert figures[0] == pytest.approx([0.3, 0.1, 0.2])
    assert trials.plans == [plan(1)]


def test_short_steps_are_timed_more_often() -> None:
    assert steps_per_visit(1e-4) == 6
    assert steps_per_visit(0.04) == 4
    assert steps_per_visit(3.0) == 3


def test_a_backward_that_never_ended_is_not_recorded() -> None:
    readiness = Readiness(2, torch.device("cpu"))
    readiness.start()
    readiness.mark(0)
    readiness.start()
    readiness.mark(1)
    readiness.end()
    readiness.mark(0)  # of a backward that is not recorded
    assert readiness.num_backwards == 1
    ready_s, backward_s = readiness.result()
    assert ready_s[0] == backward_s  # no gradient in the backward that ended
    assert 0 <= ready_s[1] <= backward_s
