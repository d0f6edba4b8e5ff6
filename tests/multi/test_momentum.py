"""Algorithms that average a quantized momentum, with their optimizer, against a NumPy reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import commlib
from commlib.algorithms import CompressionPolicy, OneBitAdam, QAdam
from commlib.errors import ConfigError
from commlib.kernels.reference import BLOCK_CODECS
from commlib.optim import FrozenVarianceAdam
from tests.multi.common import SMALL_BUCKET_MB, Mlp, mlp_loss, raises_on_every_rank, seeded, wrap
from tests.multi.equations import against_equations
from tests.multi.pool import on_ranks
from tests.multi.relaxation_references import FrozenVarianceAdamReference, QuantizedReference
from tests.multi.test_relaxations import assert_replicas_identical, gradients_of_all_ranks, numels, two_nodes

EVERYTHING = CompressionPolicy()
WARM_UP, STEPS = 6, 56


def groups_of(model: Any) -> list[dict[str, Any]]:
    """Two groups with settings of their own."""
    named = dict(model.named_parameters())
    first = [p for name, p in named.items() if name.startswith("first")]
    rest = [p for name, p in named.items() if not name.startswith("first")]
    return [
        {"params": first, "betas": (0.8, 0.99), "weight_decay": 0.1},
        {"params": rest, "lr": 0.005},
    ]


@against_equations(OneBitAdam, QAdam)
@on_ranks(1, 3, slow=(2, 4))
@pytest.mark.parametrize("name", ["onebit_adam", "qadam"])
def test_the_momentum_is_averaged_and_the_variance_frozen(name: str) -> None:
    model = seeded(Mlp)
    optimizer = FrozenVarianceAdam(groups_of(model), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    settings = {}
    for group in optimizer.param_groups:
        own = {id(p) for p in group["params"]}
        settings |= {
            n: {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
            for n, p in model.named_parameters()
            if id(p) in own
        }
    settings = {n: settings[n] for n in numels()}
    first = {n: p.detach().numpy().reshape(-1).copy() for n, p in model.named_parameters()}
    codec, feedback = {"onebit_adam": ("onebit", True), "qadam": ("int8", False)}[name]
    average = QuantizedReference(BLOCK_CODECS[codec], dist.get_world_size(), numels(), feedback=feedback)
    reference = FrozenVarianceAdamReference(average, first, settings, WARM_UP)
    algorithm = {"onebit_adam": OneBitAdam, "qadam": QAdam}[name](warmup_steps=WARM_UP, compress=EVERYTHING)
    wrap(model, algorithm=algorithm, optimizer=optimizer, bucket_cap_mb=SMALL_BUCKET_MB)
    for step in range(STEPS):
        if step == STEPS // 2:  # as schedulers do that cycle the momentum
            optimizer.param_groups[0]["betas"] = (0.7, 0.99)
            for n in settings:
                settings[n]["betas"] = (0.7, 0.99) if n.startswith("first") else settings[n]["betas"]
        by_rank = gradients_of_all_ranks(model, step)
        optimizer.zero_grad()
        mlp_loss(model, step).backward()
        # Follow the model: a value that rounds to the other code because of a last bit would hide all that follows.
        reference.values = {n: p.detach().numpy().reshape(-1).astype(np.float64) for n, p in model.named_parameters()}
        reference.m = {n: optimizer.momentum(p).numpy().reshape(-1).copy() for n, p in model.named_parameters()}
        optimizer.step()
        reference.step(step, by_rank, [bucket.parameters for bucket in commlib.stats(model).buckets])
        for n, p in model.named_parameters():
            difference = np.abs(p.detach().numpy().reshape(-1) - reference.values[n]).max()
            assert difference < 1e-6, (step, n, difference)
    assert_replicas_identical(model)
    assert all(group["frozen"] for group in optimizer.param_groups)


@on_ranks(4)
def test_momentum_is_summed_by_node_first() -> None:
    model = seeded(Mlp)
    optimizer = FrozenVarianceAdam(model.parameters(), lr=0.01)
    with two_nodes():
        wrap(model, algorithm=QAdam(warmup_steps=2, hierarchical=True), optimizer=optimizer)
    for step in range(12):
        by_rank = gradients_of_all_ranks(model, step)
        optimizer.zero_grad()
        mlp_loss(model, step).backward()
        for n, p in model.named_parameters():
            gradient = np.mean([own[n] for own in by_rank], axis=0)
            before = optimizer.momentum(p).numpy().reshape(-1).copy()
            expected = 0.9 * before + 0.1 * gradient if step >= 2 else gradient
            assert p.grad is not None
            # Two encodings of 8 bits, with a scale for 256 elements, which other parameters may share.
            lost = np.abs(p.grad.numpy().reshape(-1) - expected).max()
            largest = max(np.abs(0.9 * optimizer.momentum(q).numpy()).max() for q in model.parameters())
            largest += max(np.abs(0.1 * own[name]).max() for own in by_rank for name in own)
            assert lost <= (2 / 127 * largest if step >= 2 else 1e-6 * np.abs(gradient).max()), (step, n)
        optimizer.step()
    assert_replicas_identical(model)


@on_ranks(2)
def test_another_optimizer_is_refused() -> None:
    model = seeded(Mlp)
    with raises_on_every_rank(ConfigError, "FrozenVarianceAdam", "freeze"):
        wrap(model, algorithm=QAdam(), optimizer=torch.optim.Adam(model.parameters()))
    with raises_on_every_rank(ConfigError, "optimizer="):
        wrap(seeded(Mlp), algorithm="onebit_adam")


@on_ranks(1)
def test_before_the_freeze_the_optimizer_is_adamw() -> None:
    model, other = seeded(Mlp), seeded(Mlp)
    own = FrozenVarianceAdam(model.parameters(), lr=0.01, weight_decay=0.1)
    theirs = torch.optim.AdamW(other.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(30):
        for each, optimizer in ((model, own), (other, theirs)):
            optimizer.zero_grad()
            mlp_loss(each, step).backward()
            optimizer.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


class HalfDead(torch.nn.Module):
    """A layer of which every second unit is never used, so that its variance is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[:, ::2]


@on_ranks(2)
@pytest.mark.parametrize("name", ["onebit_adam", "qadam"])
def test_an_element_without_variance_takes_no_larger_a_step_than_adam_would(name: str) -> None:
    torch.manual_seed(0)
    model = HalfDead()
    optimizer = FrozenVarianceAdam(model.parameters(), lr=0.01)
    algorithm = {"onebit_adam": OneBitAdam, "qadam": QAdam}[name](warmup_steps=5, compress=EVERYTHING)
    wrap(model, algorithm=algorithm, optimizer=optimizer)
    bound = 0.01 * 0.1 / 0.001**0.5
    for step in range(40):
        before = model.layer.weight.detach().clone()
        optimizer.zero_grad()
        torch.manual_seed(step)
        (model(torch.randn(8, 32)) - 1).square().mean().backward()
        optimizer.step()
        assert (model.layer.weight.detach() - before).abs().max() <= 1.01 * bound, step
    assert_replicas_identical(model)
