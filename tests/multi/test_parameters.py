"""Every kind of parameter that DDP takes: dtypes, complex, sparse gradients, strides, no elements, ignored ones."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.multi.common import (
    SMALL_BUCKET_MB,
    Mlp,
    OneParameter,
    Trace,
    assert_replicas_identical,
    assert_same_tensors,
    check_like_ddp,
    data,
    ddp,
    gradients,
    is_exact,
    mean_gradients,
    mlp_loss,
    plain,
    raises_on_every_rank,
    seeded,
    sgd,
    tensors,
    train,
    wrap,
)
from tests.multi.pool import on_ranks

SMALL = {"bucket_cap_mb": SMALL_BUCKET_MB}
# Plans are made in most tests of algorithms, and here in one: with them, the others are slow tests.
PLANNED_OR_SMALL = [
    pytest.param({}, id="planned", marks=pytest.mark.slow),
    pytest.param(SMALL, id="small-buckets"),
]


class MixedDtypes(nn.Module):
    """Layers of four dtypes in turn, so that neighbours in parameter order never share a bucket's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.fp32 = nn.Linear(8, 8)
        self.bf16 = nn.Linear(8, 8).to(torch.bfloat16)
        self.fp64 = nn.Linear(8, 8).to(torch.float64)
        self.fp16 = nn.Linear(8, 8).to(torch.float16)
        self.last = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs
        for layer in (self.fp32, self.bf16, self.fp64, self.fp16, self.last):
            hidden = torch.tanh(layer(hidden.to(layer.weight.dtype)))
        return hidden.float()


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, SMALL], ids=["planned", "small-buckets"])
def test_mixed_dtypes(options: dict[str, float]) -> None:
    model = check_like_ddp(MixedDtypes, mlp_loss, wrap_options=options)
    assert model.fp64.weight.grad.dtype == torch.float64
    assert model.bf16.weight.grad.dtype == torch.bfloat16


@on_ranks(3)
def test_mixed_dtypes_on_three_ranks() -> None:
    """Half-precision sums depend on the order that the library chooses, so only their replicas are compared here."""
    model = wrap(seeded(MixedDtypes), **SMALL)
    train(model, mlp_loss, 3)
    assert_replicas_identical(model)


def one_parameter_loss(*shape: int) -> Callable[[nn.Module, int], Tensor]:
    return lambda model, step: model(data(step, *shape))


@on_ranks(3, slow=(2,))
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_parameters(dtype: torch.dtype) -> None:
    model = check_like_ddp(lambda: OneParameter(torch.randn(4, 3, dtype=dtype)), one_parameter_loss(4, 3))
    assert model.weight.grad.dtype == dtype


@on_ranks(2, 3)
def test_channels_last_parameters() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def loss(model: nn.Module, step: int) -> Tensor:
        images = data(step, 3, 2, 8, 8).contiguous(memory_format=torch.channels_last)
        return model(images).square().mean()

    model = check_like_ddp(build, loss, wrap_options=SMALL)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert model[0].weight.grad.stride() == model[0].weight.stride()


STRIDED = {
    "transposed": lambda: torch.randn(3, 4).t(),
    "every-other": lambda: torch.randn(4, 6)[:, ::2],
    "expanded-then-cloned": lambda: torch.randn(1, 3).expand(4, 3).contiguous()[:, :3],
    "with-offset": lambda: torch.randn(5, 3)[1:],
}


@on_ranks(2)
@pytest.mark.parametrize("kind", list(STRIDED))
def test_non_contiguous_parameters(kind: str) -> None:
    """DDP warns about strides that no bucket can hold; values must agree all the same."""
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    model = check_like_ddp(lambda: OneParameter(STRIDED[kind]()), one_parameter_loss(4, 3))
    assert model.weight.shape == (4, 3)


@on_ranks(2)
def test_strides_that_differ_between_ranks_are_an_error_on_all() -> None:
    import commlib.errors

    values = torch.ones(4, 3)
    with raises_on_every_rank(commlib.errors.ConfigError, "weight", "strides"):
        wrap(OneParameter(values if dist.get_rank() == 0 else values.t().contiguous().t()))


