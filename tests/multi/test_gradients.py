"""Gradients are the mean over the ranks, as in DDP, however the model is used: dense models, accumulation, unused and
frozen parameters, several forwards, checkpointing, gradients of gradients."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.multi.common import (
    SMALL_BUCKET_MB,
    Branches,
    Cnn,
    Mlp,
    Trace,
    assert_replicas_identical,
    assert_same_tensors,
    check_like_ddp,
    cnn_loss,
    data,
    ddp,
    gradients,
    is_exact,
    mean_gradients,
    mlp_loss,
    seeded,
    sgd,
    snapshot,
    tensors,
    train,
    wrap,
)
from tests.multi.pool import on_ranks

FIND_UNUSED = {"find_unused_parameters": True}
SMALL = {"bucket_cap_mb": SMALL_BUCKET_MB}
# Plans are made in most tests of algorithms, and here in one: with them, the others are slow tests.
PLANNED_OR_SMALL = [
    pytest.param({}, id="planned", marks=pytest.mark.slow),
    pytest.param(SMALL, id="small-buckets"),
]


def branches_loss(used: Callable[[int, int], list[int]]) -> Callable[[nn.Module, int], Tensor]:
    """Return a loss of `Branches` that uses `used(rank, step)`."""

    def loss(model: nn.Module, step: int) -> Tensor:
        return model(data(step, 5, 8), used(dist.get_rank(), step)).square().mean()

    return loss


def assert_mean(model: nn.Module, loss_of_rank: Callable[[nn.Module, int], Tensor], base: nn.Module) -> None:
    """Check the gradients of `model` against the mean over ranks, taken on copies of `base` in this process."""
    expected = mean_gradients(lambda: copy.deepcopy(base), loss_of_rank)
    assert_same_tensors(gradients(model), expected, "gradient", exact=is_exact())
    assert_replicas_identical(model, buffers=False)


# --- Dense models ----------------------------------------------------------------------------------------------------


@on_ranks(1, 2, 3, slow=(4,))
@pytest.mark.parametrize("options", [{}, SMALL], ids=["planned", "small-buckets"])
def test_mlp_trains_as_in_ddp(options: dict[str, float]) -> None:
    check_like_ddp(Mlp, mlp_loss, steps=5, wrap_options=options)


@on_ranks(2, 3)
def test_cnn_with_buffers_trains_as_in_ddp() -> None:
    check_like_ddp(Cnn, cnn_loss, steps=5, wrap_options=SMALL)


@on_ranks(2)
def test_adam_trains_as_in_ddp() -> None:
    def adam(model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor], steps: int) -> Trace:
        return train(model, loss_of, steps, torch.optim.AdamW(model.parameters(), lr=0.01))

    check_like_ddp(Mlp, mlp_loss, steps=5, trainer=adam)


@on_ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_both_ways(set_to_none: bool) -> None:
    def trainer(model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor], steps: int) -> Trace:
        return train(model, loss_of, steps, set_to_none=set_to_none)

    check_like_ddp(Mlp, mlp_loss, steps=5, trainer=trainer, wrap_options=SMALL)


@on_ranks(2)
def test_zero_grad_changes_its_way_between_steps() -> None:
    def trainer(model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor], steps: int) -> Trace:
        trace, optimizer = Trace(), sgd(model)
        for step in range(steps):
            optimizer.zero_grad(set_to_none=step % 3 != 1)
            loss_of(model, step).backward()
            trace.gradients.append(gradients(model))
            optimizer.step()
        return trace

    check_like_ddp(Mlp, mlp_loss, steps=7, trainer=trainer)


@on_ranks(2, 3)
def test_gradient_clipping() -> None:
    def clipped(model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor], steps: int) -> Trace:
        trace, optimizer = Trace(), sgd(model)
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            trace.losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01))
            trace.gradients.append(gradients(model))
            optimizer.step()
        trace.final = tensors(model)
        return trace

    check_like_ddp(Mlp, mlp_loss, trainer=clipped, wrap_options=SMALL)


@on_ranks(2)
def test_backwards_without_zero_grad_accumulate() -> None:
    def accumulating(model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor], steps: int) -> Trace:
        trace = Trace()
        for step in range(steps):
            loss_of(model, step).backward()
            trace.gradients.append(gradients(model))
        return trace

    check_like_ddp(Mlp, mlp_loss, trainer=accumulating, wrap_options=SMALL)


@on_ranks(2)
def test_a_gradient_that_the_user_put_there_is_added_to() -> None:
    def preset(model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor], steps: int) -> Trace:
        trace = Trace()
        for step in range(steps):
            for p in model.parameters():
                p.grad = torch.full_like(p, float(dist.get_rank() + 1))
            loss_of(model, step).backward()
            trace.gradients.append(gradients(model))
        return trace

    check_like_ddp(Mlp, mlp_loss, trainer=preset)


@on_ranks(2)
def test_a_forward_without_backward_is_forgotten() -> None:
    def dropping(model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor], steps: int) -> Trace:
        trace, optimizer = Trace(), sgd(model)
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, step + 50)
            loss_of(model, step).backward()
            trace.gradients.append(gradients(model))
            optimizer.step()
        return trace

    check_like_ddp(Mlp, mlp_loss, trainer=dropping)


@on_ranks(2)
def test_a_user_hook_sees_the_local_gradient() -> None:
    def hooked(model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor], steps: int) -> Trace:
        for p in model.parameters():
            p.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return train(model, loss_of, steps)

    check_like_ddp(Mlp, mlp_loss, trainer=hooked)


# --- Accumulation: no_sync -------------------------------------------------------------------------------------------


def accumulate(model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor], steps: int) -> Trace:
    """Three micro-batches per step, the first two without synchronisation; records the local gradients too."""
    trace, optimizer = Trace(), sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(3):
            with model.no_sync() if micro < 2 else contextlib.nullcontext():  # type: ignore[operator]
                loss = loss_of(model, 3 * step + micro)
                loss.backward()
            trace.losses.append(loss.detach().clone())
            trace.gradients.append(gradients(model))
        optimizer.step()
    trace.final = tensors(model)
    return trace


@on_ranks(3, slow=(2,))
@pytest.mark.parametrize("options", PLANNED_OR_SMALL)
def test_no_sync_accumulates_locally_then_averages(options: dict[str, float]) -> None:
    check_like_ddp(Mlp, mlp_loss, trainer=accumulate, wrap_options=options)


@on_ranks(2)
def test_no_sync_with_buffers() -> None:
    check_like_ddp(Cnn, cnn_loss, trainer=accumulate)


@on_ranks(2)
def test_no_sync_communicates_nothing() -> None:
    model = wrap(seeded(Mlp))
    if dist.get_rank() == 0:  # a rank alone: anything that communicates would hang or be found by the next step
        with model.no_sync():
            mlp_loss(model, 0).backward()
    model.zero_grad()
    dist.barrier()
    mlp_loss(model, 1).backward()
    base = seeded(Mlp)
    assert_mean(model, lambda m, rank: m(data(1, 5, 8, rank=rank)).square().mean(), base)


@on_ranks(2)
def test_no_sync_is_left_after_an_exception_and_nests() -> None:
    model = wrap(seeded(Mlp))
    with pytest.raises(KeyError), model.no_sync(), model.no_sync():
        raise KeyError("stop")
    with model.no_sync():
        with model.no_sync():
            pass
        mlp_loss(model, 3).backward()
    local = copy.deepcopy(seeded(Mlp))
    mlp_loss(local, 3).backward()
    assert_same_tensors(gradients(model), gradients(local), "local gradient", exact=True)
    model.zero_grad()
    mlp_loss(model, 1).backward()
    assert_mean(model, lambda m, rank: m(data(1, 5, 8, rank=rank)).square().mean(), seeded(Mlp))


@on_ranks(2)
def test_the_forward_decides_whether_no_sync_holds() -> None:
    """DDP: a backward in no_sync after a forward outside of it synchronises."""

    def trainer(model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor], steps: int) -> Trace:
        trace = Trace()
        for step in range(steps):
            model.zero_grad()
            loss = loss_of(model, step)
            with model.no_sync():  # type: ignore[operator]
                loss.backward()
            trace.gradients.append(gradients(model))
        return trace

    check_like_ddp(Mlp, mlp_loss, trainer=trainer)


# --- Unused parameters and outputs -----------------------------------------------------------------------------------


@on_ranks(3, slow=(2,))
@pytest.mark.parametrize("options", PLANNED_OR_SMALL)
def test_parameters_unused_on_all_ranks_keep_no_gradient(options: dict[str, float]) -> None:
    model = check_like_ddp(
        Branches, branches_loss(lambda rank, step: [0, 2]), ddp_options=FIND_UNUSED, wrap_options=options
    )
    assert model.branches[1].weight.grad is None
    assert model.branches[3].bias.grad is None


@on_ranks(2, 3, slow=(4,))
@pytest.mark.parametrize("options", PLANNED_OR_SMALL)
def test_parameters_unused_on_some_ranks(options: dict[str, float]) -> None:
    check_like_ddp(
        Branches,
        branches_loss(lambda rank, step: [rank % 3]),
        steps=5,
        ddp_options=FIND_UNUSED,
        wrap_options=options,
    )


@on_ranks(2, 3)
def test_unused_parameters_change_from_step_to_step() -> None:
    def used(rank: int, step: int) -> list[int]:
        return [i for i in range(4) if (rank + step * 3 + i * 7) % 4 < step % 3 + 1]

    def in_double() -> nn.Module:  # the ranks' gradients nearly cancel, so float32 shows the order of the sum
        return Branches().double()

    check_like_ddp(in_double, branches_loss(used), steps=8, ddp_options=FIND_UNUSED, wrap_options=SMALL)


@on_ranks(2)
def test_unused_parameters_with_zeroed_gradients() -> None:
    def trainer(model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor], steps: int) -> Trace:
        return train(model, loss_of, steps, set_to_none=False)

    check_like_ddp(
        Branches,
        branches_loss(lambda rank, step: [step % 3] if rank else [3, step % 3]),
        steps=6,
        ddp_options=FIND_UNUSED,
        trainer=trainer,
    )


@on_ranks(2)
def test_gradients_unused_everywhere_are_left_alone() -> None:
    """A gradient that is there already and gets no contribution on any rank keeps its value."""
    model = wrap(seeded(Branches), **SMALL)
    loss = branches_loss(lambda rank, step: [step])
    loss(model, 0).backward()
    kept = model.branches[0].weight.grad.clone()
    loss(model, 1).backward()
    torch.testing.assert_close(model.branches[0].weight.grad, kept, rtol=0, atol=0)
    assert model.branches[2].weight.grad is None


@on_ranks(2)
def test_no_parameter_used_on_one_rank() -> None:
    """A rank whose loss touches none of a submodel's parameters still takes part, through the output that it uses."""

    def loss(model: nn.Module, step: int) -> Tensor:
        output = model(data(step, 5, 8), [0])
        return output.square().mean() * (0.0 if dist.get_rank() else 1.0)

    check_like_ddp(Branches, loss, ddp_options=FIND_UNUSED)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.left = nn.Linear(8, 4)
        self.right = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.stem(inputs))
        return {"left": self.left(hidden), "right": self.right(hidden)}


