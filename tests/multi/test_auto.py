"""`algorithm="auto"`: its choice, identical on all ranks, when it chooses again, and that training continues."""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlib
from commlib.algorithms import Auto, ByteGrad
from commlib.algorithms.context import Context
from commlib.errors import CommlibError, ConfigError
from commlib.replica import replica_of
from commlib.tuner import Tuner
from tests.multi.common import (
    Mlp,
    assert_replicas_identical,
    assert_same_trace,
    mlp_loss,
    raises_on_every_rank,
    seeded,
    sgd,
    train,
    wrap,
)
from tests.multi.pool import on_ranks

STEPS = 12


class Lines(logging.Handler):
    """Keeps what commlib logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "auto" in record.getMessage():
            self.lines.append(record.getMessage())


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    handler = Lines()
    logging.getLogger("commlib").addHandler(handler)
    try:
        yield handler.lines
    finally:
        logging.getLogger("commlib").removeHandler(handler)


def tuner_of(model: torch.nn.Module) -> Tuner:
    tuner = replica_of(model).tuner
    assert tuner is not None
    return tuner


def adopt(model: torch.nn.Module, name: str) -> None:
    ready_s = tuple(2e-3 for _ in model.parameters())
    tuner_of(model).adopt(name, {"forward_s": 1e-3, "backward_s": 2e-3, "optimizer_s": 1e-3, "ready_s": ready_s})


def everyone(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


@on_ranks(2, 3)
def test_all_ranks_go_on_as_the_same_algorithm_and_rank_0_says_why() -> None:
    with logged() as lines:
        model = wrap(seeded(Mlp), algorithm=Auto(allow="compensated"))
        train(model, mlp_loss, STEPS)
    chosen = commlib.stats(model).algorithm
    assert chosen in ("allreduce", "bytegrad", "ef_quantized", "signsgd", "topk", "powersgd")
    assert everyone(chosen) == [chosen] * dist.get_world_size()
    assert_replicas_identical(model)
    assert len(lines) == (1 if dist.get_rank() == 0 else 0)
    if lines:
        assert chosen in lines[0]
        assert "Gbit/s" in lines[0]
        assert "powersgd" in lines[0], "the predictions of all candidates are named"
        computing_ms = int(re.search(r"(\d+) ms a step without communication", lines[0])[1])  # type: ignore[index]
        predicted_ms = re.findall(r"(\d+)[,;]", lines[0].split("predicted ms:")[1].split("left out")[0] + ",")
        assert min(map(int, predicted_ms)) >= computing_ms


@on_ranks(2)
def test_the_class_bounds_the_choice() -> None:
    model = wrap(seeded(Mlp), algorithm=Auto(allow="exact", candidates=["powersgd", "allreduce", "topk"]))
    train(model, mlp_loss, STEPS)
    assert commlib.stats(model).algorithm == "allreduce"


@on_ranks(2)
def test_an_algorithm_on_weights_can_be_chosen_and_left_again() -> None:
    model = seeded(Mlp)
    optimizer = sgd(model)
    auto = Auto(allow="any", candidates=["local_sgd", "allreduce"])
    wrap(model, algorithm=auto, optimizer=optimizer)
    for name in ("local_sgd", "allreduce", "local_sgd"):
        adopt(model, name)
        train(model, mlp_loss, 10, optimizer)
        assert commlib.stats(model).algorithm == name
    commlib.synchronize(model)
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert all(torch.equal(weights, other) for other in everyone(weights))
    commlib.unwrap(model)


@on_ranks(2)
def test_a_step_that_departs_from_the_expected_one_leads_to_a_new_choice() -> None:
    model = wrap(seeded(Mlp), algorithm=Auto(allow="8bit"), bucket_cap_mb=1.0)
    train(model, mlp_loss, 8)
    tuner = tuner_of(model)
    tuner._expected_s = 10.0  # as if steps had been this slow when the choice was made
    with logged() as lines:
        train(model, mlp_loss, 45)
    expected = tuner._expected_s
    assert expected is not None
    assert expected < 5.0
    if dist.get_rank() == 0:
        assert any("instead of 10000" in line for line in lines), lines
    chosen = commlib.stats(model).algorithm
    assert everyone(chosen) == [chosen] * 2


class SteppedClock:
    """A clock that is set by hand, in seconds."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def now(self) -> float:
        return self.now_s

    def arrive(self, moment: float) -> None:
        """Nothing to wait for."""

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


@on_ranks(2)
def test_a_pause_between_two_steps_leads_to_no_new_choice() -> None:
    """As for an evaluation or a checkpoint: here one that takes longer than all steps of its window."""
    model = wrap(seeded(Mlp), algorithm=Auto(allow="8bit"), bucket_cap_mb=1.0)
    train(model, mlp_loss, 8)
    tuner = tuner_of(model)
    tuner._expected_s = None  # the first window says it
    clock = tuner._watch._timer = SteppedClock(tuner._watch._timer.now())  # pyright: ignore[reportAttributeAccessIssue]

    def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
        clock.now_s += 2.5 if step == 60 else 0.05
        return mlp_loss(model, step)

    with logged() as lines:
        train(model, loss_of, 130)
    assert tuner._expected_s == pytest.approx(0.05)
    assert not lines


