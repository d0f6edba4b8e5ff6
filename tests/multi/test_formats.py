"""Memory formats, dtypes, complex parameters, default dtype and device: for every registered algorithm.

Where results are compared with a reference, gradients are constant patterns of signs, of rank 1 as matrices and of
another size on each rank. Then every codec keeps them, and weights may only move along the pattern, by the same
distance everywhere: an element that is taken for another one is seen at once, and a recursion says how far they move.

Most tests go through the algorithms in one body: starting a group takes longer than training in it.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commlib
from commlib import algorithms
from commlib.algorithms.policy import MATRICES
from commlib.codecs.base import BlockCodec
from commlib.codecs.registry import by_name
from commlib.errors import ConfigError
from commlib.optim import FrozenVarianceAdam
from tests.multi.common import assert_replicas_identical, raises_on_every_rank, wrap
from tests.multi.pool import on_ranks
from tests.thin import fast

ALL = algorithms.list()
LR, STEPS = 0.125, 4
CAP_MB = 0.02  # several buckets
#: One algorithm of each way to treat a bucket, for the fast part.
CHOSEN = ("allreduce", "topk", "powersgd", "onebit_adam", "diloco", "async_sgd")


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
    "demo": {"chunk": 1},
    "dgc": {"ratio": 1.0},
    "diloco": {"period": 2, "outer_lr": 0.5, "outer_momentum": 0.5},
    "hierarchical_local_sgd": {"period": 2, "global_every": 1},
    "local_sgd": {"period": 2},
    "noloco": {"period": 2, "outer_lr": 0.5, "outer_momentum": 0.5},
    "ok_topk": {"ratio": 1.0},
    "onebit_adam": {"warmup_steps": 2},
    "passive_gossip": {"period": 1},
    "post_local_sgd": {"warmup_steps": 2, "period": 2},
    "qadam": {"warmup_steps": 2},
    "randomk": {"ratio": 1.0},
    "sparse_loco": {"period": 2, "kept": 4096},
    "streaming_diloco": {"period": 2, "fragments": 1, "delay": 1},
    "topk": {"ratio": 1.0},
    "zero_one_adam": {"warmup_steps": 2},
}
WITH_CODEC = ("async_sgd", "diloco", "gossip", "local_sgd", "post_local_sgd", "streaming_diloco")
#: How far weights go depends on who comes first; that they stay on the line does not.
TIMED = ("async_averaging", "async_sgd", "hogwild", "passive_gossip")
#: Blocks of a codec hold other elements in another order.
BLOCKWISE = (
    *("bytegrad", "ef_quantized", "low_precision_decentralized", "onebit_adam", "qadam", "qsgd", "signsgd"),
    "zero_one_adam",
    "auto",  # whatever it takes
)
#: Whose random numbers, or blocks or regions of elements of which some are chosen, go by place.
BY_PLACE = ("qsgd", "randomk", "sparse_loco", "ok_topk")
ELEMENTWISE = [name for name in ALL if name not in (*TIMED, *BLOCKWISE, *BY_PLACE)]


def make(name: str, **options: Any) -> Any:
    return algorithms.get(name)(**{**OPTIONS.get(name, {}), **options})


def optimizer_for(name: str, model: nn.Module, lr: float = LR) -> torch.optim.Optimizer:
    kind = algorithms.get(name).optimizer_type or torch.optim.SGD
    return kind(model.parameters(), lr=lr)


def stored(values: Tensor, name: str, permuted: bool) -> Tensor:
    """Return a copy of `values` in the memory format of a parameter."""
    if permuted and name == "slice":
        wide = values.new_zeros(values.shape[0], 2 * values.shape[1])
        return wide[:, ::2].copy_(values)
    if permuted and name in ORDERS:
        order = ORDERS[name]
        return (
            values.permute(order)
            .clone(memory_format=torch.contiguous_format)
            .permute(*map(order.index, range(len(order))))
        )
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
    """Parameters in many memory formats; the gradient of each is its factor plus `pull` times its value."""

    def __init__(
        self, dtype: torch.dtype = torch.float32, permuted: bool = True, without: tuple[str, ...] = ()
    ) -> None:
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


def noloco_distance(period: int, outer_lr: float, outer_momentum: float) -> float:
    x = u = 0.0
    for _ in range(STEPS // period):
        u = outer_momentum * u + 2.0 * period
        x += outer_lr * u
    return x


def expected_distance(name: str, parameter: Tensor) -> tuple[float, float]:
    """Return the least and largest distance that weights move along the pattern, in learning rates."""
    if name == "dgc" and not MATRICES("", parameter):  # all is sent, so no momentum is left
        momenta = [sum(0.9**k for k in range(step + 1)) for step in range(STEPS)]
        return 2 * sum(momenta), 2 * sum(momenta)
    if name in ("onebit_adam", "qadam", "zero_one_adam"):
        return STEPS, STEPS  # Adam with a constant gradient
    if name == "hogwild":
        return 4 * STEPS, 4 * STEPS
    if name == "diloco":
        distance = diloco_distance(**OPTIONS["diloco"])
        return distance, distance
    if name == "noloco":
        distance = noloco_distance(**OPTIONS["noloco"])
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
@pytest.mark.parametrize("name", fast(ALL, *CHOSEN))
def test_every_format_and_dtype_trains(name: str) -> None:
    for dtype in DTYPES[:1] if name == "auto" else DTYPES:  # which measures for seconds
        check_patterns(name, dtype, True, tolerance_for(name, dtype))
    check_patterns(name, torch.float32, False, tolerance_for(name, torch.float32))


@on_ranks(2)
def test_every_format_trains_with_a_codec() -> None:
    for name in WITH_CODEC:
        for dtype in (torch.float32, torch.bfloat16):
            check_patterns(name, dtype, True, 0.06, codec="int8")


def always(name: str, parameter: Tensor) -> bool:
    return True


@on_ranks(2)
def test_complex_parameters_may_be_compressed() -> None:
    """As pairs of reals, where the user's policy says so."""
    for name in ("bytegrad", "ef_quantized", "onebit_adam", "powersgd", "qadam", "qsgd", "randomk", "signsgd", "topk"):
        for dtype in (torch.complex64, torch.complex128):
            check_patterns(name, dtype, True, 0.06, compress=always)
    for name in ("diloco", "local_sgd"):
        check_patterns(name, torch.complex64, True, 0.06, compress=always, codec="int8")