@on_ranks(2, 3)
@pytest.mark.parametrize("per_rank", [False, True], ids=["same-on-all", "by-rank"])
def test_outputs_that_the_loss_does_not_use(per_rank: bool) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        key = "right" if per_rank and dist.get_rank() == 1 else "left"
        return model(data(step, 5, 8))[key].square().mean()

    check_like_ddp(TwoHeads, loss, ddp_options=FIND_UNUSED, wrap_options=SMALL)


# --- Frozen and shared parameters ------------------------------------------------------------------------------------


def half_frozen() -> nn.Module:
    model = Mlp()
    model.second.requires_grad_(False)
    return model


@on_ranks(2, 3)
def test_parameters_frozen_at_wrap() -> None:
    model = check_like_ddp(half_frozen, mlp_loss, wrap_options=SMALL)
    assert model.second.weight.grad is None


@on_ranks(3, slow=(2,))
@pytest.mark.parametrize("options", PLANNED_OR_SMALL)
def test_freezing_and_unfreezing_after_wrap(options: dict[str, float]) -> None:
    model = wrap(seeded(half_frozen), **options)
    plan = [("second", False), ("first", False), ("second", True), ("first", True), ("third", False), ("third", True)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (name, flag) in enumerate(plan * 2):
        getattr(model, name).requires_grad_(flag)
        optimizer.zero_grad()
        base = snapshot(model, Mlp)
        mlp_loss(model, step).backward()
        assert_mean(model, lambda m, rank, step=step: m(data(step, 5, 8, rank=rank)).square().mean(), base)
        optimizer.step()
    assert_replicas_identical(model)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embedding(tokens))))


