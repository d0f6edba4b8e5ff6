"""The cost of a system to reach DDP's loss: steps, rounds, bytes and time, from losses at the end of budgets."""

from __future__ import annotations

import pathlib
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))

import time_to_loss


def loss_row(system: str, steps: int, seed: int, loss: float) -> dict[str, object]:
    return {"system": system, "steps": steps, "seed": seed, "loss": loss}


def test_time_to_loss_takes_the_smallest_budget_that_is_enough_times_the_step() -> None:
    rows = [loss_row("commlib:allreduce@1", steps, seed, 1.0 + seed) for steps in (100, 200) for seed in (0, 1)]
    rows += [loss_row("commlib:bytegrad@1", 100, seed, 1.004 * (1.0 + seed)) for seed in (0, 1)]
    rows += [loss_row("ddp:powersgd", steps, 0, loss) for steps, loss in ((100, 1.2), (150, 1.004), (200, 0.9))]
    rows += [loss_row("torchft:diloco(sync_every=50)", 100, 0, 1.5)]
    rows += [
        loss_row(f"commlib:signsgd(feedback=False,lr={lr})@1", 100, 0, loss)
        for lr, loss in (("1e-4", 1.0), ("1e-3", 9.0))
    ]
    rows += [loss_row("commlib:onebit_adam(warmup_steps=20)@1", 100, 1, 2.0)]
    needed = time_to_loss.needed_to_loss(rows, 100, 0.005)
    assert needed["commlib:bytegrad"].steps == 100
    assert needed["commlib:bytegrad"].changes == {100: pytest.approx(0.004)}
    assert needed["ddp:powersgd"].steps == 150
    assert needed["ddp:powersgd"].changes[100] == pytest.approx(0.2)
    assert needed["torchft:diloco(sync_every=50)"].steps is None
    assert needed["torchft:diloco(sync_every=50)"].changes == {100: pytest.approx(0.5)}
    assert needed["commlib:onebit_adam"].steps == 100
    assert needed["commlib:signsgd(feedback=False,lr=0.0001)"].steps == 100
    assert needed["commlib:signsgd(feedback=False,lr=0.001)"].steps is None
    times = {
        "none": 0.1,
        "commlib:signsgd(feedback=False)@4": 0.4,
        "ddp": 1.0,
        "commlib:bytegrad@4": 0.5,
        "ddp:powersgd": 0.25,
    }
    times["commlib:onebit_adam(warmup_steps=1)@25"] = 0.2
    lines = time_to_loss.summary([{"system": name, "step_s": step_s} for name, step_s in times.items()], needed)
    faster = {line["system"]: line["speed_up"] for line in lines}
    assert faster["commlib:allreduce"] == 1.0, "DDP itself"
    assert faster["commlib:bytegrad"] == pytest.approx(2.0)
    assert faster["ddp:powersgd"] == pytest.approx(100 / (150 * 0.25))
    assert faster["torchft:diloco(sync_every=50)"] is None
    assert faster["commlib:signsgd(feedback=False,lr=0.0001)"] == pytest.approx(2.5)
    assert lines[0]["system"] == "commlib:onebit_adam"
    assert {line["system"] for line in lines if not line["is_measured"]} == {"torchft:diloco(sync_every=50)"}


def test_the_rate_of_an_outer_optimizer_is_an_option_of_the_step() -> None:
    """Unlike the optimizer's own, of which a step takes as long at any."""
    name = "commlib:diloco(outer_lr=1.0,lr=0.1)@1"
    rows = [loss_row("commlib:allreduce@1", 100, 0, 1.0), loss_row(name, 100, 0, 1.0)]
    steps = [{"system": each, "step_s": 1.0} for each in ("ddp", "none")]
    steps.append({"system": "commlib:diloco(outer_lr=1.0)@1", "step_s": 0.5})
    lines = time_to_loss.summary(steps, time_to_loss.needed_to_loss(rows, 100, 0.005))
    assert {line["system"]: line["speed_up"] for line in lines}["commlib:diloco(outer_lr=1.0,lr=0.1)"] == 2.0


def test_rounds_and_bytes_to_a_loss(capsys: pytest.CaptureFixture[str]) -> None:
    old = {"wire_bytes": 40.0}  # of rows that were made before rounds were counted
    rows: list[dict[str, object]] = [loss_row("commlib:allreduce@1", 100, seed, 1.0) | old for seed in (0, 1)]
    rows += [
        loss_row("commlib:local_sgd(period=8)@1", steps, seed, loss) | {"rounds": steps // 8, "sent_bytes": steps * 5.0}
        for steps, loss in ((100, 1.02), (160, 1.0))
        for seed in (0, 1)
    ]
    rows += [
        loss_row("commlib:diloco@1", 100, 0, 1.4) | {"rounds": 2, "sent_bytes": 80.0},
        loss_row("ddp:fp16", 100, 0, 1.0),
    ]
    needed = time_to_loss.needed_to_loss(rows, 100, 0.01)
    assert (needed["commlib:allreduce"].rounds, needed["commlib:allreduce"].sent_bytes) == (100, 4000)
    local = needed["commlib:local_sgd(period=8)"]
    assert (local.steps, local.rounds, local.sent_bytes, local.seeds) == (160, 20, 800, 2)
    assert needed["commlib:diloco"].steps is None
    assert needed["ddp:fp16"].sent_bytes is None
    time_to_loss.harness.print_table(time_to_loss.table_of_needs("needs", needed, 100))
    shown = capsys.readouterr().out
    assert "20.00%" in shown, "800 of 4,000 bytes"
    assert "> 100 (+40.0%)" in shown


def test_a_reference_without_counted_bytes_leaves_the_shares_empty(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [loss_row("ddp@25", 100, 0, 1.0), loss_row("commlib:bytegrad@1", 100, 0, 1.0) | {"wire_bytes": 1e6}]
    time_to_loss.harness.print_table(time_to_loss.table_of_needs("", time_to_loss.needed_to_loss(rows, 100, 0.01), 100))
    shown = capsys.readouterr().out
    assert "100.00" in shown, "MB"
    assert "100.00%" not in shown
