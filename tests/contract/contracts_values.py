"""Contracts about values: an algorithm's result from the gradients, or weights, of all ranks, by its declared class.

One for each class: exact, 8 bits, error feedback, other means of gradients, weights, and asynchronous exchange.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import commlib
from commlib.algorithms import Weights
from tests.contract.subjects import Mlp, Subject, Training, build, data, everyones, joined

Contract = Callable[[Subject], None]

#: Which algorithms a contract concerns, by its name; the others keep it as they are.
CONCERNS: dict[str, Callable[[Subject], bool]] = {}

#: Steps with gradients that differ from one to the next.
_STEPS = 6
#: Steps with gradients of zero, in which unsent values of the steps before are sent.
_ROUNDS_OF_ZEROS = 60
#: The part that may still be unsent after them, for algorithms that never send everything, such as one of one bit.
_STILL_OWED = 0.05
#: Steps, or exchanges, after which every rank must count in the result.
_PATIENCE = 200
#: Steps that show a momentum.
_LONG_RUN = 12
#: The least factor of the mean for a rank's own elements, and the largest, which a coarse code may cause.
_COUNTS, _ROUNDED_UP = 0.3, 1.25
#: The largest factor by which an outer momentum may lengthen the mean path, such as 0.7 / (1 - 0.9).
_OUTER = 8.0
#: So small that the first weights are far larger than all steps together.
_LR = 1e-3
#: Limits of the remaining loss, and of the change by late updates, both relative; and a guard against hangs.
_LOSS, _LATE = 0.5, 0.4
_LIMIT_S = 60.0


def _concerning(concerned: Callable[[Subject], bool]) -> Callable[[Contract], Contract]:
    """Let a contract hold for the algorithms of one class."""

    def mark(contract: Contract) -> Contract:
        CONCERNS[contract.__name__.removeprefix("contract_")] = concerned

        @functools.wraps(contract)
        def held(subject: Subject) -> None:
            if concerned(subject):
                contract(subject)

        return held

    return mark


class Fed(Mlp):
    """An `Mlp` whose gradients are given: its loss is their product with the parameters."""

    def forward(self, gradients: Tensor) -> Tensor:
        parameters = list(self.parameters())
        pieces = gradients.split([parameter.numel() for parameter in parameters])
        return sum(((p.reshape(-1) * g).sum() for p, g in zip(parameters, pieces, strict=True)), torch.zeros(()))


class Feeding:
    """Training with gradients that are given.

    Every element counts in the gradient of one rank alone, or of all.

    Args:
        subject: The algorithm.
        lr: The learning rate; of SGD, without momentum.
    """

    def __init__(self, subject: Subject, lr: float = _LR) -> None:
        self.training: Training = subject.start(build(Fed), lr=lr)
        for group in self.training.optimizer.param_groups:
            group["momentum"] = 0.0  # of SGD; others do not look at it
        self.num_ranks = dist.get_world_size()
        self.numel = sum(parameter.numel() for parameter in self.training.model.parameters())
        self._owners = torch.arange(self.numel) % (self.num_ranks + 1)
        self.groups = [self._owners == owner for owner in range(self.num_ranks + 1)]

    def is_own(self, rank: int) -> Tensor:
        """Return which elements count in a rank's gradient, `[numel] bool`."""
        return (self._owners == rank) | (self._owners == self.num_ranks)

    def gradient(self, step: int, rank: int) -> Tensor:
        """Return the gradient of a rank in a step, `[numel] float32`."""
        return torch.where(self.is_own(rank), data(step, rank, self.numel), 0.0)

    def mean(self, step: int) -> Tensor:
        """Return the mean of all ranks' gradients, `[numel] float64`."""
        return torch.stack([self.gradient(step, rank).double() for rank in range(self.num_ranks)]).mean(dim=0)

    def parts(self, values: Tensor, mean: Tensor) -> list[float]:
        """Return how many times the mean is in values, for the elements of each rank and those of all."""
        return [float(values[own] @ mean[own] / (mean[own] @ mean[own])) for own in self.groups]

    def step(self, gradient: Tensor) -> Tensor:
        """Make a step with a gradient; return the gradient that the optimizer saw, `[numel] float64`."""
        training = self.training
        training.optimizer.zero_grad()
        training.model(gradient).backward()
        seen = joined([parameter.grad for parameter in training.model.parameters()])
        training.optimizer.step()
        training.num_steps += 1
        return seen


