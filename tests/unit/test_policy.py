"""The scheduling policy is pure: these tests are its only driver."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.algorithms import Traits
from commlib.engine.policy import Do, Event, IssueOrder, Schedule, StepActions
from commlib.errors import ConfigError


def drive(stages: list[int], window: int, seed: int) -> list[tuple[int, int]]:
    """Run a round with `stages[k]` collectives in task k, with events in a random order; return what was issued."""
    rng = random.Random(seed)
    order = IssueOrder(len(stages), window)
    issued: list[tuple[int, int]] = []
    done = [0] * len(stages)  # collectives issued per task
    pending = [(Event.READY, task) for task in range(len(stages))]
    while pending:
        event, task = pending.pop(rng.randrange(len(pending)))
        todo = order.feed(event, task)
        while todo:
            action = todo.pop(0)
            if action.do is Do.ISSUE:
                issued.append((action.task, done[action.task]))
                done[action.task] += 1
                pending.append((Event.ARRIVED, action.task))
            else:
                has_more = done[action.task] < stages[action.task]
                todo += order.feed(Event.YIELDED if has_more else Event.FINISHED, action.task)
    assert order.complete, f"the order waits for task {order.waits_for}"
    return issued


@given(st.lists(st.integers(0, 4), max_size=8), st.integers(1, 5), st.integers(0, 2**31), st.integers(0, 2**31))
def test_the_order_of_collectives_does_not_depend_on_timing(stages: list[int], window: int, one: int, two: int) -> None:
    first = drive(stages, window, one)
    assert first == drive(stages, window, two)
    assert sorted(first) == [(task, stage) for task, count in enumerate(stages) for stage in range(count)]


def test_the_second_collective_of_a_bucket_follows_the_first_of_the_next() -> None:
    assert drive([2, 2, 2], 2, 0) == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (2, 1)]


def test_a_window_of_one_is_one_bucket_after_the_other() -> None:
    assert drive([2, 1, 3], 1, 0) == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]


@pytest.mark.parametrize("window", [1, 2, 4])
def test_the_window_bounds_how_many_buckets_are_under_way(window: int) -> None:
    issued = drive([3] * 10, window, 1)
    started: set[int] = set()
    for task, stage in issued:
        started.add(task)
        assert len(started) <= 2 * (window - 1) + 1
        if stage == 2:
            started.discard(task)


def test_a_round_without_tasks_is_complete() -> None:
    assert IssueOrder(0, 2).complete


def actions(traits: Traits, num_steps: int) -> list[StepActions]:
    schedule = Schedule(traits)
    return [schedule.end_step() for _ in range(num_steps)]


def test_gradients_are_synchronised_in_every_step() -> None:
    schedule = Schedule(Traits())
    for _ in range(3):
        assert schedule.gradients
        assert not schedule.warming_up
        assert schedule.end_step() == StepActions()


def test_weights_are_averaged_every_period_after_the_warm_up() -> None:
    traits = Traits(tensors="weights", period=3, warmup_steps=2)
    schedule = Schedule(traits)
    gradients, starts = [], []
    for step in range(1, 12):
        gradients.append(schedule.gradients)
        if schedule.end_step().start:
            starts.append(step)
    assert gradients == [True, True] + [False] * 9
    assert starts == [5, 8, 11]


def test_a_background_round_is_taken_after_its_delay() -> None:
    got = actions(Traits(tensors="weights", period=4, delay=2), 11)
    assert [step for step, action in enumerate(got, 1) if action.start] == [4, 8]
    assert [step for step, action in enumerate(got, 1) if action.take_background] == [6, 10]
    assert all(action.in_background == action.start for action in got)


def test_a_delay_of_a_whole_period_takes_before_it_starts() -> None:
    got = actions(Traits(tensors="state:exp_avg", period=2, delay=2), 6)
    assert [(a.take_background, a.start) for a in got] == [
        (False, False), (False, True), (False, False), (True, True), (False, False), (True, True),
    ]  # fmt: skip


def test_draining_takes_the_round_in_the_background_once() -> None:
    schedule = Schedule(Traits(tensors="weights", period=2, delay=1))
    assert not schedule.drain()
    for _ in range(2):
        schedule.end_step()
    assert schedule.in_background
    assert schedule.drain()
    assert not schedule.drain()
    assert not schedule.end_step().take_background


@pytest.mark.parametrize(
    "wrong",
    [
        {"tensors": "grads"},
        {"tensors": "state:"},
        {"tensors": "weights", "period": 0},
        {"tensors": "weights", "delay": 2},
        {"period": 2},
        {"warmup_steps": -1},
        {"window": 0},
    ],
)
def test_impossible_traits_are_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError, match="Traits"):
        Traits(**wrong)


def test_many_rounds_of_the_same_plan_issue_the_same() -> None:
    orders = {tuple(drive([1, 2, 0, 3], 3, seed)) for seed in range(50)}
    assert len(orders) == 1
    assert len(next(iter(orders))) == sum(itertools.chain([1, 2, 0, 3]))


def test_an_asynchronous_round_is_taken_when_it_has_arrived_and_the_next_one_starts_then() -> None:
    schedule = Schedule(Traits(tensors="weights", asynchronous=True, period=2))
    arrived = [False, False, False, True, False, True, True]
    got = [schedule.end_step(has_arrived=each) for each in arrived]
    start = StepActions(start=True, in_background=True)
    took = StepActions(take_background=True)
    took_and_start = StepActions(take_background=True, start=True, in_background=True)
    assert got == [start, StepActions(), StepActions(), took_and_start, StepActions(), took_and_start, took]