class WithEmpty(nn.Module):
    """Parameters without elements, in front, between and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.zeros(0, 8))
        self.first = nn.Linear(8, 8)
        self.between = nn.Parameter(torch.zeros(3, 0))
        self.second = nn.Linear(8, 4)
        self.after = nn.Parameter(torch.zeros(0))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs)) + self.before.sum() + self.between.sum()
        return self.second(hidden) + self.after.sum()


@on_ranks(3, slow=(2,))
@pytest.mark.parametrize("options", PLANNED_OR_SMALL)
def test_zero_element_parameters(options: dict[str, float]) -> None:
    model = check_like_ddp(WithEmpty, mlp_loss, wrap_options=options)
    assert model.before.grad.shape == (0, 8)


@on_ranks(2)
def test_a_scalar_parameter() -> None:
    class Scaled(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) * self.scale

    check_like_ddp(Scaled, mlp_loss)


# --- Sparse gradients ------------------------------------------------------------------------------------------------


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 6, sparse=True)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(tokens)))


# Rows that occur twice are summed in an order of the library's own, so sparse gradients are compared within 1e-6.
def sparse_loss(model: nn.Module, step: int) -> Tensor:
    tokens = data(step, 4, 5 + dist.get_rank()).mul(31).long().remainder(50)  # another number of rows on each rank
    return model(tokens).square().mean()


@on_ranks(2, 3)
def test_sparse_embedding_gradients_with_sgd() -> None:
    def trainer(model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor], steps: int) -> Trace:
        return train(model, loss_of, steps, torch.optim.SGD(model.parameters(), lr=0.1))

    model = check_like_ddp(SparseEmbedding, sparse_loss, trainer=trainer, exact=False)
    assert model.embedding.weight.grad.is_sparse


@on_ranks(2)
def test_sparse_embedding_gradients_with_sparse_adam() -> None:
    def trainer(model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor], steps: int) -> Trace:
        dense = [p for name, p in model.named_parameters() if "embedding" not in name]
        sparse = [p for name, p in model.named_parameters() if "embedding" in name]
        optimizers = torch.optim.SparseAdam(sparse, lr=0.01), torch.optim.SGD(dense, lr=0.1)
        trace = Trace()
        for step in range(steps):
            model.zero_grad()
            loss_of(model, step).backward()
            trace.gradients.append(gradients(model))
            for optimizer in optimizers:
                optimizer.step()
        trace.final = tensors(model)
        return trace

    check_like_ddp(SparseEmbedding, sparse_loss, trainer=trainer, exact=False)


@on_ranks(2)
def test_sparse_embedding_bag_gradients() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(50, 6, mode="sum", sparse=True)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.bag(tokens)

    def trainer(model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor], steps: int) -> Trace:
        return train(model, loss_of, steps, torch.optim.SGD(model.parameters(), lr=0.1))

    check_like_ddp(Bag, sparse_loss, trainer=trainer, exact=False)


@on_ranks(2)
def test_a_sparse_embedding_unused_on_one_rank() -> None:
    class Optional(SparseEmbedding):
        def forward(self, tokens: Tensor) -> Tensor:
            hidden = self.embedding(tokens) if dist.get_rank() == 0 else tokens.float().unsqueeze(-1).expand(-1, -1, 6)
            return self.head(torch.tanh(hidden))

    def on_rank(model: nn.Module, rank: int) -> Tensor:
        tokens = data(0, 4, 5 + rank, rank=rank).mul(31).long().remainder(50)
        hidden = model.embedding(tokens) if rank == 0 else tokens.float().unsqueeze(-1).expand(-1, -1, 6)  # type: ignore[operator]
        return model.head(torch.tanh(hidden)).square().mean()  # type: ignore[operator]

    model = wrap(seeded(Optional))
    for _ in range(3):
        model.zero_grad()
        sparse_loss(model, 0).backward()
        expected = mean_gradients(lambda: seeded(Optional), on_rank)
        got = gradients(model)
        torch.testing.assert_close(got["embedding.weight"].to_dense(), expected["embedding.weight"].to_dense())  # type: ignore[union-attr]
        assert_replicas_identical(model)


# --- Ignored parameters ----------------------------------------------------------------------------------------------


def train_with_local(model: nn.Module, local: str) -> Trace:
    """Train with a parameter per rank that nobody synchronises, from a value per rank."""
    with torch.no_grad():
        {plain(name): p for name, p in model.named_parameters()}[local].add_(dist.get_rank())
    return train(model, mlp_loss, 4)


@on_ranks(2, 3)
@pytest.mark.parametrize("by_name", [True, False], ids=["by-name", "by-parameter"])
def test_ignored_parameters_stay_local(by_name: bool) -> None:
    original = seeded(Mlp)
    oracle = copy.deepcopy(original)
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(oracle, ["second.weight"])
    expected = train_with_local(ddp(oracle), "second.weight")
    ignored = "second.weight" if by_name else original.second.weight
    model = wrap(original, ignored_parameters=(ignored,))
    got = train_with_local(model, "second.weight")
    for step, expected_gradients in enumerate(expected.gradients):
        assert_same_tensors(got.gradients[step], expected_gradients, f"step {step}: gradient", exact=is_exact())
    assert_same_tensors(got.final, expected.final, "final value", exact=is_exact())
    assert_replicas_identical(model, ignored=("second.weight",))


@on_ranks(2)
def test_ignored_parameters_are_not_broadcast_at_wrap() -> None:
    model = seeded(Mlp, seed=dist.get_rank())
    before = model.second.weight.detach().clone()
    wrap(model, ignored_parameters=["second.weight"])
    assert torch.equal(model.second.weight, before)
    assert_replicas_identical(model, ignored=("second.weight",))


@on_ranks(2)
def test_ignored_parameters_may_differ_in_shape() -> None:
    model = Mlp()
    model.register_parameter("local", nn.Parameter(torch.zeros(dist.get_rank() + 1)))
    model = wrap(model, ignored_parameters=["local"])
    train(model, mlp_loss, 2, sgd(model))
    assert_replicas_identical(model, ignored=("local",))


@on_ranks(2)
def test_an_ignored_name_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"second\.wieght"):
        wrap(Mlp(), ignored_parameters=["second.wieght"])
