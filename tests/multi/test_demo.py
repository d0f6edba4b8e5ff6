"""DeMo against its equations in NumPy, its state, and what its optimizer learns."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from torch import nn

import commlib
from commlib import optim
from commlib.algorithms import DeMo
from commlib.errors import ConfigError
from tests.multi.common import (
    SMALL_BUCKET_MB,
    Cnn,
    Mlp,
    assert_replicas_identical,
    data,
    mlp_loss,
    raises_on_every_rank,
    seeded,
    snapshot,
    train,
    wrap,
)
from tests.multi.equations import against_equations
from tests.multi.pool import on_ranks
from tests.multi.relaxation_references import ByName, flat_gradients

Doubles = npt.NDArray[np.float64]
STEPS = 50
#: Of the largest component of a chunk: what fp32 may make of a component.
ROUNDING = 1e-5
INPUTS = {Mlp: (5, 8), Cnn: (4, 2, 6, 6)}


@functools.cache
def cosines(size: int) -> Doubles:
    """Return the orthonormal DCT-II as the definition has it."""
    frequency, place = np.mgrid[:size, :size]
    basis = np.cos(np.pi / size * (place + 0.5) * frequency) * np.sqrt(2 / size)
    basis[0] /= np.sqrt(2)
    return basis


class Chunks:
    """One parameter in its chunks.

    Args:
        shape: The parameter's.
        chunk: The largest side.
    """

    def __init__(self, shape: tuple[int, ...], chunk: int) -> None:
        self.rows, self.columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
        self.height, self.width = (
            max(side for side in range(1, chunk + 1) if size % side == 0) for size in (self.rows, self.columns)
        )
        self.size = self.height * self.width

    def transformed(self, values: Doubles) -> Doubles:
        """Return the components of each chunk, [chunks, size]."""
        matrix = values.reshape(self.rows, self.columns)
        found = [
            cosines(self.height) @ matrix[y : y + self.height, x : x + self.width] @ cosines(self.width).T
            for y in range(0, self.rows, self.height)
            for x in range(0, self.columns, self.width)
        ]
        return np.stack(found).reshape(-1, self.size)

    def values(self, components: Doubles) -> Doubles:
        """Return the parameter [numel] that has these components."""
        matrix, chunks = np.zeros((self.rows, self.columns)), iter(components.reshape(-1, self.height, self.width))
        for y in range(0, self.rows, self.height):
            for x in range(0, self.columns, self.width):
                back = cosines(self.height).T @ next(chunks) @ cosines(self.width)
                matrix[y : y + self.height, x : x + self.width] = back
        return matrix.reshape(-1)


class Reference:
    """DeMo in float64, all ranks in one process.

    fp32 may choose the other of two nearly equal components, and round to the other bf16 value; so the reference takes
    the components that each rank has kept, and checks that they are valid.

    Args:
        shapes: The shapes of the parameters.
        decay: The decay of the momentum.
        kept: The number of components of a chunk that are sent.
        chunk: The largest side of a chunk.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]], decay: float, kept: int, chunk: int) -> None:
        self.decay, self.kept = decay, kept
        self.chunks = {name: Chunks(shape, chunk) for name, shape in shapes.items()}
        zeros = {name: np.zeros(math.prod(shape)) for name, shape in shapes.items()}
        self.momenta = [dict(zeros) for _ in range(dist.get_world_size())]

    def step(self, by_rank: list[ByName], rests: list[dict[str, Doubles]], lr_ratio: float) -> dict[str, Doubles]:
        """Return what all ranks get, given the gradients and the components that ranks have kept [numel]."""
        result = {}
        for name, chunks in self.chunks.items():
            total = np.zeros(1)
            for momenta, gradients, own in zip(self.momenta, by_rank, rests, strict=True):
                momentum = self.decay * lr_ratio * momenta[name] + gradients[name]
                components, rest = chunks.transformed(momentum), own[name].reshape(-1, chunks.size)
                for before, after in zip(components, rest, strict=True):
                    self._check(name, before, before - after)
                momenta[name] = chunks.values(rest)
                total = total + chunks.values(components - rest)
            result[name] = total / len(by_rank)
        return result

    def _check(self, name: str, components: Doubles, sent: Doubles) -> None:
        magnitudes = np.abs(components)
        close = ROUNDING * magnitudes.max()
        least = np.sort(magnitudes)[-self.kept :][0]
        is_sent = np.abs(sent - components) <= 2.0**-8 * magnitudes + close
        is_kept = np.abs(sent) <= close
        assert is_sent[magnitudes > least + close].all(), f"{name}: one of the largest components is not sent"
        assert is_kept[magnitudes < least - close].all(), f"{name}: a component other than the largest is sent"
        assert (is_sent | is_kept).all(), f"{name}: a component is neither kept nor sent"
        assert np.sum(~is_kept) <= self.kept, f"{name}: too many components are sent"


def gradients_of_all_ranks(model: nn.Module, kind: Any, step: int) -> list[ByName]:
    found = []
    for rank in range(dist.get_world_size()):
        bare = snapshot(model, kind)
        bare(data(step, *INPUTS[kind], rank=rank)).square().mean().backward()
        found.append(flat_gradients(bare))
    return found


def rests_of_all_ranks(model: nn.Module) -> list[dict[str, Doubles]]:
    pieces = commlib.state_dict(model)["state"]["momentum"]
    own = {name: piece[1].double().numpy() for name, piece in pieces.items()}
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


