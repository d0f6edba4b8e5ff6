"""0/1 Adam against NumPy: its policies, one bit with error feedback, local steps."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import commlib
from commlib.algorithms import CompressionPolicy, ZeroOneAdam
from commlib.errors import ConfigError
from commlib.kernels.reference import BLOCK_CODECS
from commlib.optim import FrozenVarianceAdam
from tests.multi.common import SMALL_BUCKET_MB, Mlp, mlp_loss, raises_on_every_rank, seeded, wrap
from tests.multi.equations import against_equations
from tests.multi.pool import on_ranks
from tests.multi.relaxation_references import ByName, QuantizedReference
from tests.multi.test_relaxations import assert_replicas_identical, gradients_of_all_ranks, numels
from tests.multi.test_simulated_bytes import simulated_bytes

EVERYTHING = CompressionPolicy()
LOCAL = {"warmup_steps": 3, "local_after": 14, "interval_doubling": 8, "longest_interval": 8}
VARIANCE = [0, 1, 2, 3, 5, 7, 9]  # until the next, 13, is the last one before local steps, or on to these:
LATER = [13, 17, 21, 29, 37, 45]
ROUNDS = [*range(14), 15, 17, 19, 21, 25, 29, 37, 45]
STEPS = 50
LR, B1, B2, EPS, DECAY = 0.01, 0.8, 0.95, 1e-8, 0.1


def flats(model: torch.nn.Module) -> ByName:
    return {n: p.detach().numpy().reshape(-1).astype(np.float64) for n, p in model.named_parameters()}


def gathered(value: ByName) -> list[ByName]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def lr_at(step: int) -> float:
    """Return a learning rate that begins at zero, as schedulers let it, and falls."""
    return LR * min(step / 5, 1.0) * 0.97**step


class Reference:
    """Algorithm 1 of the paper with the deviations of `ZeroOneAdam`, of all ranks at once.

    Args:
        first: The first weights, by name.
        variance: Steps in which the variance is updated.
        rounds: Steps with a round.
    """

    def __init__(self, first: ByName, variance: list[int], rounds: list[int]) -> None:
        size = dist.get_world_size()
        self.average = QuantizedReference(BLOCK_CODECS["onebit"], size, numels(), feedback=True)
        self.variance, self.rounds = variance, rounds
        self.common = {n: value.copy() for n, value in first.items()}
        self.x = [copy.deepcopy(first) for _ in range(size)]
        self.m = [{n: np.zeros(len(x)) for n, x in first.items()} for _ in range(size)]
        self.s = copy.deepcopy(self.m)
        self.v = copy.deepcopy(self.m[0])
        self.span, self.last_span, self.num_updates = 0.0, 0.0, 0

    def step(self, step: int, by_rank: list[ByName], buckets: list[Any]) -> None:
        """Make optimizer step number `step`, from 0 on."""
        lr = lr_at(step)
        if step in self.variance:
            self.num_updates += 1
            for n in self.v:
                g = np.mean([own[n] for own in by_rank], axis=0, dtype=np.float64)
                self.v[n] = B2 * self.v[n] + (1 - B2) * g**2
                mean = B1 * self.m[0][n] + (1 - B1) * g
                self._go(n, mean, lr, step, np.inf)
            return
        self.span += lr
        for own, m, s in zip(by_rank, self.m, self.s, strict=True):
            for n in m:
                m[n] = B1 * m[n] + (1 - B1) * own[n]
                s[n] = s[n] + lr * m[n]
        if step not in self.rounds:
            for rank, m in enumerate(self.m):
                for n in m:
                    self.x[rank][n] = self.x[rank][n] * (1 - lr * DECAY) - lr * self._direction(n, m[n], step)
            self.common = {n: value * (1 - lr * DECAY) for n, value in self.common.items()}
            return
        sent = [{n: (s[n] / self.span).astype(np.float32) for n in s} for s in self.s]
        decay = self.last_span / self.span if self.last_span else 1.0
        mean = self.average.step(step, sent, buckets, decay)
        for n in mean:
            self._go(n, mean[n].astype(np.float64), lr, step)
        self.last_span, self.span = self.span, 0.0

    def _go(self, n: str, mean: np.ndarray, lr: float, step: int, bound: float | None = None) -> None:
        span = lr if bound else self.span
        self.common[n] = self.common[n] * (1 - lr * DECAY) - span * self._direction(n, mean, step, bound)
        for x, m, s in zip(self.x, self.m, self.s, strict=True):
            x[n], m[n], s[n] = self.common[n].copy(), mean.copy(), np.zeros(len(mean))

    def _direction(self, n: str, mean: np.ndarray, step: int, bound: float | None = None) -> np.ndarray:
        bound = bound or max(1.0, (1 - B1) / (1 - B2) ** 0.5)
        root = np.sqrt(self.v[n] / (1 - B2**self.num_updates)) + EPS
        return np.clip(mean / (1 - B1 ** (step + 1)) / root, -bound, bound)

    def follow(self, model: torch.nn.Module, optimizer: FrozenVarianceAdam) -> None:
        """Take this rank's momenta: a value that rounds to the other code by a last bit would hide all that follows."""
        rank = dist.get_rank()
        for kind, own in (("x", flats(model)), ("m", {n: optimizer.momentum(p) for n, p in model.named_parameters()})):
            flat = {n: np.asarray(value).reshape(-1).astype(np.float64) for n, value in own.items()}
            setattr(self, kind, gathered(flat))
        moved = {n: optimizer.moved(p) for n, p in model.named_parameters()}
        if all(value is None for value in moved.values()):
            self.common = copy.deepcopy(self.x[rank])


