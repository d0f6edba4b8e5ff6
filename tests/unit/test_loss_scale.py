"""The loss scale that ranks share, compared by marks that are summed."""

from __future__ import annotations

import pytest
import torch

from commlib.engine.gradients.loss_scale import NUM_LEVELS, LossScale
from commlib.errors import ConfigError

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def marks_of(scale: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    marks = torch.full((NUM_LEVELS,), 7.0, dtype=dtype)
    LossScale(torch.amp.GradScaler("cpu", init_scale=scale), 0).mark(marks)
    return marks


def take(marks: torch.Tensor) -> None:
    LossScale(torch.amp.GradScaler("cpu"), 0).take(marks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [2.0**-20, 1.0, 3.0, 65536.0, 2.0**40])
def test_ranks_with_one_scale_mark_one_level(scale: float, dtype: torch.dtype) -> None:
    marks = marks_of(scale, dtype)
    assert marks.sum() == 1
    take(1000 * marks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [0.5, 1.5, 2.0, 16.0, 65536.0, 2.0**30])
def test_one_rank_of_many_with_another_scale_is_found(factor: float, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match="the loss scale differs between ranks"):
        take(1000 * marks_of(256.0, dtype) + marks_of(256.0 * factor, dtype))


def test_a_rank_without_data_marks_nothing() -> None:
    take(marks_of(256.0) + torch.zeros(NUM_LEVELS))