class Branches(nn.Module):
    """A sparse embedding, and two layers of which each rank uses one, or both."""

    def __init__(self, all_used: bool) -> None:
        super().__init__()
        self.all_used = all_used
        torch.manual_seed(5)
        self.embedding = nn.Embedding(20, 4, sparse=True)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embedding(tokens)
        if self.all_used:
            return (self.first(embedded) * self.second(embedded)).sum()
        layer = self.first if dist.get_rank() == 0 else self.second
        return layer(embedded).square().sum()


# --- the same in every format ----------------------------------------------------------------------------------------


def random_factors(model: nn.Module, step: int) -> dict[str, Tensor]:
    generator = torch.Generator(device="cpu").manual_seed(1000 * step + dist.get_rank())
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        for name, shape in shapes.items()
    }


def make_small(name: str) -> Any:
    """Make the algorithm so that it leaves something out, if it can."""
    sparse = {"topk": {"ratio": 0.1}, "randomk": {"ratio": 0.1}, "dgc": {"ratio": 0.1}}
    sparse |= {"demo": {"chunk": 8, "kept": 4}}
    return make(name, **sparse.get(name, {}))


def wrapped(name: str, permuted: bool) -> tuple[Any, torch.optim.Optimizer]:
    model = Formats(torch.float32, permuted, without_for(name))
    optimizer = optimizer_for(name, model, lr=0.01)
    return wrap(model, algorithm=make_small(name), optimizer=optimizer, bucket_cap_mb=CAP_MB), optimizer


