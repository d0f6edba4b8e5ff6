"""Mixed precision with GradScaler and autocast, and SyncBatchNorm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.multi.common import (
    SMALL_BUCKET_MB,
    Cnn,
    Mlp,
    Trace,
    assert_replicas_identical,
    check_like_ddp,
    cnn_loss,
    data,
    gradients,
    mlp_loss,
    raises_on_every_rank,
    seeded,
    sgd,
    tensors,
    wrap,
)
from tests.multi.pool import on_ranks

SMALL = {"bucket_cap_mb": SMALL_BUCKET_MB}


def scaled(model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor], steps: int, poison: int = -1) -> Trace:
    """Train with a GradScaler; at step `poison` rank 1 gets an infinite gradient."""
    scaler, optimizer, trace = torch.amp.GradScaler("cpu", init_scale=1024.0), sgd(model), Trace()
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if step == poison and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        trace.gradients.append(gradients(model))
        scaler.step(optimizer)
        scaler.update()
        trace.losses.append(torch.tensor(scaler.get_scale()))
    trace.final = tensors(model)
    return trace


@on_ranks(2, 3)
@pytest.mark.parametrize("options", [{}, SMALL], ids=["planned", "small-buckets"])
def test_grad_scaler_trains_as_in_ddp(options: dict[str, float]) -> None:
    check_like_ddp(Mlp, mlp_loss, trainer=scaled, wrap_options=options)


@on_ranks(2, 3)
def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all() -> None:
    def trainer(model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor], steps: int) -> Trace:
        return scaled(model, loss_of, steps, poison=1)

    model = check_like_ddp(Mlp, mlp_loss, steps=4, trainer=trainer, wrap_options=SMALL)
    scales = scaled(model, mlp_loss, 3, poison=1).losses
    assert [float(scale) for scale in scales] == [1024.0, 512.0, 512.0]
    assert all(torch.isfinite(p).all() for p in model.parameters())


@on_ranks(2)
def test_the_scaler_option_takes_the_users_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = wrap(seeded(Mlp), scaler=scaler)
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(mlp_loss(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert_replicas_identical(model)


@on_ranks(2)
def test_autocast_trains_as_in_ddp() -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(data(step, 5, 8)).float().square().mean()

    check_like_ddp(Mlp, loss)


# --- SyncBatchNorm ---------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_sync_batch_norm_on_cpu_evaluates_and_is_refused_by_torch_in_training() -> None:
    """torch trains it on GPUs only; the conversion, the buffers and evaluation work everywhere."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(seeded(Cnn, seed=dist.get_rank()))
    assert isinstance(model.norm, nn.SyncBatchNorm)
    model.norm.running_mean.fill_(dist.get_rank() + 1.0)
    model = wrap(model)
    assert_replicas_identical(model)
    model.eval()
    cnn_loss(model, 0).backward()
    assert_replicas_identical(model)
    model.train()
    with raises_on_every_rank(ValueError, "SyncBatchNorm"):
        cnn_loss(model, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="SyncBatchNorm trains on GPUs only")
@pytest.mark.gpu
@on_ranks(2)
def test_sync_batch_norm_on_gpus() -> None:
    if torch.cuda.device_count() < dist.get_world_size():
        pytest.skip("needs a GPU per rank")
    group = dist.new_group(backend="nccl")
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(seeded(Cnn)).to(device)
    model = wrap(model, process_group=group)
    for step in range(3):
        model.zero_grad()
        model(data(step, 4, 2, 6, 6).to(device)).square().mean().backward()
    everyone = [torch.empty_like(model.norm.running_mean) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, model.norm.running_mean, group=group)
    assert all(torch.equal(mean, everyone[0]) for mean in everyone)