@on_ranks(2)
def test_a_resumed_run_keeps_the_choice_and_is_bit_identical() -> None:
    whole = seeded(Mlp)
    optimizer = sgd(whole)
    wrap(whole, algorithm=Auto(allow="compensated"), bucket_cap_mb=0.001, optimizer=optimizer)
    adopt(whole, "ef_quantized")
    train(whole, mlp_loss, 6, optimizer)
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict(), commlib.state_dict(whole)))
    rest = train(whole, lambda m, s: mlp_loss(m, s + 6), 4, optimizer)

    resumed = seeded(Mlp, seed=99)
    own = sgd(resumed)
    resumed.load_state_dict(saved[0])
    own.load_state_dict(saved[1])
    wrap(resumed, algorithm=Auto(allow="compensated"), bucket_cap_mb=0.001, optimizer=own)
    commlib.load_state_dict(resumed, saved[2])
    assert commlib.stats(resumed).algorithm == "ef_quantized"
    got = train(resumed, lambda m, s: mlp_loss(m, s + 6), 4, own)
    assert_same_trace(got, rest, exact=True)

    tuner_of(resumed)._expected_s = 10.0  # the saved state is enough to choose again
    train(resumed, mlp_loss, 45, own)
    assert tuner_of(resumed).choice is not None
    assert tuner_of(resumed).choice.predicted_s  # pyright: ignore[reportOptionalMemberAccess]


@on_ranks(2)
def test_candidates_that_cannot_be_are_errors_at_wrap() -> None:
    with raises_on_every_rank(ConfigError, "not registered"):
        wrap(seeded(Mlp), algorithm=Auto(candidates=["bytegrd"]))
    with raises_on_every_rank(ConfigError, "expected a candidate"):
        wrap(seeded(Mlp), algorithm=Auto(allow="any", candidates=["local_sgd"]))  # which needs an optimizer
    with raises_on_every_rank(ConfigError, "different names"):
        wrap(seeded(Mlp), algorithm=Auto(allow="compensated", candidates=["bytegrad", ByteGrad(feedback=True)]))


def test_an_unknown_class_is_an_error() -> None:
    with pytest.raises(ConfigError, match="allow"):
        Auto(allow="everything")


@on_ranks(2)
def test_accumulated_gradients_count_as_one_step() -> None:
    model = wrap(seeded(Mlp), algorithm=Auto(allow="8bit"), bucket_cap_mb=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        optimizer.zero_grad()
        with model.no_sync():
            mlp_loss(model, 2 * step).backward()
        mlp_loss(model, 2 * step + 1).backward()
        optimizer.step()
    assert_replicas_identical(model)
    assert commlib.stats(model).algorithm in ("allreduce", "bytegrad")


class Unsimulated(ByteGrad):
    """Trains, but fails on the simulator's tensors."""

    def setup(self, ctx: Context) -> None:
        if ctx.device.type == "meta":
            raise ValueError("not on meta")
        super().setup(ctx)


@on_ranks(2, 3)
def test_a_candidate_that_cannot_be_simulated_is_an_error_on_every_rank() -> None:
    model = wrap(seeded(Mlp), algorithm=Auto(allow="8bit", candidates=["allreduce", Unsimulated()]), bucket_cap_mb=1.0)
    with raises_on_every_rank(CommlibError, "not on meta"):
        train(model, mlp_loss, STEPS)


@on_ranks(1)
def test_one_rank_has_nothing_to_choose() -> None:
    model = wrap(seeded(Mlp), algorithm="auto")
    assert replica_of(model).tuner is None
    train(model, mlp_loss, STEPS)
    resumed = wrap(seeded(Mlp), algorithm="auto")
    commlib.load_state_dict(resumed, commlib.state_dict(model))


@on_ranks(2)
def test_a_run_resumed_before_the_choice_chooses() -> None:
    early = wrap(seeded(Mlp), algorithm=Auto(allow="8bit"))
    train(early, mlp_loss, 3)
    resumed = wrap(seeded(Mlp), algorithm=Auto(allow="8bit"))
    commlib.load_state_dict(resumed, commlib.state_dict(early))
    train(resumed, mlp_loss, STEPS)
    assert tuner_of(resumed).choice is not None


@on_ranks(2)
def test_a_checkpoint_of_the_chosen_algorithm_alone_is_refused() -> None:
    alone = wrap(seeded(Mlp), algorithm="bytegrad")
    tuned = wrap(seeded(Mlp), algorithm=Auto(allow="8bit"))
    with raises_on_every_rank(ConfigError, "bytegrad"):
        commlib.load_state_dict(tuned, commlib.state_dict(alone))
