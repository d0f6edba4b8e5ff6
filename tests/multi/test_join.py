"""`join` with uneven inputs: torch's Join semantics, with DDP as the oracle."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import commlib
from tests.multi.common import (
    SMALL_BUCKET_MB,
    Branches,
    Cnn,
    Mlp,
    Trace,
    assert_replicas_identical,
    assert_same_tensors,
    assert_same_trace,
    cnn_loss,
    data,
    ddp,
    gradients,
    is_exact,
    mlp_loss,
    seeded,
    sgd,
    tensors,
    train,
    wrap,
)
from tests.multi.pool import on_ranks

SMALL = {"bucket_cap_mb": SMALL_BUCKET_MB}


def num_inputs(rank: int) -> int:
    return 2 + 2 * rank


def joined(model: Any, loss_of: Callable[[nn.Module, int], Tensor], **options: Any) -> Trace:
    """Train on more inputs the higher the rank, inside `join`, and then two more steps with all ranks."""
    trace, optimizer = Trace(), sgd(model)
    with model.join(**options):
        for step in range(num_inputs(dist.get_rank())):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            trace.losses.append(loss.detach().clone())
            trace.gradients.append(gradients(model))
            optimizer.step()
    trace.final = tensors(model)
    return trace


@on_ranks(2, 3)
@pytest.mark.parametrize("by_initial", [True, False], ids=["by-initial-size", "by-effective-size"])
def test_uneven_inputs(by_initial: bool) -> None:
    original = seeded(Mlp)
    expected = joined(ddp(copy.deepcopy(original)), mlp_loss, divide_by_initial_world_size=by_initial)
    model = wrap(original, **SMALL)
    got = joined(model, mlp_loss, divide_by_initial_world_size=by_initial)
    assert_same_trace(got, expected, exact=is_exact())
    model.zero_grad()
    assert_replicas_identical(model)
    train(model, mlp_loss, 2)
    assert_replicas_identical(model)


@on_ranks(2, 3)
def test_uneven_inputs_with_buffers() -> None:
    """Parameters go the way of DDP; buffers end as those of a rank that joined last, the same everywhere.

    Whose buffers count while some ranks have joined is not compared: DDP takes the highest rank that is left.
    """
    original = seeded(Cnn)
    expected = joined(ddp(copy.deepcopy(original)), cnn_loss)
    model = wrap(original, **SMALL)
    got = joined(model, cnn_loss)
    assert_same_trace(got, expected, exact=is_exact(), without={name for name, _ in model.named_buffers()})
    model.zero_grad()
    assert_replicas_identical(model)
    assert int(model.norm.num_batches_tracked) == num_inputs(dist.get_world_size() - 1)


@on_ranks(2)
def test_uneven_inputs_with_unused_parameters() -> None:
    """A rank that has joined counts as zeros for parameters that others use, and as nothing for those that none uses.

    DDP is no oracle here: its joined ranks go on announcing the parameters that their last step used.
    """

    def used(rank: int, step: int) -> list[int]:
        return [(step + rank) % 3]

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        return model(data(step, 5, 8, rank=rank), used(rank, step)).square().mean()

    rank, trace = dist.get_rank(), Trace()
    model = wrap(seeded(Branches), **SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(num_inputs(rank)):
            model.zero_grad()
            loss(model, step, rank).backward()
            trace.gradients.append(gradients(model))
            optimizer.step()
    oracle = seeded(Branches)
    optimizer = torch.optim.SGD(oracle.parameters(), lr=0.1)
    for step in range(num_inputs(1)):
        oracle.zero_grad()
        for active in [rank for rank in range(2) if step < num_inputs(rank)]:
            (loss(oracle, step, active) / 2).backward()
        if step < num_inputs(rank):
            assert_same_tensors(trace.gradients[step], gradients(oracle), f"gradient of step {step}", exact=False)
        optimizer.step()
    assert_same_tensors(tensors(model), tensors(oracle), "final value", exact=False)


@on_ranks(2)
def test_uneven_inputs_with_accumulation() -> None:
    def accumulating(model: Any) -> dict[str, Tensor]:
        optimizer = sgd(model)
        with model.join():
            for step in range(num_inputs(dist.get_rank())):
                optimizer.zero_grad()
                with model.no_sync():
                    mlp_loss(model, 10 + step).backward()
                mlp_loss(model, step).backward()
                optimizer.step()
        return tensors(model)

    expected = accumulating(ddp(seeded(Mlp)))
    assert_same_tensors(accumulating(wrap(seeded(Mlp))), expected, "final value", exact=True)


@on_ranks(2)
def test_join_where_all_inputs_are_even() -> None:
    model = wrap(seeded(Mlp))
    with model.join():
        train(model, mlp_loss, 3)
    oracle = ddp(seeded(Mlp))
    train(oracle, mlp_loss, 3)
    assert_same_tensors(tensors(model), tensors(oracle), "final value", exact=True)


@on_ranks(2)
def test_join_can_be_switched_off() -> None:
    model = wrap(seeded(Mlp))
    with model.join(enable=False):
        train(model, mlp_loss, 3)
    assert_replicas_identical(model)


@on_ranks(2, 3)
def test_throwing_on_early_termination_reaches_all_ranks() -> None:
    model = wrap(seeded(Mlp))
    with pytest.raises(RuntimeError, match="exhausted"):
        joined(model, mlp_loss, throw_on_early_termination=True)


@on_ranks(2)
def test_one_rank_has_no_inputs_at_all() -> None:
    model = wrap(seeded(Mlp))
    optimizer = sgd(model)
    with model.join():
        for step in range(3 * dist.get_rank()):
            optimizer.zero_grad()
            mlp_loss(model, step).backward()
            optimizer.step()
    model.zero_grad()
    assert_replicas_identical(model)
    alone = seeded(Mlp)
    optimizer = sgd(alone)
    for step in range(3):
        optimizer.zero_grad()
        (alone(data(step, 5, 8, rank=1)).square().mean() / 2).backward()
        optimizer.step()
    assert_same_tensors(tensors(model), tensors(alone), "final value", exact=False)


@on_ranks(3)
def test_a_rank_without_inputs_has_loaded_state() -> None:
    model = wrap(seeded(Mlp), **SMALL)
    train(model, mlp_loss, 3)
    commlib.load_state_dict(model, commlib.state_dict(model))
    with model.join():
        for step in range(dist.get_rank()):
            model.zero_grad()
            mlp_loss(model, step).backward()
    train(model, mlp_loss, 2)
    assert_replicas_identical(model)


@on_ranks(2)
def test_two_models_join_together() -> None:
    def both(one: Any, two: Any) -> dict[str, Tensor]:
        optimizers = sgd(one), sgd(two)
        with Join([one, two]):
            for step in range(num_inputs(dist.get_rank())):
                one.zero_grad()
                two.zero_grad()
                mlp_loss(one, step).backward()
                mlp_loss(two, step + 30).backward()
                for optimizer in optimizers:
                    optimizer.step()
        return tensors(one) | {f"two.{name}": tensor for name, tensor in tensors(two).items()}

    expected = both(ddp(seeded(Mlp)), ddp(seeded(Mlp, seed=8)))
    got = both(wrap(seeded(Mlp)), wrap(seeded(Mlp, seed=8)))
    assert_same_tensors(got, expected, "final value", exact=False)


@on_ranks(2)
def test_an_exception_inside_join_comes_out() -> None:
    model = wrap(seeded(Mlp))
    with pytest.raises(KeyError), model.join():
        raise KeyError("stop")