def train_at_random(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Train with gradients that depend on the weights, so that errors go on."""
    for step in steps:
        factors = random_factors(model, step)
        optimizer.zero_grad()
        model(factors, pull=0.5).backward()
        optimizer.step()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone(memory_format=torch.contiguous_format) for name, p in model.named_parameters()}


def assert_same_bits(got: dict[str, Tensor], expected: dict[str, Tensor], what: Any) -> None:
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), (what, name, float((got[name] - tensor).abs().max()))


@on_ranks(2)
@pytest.mark.parametrize("name", fast(ELEMENTWISE, *CHOSEN))
def test_the_format_does_not_change_a_bit(name: str) -> None:
    found = []
    for permuted in (False, True):
        model, optimizer = wrapped(name, permuted)
        train_at_random(model, optimizer, range(6))
        found.append(weights_of(model))
        commlib.unwrap(model)
    assert_same_bits(found[1], found[0], name)


def by_index(piece: Any, parameter: Tensor) -> Tensor:
    """Return a piece of saved state in the parameter's shape, zeros where it does not reach."""
    start, values, *order = piece
    if values.dim() > 1:
        return values.reshape(parameter.shape)
    whole = torch.zeros(parameter.numel(), dtype=values.dtype)
    whole[start : start + values.numel()] = values
    return whole.as_strided(parameter.shape, parameter.stride()) if order else whole.view(parameter.shape)


def owed_by_this_rank(state: dict[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """Return what saved residuals are worth in a sum over the ranks, by parameter."""
    worth = {"worker": 1.0, "errors": 1.0, "owner": float(dist.get_world_size())}
    found = {name: torch.zeros_like(p.detach()) for name, p in model.named_parameters()}
    for kind, factor in worth.items():
        for name, piece in state["state"].get(kind, {}).items():
            found[name] += factor * by_index(piece, dict(model.named_parameters())[name])
    return found


class ConvNet(nn.Module):
    """Two convolutions."""

    def __init__(self, permuted: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 12, 3)
        self.to(memory_format=torch.channels_last if permuted else torch.contiguous_format)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(images))).square().mean()


def everything(_: str, parameter: Tensor) -> bool:
    return parameter.is_floating_point()


COMPENSATED: dict[str, Callable[[], Any]] = {
    **{
        codec: (lambda codec=codec: algorithms.EFQuantized(codec, compress=everything))
        for codec, kind in by_name.items()
        if issubclass(kind, BlockCodec)
    },
    "signsgd": lambda: algorithms.SignSGD(compress=everything),
    "topk": lambda: algorithms.TopK(ratio=0.05, compress=everything),
    "ok_topk": lambda: algorithms.OkTopK(ratio=0.05, compress=everything),
    "randomk": lambda: algorithms.RandomK(ratio=0.05, compress=everything),
    "powersgd": lambda: algorithms.PowerSGD(rank=2, min_compression=1.0),
}


@on_ranks(2)
@pytest.mark.parametrize("permuted", [False, True], ids=["contiguous", "channels-last"])
def test_what_is_not_sent_is_remembered_for_the_same_elements(permuted: bool) -> None:
    """N times all results and all residuals are the sum of all gradients."""
    for kind in COMPENSATED:
        model, twin = ConvNet(permuted), ConvNet(permuted)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run = wrap(model, algorithm=COMPENSATED[kind](), optimizer=optimizer, bucket_cap_mb=0.004)
        balance = {name: torch.zeros_like(p.detach()) for name, p in model.named_parameters()}
        largest = 0.0
        for step in range(4):
            images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            twin.load_state_dict(model.state_dict())
            twin.zero_grad()
            twin(images).backward()
            optimizer.zero_grad()
            run(images).backward()
            optimizer.step()
            for (name, p), other in zip(model.named_parameters(), twin.parameters(), strict=True):
                assert p.grad is not None
                assert other.grad is not None
                balance[name] += other.grad - p.grad  # the sum over the ranks makes N results of one
                largest = max(largest, float(other.grad.abs().max()))
        owed = owed_by_this_rank(commlib.state_dict(run), model)
        for name, rest in balance.items():
            total = rest - owed[name]
            dist.all_reduce(total)
            assert float(total.abs().max()) < 1e-4 * largest, (kind, permuted, name)
        assert max(float(each.abs().max()) for each in owed.values()) > 1e-5 * largest, (kind, "nothing is owed")
        commlib.unwrap(run)


@on_ranks(2)
def test_eight_bits_round_the_same_in_every_format() -> None:
    for name in ("bytegrad", "qsgd"):
        for permuted in (False, True):
            model, _ = wrapped(name, permuted)
            for step in range(3):
                model.zero_grad()
                factors = random_factors(model, step)
                model(factors).backward()
                largest = torch.stack([f.abs().max() for f in factors.values()]).max()
                dist.all_reduce(largest, dist.ReduceOp.MAX)
                for n, p in model.named_parameters():
                    mean = factors[n].clone()
                    dist.all_reduce(mean)
                    mean /= 2
                    assert p.grad is not None
                    # Two roundings by at most a step: 1/127 of a scale, which is rounded up to bf16.
                    assert float((p.grad - mean).abs().max()) < 2.02 / 127 * largest, (name, n, permuted)


# --- resuming in another format --------------------------------------------------------------------------------------

RESUMABLE = [name for name in ALL if name not in ("auto", "hogwild")]


@pytest.mark.thin
@on_ranks(2)
@pytest.mark.parametrize("permuted", [False, True], ids=["from-contiguous", "from-permuted"])
@pytest.mark.parametrize("name", fast(RESUMABLE, *CHOSEN))
def test_state_resumes_in_another_format(name: str, permuted: bool) -> None:
    model, optimizer = wrapped(name, permuted)
    train_at_random(model, optimizer, range(4))
    state, weights = commlib.state_dict(model), weights_of(model)
    other, own = wrapped(name, not permuted)
    other.load_state_dict(weights)
    own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if name == "async_sgd":
        with raises_on_every_rank(ConfigError, "memory format", "conv"):
            commlib.load_state_dict(other, state)
        return
    commlib.load_state_dict(other, state)
    # A former owner's errors, of elements that another rank owns now, go to its worker: times N, rounded once.
    owed, before = owed_by_this_rank(commlib.state_dict(other), other), owed_by_this_rank(state, model)
    for n, each in before.items():
        torch.testing.assert_close(owed[n], each, rtol=1e-6, atol=1e-7)
    if name in ELEMENTWISE:
        train_at_random(model, optimizer, range(4, 8))
        train_at_random(other, own, range(4, 8))
        assert_same_bits(weights_of(other), weights_of(model), name)
    commlib.unwrap(model)
    commlib.unwrap(other)


def rewrapped(name: str) -> tuple[Any, torch.optim.Optimizer, dict[str, Tensor]]:
    """Return a wrapped model whose memory format has changed since, its optimizer, and its weights."""
    model = Formats(torch.float32, True, without_for(name))
    start = {n: as_reals(p).clone() for n, p in model.named_parameters()}
    optimizer = optimizer_for(name, model)
    wrap(model, algorithm=make(name), optimizer=optimizer, bucket_cap_mb=CAP_MB)
    for n, p in model.named_parameters():
        p.data = stored(p.detach(), n, permuted=False).contiguous()
    return model, optimizer, start


@on_ranks(2)
@pytest.mark.parametrize("name", fast([name for name in RESUMABLE if name != "async_sgd"], *CHOSEN))
def test_a_format_that_changes_after_wrapping_changes_no_element(name: str) -> None:
    model, optimizer, start = rewrapped(name)
    train_on_patterns(model, optimizer, in_turns=False)
    assert_on_the_line(model, name, start, tolerance_for(name, torch.float32), name)
    commlib.unwrap(model)


@on_ranks(2)
@pytest.mark.parametrize("name", ["async_sgd", "hogwild"])
def test_what_is_cut_or_shared_by_memory_refuses_another_format_after_wrapping(name: str) -> None:
    model, optimizer, _ = rewrapped(name)
    with raises_on_every_rank(ConfigError, "before wrapping", "conv"):
        train_on_patterns(model, optimizer, in_turns=False)


# --- defaults of torch -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def defaults(dtype: torch.dtype, device: str | None) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


DEFAULTS = [(torch.float64, None), (torch.bfloat16, "meta")]


@on_ranks(2)
@pytest.mark.parametrize("name", fast([name for name in ALL if name not in (*TIMED, "auto")], *CHOSEN))
def test_torchs_defaults_do_not_change_a_bit(name: str) -> None:
    found = []
    for dtype, device in [(torch.float32, None), *DEFAULTS]:
        with defaults(dtype, device):
            model, optimizer = wrapped(name, True)
            train_at_random(model, optimizer, range(5))
            commlib.load_state_dict(model, commlib.state_dict(model))
            found.append(weights_of(model))
            commlib.unwrap(model)
        assert_same_bits(found[-1], found[0], (name, dtype, device))


@on_ranks(2)
def test_torchs_defaults_do_not_matter_in_the_background() -> None:
    for dtype, device in DEFAULTS:
        with defaults(dtype, device):
            for name in TIMED:
                check_patterns(name, torch.float32, True, tolerance_for(name, torch.float32))
            check_patterns("async_sgd", torch.float32, True, 0.06, codec="int8")


@on_ranks(2)
def test_sparse_and_missing_gradients_do_not_depend_on_torchs_defaults() -> None:
    for device, all_used in ((None, False), ("meta", True)):
        found = []
        for default in ((torch.float32, None), (torch.float64, device)):
            model, tokens = Branches(all_used), torch.tensor([1, 3, 3, 7 + dist.get_rank()])
            with defaults(*default):
                wrap(model, bucket_cap_mb=CAP_MB)(tokens).backward()
            found.append({n: p.grad.to_dense().clone() for n, p in model.named_parameters() if p.grad is not None})
        assert found[0].keys() == dict(model.named_parameters()).keys()
        assert_same_bits(found[1], found[0], device)


# --- the optimizer of the momentum algorithms ------------------------------------------------------------------------


def adam_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, dtype: torch.dtype) -> None:
    for seed, p in enumerate(model.parameters()):
        p.grad = drawn(tuple(p.shape), 100 * step + seed, dtype)
    optimizer.step()


