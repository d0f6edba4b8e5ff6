"""Which plan the trials choose, from scripted step times."""

from __future__ import annotations

import pytest

from commlib.engine.plan import Plan
from commlib.engine.profile import Trials, steps_per_visit


def plan(idx: int) -> Plan:
    return Plan(((idx,),), "trial")


def run(step_s: list[float], disturbed: set[int], steps: int) -> tuple[Trials, list[Plan]]:
    """Run trials in which a step of plan k takes `step_s[k]`, and those numbered in `disturbed` a second more."""
    trials = Trials([plan(idx) for idx in range(len(step_s))], steps)
    now, count, visited = 0.0, 0, []
    while (current := trials.current) is not None:
        visited.append(current)
        ended = False
        while not ended:
            now += step_s[current.buckets[0][0]] + (1.0 if count in disturbed else 0.0)
            count += 1
            ended = trials.step_ended(now)
    return trials, visited


def test_every_plan_is_visited_there_and_back() -> None:
    _, visited = run([1.0, 2.0, 3.0], set(), 2)
    assert [p.buckets[0][0] for p in visited] == [0, 1, 2, 2, 1, 0]


def test_the_figure_is_the_steps_own_time() -> None:
    trials, _ = run([0.3, 0.1, 0.2], set(), 3)
    assert trials.seconds == pytest.approx([0.3, 0.1, 0.2])


def test_disturbed_steps_do_not_count() -> None:
    trials, _ = run([0.3, 0.1, 0.2], {5, 6, 13, 20}, 4)
    assert trials.seconds == pytest.approx([0.3, 0.1, 0.2])


def test_short_steps_are_timed_more_often() -> None:
    assert steps_per_visit(1e-4) == 6
    assert steps_per_visit(0.04) == 4
    assert steps_per_visit(3.0) == 2