def start(
    model: torch.nn.Module | None = None, cap_mb: float = SMALL_BUCKET_MB, **options: Any
) -> tuple[Any, FrozenVarianceAdam]:
    model = model or seeded(Mlp)
    optimizer = FrozenVarianceAdam(model.parameters(), lr=LR, betas=(B1, B2), eps=EPS, weight_decay=DECAY)
    algorithm = ZeroOneAdam(compress=EVERYTHING, **options)
    return wrap(model, algorithm=algorithm, optimizer=optimizer, bucket_cap_mb=cap_mb), optimizer


def train(model: Any, optimizer: FrozenVarianceAdam, steps: range) -> None:
    for step in steps:
        optimizer.param_groups[0]["lr"] = lr_at(step)
        optimizer.zero_grad()
        mlp_loss(model, step).backward()
        optimizer.step()


@pytest.mark.thin
@against_equations(ZeroOneAdam)
@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("is_local", [False, True])
def test_weights_are_those_of_the_reference(is_local: bool) -> None:
    model, optimizer = start(**(LOCAL if is_local else {"warmup_steps": 3}))
    rounds = ROUNDS if is_local else list(range(STEPS))
    reference = Reference(flats(model), VARIANCE if is_local else [*VARIANCE, *LATER], rounds)
    for step in range(STEPS):
        by_rank = gathered(gradients_of_all_ranks(model, step)[dist.get_rank()])  # each at its own weights
        reference.follow(model, optimizer)
        train(model, optimizer, range(step, step + 1))
        reference.step(step, by_rank, [bucket.parameters for bucket in commlib.stats(model).buckets])
        for n, value in flats(model).items():
            difference = np.abs(value - reference.x[dist.get_rank()][n]).max()
            assert difference < 2e-6, (step, n, difference)
        if step in rounds:
            assert_replicas_identical(model)
    assert commlib.stats(model).rounds == len(rounds)


@on_ranks(2)
@pytest.mark.parametrize("stop", [8, 23, 34])
def test_a_resumed_run_goes_on_bit_for_bit(stop: int) -> None:
    whole, optimizer = start(**LOCAL)
    train(whole, optimizer, range(stop))
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict(), commlib.state_dict(whole)))
    train(whole, optimizer, range(stop, STEPS))
    model, own = start(**LOCAL)
    model.load_state_dict(saved[0])
    own.load_state_dict(saved[1])
    commlib.load_state_dict(model, saved[2])
    train(model, own, range(stop, STEPS))
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(p, q)