@on_ranks(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_frozen_variance_adam_is_adamw_until_it_is_frozen(dtype: torch.dtype) -> None:
    models = [Formats(dtype) for _ in range(2)]
    options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1}
    own = FrozenVarianceAdam(models[0].parameters(), **options)
    theirs = torch.optim.AdamW(models[1].parameters(), **options)
    for step in range(10):
        for model, optimizer in zip(models, (own, theirs), strict=True):
            adam_step(model, optimizer, step, dtype)
        assert_same_bits(weights_of(models[0]), weights_of(models[1]), (step, dtype))
        for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert own.state[p]["step"] == int(theirs.state[q]["step"])
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(own.state[p][key], theirs.state[q][key]), (step, key)
                assert own.state[p][key].dtype == theirs.state[q][key].dtype, (step, key)


@on_ranks(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_frozen_variance_adam_takes_over_the_state_of_adamw(dtype: torch.dtype) -> None:
    before = Formats(dtype, permuted=False)
    theirs = torch.optim.AdamW(before.parameters(), lr=0.01, weight_decay=0.0)
    for step in range(3):
        adam_step(before, theirs, step, dtype)
    model = Formats(dtype)
    model.load_state_dict(before.state_dict())
    own = FrozenVarianceAdam(model.parameters(), lr=0.01)
    own.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for step in range(3, 6):
        adam_step(before, theirs, step, dtype)
        adam_step(model, own, step, dtype)
    assert_same_bits(weights_of(model), weights_of(before), dtype)
    own.freeze()
    adam_step(model, own, 6, dtype)  # with a variance that counts all six steps
    assert all(state["variance_steps"] == 6 for state in own.state.values())


@on_ranks(2)
@pytest.mark.parametrize("name", ["onebit_adam", "qadam"])
def test_the_averaged_momentum_is_each_elements_own(name: str) -> None:
    """Also where loading a state replaced the optimizer's groups and the strides of its state."""
    model = Formats(torch.complex64)
    optimizer = FrozenVarianceAdam(model.parameters(), lr=0.01)
    algorithm = make(name, warmup_steps=1, compress=lambda name, parameter: False)
    wrap(model, algorithm=algorithm, optimizer=optimizer, bucket_cap_mb=CAP_MB)
    for step in range(5):
        if step == 3:
            saved = optimizer.state_dict()
            saved["param_groups"][0]["betas"] = (0.5, 0.999)
            for state in saved["state"].values():
                state["exp_avg"] = state["exp_avg"].clone(memory_format=torch.contiguous_format)
            optimizer.load_state_dict(saved)
        factors = {n: torch.complex(f, f.flip(0)) for n, f in random_factors(model, step).items()}
        before = {n: optimizer.momentum(p).clone() for n, p in model.named_parameters()}
        optimizer.zero_grad()
        model(factors).backward()
        b1 = optimizer.param_groups[0]["betas"][0]
        for n, p in model.named_parameters():
            mean = factors[n].clone()
            dist.all_reduce(mean)
            expected = b1 * before[n] + (1 - b1) * mean / 2 if step >= 1 else mean / 2
            assert p.grad is not None
            assert float((p.grad - expected).abs().max()) < 1e-5, (step, n)
        optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("name", ["onebit_adam", "qadam"])
def test_parameters_without_a_group_are_named(name: str) -> None:
    model = Formats()
    optimizer = FrozenVarianceAdam([p for n, p in model.named_parameters() if n != "cube"], lr=0.01)
    with raises_on_every_rank(ConfigError, "'cube'", "no group", "freeze the parameters"):
        wrap(model, algorithm=make(name), optimizer=optimizer)
    optimizer.add_param_group({"params": [model.cube]})
    train_on_patterns(wrap(model, algorithm=make(name), optimizer=optimizer), optimizer, in_turns=False)


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_outer_step_is_torchs_in_half_precision_too(dtype: torch.dtype) -> None:
    model = Formats(dtype)
    outer = Formats(dtype)
    outer.load_state_dict(model.state_dict())
    theirs = torch.optim.SGD(outer.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    wrap(model, algorithm=algorithms.DiLoCo(period=2), optimizer=optimizer, bucket_cap_mb=CAP_MB)
    for step in range(6):
        factors = {n: f.to(dtype) for n, f in random_factors(model, step).items()}
        optimizer.zero_grad()
        model(factors).backward()
        moved = weights_of(model)
        torch._foreach_add_(list(moved.values()), [p.grad for p in model.parameters()], alpha=-LR)  # type: ignore[misc]
        optimizer.step()
        if step % 2 == 0:
            continue
        for n, p in outer.named_parameters():
            total = p.detach() - moved[n]
            dist.all_reduce(total)
            p.grad = total / 2
        theirs.step()
        assert_same_bits(weights_of(model), weights_of(outer), (step, dtype))
