"""Which plan the trials choose, from scripted step times."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from commlib.engine.planning.plan import Plan
from commlib.engine.planning.readiness import Readiness
from commlib.engine.planning.trials import Figure, Trials, figure_of, steps_per_visit


def plan(idx: int) -> Plan:
    return Plan(((idx,),), "trial")


def run(
    step_s: list[float], disturbed: set[int], steps: int, noise_s: float = 0.0
) -> tuple[Trials, list[int], list[list[float]]]:
    """Run trials in which a step of plan k takes `step_s[k]`, give or take `noise_s`, those in `disturbed` 1 s more."""
    rng = np.random.default_rng(0)
    trials = Trials([plan(idx) for idx in range(len(step_s))], steps)
    now, count, visited, figures = 0.0, 0, [], []
    while (current := trials.current) is not None:
        visited.append(current.buckets[0][0])
        ended = False
        while not ended:
            now += step_s[current.buckets[0][0]] + noise_s * rng.standard_normal() + float(count in disturbed)
            count += 1
            ended = trials.step_ended(now)
        if trials.current is None:
            figures.append([figure.seconds for figure in trials.figures])
            trials.end_pass(trials.figures)
    return trials, visited, figures


def visits(doubts_s: list[float], step_s: list[float]) -> tuple[list[Plan], list[int]]:
    """Return the plans left, and how many were in the race in each pass, whose steps leave these doubts."""
    trials = Trials([plan(idx) for idx in range(len(step_s))], 1)
    in_race = []
    for doubt_s in doubts_s:
        in_race.append(len(trials.plans))
        trials.end_pass([Figure(step_s[left.buckets[0][0]], doubt_s) for left in trials.plans])
        if len(trials.plans) == 1:
            break
    return trials.plans, in_race


def test_plans_are_visited_there_and_back() -> None:
    trials, visited, _ = run([1.06, 1.0, 1.01, 1.05, 1.07], set(), 2, noise_s=0.01)
    assert visited[:10] == [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]
    assert visited[10:14] == [1, 2, 2, 1]  # the others were 5 % slower and more
    assert trials.plans == [plan(1)]


def test_the_slow_ones_drop_out_as_the_doubt_shrinks() -> None:
    """Those behind by more than twice the doubt of the difference, which is 1.41 times that of a figure."""
    left, in_race = visits([0.03, 0.02, 0.015, 0.01, 0.005], [1.04, 1.0, 1.05, 1.018, 1.07])
    assert in_race == [5, 5, 4, 3, 2]  # within 0.085, 0.057, 0.042, 0.028, 0.014
    assert left == [plan(1)]


def test_a_clear_race_ends_at_once() -> None:
    _, visited, _ = run([1.1, 1.0, 1.2], set(), 3, noise_s=0.01)
    assert visited == [0, 1, 2, 2, 1, 0]


def test_a_close_race_ends_too() -> None:
    trials, visited, _ = run([1.002, 1.0], set(), 3, noise_s=0.1)
    assert visited == [0, 1, 1, 0] * 12
    assert len(trials.plans) == 1


def test_a_race_of_plans_surely_level_ends_at_once() -> None:
    assert visits([0.003] * 12, [1.001, 1.0, 1.001]) == ([plan(1)], [3])  # 0.0042 in doubt
    assert visits([0.004] * 12, [1.001, 1.0, 1.001]) == ([plan(1)], [3] * 12)  # 0.0057 in doubt: up to 0.0123 apart


def test_of_level_plans_the_one_of_fewest_buckets_stays() -> None:
    three = Plan(((0,), (1,), (2,)), "trial")
    two = Plan(((0,), (1, 2)), "trial")
    slower = Plan(((0, 1, 2),), "trial")
    for doubt_s, expected in ((0.02, two), (0.0065, two), (0.006, three)):  # 0.0065 for each of two is 0.0092
        trials = Trials([three, two, slower], 1)
        for _ in range(12):
            assert trials.plans == [three, two, slower]
            trials.end_pass([Figure(seconds, doubt_s) for seconds in (1.0, 1.009, 1.0101)])
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
    assert figures == [pytest.approx([0.206, 0.2, 0.3])]


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