class Wide(Mlp):
    """So many elements that the ends of chunks do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 4096)
        self.second = torch.nn.Linear(4096, 8)
        self.third = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(torch.tanh(self.first(x))))


@pytest.mark.thin
@on_ranks(2, 3)
@pytest.mark.parametrize("is_local", [False, True])
def test_bytes_are_those_of_the_formula(is_local: bool) -> None:
    """Full precision where the variance is updated, else one bit in each round; nothing in a local step."""
    model, optimizer = start(seeded(Wide), cap_mb=25, **(LOCAL if is_local else {"warmup_steps": 3}))
    rounds = ROUNDS if is_local else list(range(STEPS))
    variance = VARIANCE if is_local else [*VARIANCE, *LATER]
    numel, size = sum(p.numel() for p in model.parameters()), dist.get_world_size()
    train(model, optimizer, range(1))  # in which the engine's ranks agree on more than gradients
    for step in range(1, STEPS):
        before = commlib.stats(model).wire_bytes
        train(model, optimizer, range(step, step + 1))
        sent = commlib.stats(model).wire_bytes - before
        nbytes = 4 * numel if step in variance else numel * (1 + 16 / 512) / 8 if step in rounds else 0
        flags = 4 * 6 if nbytes else 0  # one for each parameter
        assert sent == pytest.approx(2 * (size - 1) / size * (nbytes + flags), rel=0.05), step


@on_ranks(2)
def test_synchronize_between_rounds_gives_the_mean_and_loses_nothing() -> None:
    model, optimizer = start(**LOCAL)
    train(model, optimizer, range(35))  # the last round was in step 29
    mean = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    own = mean.clone()
    dist.all_reduce(mean)
    commlib.synchronize(model)
    assert not torch.equal(own, mean / 2)
    assert torch.allclose(torch.nn.utils.parameters_to_vector(model.parameters()), mean / 2)
    train(model, optimizer, range(35, 38))
    assert_replicas_identical(model)


@on_ranks(2)
def test_loaded_weights_are_what_the_next_round_begins_from() -> None:
    model, optimizer = start(**LOCAL)
    train(model, optimizer, range(32))
    model.load_state_dict({n: torch.full_like(value, 3.0) for n, value in model.state_dict().items()})
    train(model, optimizer, range(32, 38))
    assert_replicas_identical(model)
    assert all(bool(((p - 3).abs() < 1).all()) for p in model.parameters())


@on_ranks(2)
def test_what_cannot_be_is_refused() -> None:
    with raises_on_every_rank(ConfigError, "local_after", "more than warmup_steps=16", "got 5"):
        ZeroOneAdam(local_after=5)
    with raises_on_every_rank(ConfigError, "longest a power of two", "12"):
        ZeroOneAdam(local_after=20, longest_interval=12)
    model = seeded(Mlp)
    optimizer = FrozenVarianceAdam(model.parameters())
    with raises_on_every_rank(ConfigError, "GradScaler", "local_after=None"):
        wrap(model, algorithm=ZeroOneAdam(**LOCAL), optimizer=optimizer, scaler=torch.amp.GradScaler("cpu"))
    model, _ = start(**LOCAL)
    with raises_on_every_rank(ConfigError, "join"), model.join():
        pass


@on_ranks(2)
def test_a_checkpoint_between_rounds_is_resumed_bit_for_bit() -> None:
    model, optimizer = start(**LOCAL)
    train(model, optimizer, range(35))
    tree = copy.deepcopy(commlib.Checkpoint(model, optimizer).state_dict())
    train(model, optimizer, range(35, STEPS))
    other, own = start(**LOCAL)
    commlib.Checkpoint(other, own).load_state_dict(tree | {"communication": gathered_ranks(tree["communication"])})
    train(other, own, range(35, STEPS))
    for p, q in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)


def gathered_ranks(own: dict[str, Any]) -> dict[str, Any]:
    """Return the state that torch.distributed.checkpoint assembles from the states of the ranks."""
    whole: dict[str, Any] = {}
    for each in gathered(own):
        whole |= each
    return whole


@on_ranks(2)
def test_simulated_are_the_longest_intervals() -> None:
    every, rare = ZeroOneAdam(), ZeroOneAdam(local_after=100, longest_interval=8)
    assert simulated_bytes(rare, 8) == pytest.approx(simulated_bytes(every, 1))
