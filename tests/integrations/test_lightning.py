"""Training in Lightning: bit for bit equal to its own DDP, every algorithm, every kind of optimization."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commlib
from commlib.replica import find
from tests.contract.subjects import Subject, of_each_kind, spread
from tests.integrations import lightning_common as common
from tests.integrations.lightning_common import pl
from tests.multi.common import assert_replicas_identical, raises_on_every_rank
from tests.multi.pool import on_ranks
from tests.thin import fast


class Scheduled(common.Module):
    """A learning rate that falls with every step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Lbfgs(common.Module):
    """An optimizer that evaluates its closure several times."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Dictionary(common.Module):
    """Its `training_step` returns a dictionary."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "batch_idx": batch_idx}


class HalfPrecise(common.Module):
    """Takes batches of float32 in whatever precision it has."""

    def loss_of(self, batch: Any) -> Tensor:
        return super().loss_of([part.to(self.head.weight.dtype) for part in batch])


def scaled() -> Any:
    """Half precision with a scaler, which Lightning itself offers for GPUs only; it skips the first steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    return pl.plugins.precision.MixedPrecision("16-mixed", "cpu", scaler)


def chosen(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value() if callable(value) else value for name, value in options.items()}


WAYS: dict[str, tuple[type[common.Module], dict[str, Any]]] = {
    "plain": (common.Module, {}),
    "submodules": (common.Submodules, {}),
    "dictionary": (Dictionary, {}),
    "accumulate": (common.Module, {"accumulate_grad_batches": 2}),
    "accumulate submodules": (common.Submodules, {"accumulate_grad_batches": 4}),
    "clip by norm": (common.Module, {"gradient_clip_val": 0.05}),
    "clip by value": (common.Module, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "bf16-mixed": (common.Module, {"precision": "bf16-mixed"}),
    "bf16-true": (HalfPrecise, {"precision": "bf16-true"}),
    "16-mixed": (common.Module, {"plugins": lambda: [scaled()]}),
    "lbfgs": (Lbfgs, {}),
    "scheduler": (Scheduled, {"max_epochs": 2}),
    "fast_dev_run": (common.Module, {"fast_dev_run": 2}),
}


#: The ways in the fast part: those that differ in commlib's behavior.
CHOSEN = ("plain", "accumulate submodules", "clip by norm", "bf16-mixed", "16-mixed", "lbfgs")


@on_ranks(2)
@pytest.mark.parametrize("way", fast(WAYS, *CHOSEN))
def test_allreduce_is_ddp_bit_for_bit(way):
    kind, options = WAYS[way]
    with common.run_on_rank():
        expected, _ = common.fit(kind(), common.ddp(), **chosen(options))
        got, _ = common.fit(kind(), common.strategy(unannounced="error"), **chosen(options))
        common.assert_equal_runs(got, expected)
        assert_replicas_identical(got)
        assert type(got) is kind


@on_ranks(2)
def test_ranks_really_have_data_of_their_own_and_begin_with_rank_0s_weights():
    """Otherwise the equality of two runs would prove little."""
    with common.run_on_rank():
        mine, _ = common.fit(common.Module(), common.strategy())
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, [float(loss) for loss in mine.losses])
        assert everyone[0] != everyone[1]
        assert_replicas_identical(mine)


# --- manual optimization ----------------------------------------------------------------------------------------------


class Manual(common.Module):
    """Makes its own steps."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.loss_of(batch)
        self.losses.append(loss.detach().clone())
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class ManualClosure(Manual):
    """Gives a closure to its optimizer's step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (self.head(self.encoder(batch[0])) - batch[1]).square().mean()
            self.manual_backward(loss)
            self.losses.append(loss.detach().clone())
            return loss

        optimizer.step(closure=closure)


class TwoBackwards(Manual):
    """Two losses, a backward each, before one step; the forwards of both come first."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        hidden = self.encoder(batch[0])
        losses = self.head(hidden).square().mean(), (self(batch[0]) - batch[1]).square().mean()
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward(losses[0])
        self.manual_backward(losses[1])
        self.losses.append(losses[1].detach().clone())
        optimizer.step()


class Gan(common.Module):
    """Two networks with an optimizer each; `every` steps of the first for one of the second."""

    every = 1
    clears = True  # gradients after a step, too

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9) for net in (self.head, self.encoder)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        judge, maker = self.optimizers()
        made = self.encoder(batch[0])
        self._step(judge, (self.head(made.detach()) - batch[1]).square().mean)
        if batch_idx % self.every == 0:
            self._step(maker, lambda: self.head(self.encoder(batch[0])).square().mean())

    def _step(self, optimizer: Any, loss_of: Any) -> None:
        self.toggle_optimizer(optimizer)
        loss = loss_of()
        self.losses.append(loss.detach().clone())
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        if self.clears:
            optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)


class GanOfFrequencies(Gan):
    every = 2


class GanThatKeeps(Gan):
    """Has the gradients of one network while the other is trained."""

    clears = False