def _rank() -> int:
    return dist.get_rank()


def _is_mean(subject: Subject) -> bool:
    return subject.on_gradients and subject.exactness == "exact"


@_concerning(_is_mean)
def contract_mean_of_gradients(subject: Subject) -> None:
    """An exact algorithm leaves the mean of all ranks' gradients, in every step."""
    feeding = Feeding(subject)
    for step in range(_STEPS):
        seen = feeding.step(feeding.gradient(step, _rank()))
        torch.testing.assert_close(seen, feeding.mean(step), rtol=1e-6, atol=1e-6)


def _is_narrow(subject: Subject) -> bool:
    return subject.on_gradients and subject.exactness == "8bit"


@_concerning(_is_narrow)
def contract_mean_within_8_bits(subject: Subject) -> None:
    """An algorithm of 8 bits leaves the mean of all ranks' gradients, but for two roundings of 8 bits each.

    A code of 8 bits has 127 steps up to the largest magnitude a, and rounds by less than one (by half of one to
    nearest). Each rank's gradient is rounded, and then their mean.
    """
    feeding = Feeding(subject)
    for step in range(2 * _STEPS):
        seen, mean = feeding.step(feeding.gradient(step, _rank())), feeding.mean(step)
        largest = [float(feeding.gradient(step, rank).abs().max()) for rank in range(feeding.num_ranks)]
        first = 1.01 * sum(largest) / len(largest) / 127
        bound = first + 1.01 * (float(mean.abs().max()) + first) / 127
        far = float((seen - mean).abs().max())
        assert far <= bound, f"step {step}: {far} from the mean, expected at most {bound}"


def _remembers(subject: Subject) -> bool:
    is_plain = subject.on_gradients and subject.channel.accumulates and not subject.cls.has_momentum
    return is_plain and subject.exactness == "compensated"


@_concerning(_remembers)
def contract_nothing_is_lost(subject: Subject) -> None:
    """Error feedback delays values and loses none: after gradients of zero, sent and given gradients have equal sums.

    While values still arrive, a small part may be unsent; the mean may be rounded to 16 bits.
    """
    feeding = Feeding(subject)
    total, seen, moved = (torch.zeros(feeding.numel).double() for _ in range(3))
    last = seen
    for step in range(_STEPS + _ROUNDS_OF_ZEROS):
        gradient = feeding.gradient(step, _rank()) if step < _STEPS else torch.zeros(feeding.numel)
        last = feeding.step(gradient)
        total += feeding.mean(step) if step < _STEPS else 0
        seen += last
        moved += last.abs()
    comes = bool(last.norm() > 1e-6 * total.norm())
    bound = float(_STILL_OWED * total.norm() if comes else 2**-9 * moved.norm())
    far = float((seen - total).norm())
    assert far <= bound, f"{far} of {float(total.norm())} is lost, expected at most {bound}"


def _smooths(subject: Subject) -> bool:
    return subject.on_gradients and subject.exactness in ("compensated", "any") and not _remembers(subject)


@_concerning(_smooths)
def contract_steady_gradients(subject: Subject) -> None:
    """For constant gradients, the sum of the results never exceeds that of the means, and reaches it in the long run.

    Gradients with momentum count up to once per later step. Elements that only one rank has are
    checked separately, so that each rank counts.
    """
    feeding = Feeding(subject)
    gradient, mean = feeding.gradient(0, _rank()), feeding.mean(0)
    for _ in range(subject.channel.warmup_steps):
        feeding.step(gradient)
    seen, parts = torch.zeros(feeding.numel).double(), [0.0]
    for step in range(1, _PATIENCE + 1):
        seen += feeding.step(gradient)
        parts = feeding.parts(seen / step, mean)
        most = _ROUNDED_UP * ((step + 1) / 2 if subject.cls.has_momentum else 1.0)
        assert max(parts) <= most, f"after {step} steps {parts} times the mean, expected at most {most}"
        if step >= _LONG_RUN and min(parts) >= _COUNTS:
            return
    raise AssertionError(f"after {_PATIENCE} steps {parts} times the mean, expected at least {_COUNTS}")


