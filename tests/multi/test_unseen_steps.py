"""Steps that the optimizer given to `wrap` does not make: counted, refused, or followed by `set_optimizer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commlib
from commlib.algorithms import OneBitAdam
from commlib.engine.unseen import NUM_CHANGES
from commlib.errors import ConfigError
from commlib.optim import FrozenVarianceAdam
from tests.multi.common import (
    Averaging,
    Mlp,
    assert_replicas_identical,
    data,
    mlp_loss,
    raises_on_every_rank,
    seeded,
    sgd,
    train,
    wrap,
)
from tests.multi.pool import on_ranks


def steps_with(model: nn.Module, optimizer: Any, count: int) -> None:
    for step in range(count):
        optimizer.zero_grad()
        mlp_loss(model, step).backward()
        optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("algorithm", ["diloco", "async_averaging"])
def test_a_wrapper_that_changes_the_weights_after_the_given_optimizer_is_refused(algorithm: str) -> None:
    model = seeded(Mlp)
    base = sgd(model)
    wrap(model, algorithm=algorithm, optimizer=base)
    with raises_on_every_rank(ConfigError, "Averaging.step", "SGD", "in the middle of a step"):
        steps_with(model, Averaging(base), 3)


@on_ranks(2)
def test_a_wrapper_is_left_as_it_was() -> None:
    for algorithm, changes in (("local_sgd", False), ("allreduce", True)):
        model = seeded(Mlp)
        base = sgd(model)
        wrap(model, algorithm=algorithm, optimizer=base)
        wrapper = Averaging(base, changes=changes)
        steps_with(model, wrapper, 30)
        assert "step" not in vars(wrapper)
        assert commlib.stats(model).rounds == (3 if algorithm == "local_sgd" else 30)


class Lookahead(torch.optim.Optimizer):
    """Two optimizers in one, as libraries have it: the outer one calls the hooks of torch's optimizers, too."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__([{"params": group["params"]} for group in optimizer.param_groups], {})
        self.optimizer = optimizer

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.999)


@on_ranks(2)
def test_an_optimizer_around_another_one_is_the_one_that_steps() -> None:
    model = seeded(Mlp)
    outer = Lookahead(sgd(model))
    wrap(model, algorithm=commlib.algorithms.LocalSGD(period=2), optimizer=outer)
    for step in range(6):
        train(model, mlp_loss, 1, outer)
        everyone = [torch.empty_like(model.first.bias) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, model.first.bias.detach())
        assert torch.equal(everyone[0], everyone[1]) == (step % 2 == 1), "rounds come at the end of the whole step"


class TwoPoints(torch.optim.SGD):
    """An optimizer that keeps the weights at another point in evaluation, as schedule-free ones do."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


@on_ranks(2)
@pytest.mark.parametrize(("algorithm", "is_refused"), [("diloco", True), ("async_sgd", True), ("topk", False)])
def test_optimizers_with_two_points(algorithm: str, is_refused: bool) -> None:
    model = seeded(Mlp)
    optimizer = TwoPoints(model.parameters(), 0.1)
    if is_refused:
        with raises_on_every_rank(ConfigError, "TwoPoints", "on gradients"):
            wrap(model, algorithm=algorithm, optimizer=optimizer)
    else:
        wrap(model, algorithm=algorithm, optimizer=optimizer)
        train(model, mlp_loss, 3, optimizer)
        assert_replicas_identical(model)


@on_ranks(2)
def test_a_gan_whose_parts_step_in_turns_trains() -> None:
    generator, critic = seeded(lambda: nn.Linear(4, 4)), seeded(lambda: nn.Linear(4, 1), seed=3)
    optimizers = {part: torch.optim.SGD(part.parameters(), 0.05) for part in (generator, critic)}
    for part, optimizer in optimizers.items():
        wrap(part, algorithm=commlib.algorithms.LocalSGD(period=2), optimizer=optimizer)
    for step in range(4):
        for turn in range(NUM_CHANGES + 2):  # of the critic, each through the generator
            optimizers[critic].zero_grad()
            (critic(generator(data(step * 20 + turn, 5, 4))) - critic(data(turn, 5, 4))).mean().backward()
            optimizers[critic].step()
            with torch.no_grad():  # clipped, as Wasserstein's are
                for parameter in critic.parameters():
                    parameter.clamp_(-0.5, 0.5)
        optimizers[generator].zero_grad()
        (-critic(generator(data(step, 5, 4))).mean()).backward()
        optimizers[generator].step()
    assert (commlib.stats(generator).rounds, commlib.stats(critic).rounds) == (2, 2 * (NUM_CHANGES + 2))


@on_ranks(2)
def test_half_steps_of_an_allreduce_train() -> None:
    model = seeded(Mlp)
    base = sgd(model)
    wrap(model, optimizer=base)
    for step in range(NUM_CHANGES + 4):
        with model.no_sync():
            mlp_loss(model, step).backward()
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=0.01)
        base.zero_grad()
        mlp_loss(model, step).backward()
        with torch.no_grad():
            for parameter, before in zip(model.parameters(), kept, strict=True):
                parameter.copy_(before)
        base.step()
        base.zero_grad()
    assert_replicas_identical(model)


# --- set_optimizer ----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_optimizers_that_cannot_be_set_are_refused_and_the_old_one_goes_on() -> None:
    model = seeded(Mlp)
    with pytest.raises(ConfigError, match="not wrapped"):
        commlib.set_optimizer(model, sgd(model))
    known = sgd(model)
    wrap(model, algorithm=commlib.algorithms.LocalSGD(period=2), optimizer=known)
    other: Callable[..., Any] = torch.optim.AdamW if dist.get_rank() else torch.optim.SGD
    for optimizer, words in (
        (None, "got None"),
        (torch.optim.SGD(model.first.parameters(), 0.1), "are in no group of the optimizer"),
        (TwoPoints(model.parameters(), 0.1), "on gradients"),
        (other(model.parameters(), lr=0.1), "differ between ranks"),
    ):
        with raises_on_every_rank(ConfigError, words):
            commlib.set_optimizer(model, optimizer)  # type: ignore[arg-type]
    train(model, mlp_loss, 4, known)
    assert commlib.stats(model).rounds == 2
    new = torch.optim.AdamW(model.parameters())
    commlib.set_optimizer(model, new)
    train(model, mlp_loss, 4, new)
    assert commlib.stats(model).rounds == 4


@on_ranks(2)
def test_the_optimizer_of_onebit_adam_after_its_warm_up_is_known_to_be_frozen() -> None:
    model = seeded(Mlp)
    first, second = (FrozenVarianceAdam(model.parameters(), lr=1e-3) for _ in range(2))
    wrap(model, algorithm=OneBitAdam(warmup_steps=2), optimizer=first)
    train(model, mlp_loss, 1, first)
    commlib.set_optimizer(model, second)  # in the warm-up any will do
    train(model, mlp_loss, 3, second)
    with raises_on_every_rank(ConfigError, "not frozen", "load_state_dict"):
        commlib.set_optimizer(model, first)
    first.load_state_dict(second.state_dict())
    commlib.set_optimizer(model, first)
    train(model, mlp_loss, 3, first)
    assert_replicas_identical(model)
