"""Wrapped models that are stages of torch's pipelines: one round a step, and the gradients of the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules

import commlib
from tests.multi.common import assert_replicas_identical, data
from tests.multi.pool import on_ranks

WIDTH, BATCH, MICRO_BATCHES, STEPS = 8, 8, 4, 3

#: Schedules by name, and how many stages each rank has.
SCHEDULES: dict[str, tuple[Any, int]] = {
    "GPipe": (schedules.ScheduleGPipe, 1),
    "1F1B": (schedules.Schedule1F1B, 1),
    "Interleaved1F1B": (schedules.ScheduleInterleaved1F1B, 2),
    "LoopedBFS": (schedules.ScheduleLoopedBFS, 2),
    "InterleavedZeroBubble": (schedules.ScheduleInterleavedZeroBubble, 2),
}


def layers(count: int) -> list[nn.Module]:
    """Make the stages of a model, the same on all ranks."""
    generator = torch.Generator().manual_seed(5)
    made: list[nn.Module] = []
    for _ in range(count):
        layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
        made.append(layer)
    return made


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    return data(step, BATCH, WIDTH, rank=replica), data(step + 50, BATCH, WIDTH, rank=replica)


def reference_gradients(stages: list[nn.Module], step: int, replicas: int) -> None:
    """Give the stages the gradients of the mean loss over all replicas' batches, in this process alone."""
    whole = nn.Sequential(*stages)
    whole.zero_grad()
    for replica in range(replicas):
        inputs, target = batch(step, replica)
        (loss_of(whole(inputs), target) / replicas).backward()


def stages_of(name: str, algorithm: str, lr: float) -> tuple[Any, list[tuple[int, nn.Module, Any]], Any]:
    """Return a schedule, this rank's wrapped stages with their numbers and optimizers, and the mesh."""
    make, per_rank = SCHEDULES[name]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "stage"))
    models, group = layers(2 * per_rank), mesh["stage"].get_group()
    own = []
    for idx in range(mesh["stage"].get_local_rank(), len(models), 2):
        optimizer = torch.optim.SGD(models[idx].parameters(), lr)
        commlib.wrap(models[idx], algorithm, optimizer=optimizer, process_group=mesh["replicate"])
        own.append((idx, models[idx], optimizer))
    stages = [PipelineStage(model, idx, len(models), torch.device("cpu"), group=group) for idx, model, _ in own]
    return make(stages if per_rank > 1 else stages[0], MICRO_BATCHES, loss_fn=loss_of), own, mesh


def run(schedule: Any, own: list[tuple[int, nn.Module, Any]], num_stages: int, step: int, replica: int) -> None:
    """Make forwards and backwards of one step."""
    for _, _, optimizer in own:
        optimizer.zero_grad()
    inputs, target = batch(step, replica)
    is_last = own[-1][0] == num_stages - 1
    schedule.step(*([inputs] if own[0][0] == 0 else []), target=target if is_last else None)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    ("algorithm", "bound"), [("allreduce", 1e-6), pytest.param("bytegrad", 0.02, marks=pytest.mark.slow)]
)
@on_ranks(4)
def test_a_stage_communicates_once_a_step(name: str, algorithm: str, bound: float) -> None:
    schedule, own, mesh = stages_of(name, algorithm, lr=0.0)
    num_stages, replica = 2 * len(own), mesh["replicate"].get_local_rank()
    reference = layers(num_stages)
    for step in range(STEPS):
        run(schedule, own, num_stages, step, replica)
        reference_gradients(reference, step, 2)
        for idx, model, optimizer in own:
            for parameter, wanted in zip(model.parameters(), reference[idx].parameters(), strict=True):
                assert wanted.grad is not None
                assert (parameter.grad - wanted.grad).norm() <= bound * wanted.grad.norm(), (step, idx)
            optimizer.step()
    for _, model, _ in own:
        assert commlib.stats(model).rounds == STEPS
        assert_replicas_identical(model, mesh["replicate"].get_group())
        commlib.unwrap(model)
    dist.barrier()


@on_ranks(4)
def test_local_steps_of_stages_and_evaluations_between() -> None:
    schedule, own, mesh = stages_of("1F1B", "local_sgd", lr=0.05)
    for step in range(9):
        run(schedule, own, 2, step, mesh["replicate"].get_local_rank())
        for _, model, optimizer in own:
            optimizer.step()
            with torch.no_grad():
                model(torch.ones(2, WIDTH))
    for _, model, _ in own:
        assert commlib.stats(model).rounds == 1  # a period is of eight steps
        commlib.synchronize(model)
        model.zero_grad()
        assert_replicas_identical(model, mesh["replicate"].get_group())
    dist.barrier()


@on_ranks(2)
def test_a_stage_is_trained_without_a_pipeline_after_it() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "stage"))
    (model,) = layers(1)
    commlib.wrap(model, process_group=mesh["replicate"])
    stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=mesh["stage"].get_group())
    schedule = schedules.ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=loss_of)
    replica = mesh["replicate"].get_local_rank()
    schedule.step(batch(0, replica)[0], target=batch(0, replica)[1])
    model.zero_grad()
    loss_of(model(batch(1, replica)[0]), batch(1, replica)[1]).backward()
    (reference,) = layers(1)
    reference_gradients([reference], 1, 2)
    for parameter, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad)
    assert commlib.stats(model).rounds == 2