@pytest.mark.thin
@against_equations(DeMo)
@on_ranks(1, 3, slow=(2, 4))
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Mlp, {}),
        (Mlp, {"chunk": 6, "kept": 3, "decay": 0.9}),
        (Mlp, {"chunk": 6, "kept": 3, "rescale_residuals": True}),
        (Cnn, {"chunk": 5, "kept": 2}),
    ],
)
@pytest.mark.parametrize("cap", [SMALL_BUCKET_MB, 1.0])
def test_demo_follows_its_equations(kind: Any, options: dict[str, Any], cap: float) -> None:
    model = seeded(kind)
    rescale = options.get("rescale_residuals", False)
    optimizer = optim.DeMo(model.parameters(), lr=1e-3)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    equations = {name: value for name, value in options.items() if name != "rescale_residuals"}
    reference = Reference(shapes, **{"decay": 0.999, "kept": 32, "chunk": 64, **equations})
    wrap(model, algorithm=DeMo(**options), optimizer=optimizer, bucket_cap_mb=cap)
    rates = [1e-3, 1e-3, 4e-3, 2e-3]
    largest = dict.fromkeys(shapes, 0.0)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = rates[step % 4]
        by_rank = gradients_of_all_ranks(model, kind, step)
        optimizer.zero_grad()
        model(data(step, *INPUTS[kind])).square().mean().backward()
        lr_ratio = rates[(step - 1) % 4] / rates[step % 4] if rescale else 1.0
        expected = reference.step(by_rank, rests_of_all_ranks(model), lr_ratio)
        for name, gradient in flat_gradients(model).items():
            largest[name] = max(largest[name], np.abs(expected[name]).max())
            off = np.abs(gradient - expected[name]).max()
            assert off <= ROUNDING * largest[name], f"step {step}: {name} differs by {off}"
        optimizer.step()
    assert_replicas_identical(model)


@on_ranks(2)
def test_sign_leaves_the_signs_of_what_is_decoded() -> None:
    found = []
    for sign in (False, True):
        model = wrap(seeded(Mlp), algorithm=DeMo(sign=sign, kept=4))
        mlp_loss(model, 0).backward()
        found.append([p.grad for p in model.parameters()])
    for decoded, signs in zip(*found, strict=True):
        assert torch.equal(signs, decoded.sign())
        assert signs.abs().sum() > 0


@on_ranks(2)
def test_momentum_goes_with_its_parameters_when_buckets_change() -> None:
    model = wrap(seeded(Mlp), algorithm=DeMo(kept=4), bucket_cap_mb=SMALL_BUCKET_MB)
    train(model, mlp_loss, 5)
    saved = commlib.state_dict(model)
    other = wrap(seeded(Mlp), algorithm=DeMo(kept=4), bucket_cap_mb=1.0)
    mlp_loss(other, 0).backward()
    assert len(commlib.stats(model).buckets) > len(commlib.stats(other).buckets)
    commlib.load_state_dict(other, saved)
    moved = commlib.state_dict(other)["state"]["momentum"]
    for name, piece in saved["state"]["momentum"].items():
        assert torch.equal(moved[name][1], piece[1])
        assert piece[1].abs().sum() > 0
    wrong = wrap(seeded(Mlp), algorithm=DeMo(kept=4, chunk=8))
    with raises_on_every_rank(ConfigError, "DeMo.chunk: expected 64"):
        commlib.load_state_dict(wrong, saved)


@on_ranks(2)
def test_bytes_are_four_for_each_component() -> None:
    model = wrap(nn.Linear(128, 192), algorithm="demo", bucket_cap_mb=1.0)
    for _ in range(2):
        model.zero_grad()
        before = commlib.stats(model).wire_bytes
        model(data(0, 4, 128)).square().mean().backward()
        sent = commlib.stats(model).wire_bytes - before
    num_chunks = (128 // 64) * (192 // 64) + 192 // 64
    assert sent == pytest.approx(4 * 32 * num_chunks, rel=0.05)


@on_ranks(1, 2)
def test_its_optimizer_learns_with_a_rate_for_each_group() -> None:
    teacher, model = seeded(Mlp, seed=3), seeded(Mlp)
    groups = [
        {"params": [*model.first.parameters()], "lr": 4e-3},
        {"params": [*model.second.parameters(), *model.third.parameters()]},
    ]
    optimizer = optim.DeMo(groups, lr=2e-3, weight_decay=0.01)
    wrap(model, algorithm="demo", optimizer=optimizer)
    losses = []
    for step in range(400):
        for group, rate in zip(optimizer.param_groups, (4e-3, 2e-3), strict=True):
            group["lr"] = rate * (1 - step / 400)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        inputs = data(step, 32, 8)
        loss = (model(inputs) - teacher(inputs)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 0:
            for group, old in ((0, before[:2]), (1, before[2:])):
                lr = optimizer.param_groups[group]["lr"]
                for p, q in zip(optimizer.param_groups[group]["params"], old, strict=True):
                    assert torch.allclose(p, (1 - 0.01 * lr) * q - lr * p.grad.sign(), rtol=0, atol=1e-7)
                    assert (p.grad != 0).all()
    first, last = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
    assert last < 0.1 * first, f"loss {first:.4f}, then {last:.4f}"
    assert_replicas_identical(model)


def test_options_out_of_range_are_refused() -> None:
    for options in ({"decay": 1.1}, {"kept": 0}, {"chunk": 0}, {"chunk": 182}):
        with pytest.raises(ConfigError, match=f"DeMo: expected .*{next(iter(options))}="):
            DeMo(**options)
    with pytest.raises(ConfigError, match="lr >= 0"):
        optim.DeMo([torch.nn.Parameter(torch.ones(1))], lr=-1.0)


def test_the_optimizer_takes_a_closure() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, -1.0, 2.0]))
    optimizer = optim.DeMo([parameter], lr=0.5)

    def closure() -> float:
        loss = (parameter * torch.tensor([3.0, -2.0, 0.0])).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 5.0
    assert parameter.tolist() == [0.5, -0.5, 2.0]
