"""What `wrap` checks and broadcasts: models that differ between ranks, values, buffers; errors reach every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.multi.common import (
    Cnn,
    Mlp,
    Trace,
    assert_replicas_identical,
    check_like_ddp,
    cnn_loss,
    data,
    mlp_loss,
    raises_on_every_rank,
    seeded,
    tensors,
    train,
    wrap,
)
from tests.multi.pool import on_ranks

# --- Broadcast at wrap -----------------------------------------------------------------------------------------------


@on_ranks(2, 3)
def test_parameters_and_buffers_are_broadcast_at_wrap() -> None:
    expected = tensors(seeded(Cnn, seed=0))
    model = seeded(Cnn, seed=dist.get_rank())
    model.norm.running_mean.fill_(dist.get_rank())
    wrap(model)
    assert_replicas_identical(model)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors(model).items())


@on_ranks(2)
def test_frozen_parameters_and_odd_dtypes_are_broadcast_too() -> None:
    class Odd(nn.Module):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.frozen = nn.Parameter(torch.full((3,), float(rank)), requires_grad=False)
            self.integer = nn.Parameter(torch.full((2, 2), rank), requires_grad=False)
            self.spiral = nn.Parameter(torch.full((2, 3), complex(rank, rank)).t())
            self.empty = nn.Parameter(torch.zeros(0))
            self.register_buffer("flag", torch.tensor(rank == 0))
            self.register_buffer("narrow", torch.full((5,), rank, dtype=torch.bfloat16))
            self.register_buffer("scratch", torch.full((2,), float(rank)), persistent=False)

    model = wrap(Odd(dist.get_rank()))
    assert_replicas_identical(model)
    assert bool(model.flag)
    assert model.frozen.sum() == 0
    assert model.spiral.stride() == (1, 3)


@on_ranks(2)
def test_init_sync_can_be_left_out() -> None:
    model = wrap(seeded(Mlp, seed=dist.get_rank()), init_sync=False)
    assert torch.equal(model.first.weight, seeded(Mlp, seed=dist.get_rank()).first.weight)


# --- Buffers ---------------------------------------------------------------------------------------------------------


@on_ranks(2, 3)
@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_buffer_policy_is_that_of_ddp(broadcast_buffers: bool) -> None:
    options = {"broadcast_buffers": broadcast_buffers}
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    model = check_like_ddp(Cnn, cnn_loss, ddp_options=options, wrap_options=options)
    cnn_loss(model, 9)
    means: list[Tensor] = [torch.empty(4) for _ in range(dist.get_world_size())]
    dist.all_gather(means, model.norm.running_mean)
    assert not torch.equal(means[0], means[1]), "each rank's own batch must have moved its running mean"


@on_ranks(2)
def test_each_forward_starts_from_the_buffers_of_rank_0() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("seen", torch.zeros(1, dtype=torch.long))

        def forward(self, amount: int) -> Tensor:
            self.seen += amount
            return self.weight * self.seen

    model = wrap(Counter())
    values = []
    for _ in range(3):
        output = model(dist.get_rank() + 1)
        values.append(int(output))
        output.sum().backward()
    assert values == ([1, 2, 3] if dist.get_rank() == 0 else [2, 3, 4])


@on_ranks(2)
def test_buffers_that_the_model_replaces_are_followed() -> None:
    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, amount: float) -> Tensor:
            self.seen = self.seen + amount
            return self.weight * self.seen

    check_like_ddp(Replacing, lambda model, step: model(float(dist.get_rank() + step)).sum())


@on_ranks(2)
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_evaluation_between_steps_is_as_in_ddp(mode: str) -> None:
    def trainer(model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor], steps: int) -> Trace:
        trace = Trace()
        for step in range(steps):
            model.train()
            part = train(model, lambda m, _, step=step: loss_of(m, step), 1)
            trace.gradients += part.gradients
            model.eval()
            with getattr(torch, mode)():
                trace.losses += [model(data(99, 4, 2, 6, 6, rank=0)).sum().clone() for _ in range(2)]
                trace.gradients += [{}, {}]
        trace.gradients = trace.gradients[: len(trace.losses)]
        trace.final = tensors(model)
        return trace

    model = check_like_ddp(Cnn, cnn_loss, steps=3, trainer=trainer)
    assert not model.training


@on_ranks(2)
def test_the_bare_module_evaluates_on_one_rank_alone() -> None:
    model = wrap(seeded(Cnn))
    train(model, cnn_loss, 2)
    if dist.get_rank() == 0:
        model.eval()
        with torch.no_grad():
            assert model.module(data(0, 4, 2, 6, 6)).shape == (4, 3)
        model.train()
    train(model, cnn_loss, 2)
    assert_replicas_identical(model, buffers=False)


# --- Models that differ between ranks --------------------------------------------------------------------------------


def renamed(rank: int) -> nn.Module:
    return nn.ModuleDict({"same": nn.Linear(3, 3), "left" if rank == 1 else "right": nn.Linear(3, 3)})


def reshaped(rank: int) -> nn.Module:
    return nn.ModuleDict({"same": nn.Linear(3, 3), "other": nn.Linear(3, 5 if rank == 1 else 4)})


def redtyped(rank: int) -> nn.Module:
    other = nn.Linear(3, 3).to(torch.float64 if rank == 1 else torch.float32)
    return nn.ModuleDict({"same": nn.Linear(3, 3), "other": other})


def reordered(rank: int) -> nn.Module:
    names = ["one", "two"] if rank == 1 else ["two", "one"]
    return nn.ModuleDict({name: nn.Linear(3, 3) for name in ["same", *names]})


def longer(rank: int) -> nn.Module:
    layers = {"same": nn.Linear(3, 3), "other": nn.Linear(3, 3)}
    return nn.ModuleDict(layers | ({"extra": nn.Linear(3, 3)} if rank == 1 else {}))


def frozen_on_one(rank: int) -> nn.Module:
    model = nn.ModuleDict({"same": nn.Linear(3, 3), "other": nn.Linear(3, 3)})
    model["other"].requires_grad_(rank != 1)
    return model


def other_buffer(rank: int) -> nn.Module:
    model = nn.ModuleDict({"same": nn.Linear(3, 3)})
    model.register_buffer("counts", torch.zeros(5 if rank == 1 else 4))
    return model


MISMATCHES: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "name": (renamed, "left"),
    "shape": (reshaped, "other.weight"),
    "dtype": (redtyped, "other.weight"),
    "order": (reordered, "one"),
    "number": (longer, "extra"),
    "requires-grad": (frozen_on_one, "other.weight"),
    "buffer": (other_buffer, "counts"),
}


@on_ranks(3, slow=(2,))
@pytest.mark.parametrize("kind", list(MISMATCHES))
def test_a_model_that_differs_on_one_rank_is_an_error_on_all(kind: str) -> None:
    import commlib.errors

    build, name = MISMATCHES[kind]
    with raises_on_every_rank(commlib.errors.ConfigError, name, "rank", "1"):
        wrap(build(dist.get_rank()))


@on_ranks(2)
def test_ranks_recover_from_a_refused_wrap() -> None:
    """After the error the same processes, over the same group, can wrap a proper model."""
    import commlib.errors

    with raises_on_every_rank(commlib.errors.ConfigError, "other.weight"):
        wrap(reshaped(dist.get_rank()))
    model = wrap(seeded(Mlp))
    train(model, mlp_loss, 2)
    assert_replicas_identical(model)


# --- Errors on one rank only -----------------------------------------------------------------------------------------


def with_unknown_algorithm() -> None:
    wrap(Mlp(), algorithm="allredcue")


def with_unknown_parameter() -> None:
    wrap(Mlp(), ignored_parameters=["nothing.like.this"])


def with_meta_parameters() -> None:
    with torch.device("meta"):
        model = Mlp()
    wrap(model)


def with_parameters_on_two_devices() -> None:
    model = Mlp()
    model.second.to("meta")
    wrap(model)


def with_bad_timeout() -> None:
    wrap(Mlp(), timeout=-3)


def with_bad_bucket_cap() -> None:
    wrap(Mlp(), bucket_cap_mb=0)


def with_no_module() -> None:
    wrap("not a module")  # type: ignore[arg-type]


LOCAL_ERRORS: dict[str, tuple[Callable[[], None], str]] = {
    "unknown-algorithm": (with_unknown_algorithm, "allredcue"),
    "unknown-ignored": (with_unknown_parameter, "nothing.like.this"),
    "meta": (with_meta_parameters, "meta"),
    "two-devices": (with_parameters_on_two_devices, "second.weight"),
    "timeout": (with_bad_timeout, "timeout"),
    "bucket-cap": (with_bad_bucket_cap, "bucket_cap_mb"),
}


@on_ranks(2)
@pytest.mark.parametrize("kind", list(LOCAL_ERRORS))
def test_an_error_on_all_ranks_is_clear(kind: str) -> None:
    import commlib.errors

    fail, word = LOCAL_ERRORS[kind]
    with raises_on_every_rank(commlib.errors.ConfigError, word):
        fail()


@on_ranks(3, slow=(2,))
@pytest.mark.parametrize("kind", list(LOCAL_ERRORS))
def test_an_error_on_one_rank_is_an_error_on_all(kind: str) -> None:
    import commlib.errors

    fail, word = LOCAL_ERRORS[kind]
    with raises_on_every_rank(commlib.errors.ConfigError, word, "rank 1"):
        fail() if dist.get_rank() == 1 else wrap(Mlp())


@on_ranks(2)
def test_wrapping_twice_on_one_rank_is_an_error_on_all() -> None:
    import commlib.errors

    first, second = wrap(Mlp()), Mlp()
    with raises_on_every_rank(commlib.errors.CommlibError):
        wrap(first if dist.get_rank() == 1 else second)


@on_ranks(2)
def test_wrapping_twice_is_an_error() -> None:
    import commlib.errors

    model = wrap(Mlp())
    with raises_on_every_rank(commlib.errors.ConfigError, "wrapped already", "unwrap"):
        wrap(model)
    with raises_on_every_rank(commlib.errors.ConfigError, "wrapped"):
        wrap(nn.Sequential(model, nn.Linear(4, 4)))


@on_ranks(2)
def test_options_that_differ_between_ranks_are_an_error_on_all() -> None:
    import commlib.errors

    rank = dist.get_rank()
    with raises_on_every_rank(commlib.errors.ConfigError, "bucket_cap_mb"):
        wrap(Mlp(), bucket_cap_mb=1 + rank)
    wire = commlib.algorithms.AllReduce(wire_dtype="bf16" if rank else "fp32")
    with raises_on_every_rank(commlib.errors.ConfigError, "rank"):
        wrap(Mlp(), algorithm=wire)


# --- The model changes after wrapping --------------------------------------------------------------------------------


@on_ranks(2)
def test_a_parameter_added_after_wrapping_is_an_error_at_the_next_forward() -> None:
    import commlib.errors

    model = wrap(Mlp())
    train(model, mlp_loss, 2)
    model.late = nn.Linear(3, 3)
    with raises_on_every_rank(commlib.errors.ConfigError, "late.weight"):
        mlp_loss(model, 0)


@on_ranks(2)
def test_a_parameter_replaced_after_wrapping_is_an_error_at_the_next_forward() -> None:
    import commlib.errors

    model = wrap(Mlp())
    train(model, mlp_loss, 2)
    model.second.weight = nn.Parameter(torch.zeros(16, 16))
    with raises_on_every_rank(commlib.errors.ConfigError, "second.weight"):
        mlp_loss(model, 0)