def _keeps_mean(subject: Subject) -> bool:
    return subject.algorithm().keeps_mean


@_concerning(_keeps_mean)
def contract_mean_of_weights(subject: Subject) -> None:
    """Rounds that keep the mean of the weights keep it: the ranks' mean goes where SGD with mean gradients goes.

    Replicas that are fed identical data stay as local training leaves them.
    """
    steps = subject.channel.warmup_steps + 3 * subject.channel.cycle + 1
    apart, start = Feeding(subject), joined(build(Fed).parameters())
    for step in range(steps):
        apart.step(apart.gradient(step, _rank()))
    commlib.synchronize(apart.training.model)  # takes all rounds that are under way, and keeps the mean
    assert commlib.stats(apart.training.model).rounds > subject.channel.warmup_steps, "there was no round"
    expected = start - _LR * torch.stack([apart.mean(step) for step in range(steps)]).sum(dim=0)
    torch.testing.assert_close(apart.training.flat(), expected, rtol=1e-5, atol=1e-6)
    if not subject.channel.keeps_step:
        return  # a round may hold the weights of different steps
    same = Feeding(subject)
    for step in range(steps):
        same.step(same.gradient(step, 0))
    expected = start - _LR * torch.stack([same.gradient(step, 0).double() for step in range(steps)]).sum(dim=0)
    torch.testing.assert_close(same.training.flat(), expected, rtol=1e-5, atol=1e-6)


def _moves_weights(subject: Subject) -> bool:
    return type(subject.channel) is Weights and subject.channel.keeps_step and not _keeps_mean(subject)


@_concerning(_moves_weights)
def contract_steady_training(subject: Subject) -> None:
    """Where gradients stay, every replica goes the way of their mean: in the long run each rank counts, none too much.

    An outer momentum may make the way several times as long.
    """
    feeding, start = Feeding(subject), joined(build(Fed).parameters())
    gradient, mean, parts = feeding.gradient(0, _rank()), feeding.mean(0), [0.0]
    longest = max(float(feeding.gradient(0, rank).norm()) for rank in range(feeding.num_ranks))
    for step in range(1, _PATIENCE + 1):
        feeding.step(gradient)
        moved = (start - feeding.training.flat()) / (_LR * step)
        parts = feeding.parts(moved, mean)
        far = float(moved.norm()) / longest
        assert far <= _OUTER, f"after {step} steps {far} times as far as alone, expected at most {_OUTER}"
        if step >= _LONG_RUN and _everywhere(min(parts) >= _COUNTS):
            return
    raise AssertionError(f"after {_PATIENCE} steps {parts} times the mean, expected at least {_COUNTS}")


def _everywhere(holds: bool) -> bool:
    return bool(everyones(torch.tensor([holds])).all())


def _has_no_steps(subject: Subject) -> bool:
    return not subject.on_gradients and not subject.channel.keeps_step


@_concerning(_has_no_steps)
def contract_learns_from_all(subject: Subject) -> None:
    """With asynchronous exchange, every rank approaches the optimum for all ranks' data, step by step.

    The loss of a rank is half the squared distance of its own elements to a target. The learning rate is near the value
    at which SGD on the whole loss would overshoot. Elements that only one rank has overshoot by late updates alone.
    """
    feeding, start = Feeding(subject, lr=0.9 / dist.get_world_size()), joined(build(Fed).parameters())
    way = data(0, 0, feeding.numel).double()
    deadline = time.monotonic() + _LIMIT_S
    while True:
        gone = feeding.training.flat() - start
        parts = feeding.parts(gone, way)
        assert -_LATE <= min(parts[:-1]) <= max(parts[:-1]) <= 1 + _LATE, f"{parts} of the way to the target"
        loss = float((way - gone).square().sum() / way.square().sum())
        if _everywhere(loss <= _LOSS and min(parts) >= _COUNTS):
            return
        rounds = commlib.stats(feeding.training.model).rounds
        assert not _everywhere(rounds >= _PATIENCE), f"after {rounds} exchanges {parts} of the way to the target"
        assert time.monotonic() < deadline, f"after {_LIMIT_S} s and {rounds} exchanges {parts} of the way"
        feeding.step(torch.where(feeding.is_own(_rank()), (gone - way).float(), 0.0))
