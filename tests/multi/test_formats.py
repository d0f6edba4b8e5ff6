"""Memory formats, dtypes, complex parameters, default dtype and device: for every registered algorithm.

Gradients are constant patterns of signs, of rank 1 as matrices and of another size on each rank. Then every codec keeps them,
and weights may only move along the pattern, by the same distance everywhere: an element that is taken for another one is
seen at once, and how far they move follows from a recursion over numbers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commlib
from commlib import algorithms
from commlib.algorithms._policy import MATRICES
from commlib.codecs.base import BlockCodec
from commlib.codecs.registry import by_name
from commlib.errors import ConfigError
from commlib.optim import FrozenVarianceAdam
from tests.multi.common import assert_replicas_identical, raises_on_every_rank, wrap
from tests.multi.pool import on_ranks

ALL = algorithms.list()
LR, STEPS = 0.125, 4
CAP_MB = 0.02  # several buckets

#: Dimensions of each parameter from the outermost to the innermost in memory, in the format "permuted".
ORDERS = {
    "conv": (0, 2, 3, 1),  # channels-last
    "volume": (0, 2, 3, 4, 1),  # channels-last, 3d
    "matrix": (1, 0),  # transposed
    "cube": (1, 2, 0),
}
SHAPES = {
    "conv": (16, 8, 3, 3),
    "volume": (8, 4, 2, 4, 5),
    "matrix": (48, 40),
    "cube": (8, 16, 12),
    "slice": (6, 4),
    "bias": (5,),
}

OPTIONS: dict[str, dict[str, Any]] = {
    "async_averaging": {"period": 1},
    "async_sgd": {"period": 1, "rest": 0.0},
    "dgc": {"ratio": 1.0},
    "diloco": {"period": 2, "outer_lr": 0.5, "outer_momentum": 0.5},
    "hierarchical_local_sgd": {"period": 2, "global_every": 1},
    "local_sgd": {"period": 2},
    "onebit_adam": {"warmup_steps": 2},
    "passive_gossip": {"period": 1},
    "post_local_sgd": {"warmup_steps": 2, "period": 2},
    "qadam": {"warmup_steps": 2},
    "randomk": {"ratio": 1.0},
    "streaming_diloco": {"period": 2, "fragments": 1, "delay": 1},
    "topk": {"ratio": 1.0},
}
WITH_CODEC = ("async_sgd", "diloco", "gossip", "local_sgd", "post_local_sgd", "streaming_diloco")
#: How far weights go depends on who comes first; that they stay on the line does not.
TIMED = ("async_averaging", "async_sgd", "hogwild", "passive_gossip")
#: Blocks of a codec hold other elements in another order.
BLOCKWISE = (
    *("bytegrad", "ef_quantized", "low_precision_decentralized", "onebit_adam", "qadam", "qsgd", "signsgd"),
    "auto",  # whatever it takes
)
ELEMENTWISE = [name for name in ALL if name not in (*TIMED, *BLOCKWISE)]


def make(name: str, **options: Any) -> Any:
    return algorithms.get(name)(**{**OPTIONS.get(name, {}), **options})


def optimizer_for(name: str, model: nn.Module, lr: float = LR) -> torch.optim.Optimizer:
    kind = algorithms.get(name).optimizer_type or torch.optim.SGD
    return kind(model.parameters(), lr=lr)


def stored(values: Tensor, name: str, permuted: bool) -> Tensor:
    """Return a copy of `values` in the memory format of a parameter."""
    if permuted and name == "slice":
        wide = torch.zeros(values.shape[0], 2 * values.shape[1], dtype=values.dtype)
        return wide[:, ::2].copy_(values)
    if permuted and name in ORDERS:
        order = ORDERS[name]
        return values.permute(order).clone(memory_format=torch.contiguous_format).permute(*map(order.index, range(len(order))))
    return values.clone(memory_format=torch.contiguous_format)


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    """Return multiples of 1/8 from -1 to 1."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    size = (*shape, 2) if dtype.is_complex else shape
    values = torch.randint(-8, 9, size, generator=generator, device="cpu").to(dtype.to_real()) / 8
    return torch.view_as_complex(values) if dtype.is_complex else values