class GanThatAccumulates(Gan):
    """Synchronises in every second step only, as `toggle_model` says."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        last = batch_idx % 2 == 1
        for optimizer, net in zip(self.optimizers(), (self.head, self.encoder), strict=True):
            with optimizer.toggle_model(sync_grad=last):
                loss = (self.head(self.encoder(batch[0])) - batch[1]).square().mean()
                self.losses.append(loss.detach().clone())
                self.manual_backward(loss)
                assert all(parameter.grad is not None for parameter in net.parameters())
            if last:
                optimizer.step()
                optimizer.zero_grad()


MANUAL = (Manual, ManualClosure, TwoBackwards, Gan, GanThatKeeps, GanOfFrequencies, GanThatAccumulates)


@on_ranks(2)
@pytest.mark.parametrize("kind", MANUAL)
def test_manual_optimization_is_ddps_bit_for_bit(kind):
    with common.run_on_rank():
        expected, _ = common.fit(kind(), common.ddp(find_unused_parameters=True), max_epochs=2)
        got, _ = common.fit(kind(), common.strategy(unannounced="error"), max_epochs=2)
        common.assert_equal_runs(got, expected)
        assert spread(got) == 0


class Unannounced(Manual):
    """Forgets `manual_backward`."""

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)


@on_ranks(2)
def test_a_backward_past_manual_backward_is_an_error_where_it_is_to_be():
    with common.run_on_rank(), pytest.raises(commlib.ConfigError, match="expect_backward"):
        common.fit(Unannounced(), common.strategy(unannounced="error"))


# --- algorithms -------------------------------------------------------------------------------------------------------


class Subjected(common.Module):
    """A module with the optimizer that an algorithm needs."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.subject = subject

    def configure_optimizers(self) -> Any:
        return self.subject.optimizer(list(self.parameters()))


class SubjectedByHand(Subjected, Manual):
    """The same with manual optimization."""


@on_ranks(2)
@pytest.mark.parametrize("name", of_each_kind(commlib.algorithms.list()))
def test_every_algorithm_trains_and_leaves_all_ranks_the_same_model(name):
    with common.run_on_rank():
        subject = Subject(name)
        for kind in (Subjected, SubjectedByHand):
            module = kind(subject)
            before = {key: value.clone() for key, value in module.state_dict().items()}
            _, trainer = common.fit(module, common.strategy(subject.algorithm(), unannounced="error"), max_epochs=2)
            assert trainer.global_step == 2 * common.STEPS
            assert type(module) is kind
            assert find(module) is None
            assert spread(module) == 0
            for key, value in module.state_dict().items():
                assert torch.isfinite(value).all()
                assert not torch.equal(value, before[key]), f"{key} was not trained"


def trained_by_hand(subject: Subject, epochs: int) -> nn.Module:
    """Train as the trainer does, without it: a loop over `commlib.wrap`."""
    module = Subjected(subject)
    for parameter in module.parameters():
        dist.broadcast(parameter.data, 0)
    optimizer = module.configure_optimizers()
    options = {"timeout": common.TIMEOUT_S, "bucket_cap_mb": common.SMALL_BUCKET_MB}
    commlib.wrap(module, subject.algorithm(), optimizer=optimizer, **options)
    for _ in range(epochs):
        for inputs, targets in common.own_loader():
            optimizer.zero_grad()
            (module(inputs) - targets).square().mean().backward()
            optimizer.step()
    commlib.synchronize(module)
    return commlib.unwrap(module)


@on_ranks(2)
@pytest.mark.parametrize("name", of_each_kind(commlib.algorithms.list()))
def test_every_algorithm_goes_the_way_of_a_plain_loop_bit_for_bit(name):
    subject = Subject(name)
    if subject.runs_by_clocks:
        pytest.skip("two runs of it differ")
    with common.run_on_rank():
        expected = trained_by_hand(subject, 2)
        got = Subjected(subject)
        options = {"max_epochs": 2, "use_distributed_sampler": False}
        common.fit(got, common.strategy(subject.algorithm()), data=common.own_loader(), **options)
        common.assert_equal(dict(got.named_parameters()), dict(expected.named_parameters()))


@on_ranks(2)
@pytest.mark.parametrize("name", ["topk", "local_sgd", "hogwild", "decentralized"])
def test_several_optimizers_train_under_relaxed_algorithms(name):
    """One of which makes a step in every second batch."""
    with common.run_on_rank():
        module = GanOfFrequencies()
        before = {key: value.clone() for key, value in module.state_dict().items()}
        common.fit(module, common.strategy(Subject(name).algorithm(), unannounced="error"), max_epochs=2)
        assert spread(module) == 0
        assert not any(torch.equal(value, before[key]) for key, value in module.state_dict().items())


@on_ranks(2)
def test_gradients_that_are_kept_while_another_network_is_trained_are_refused_where_they_would_count_twice():
    with common.run_on_rank(), raises_on_every_rank(commlib.ConfigError, "zero_grad"):
        common.fit(GanThatKeeps(), common.strategy(commlib.algorithms.SignSGD(feedback=False)))


class Ordered(common.Module):
    """Records the effects of clipping and hooks at the optimizer's step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        self.order.append("hook")
        optimizer.register_step_post_hook(self._after) if not self.losses[1:] else None

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.order.append("clip")
        super().configure_gradient_clipping(optimizer, *args, **kwargs)

    def _after(self, *_: Any) -> None:
        self.order.append("step")
        largest = max(float(p.grad.abs().max()) for p in self.parameters() if p.grad is not None)
        assert 0 < largest <= 0.01


@on_ranks(2)
@pytest.mark.parametrize("algorithm", ["allreduce", "async_sgd"])
def test_hooks_and_clipping_come_between_backward_and_step(algorithm):
    """Also where the closure runs before the step, as `async_sgd` needs the gradients there."""
    with common.run_on_rank():
        clipping = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
        options = {"push": "gradients"} if algorithm == "async_sgd" else {}
        chosen = commlib.algorithms.get(algorithm)(**options)
        module, _ = common.fit(Ordered(), common.strategy(chosen), **clipping)
        assert module.order == ["hook", "clip", "step"] * common.STEPS
        assert len(module.losses) == common.STEPS
