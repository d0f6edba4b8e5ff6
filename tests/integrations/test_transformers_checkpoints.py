"""Checkpoints of commlib's `transformers.Trainer`: saving, resuming, rotation, the best model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import commlib
from tests.contract.subjects import Subject, slow_for_siblings
from tests.integrations.transformers_runs import (
    Run,
    assert_same_weights,
    launched,
    tiny_model,
    train,
)
from tests.multi.pool import on_ranks

REPEATABLE = [name for name in commlib.algorithms.list() if not Subject(name).runs_by_clocks]
SAVES = {"max_steps": 7, "save_strategy": "steps", "save_steps": 3}


def made_for(name: str) -> dict[str, Any]:
    """Return the arguments of a trainer with an algorithm and the optimizer that it needs."""
    subject = Subject(name)
    optimizer = subject.optimizer([torch.zeros(1, requires_grad=True)])
    kind = (type(optimizer), {k: v for k, v in optimizer.defaults.items() if k in ("lr", "momentum")})
    return {"algorithm": subject.algorithm(), "optimizer_cls_and_kwargs": kind}


def logs_after(run: Run, step: int) -> dict[int, dict[str, float]]:
    """Return the logs of the later steps; those before come from rank 0's file, and gradients may be the rank's own."""
    return {int(log["step"]): log for log in run.logs if "loss" in log and log["step"] > step}


@pytest.mark.parametrize("name", slow_for_siblings(REPEATABLE))
@on_ranks(2)
def test_a_resumed_run_is_bit_identical(name: str, tmp_path: Path) -> None:
    with launched():
        whole = train(tmp_path, **made_for(name), **SAVES)
        other = tiny_model(initializer_range=0.5)
        again = train(tmp_path, **made_for(name), **SAVES, model=other, resume=str(tmp_path / "checkpoint-3"))
        assert logs_after(again, 3) == logs_after(whole, 3)
        assert set(logs_after(whole, 3)) == {4, 5, 6, 7}
        assert_same_weights(again.weights, whole.weights)