def tied_loss(model: nn.Module, step: int) -> Tensor:
    tokens = data(step, 3, 5).mul(7).long().remainder(11)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


@on_ranks(2, 3)
def test_tied_weights() -> None:
    model = check_like_ddp(Tied, tied_loss, steps=5, wrap_options=SMALL)
    assert model.head.weight is model.embedding.weight


# --- Several forwards, several backwards -----------------------------------------------------------------------------


@on_ranks(3, slow=(2,))
@pytest.mark.parametrize("options", PLANNED_OR_SMALL)
def test_several_forwards_before_one_backward(options: dict[str, float]) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        first, second = model(data(step, 5, 8)), model(data(step + 10, 5, 8))
        return (first * second).mean() + model(data(step + 20, 2, 8)).square().mean()

    check_like_ddp(Mlp, loss, wrap_options=options)


@on_ranks(2)
def test_several_forwards_that_use_different_parameters() -> None:
    """Each forward uses other branches, on each rank others; one backward runs through all of them."""

    def on_rank(model: nn.Module, rank: int) -> Tensor:
        first = model(data(0, 5, 8, rank=rank), [rank])
        return (first + model(data(1, 5, 8, rank=rank), [2])).square().mean()

    model = wrap(seeded(Branches), **SMALL)
    for _ in range(3):
        model.zero_grad()
        on_rank(model, dist.get_rank()).backward()
        assert_mean(model, on_rank, seeded(Branches))


