"""The scheduling policy is pure: these tests are its only driver."""

from __future__ import annotations

import importlib
import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlib.algorithms import Channel, Gradients, OptimizerState, SelfRunning, Weights
from commlib.algorithms.policy import Units
from commlib.engine.rounds.order import Do, Event, IssueOrder
from commlib.engine.rounds.schedule import Schedule, StepActions, StepCounter
from commlib.errors import ConfigError


def drive(stages: list[int], window: int, seed: int) -> list[tuple[int, int]]:
    """Run a round with `stages[k]` collectives in task k, with events in a random order; return the issue order."""
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


class Steps:
    """A schedule, and the counter that it reads."""

    def __init__(self, channel: Weights) -> None:
        self.counter = StepCounter(channel)
        self.schedule = Schedule(channel, self.counter)

    def end_step(self, has_arrived: bool = False) -> StepActions:
        self.counter.end_step()
        return self.schedule.end_step(has_arrived)


def actions(channel: Weights, num_steps: int) -> list[StepActions]:
    steps = Steps(channel)
    return [steps.end_step() for _ in range(num_steps)]


def test_gradients_are_synchronised_in_every_step() -> None:
    counter = StepCounter(Gradients(warmup_steps=1))
    for step in range(3):
        assert counter.syncs_gradients
        assert counter.is_warming_up == (step == 0)
        counter.end_step()
        assert counter.ended_warm_up_step == (step == 0)


@pytest.mark.parametrize("counts_backwards", [True, False])
def test_backwards_are_steps_where_no_optimizer_is_known(counts_backwards: bool) -> None:
    counter = StepCounter(Gradients(), counts_backwards=counts_backwards)
    counter.end_backward()
    assert counter.step == int(counts_backwards)


def test_weights_are_averaged_every_period_after_the_warm_up() -> None:
    steps = Steps(Weights(period=3, warmup_steps=2))
    gradients, starts = [], []
    for step in range(1, 12):
        gradients.append(steps.counter.syncs_gradients)
        if steps.end_step().start:
            starts.append(step)
    assert gradients == [True, True] + [False] * 9
    assert starts == [5, 8, 11]


def test_a_background_round_is_taken_after_its_delay() -> None:
    got = actions(Weights(period=4, delay=2), 11)
    assert [step for step, action in enumerate(got, 1) if action.start] == [4, 8]
    assert [step for step, action in enumerate(got, 1) if action.take_background] == [6, 10]
    assert all(action.in_background == action.start for action in got)


def test_a_delay_of_a_whole_period_takes_before_it_starts() -> None:
    got = actions(OptimizerState(key="exp_avg", period=2, delay=2), 6)
    assert [(a.take_background, a.start) for a in got] == [
        (False, False), (False, True), (False, False), (True, True), (False, False), (True, True),
    ]  # fmt: skip


def test_draining_takes_the_round_in_the_background_once() -> None:
    steps = Steps(Weights(period=2, delay=1))
    schedule = steps.schedule
    assert not schedule.drain()
    for _ in range(2):
        steps.end_step()
    assert schedule.in_background
    assert schedule.drain()
    assert not schedule.drain()
    assert not steps.end_step().take_background


@pytest.mark.parametrize(
    ("declare", "wrong"),
    [
        (OptimizerState, {}),
        (Weights, {"period": 0}),
        (Weights, {"delay": 2}),
        (Weights, {"asynchronous": True, "delay": 1}),
        (Weights, {"mixing": 1.5}),
        (Weights, {"fragments": 0}),
        (SelfRunning, {"period": 0}),
        (Gradients, {"warmup_steps": -1}),
        (Gradients, {"window": 0}),
    ],
)
def test_an_impossible_channel_is_refused(declare: type[Channel], wrong: dict) -> None:
    with pytest.raises(ConfigError, match=declare.__name__):
        declare(**wrong)


def test_a_channel_has_only_the_fields_that_mean_something_to_it() -> None:
    with pytest.raises(TypeError, match="period"):
        Gradients(period=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="reduces_flags"):
        Weights(reduces_flags=True)  # type: ignore[call-arg]


def test_many_rounds_of_the_same_plan_issue_the_same() -> None:
    orders = {tuple(drive([1, 2, 0, 3], 3, seed)) for seed in range(50)}
    assert len(orders) == 1
    assert len(next(iter(orders))) == sum(itertools.chain([1, 2, 0, 3]))


def test_an_asynchronous_round_is_taken_when_it_has_arrived_and_the_next_one_starts_then() -> None:
    steps = Steps(Weights(asynchronous=True, period=2))
    arrived = [False, False, False, True, False, True, True]
    got = [steps.end_step(has_arrived=each) for each in arrived]
    start = StepActions(start=True, in_background=True)
    took = StepActions(take_background=True)
    took_and_start = StepActions(take_background=True, start=True, in_background=True)
    assert got == [start, StepActions(), StepActions(), took_and_start, StepActions(), took_and_start, took]


class _Scaler:
    """A GradScaler whose scale doubles whenever it is asked."""

    def __init__(self) -> None:
        self.num_asked = 0

    def is_enabled(self) -> bool:
        return True

    def get_scale(self) -> float:
        self.num_asked += 1
        return 2.0**self.num_asked


def test_residuals_follow_the_learning_rate_only_where_they_are_told_to() -> None:
    rates = [0.1, 0.2, 0.2, 0.0, 0.0, 0.4, 0.1]
    for rescale, expected in ((True, [1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 4.0]), (False, [1.0] * 7)):
        units, optimizer = Units(rescale), torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        units.follow(optimizer, None)
        found = []
        for step, rate in enumerate(rates):
            optimizer.param_groups[0]["lr"] = rate
            found.append((units.decay(step), units.decay(step)))
        assert found == [(each, each) for each in expected]


def test_the_loss_scale_is_asked_for_once_a_round() -> None:
    """On a GPU the host waits for each answer."""
    units, scaler = Units(), _Scaler()
    units.follow(None, scaler)
    assert [units.scale(step) for step in (0, 0, 0, 1, 1)] == [2.0, 2.0, 2.0, 4.0, 4.0]
    units.load_state_dict({"lr": None})
    assert units.scale(1) == 8.0, "a checkpoint may be of another scale"
    assert scaler.num_asked == 3


def test_the_former_place_of_the_policies_warns() -> None:
    former = importlib.import_module("commlib.algorithms.families.policy")
    with pytest.warns(DeprecationWarning, match="import Units from commlib.algorithms.policy"):
        assert former.Units is Units
