"""Algorithms in the background: no step waits, replicas meet, and ends are quiet."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.multi.common import Mlp, assert_replicas_identical, data, mlp_loss, seeded
from tests.multi.pool import on_ranks

AVERAGING = ["async_averaging", "passive_gossip"]
NAMES = [*AVERAGING, "async_sgd"]


STEADY = ["async_sgd", "hogwild"]  # which have no period


def make(name: str, **options: Any) -> Any:
    from commlib import algorithms

    return algorithms.get(name)(**options)


def wrapped(name: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    import commlib

    model = seeded(Mlp)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    return commlib.wrap(model, make(name, **({} if name in STEADY else options)), optimizer=optimizer), optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, pause_s: float = 0.0) -> None:
    for step in steps:
        optimizer.zero_grad()
        mlp_loss(model, step).backward()
        optimizer.step()
        time.sleep(pause_s)


def until(model: nn.Module, optimizer: torch.optim.Optimizer, rounds: int, limit_s: float = 20.0) -> int:
    """Train until the rank has taken that many rounds; returns the steps."""
    import commlib

    deadline, step = time.monotonic() + limit_s, 0
    while commlib.stats(model).steps < rounds:
        assert time.monotonic() < deadline, f"{commlib.stats(model).steps} rounds of {rounds} within {limit_s} s"
        train(model, optimizer, range(step, step + 1), 0.002)
        step += 1
    return step


@pytest.mark.parametrize("name", [*NAMES, "hogwild"])
@on_ranks(1, 2, 3, 4)
def test_synchronize_gives_all_ranks_the_same_weights(name: str) -> None:
    import commlib

    model, optimizer = wrapped(name, period=2)
    train(model, optimizer, range(3 + 4 * dist.get_rank()))
    commlib.synchronize(model)
    assert_replicas_identical_weights(model)
    dist.barrier()
    train(model, optimizer, range(7, 9))
    commlib.synchronize(model)
    assert_replicas_identical_weights(model)
    commlib.unwrap(model)


def assert_replicas_identical_weights(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    assert_replicas_identical(model)


@pytest.mark.parametrize("name", AVERAGING)
@on_ranks(3)
def test_rounds_go_on_and_ranks_without_gradients_come_together(name: str) -> None:
    """With a learning rate of 0 the only thing that moves weights is the averaging."""
    import commlib

    model = seeded(Mlp, seed=dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    commlib.wrap(model, make(name, period=1), optimizer=optimizer, init_sync=False)
    spread_before = spread(start)
    until(model, optimizer, 20)
    dist.barrier()
    assert spread(torch.cat([p.detach().flatten() for p in model.parameters()])) < 0.05 * spread_before


def spread(own: torch.Tensor) -> float:
    """Return the largest distance of a rank from the mean."""
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    mean = torch.stack(everyone).mean(dim=0)
    return max(float(torch.dist(each, mean)) for each in everyone)


@pytest.mark.parametrize("name", NAMES)
@on_ranks(2)
def test_a_slow_rank_keeps_nobody_waiting(name: str) -> None:
    model, optimizer = wrapped(name, period=1)
    train(model, optimizer, range(2))
    dist.barrier()
    began = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(2.0)
    else:
        train(model, optimizer, range(50))
        assert time.monotonic() - began < 1.5
    dist.barrier()


@pytest.mark.parametrize("name", NAMES)
@on_ranks(2)
def test_saving_and_evaluation_ask_no_other_rank(name: str) -> None:
    import commlib

    model, optimizer = wrapped(name, period=1)
    train(model, optimizer, range(5))
    dist.barrier()
    if dist.get_rank() == 0:
        began = time.monotonic()
        state = commlib.state_dict(model)
        model.eval()
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for _ in range(10):
            model.module(data(0, 4, 8))
        time.sleep(0.2)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
        commlib.load_state_dict(model, state)
        assert time.monotonic() - began < 5.0
    dist.barrier()


@pytest.mark.parametrize("name", NAMES)
@on_ranks(2)
def test_a_rank_that_unwraps_ends_it_quietly(name: str) -> None:
    import commlib

    model, optimizer = wrapped(name, period=1)
    train(model, optimizer, range(5))
    if dist.get_rank() == 1:
        commlib.unwrap(model)
    dist.barrier()
    train(model, optimizer, range(5, 30), 0.005)
    dist.barrier()


@pytest.mark.parametrize("name", AVERAGING)
@on_ranks(2)
def test_warm_up_averages_gradients(name: str) -> None:
    model, optimizer = wrapped(name, period=50, warmup_steps=4)
    train(model, optimizer, range(4))
    assert_replicas_identical(model, buffers=False)
    train(model, optimizer, range(4, 8))
    own = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert spread(own) > 0
