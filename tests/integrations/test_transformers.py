"""commlib in `transformers.Trainer`: what it does under DDP, it does the same with commlib, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.transformers_runs import assert_same_run, launched, train
from tests.multi.pool import on_ranks

#: Ways to train, by the arguments of `TrainingArguments` that make them.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3, "max_steps": 5},
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_training_is_ddps_bit_for_bit(way: str, tmp_path: Path) -> None:
    with launched():
        expected = train(tmp_path / "ddp", **WAYS[way])
        got = train(tmp_path / "commlib", "allreduce", **WAYS[way])
        assert_same_run(got, expected)
