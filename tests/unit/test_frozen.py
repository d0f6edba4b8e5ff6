"""Which parameters count as permanently frozen, and how often a plan changes for them."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commlib
from commlib.engine.frozen import FrozenParameters
from commlib.replica import replica_of


def permanent_after(patience: int | None, *steps: str) -> str:
    """Return the permanently frozen parameters after steps in which the parameters of these letters were frozen."""
    frozen = FrozenParameters(patience)
    for names in steps:
        frozen.note(list(names))
    return "".join(sorted(frozen.permanent))


@pytest.mark.parametrize("patience", [None, 1, 5])
def test_a_parameter_counts_from_its_first_frozen_step(patience: int | None) -> None:
    assert permanent_after(patience) == ""
    assert permanent_after(patience, "", "", "ab") == "ab"
    assert permanent_after(patience, "a", "ab", "abc") == "abc"
    assert permanent_after(patience, "a", "") == ""


def test_a_parameter_that_takes_turns_counts_after_its_patience_only() -> None:
    assert permanent_after(3, "a", "b", "a", "b", "a") == ""
    assert permanent_after(3, "a", "", "a", "a", "a") == ""
    assert permanent_after(3, "a", "", "a", "a", "a", "a") == "a"
    assert permanent_after(3, "a", "", "a", "ac", "ac") == "c", "each parameter has its own history"
    assert permanent_after(None, "a", "", *["a"] * 100) == ""


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def changes_of_plan(first: str, second: str) -> list[int]:
    """Return the steps with a change of the plan, if each half is frozen in the steps that have a 1."""
    model = commlib.wrap(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), commlib.algorithms.DGC(), bucket_cap_mb=1.0)
    engine, changes = replica_of(model).engine, []
    with mock.patch.object(engine, "adopt", wraps=engine.adopt) as adopt:
        for step, flags in enumerate(zip(first, second, strict=True)):
            for module, flag in zip(model, flags, strict=True):
                module.requires_grad_(flag == "0")
            model.zero_grad()
            before = adopt.call_count
            model(torch.ones(2, 3)).sum().backward()
            changes += [step] * (adopt.call_count - before)
    commlib.unwrap(model)
    return changes


@pytest.mark.usefixtures("group")
def test_changes_of_plan_are_rare() -> None:
    assert changes_of_plan("00111111", "00000000") == [3], "a layer that is frozen for good"
    assert changes_of_plan("01010101", "10101010") == [], "two losses that alternate"
    assert changes_of_plan("0" + "1110" * 6, "1" + "0001" * 6) == [2, 4], "phases of several steps"