@on_ranks(2, 3)
def test_two_backwards_of_two_forwards() -> None:
    """Both forwards come first; each backward adds the mean of its own gradients."""

    def first(model: nn.Module, rank: int) -> Tensor:
        return model(data(0, 5, 8, rank=rank)).square().mean()

    def second(model: nn.Module, rank: int) -> Tensor:
        return model(data(1, 5, 8, rank=rank)).sin().mean()

    model = wrap(seeded(Mlp))
    rank = dist.get_rank()
    for _ in range(3):
        model.zero_grad()
        losses = first(model, rank), second(model, rank)
        for loss in losses:
            loss.backward()
        expected = mean_gradients(lambda: seeded(Mlp), first)
        more = mean_gradients(lambda: seeded(Mlp), second)
        total = {name: expected[name] + more[name] for name in expected}
        assert_same_tensors(gradients(model), total, "gradient", exact=False)
        assert_replicas_identical(model)


@on_ranks(2, 3)
def test_two_backwards_of_one_forward() -> None:
    def pair(model: nn.Module, rank: int) -> tuple[Tensor, Tensor]:
        output = model(data(0, 5, 8, rank=rank))
        return output.square().mean(), output.sin().mean()

    model = wrap(seeded(Mlp))
    for _ in range(3):
        model.zero_grad()
        first, second = pair(model, dist.get_rank())
        first.backward(retain_graph=True)
        assert_mean(model, lambda m, rank: pair(m, rank)[0], seeded(Mlp))
        second.backward()
        one = mean_gradients(lambda: seeded(Mlp), lambda m, rank: pair(m, rank)[0])
        two = mean_gradients(lambda: seeded(Mlp), lambda m, rank: pair(m, rank)[1])
        total = {name: one[name] + two[name] for name in one}
        assert_same_tensors(gradients(model), total, "gradient", exact=False)
        assert_replicas_identical(model)


