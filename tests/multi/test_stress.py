"""Many steps with random delays and random unused parameters on each rank: no hang, no mismatch."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commlib
from commlib import algorithms
from tests.multi.common import (
    SMALL_BUCKET_MB,
    Branches,
    Mlp,
    assert_replicas_identical,
    data,
    mlp_loss,
    seeded,
    sgd,
    wrap,
)
from tests.multi.pool import on_ranks

# Every kind of round: of gradients, of weights, between neighbours, in the background and one-sided.
TURNS: tuple[Callable[[], algorithms.Algorithm], ...] = (
    algorithms.AllReduce,
    algorithms.ByteGrad,
    algorithms.EFQuantized,
    algorithms.TopK,
    algorithms.PowerSGD,
    lambda: algorithms.LocalSGD(period=2),
    algorithms.Decentralized,
    algorithms.LowPrecisionDecentralized,
    lambda: algorithms.AsyncAveraging(period=2),
    lambda: algorithms.StreamingDiLoCo(period=4, fragments=2, delay=1),
    algorithms.PassiveGossip,
    algorithms.AsyncSGD,
)


def delayed(output: Tensor, delays: random.Random) -> Tensor:
    """Delay the backward at `output` by a random time, up to 3 ms."""
    output.register_hook(lambda gradient: time.sleep(delays.random() * 0.003))
    return output


def random_steps(steps: int, seed: int, **options: float) -> None:
    """Train with delays before, inside and after the backward, and other unused branches on every rank and step."""
    delays = random.Random(1000 * seed + dist.get_rank())
    model = wrap(seeded(lambda: Branches(6)), **options)
    for branch in model.branches:
        branch.register_forward_hook(lambda module, inputs, output: delayed(output, delays))
    optimizer = sgd(model)
    for step in range(steps):
        time.sleep(delays.random() * 0.003)
        optimizer.zero_grad(set_to_none=delays.random() < 0.5)
        used = [i for i in range(6) if delays.random() < 0.4]
        loss = model(data(step, 3, 8), used).square().mean()
        if step % 7 == 3:
            with model.no_sync():
                loss_extra = model(data(step + 9000, 3, 8), used).square().mean()
                loss_extra.backward()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 0:
            assert_replicas_identical(model)
    assert_replicas_identical(model)
    assert all(torch.isfinite(p).all() for p in model.parameters())


@on_ranks(3, slow=(2, 4))
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": SMALL_BUCKET_MB}], ids=["planned", "small-buckets"])
def test_a_hundred_random_steps(options: dict[str, float]) -> None:
    random_steps(100, seed=1, **options)


@on_ranks(3, timeout=300)
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": SMALL_BUCKET_MB}], ids=["planned", "small-buckets"])
def test_a_thousand_random_steps(options: dict[str, float]) -> None:
    random_steps(1000, seed=2, **options)


def train_in_turns(turns: int) -> None:
    """Wrap one model with each algorithm in turn, train for some steps and unwrap it, many times over."""
    model = seeded(lambda: Mlp(1024))  # chunks large enough to be exchanged, and small ones
    delays = random.Random(dist.get_rank())
    for turn in range(turns):
        for algorithm in TURNS:
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            cap_mb = 1 if turn % 2 else None
            wrapped = commlib.wrap(model, algorithm(), optimizer=optimizer, timeout=30, bucket_cap_mb=cap_mb)
            for step in range(5):
                optimizer.zero_grad()
                mlp_loss(wrapped, step).backward()
                optimizer.step()
                time.sleep(delays.random() * 0.003)
            commlib.unwrap(wrapped)
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.slow
@on_ranks(4)
def test_every_kind_of_algorithm_in_turn() -> None:
    train_in_turns(2)


@on_ranks(4, timeout=600)
@pytest.mark.slow
@pytest.mark.timeout(700)
def test_every_kind_of_algorithm_in_many_turns() -> None:
    train_in_turns(40)
