"""Which plan the trials choose, from scripted step times."""

from __future__ import annotations

import pytest

from commlib.engine.plan import Plan
from commlib.engine.profile import Trials, steps_per_visit


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
            figures.append(trials.seconds)
            trials.keep_better_half(trials.seconds)
    return trials, visited, figures


def test_every_plan_is_visited_there_and_back_and_the_better_half_again() -> None:
    trials, visited, _ = run([4.0, 2.0, 3.0, 5.0, 6.0], set(), 2)
    assert visited == [0, 1, 2, 3, 4, 4, 3, 2, 1, 0, 1, 2, 0, 0, 2, 1, 1, 2, 2, 1]
    assert [p.buckets[0][0] for p in trials.plans] == [1]


def test_the_figure_is_the_steps_own_time() -> None:
    _, _, figures = run([0.3, 0.1, 0.2], set(), 3)
    assert figures == [pytest.approx([0.3, 0.1, 0.2]), pytest.approx([0.1, 0.2])]


def test_disturbed_steps_do_not_count() -> None:
    trials, _, figures = run([0.3, 0.1, 0.2], {5, 6, 13, 20}, 4)
    assert figures[0] == pytest.approx([0.3, 0.1, 0.2])
    assert trials.plans == [plan(1)]


def test_short_steps_are_timed_more_often() -> None:
    assert steps_per_visit(1e-4) == 6
    assert steps_per_visit(0.04) == 4
    assert steps_per_visit(3.0) == 3