# --- Activation checkpointing ----------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Linear layers in checkpointed segments; `repeat` runs the middle one several times (shared over segments)."""

    def __init__(self, use_reentrant: bool, repeat: int = 1) -> None:
        super().__init__()
        self.use_reentrant, self.repeat = use_reentrant, repeat
        self.first = nn.Linear(8, 8)
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = checkpoint(
            lambda x: torch.tanh(self.first(x)), inputs.requires_grad_(), use_reentrant=self.use_reentrant
        )
        for _ in range(self.repeat):
            hidden = checkpoint(lambda x: torch.tanh(self.middle(x)), hidden, use_reentrant=self.use_reentrant)
        return self.last(hidden)


@on_ranks(3, slow=(2,))
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("options", PLANNED_OR_SMALL)
def test_activation_checkpointing(use_reentrant: bool, options: dict[str, float]) -> None:
    check_like_ddp(lambda: Checkpointed(use_reentrant), mlp_loss, steps=5, wrap_options=options)


@on_ranks(2)
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_a_parameter_shared_by_checkpointed_segments(use_reentrant: bool) -> None:
    """DDP needs `static_graph=True` for this; we need nothing."""
    model = wrap(seeded(lambda: Checkpointed(use_reentrant, repeat=3)), **SMALL)
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        base = snapshot(model, lambda: Checkpointed(use_reentrant, repeat=3))
        mlp_loss(model, step).backward()
        assert_mean(model, lambda m, rank, step=step: m(data(step, 5, 8, rank=rank)).square().mean(), base)
        optimizer.step()


@on_ranks(2)
def test_checkpointing_with_accumulation() -> None:
    check_like_ddp(lambda: Checkpointed(True), mlp_loss, trainer=accumulate, wrap_options=SMALL)


# --- Gradients of gradients ------------------------------------------------------------------------------------------


@on_ranks(2, 3)
def test_gradient_penalty_on_the_inputs() -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        inputs = data(step, 5, 8).requires_grad_()
        output = model(inputs).square().sum()
        (slope,) = torch.autograd.grad(output, inputs, create_graph=True)
        return output + slope.square().sum()

    check_like_ddp(Mlp, loss, wrap_options=SMALL)


@on_ranks(2)
def test_gradient_penalty_on_the_parameters() -> None:
    """`autograd.grad` for parameters takes local gradients and communicates nothing; the backward then averages."""

    def on_rank(model: nn.Module, rank: int) -> Tensor:
        loss = model(data(0, 5, 8, rank=rank)).square().mean()
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + sum(slope.square().sum() for slope in slopes)

    model = wrap(seeded(Mlp))
    for _ in range(3):
        model.zero_grad()
        on_rank(model, dist.get_rank()).backward()
        assert_mean(model, on_rank, seeded(Mlp))


@on_ranks(2)
def test_autograd_grad_alone_does_not_disturb_the_next_step() -> None:
    model = wrap(seeded(Mlp))
    for step in range(3):
        torch.autograd.grad(mlp_loss(model, step + 9), list(model.parameters()))
        model.zero_grad()
        mlp_loss(model, step).backward()
        assert_mean(model, lambda m, rank, step=step: m(data(step, 5, 8, rank=rank)).square().mean(), seeded(Mlp))


@on_ranks(2)
def test_backward_that_creates_a_graph_yields_the_mean() -> None:
    """DDP cannot do this: it fails on an in-place write."""
    warnings.filterwarnings("ignore", message="Using backward\\(\\) with create_graph=True")
    model = wrap(seeded(Mlp))
    mlp_loss(model, 0).backward(create_graph=True)
    assert_mean(model, lambda m, rank: m(data(0, 5, 8, rank=rank)).square().mean(), seeded(Mlp))
    model.zero_grad()  # torch warns that parameters and such gradients keep each other


@on_ranks(2)
def test_backward_that_creates_a_graph_in_no_sync() -> None:
    """Without synchronisation DDP leaves gradients with their graph; so do we."""
    warnings.filterwarnings("ignore", message="Using backward\\(\\) with create_graph=True")
    results = []
    for model in (ddp(seeded(Mlp)), wrap(seeded(Mlp))):
        with model.no_sync():
            mlp_loss(model, 0).backward(create_graph=True)
        results.append(gradients(model))
        assert all(p.grad.requires_grad for p in model.parameters() if p.grad is not None)
        model.zero_grad()
    assert_same_tensors(results[1], results[0], "gradient", exact=True)
