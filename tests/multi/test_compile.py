"""`torch.compile` before and after wrapping gives correct, synchronised gradients."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from tests.multi.common import (
    SMALL_BUCKET_MB,
    Mlp,
    assert_replicas_identical,
    assert_same_trace,
    ddp,
    mlp_loss,
    seeded,
    train,
    wrap,
)
from tests.multi.pool import on_ranks


def compiled_after(model: nn.Module, backend: str) -> nn.Module:
    return torch.compile(wrap(model, bucket_cap_mb=SMALL_BUCKET_MB), backend=backend)  # type: ignore[return-value]


def compiled_before(model: nn.Module, backend: str) -> nn.Module:
    return wrap(torch.compile(model, backend=backend), bucket_cap_mb=SMALL_BUCKET_MB)


def compiled_in_place_after(model: nn.Module, backend: str) -> nn.Module:
    wrap(model, bucket_cap_mb=SMALL_BUCKET_MB).compile(backend=backend)
    return model


def compiled_in_place_before(model: nn.Module, backend: str) -> nn.Module:
    model.compile(backend=backend)
    return wrap(model, bucket_cap_mb=SMALL_BUCKET_MB)


WAYS = {
    "after": compiled_after,
    "before": compiled_before,
    "in-place-after": compiled_in_place_after,
    "in-place-before": compiled_in_place_before,
}


def check_compiled(way: str, backend: str) -> None:
    original = seeded(Mlp)
    expected = train(ddp(copy.deepcopy(original)), mlp_loss, 4)
    try:
        model = WAYS[way](original, backend)
        got = train(model, mlp_loss, 4)
    finally:
        torch.compiler.reset()
    assert_same_trace(got, expected, exact=backend == "aot_eager")
    assert_replicas_identical(model)


@on_ranks(2)
@pytest.mark.parametrize("way", list(WAYS))
def test_compiled_models_train_as_in_ddp(way: str) -> None:
    check_compiled(way, "aot_eager")


@on_ranks(2, timeout=300)
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", ["after", "before"])
def test_models_compiled_by_inductor_train_as_in_ddp(way: str) -> None:
    warnings.filterwarnings("ignore", category=DeprecationWarning, message="`torch.jit")  # inductor's own imports
    check_compiled(way, "inductor")
