"""Weights that change while no step is counted: the compared elements, and the evidence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from commlib.engine.unseen import NUM_CHANGES, Sample, UncountedChanges, are_alike


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (300,), (3, 4), (64, 300), (4, 3, 5, 5), (0,), (2, 0)])
def test_a_change_of_all_elements_is_seen(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    parameter = torch.nn.Parameter(torch.randn(shape, dtype=torch.float64).to(dtype))
    sample = Sample([parameter])
    before, again = sample.take(), sample.take()
    assert bool(are_alike(before, again))
    parameter.data.add_(1.0)
    assert bool(are_alike(before, sample.take())) == (parameter.numel() == 0)


def test_few_elements_of_few_parameters_are_copied() -> None:
    taken = Sample([torch.nn.Parameter(torch.randn(1000, 1000)) for _ in range(100)]).take()
    assert len(taken) <= 8
    assert sum(each.numel() for each in taken) <= 8 * 2 * 64


def test_strides_do_not_matter() -> None:
    values = torch.randn(8, 6, 5, 5)
    plain, last = torch.nn.Parameter(values.clone()), torch.nn.Parameter(values.to(memory_format=torch.channels_last))
    assert bool(are_alike(Sample([plain]).take(), Sample([last]).take()))


def test_nan_is_no_change() -> None:
    sample = Sample([torch.nn.Parameter(torch.full((3,), float("nan")))])
    assert bool(are_alike(sample.take(), sample.take()))


def told_at(change: Callable[[int, Tensor], object], forwards: int, steps_at: tuple[int, ...] = ()) -> list[int]:
    """Return at which forwards, from 0 on, evidence is found; `change` is made after each, as are counted steps."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    changes, num_steps, found = UncountedChanges([parameter]), 0, []
    for idx in range(forwards):
        if changes.at_forward(num_steps):
            found.append(idx)
        change(idx, parameter.data)
        num_steps += idx in steps_at
    return found


def test_changes_in_a_row_are_evidence() -> None:
    assert told_at(lambda _, p: p.add_(1), NUM_CHANGES + 1) == []
    assert told_at(lambda _, p: p.add_(1), NUM_CHANGES + 3)[:1] == [NUM_CHANGES + 1]


def test_what_is_counted_or_stays_is_none() -> None:
    assert told_at(lambda _, p: p.add_(1), 50, steps_at=tuple(range(0, 50, 5))) == []
    assert told_at(lambda idx, p: p.add_(idx == 7), 50) == []  # swapped once
    assert told_at(lambda idx, p: p.add_(idx % NUM_CHANGES != 3), 50) == []


def test_other_changes_begin_anew() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    changes = UncountedChanges([parameter])
    for idx in range(40):
        if idx % 6 == 0:
            changes.expect_change()
        assert not changes.at_forward(0)
        parameter.data.add_(1)
