"""commlib in accelerate: `prepare`, accumulation, clipping and precision as with DDP, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commlib
from tests.integrations.accelerate_common import assert_equal, epoch, loader, new_accelerator, values
from tests.multi.common import Mlp, assert_replicas_identical, seeded
from tests.multi.pool import on_ranks


def run(algorithm: Any, *, epochs: int = 2, clip: str = "", samples: int = 40, **options: Any) -> tuple[Any, Any]:
    """Train for some epochs with DDP (None) or commlib; returns losses and values."""
    accelerator = new_accelerator(algorithm, use={"bucket_cap_mb": 0.001} if algorithm else None, **options)
    model = seeded(Mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, loader(samples), scheduler)
    before = {
        "": None,
        "norm": lambda: accelerator.clip_grad_norm_(model.parameters(), 0.1),
        "value": lambda: accelerator.clip_grad_value_(model.parameters(), 0.01),
    }[clip]
    losses = [epoch(accelerator, model, optimizer, batches, scheduler, before) for _ in range(epochs)]
    assert_replicas_identical(model)
    return losses, [values(model), torch.tensor(scheduler.get_last_lr())]


@on_ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 3},  # 5 batches per epoch: the last step is short
        {"gradient_accumulation_steps": 2, "samples": 38},
        {"clip": "norm"},
        {"clip": "value", "gradient_accumulation_steps": 2},
        {"mixed_precision": "bf16"},
        {"mixed_precision": "fp16"},  # on the CPU accelerate trains in float32, without a scaler
        {"split_batches": True, "clip": "norm"},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "plain",
)
def test_allreduce_is_ddp_bit_for_bit(options: dict[str, Any]) -> None:
    assert_equal(run("allreduce", **options), run(None, **options))
