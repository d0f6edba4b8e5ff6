"""Values that are not finite are found anywhere and passed on."""

from __future__ import annotations

import pytest
import torch

from commlib.primitives.finite import all_finite, mark_unless


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 17, 1000])
def test_one_value_that_is_not_finite_is_enough(dtype: torch.dtype, numel: int) -> None:
    largest = torch.finfo(dtype).max
    x = torch.linspace(-1, 1, numel, dtype=dtype)
    x[: numel // 2], x[numel // 2 :] = largest, -largest
    assert all_finite(x)
    for at in range(0, numel, 7):
        for value in (torch.nan, torch.inf, -torch.inf):
            spoilt = x.clone()
            spoilt[at] = value
            assert not all_finite(spoilt), (at, value)


def test_only_the_first_value_is_marked() -> None:
    values = torch.tensor([1.0, 2.0])
    mark_unless(torch.tensor(True), values)
    assert values.tolist() == [1, 2]
    mark_unless(torch.tensor(False), values)
    assert values[0].isnan()
    assert values[1] == 2
    mark_unless(torch.tensor(False), values[:0])