def signs(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return an outer product of the first dimension's signs and the others'."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    rows, columns = shape[0], math.prod(shape[1:])
    u, v = (torch.randint(0, 2, (n,), generator=generator, device="cpu").mul(2).sub(1) for n in (rows, columns))
    return torch.outer(u, v).view(shape)


def pattern(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    real = signs(shape, seed).to(dtype.to_real())
    return torch.complex(real, signs(shape, seed + 1).to(real.dtype)) if dtype.is_complex else real


class Formats(nn.Module):
    """Parameters in many memory formats; the gradient of each is what it is multiplied with, plus `pull` times itself."""

    def __init__(self, dtype: torch.dtype = torch.float32, permuted: bool = True, without: tuple[str, ...] = ()) -> None:
        super().__init__()
        for seed, (name, shape) in enumerate(SHAPES.items()):
            if name not in without:
                self.register_parameter(name, nn.Parameter(stored(drawn(shape, seed, dtype), name, permuted)))

    def forward(self, factors: dict[str, Tensor], pull: float = 0.0) -> Tensor:
        terms = []
        for name, p in self.named_parameters():
            term = (p * factors[name].conj()).real.sum() if p.is_complex() else (p * factors[name]).sum()
            terms.append(term)
            if pull:
                terms.append(p.square().sum() * (pull / 2))
        return torch.stack(terms).sum()


def without_for(name: str) -> tuple[str, ...]:
    return ("slice",) if name == "async_sgd" else ()  # which does not fill a stretch of memory


def patterns(model: nn.Module, scale: float = 1.0) -> dict[str, Tensor]:
    seeds = {name: 100 + 2 * idx for idx, name in enumerate(SHAPES)}
    return {n: scale * pattern(tuple(p.shape), seeds[n], p.dtype) for n, p in model.named_parameters()}


def train_on_patterns(model: Any, optimizer: torch.optim.Optimizer, in_turns: bool) -> None:
    rank = dist.get_rank()
    factors = patterns(model, 1.0 + 2 * rank)  # 1 and 3: their mean is 2
    for _ in range(STEPS):
        for turn in range(dist.get_world_size()):
            if not in_turns or turn == rank:
                optimizer.zero_grad()
                model(factors).backward()
                optimizer.step()
            if not in_turns:
                break
            dist.barrier()
    commlib.synchronize(model)


def diloco_distance(period: int, outer_lr: float, outer_momentum: float) -> float:
    x = u = 0.0
    for _ in range(STEPS // period):
        g = 2.0 * period
        u = outer_momentum * u + g
        x += outer_lr * (g + outer_momentum * u)
    return x


def expected_distance(name: str, parameter: Tensor) -> tuple[float, float]:
    """Return from where to where weights go along the pattern, in learning rates."""
    if name == "dgc" and not MATRICES("", parameter):  # what is sent has no momentum left, as all is sent
        momenta = [sum(0.9**k for k in range(step + 1)) for step in range(STEPS)]
        return 2 * sum(momenta), 2 * sum(momenta)
    if name in ("onebit_adam", "qadam"):
        return STEPS, STEPS  # Adam with a constant gradient
    if name == "hogwild":
        return 4 * STEPS, 4 * STEPS
    if name == "diloco":
        distance = diloco_distance(**OPTIONS["diloco"])
        return distance, distance
    if name == "passive_gossip":
        return STEPS, 3 * STEPS  # between the ranks
    if name == "streaming_diloco":
        return STEPS / 2, 4 * STEPS
    return 2 * STEPS, 2 * STEPS


def as_reals(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def assert_on_the_line(model: nn.Module, name: str, start: dict[str, Tensor], tolerance: float, what: Any) -> None:
    """Check that all elements have gone the same distance along the pattern, and how far."""
    for n, p in model.named_parameters():
        low, high = expected_distance(name, p)
        moved, along = as_reals(p) - start[n], as_reals(patterns(model)[n])
        distance = -float((moved * along).sum() / along.square().sum())
        assert low - tolerance * low <= distance / LR <= high + tolerance * high, (what, n, distance / LR, low, high)
        off = float((moved + distance * along).abs().max())
        assert off <= tolerance * low * LR, (what, n, "off the line", off, distance)


def check_patterns(name: str, dtype: torch.dtype, permuted: bool, tolerance: float, **options: Any) -> None:
    model = Formats(dtype, permuted, without_for(name))
    start = {n: as_reals(p).clone() for n, p in model.named_parameters()}
    strides = {n: p.stride() for n, p in model.named_parameters()}
    optimizer = optimizer_for(name, model)
    wrap(model, algorithm=make(name, **options), optimizer=optimizer, bucket_cap_mb=CAP_MB)
    train_on_patterns(model, optimizer, in_turns=name == "hogwild")
    what = (name, dtype, "permuted" if permuted else "contiguous", options)
    assert_on_the_line(model, name, start, tolerance, what)
    model.zero_grad()
    assert_replicas_identical(model)
    commlib.unwrap(model)
    if not (name == "hogwild" and permuted):  # a slice becomes dense in shared memory
        assert {n: p.stride() for n, p in model.named_parameters()} == strides, what


def tolerance_for(name: str, dtype: torch.dtype) -> float:
    if name in BLOCKWISE:
        return 0.03
    return max(1e-6, 8 * torch.finfo(dtype.to_real()).eps)


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)


@on_ranks(2)
@pytest.mark.parametrize("name", ALL)
def test_every_format_and_dtype_trains(name: str) -> None:
    for dtype in DTYPES:
        check_patterns(name, dtype, True, tolerance_for(name, dtype))
    check_patterns(name, torch.float32, False, tolerance_for(name, torch.float32))


@on_ranks(2)
@pytest.mark.parametrize("name", [name for name in WITH_CODEC if name in ALL])
def test_every_format_trains_with_a_codec(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check_patterns(name, dtype, True, 0.06, codec="int8")
