"""Algorithms in the background: no step waits, replicas meet, and ends are quiet."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.multi.common import Mlp, assert_replicas_identical, data, mlp_loss, raises_on_every_rank, seeded
from tests.multi.notices import await_told, tell
from tests.multi.pool import on_ranks
from tests.thin import fast
from tests.waiting import eventually

AVERAGING = ["async_averaging", "passive_gossip"]
NAMES = [*AVERAGING, "async_sgd", "async_sgd of gradients", "async_sgd with int8"]


#: Options that replace those of a test: these algorithms do not have all of them.
OPTIONS: dict[str, dict[str, Any]] = {
    "async_sgd": {"period": 1},
    "async_sgd of gradients": {"period": 1, "push": "gradients"},
    "async_sgd with int8": {"period": 1, "codec": "int8"},
    "hogwild": {},
}


def make(name: str, **options: Any) -> Any:
    from commlib import algorithms

    return algorithms.get(name.split()[0])(**options)


def wrapped(name: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    import commlib

    model = seeded(Mlp)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    return commlib.wrap(model, make(name, **OPTIONS.get(name, options)), optimizer=optimizer), optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, pause_s: float = 0.0) -> None:
    for step in steps:
        optimizer.zero_grad()
        mlp_loss(model, step).backward()
        optimizer.step()
        time.sleep(pause_s)


def until(model: nn.Module, optimizer: torch.optim.Optimizer, rounds: int, limit_s: float = 60.0) -> int:
    """Train until the rank has taken that many rounds; returns the steps."""
    import commlib

    deadline, step = time.monotonic() + limit_s, 0
    while commlib.stats(model).rounds < rounds:
        assert time.monotonic() < deadline, f"{commlib.stats(model).rounds} rounds of {rounds} within {limit_s} s"
        train(model, optimizer, range(step, step + 1), 0.002)
        step += 1
    return step


@pytest.mark.thin
@pytest.mark.parametrize("name", [*NAMES, "hogwild"])
@on_ranks(1, 2, 3, 4)
def test_synchronize_gives_all_ranks_the_same_weights(name: str) -> None:
    import commlib

    model, optimizer = wrapped(name, period=2)
    train(model, optimizer, range(3 + 4 * dist.get_rank()))
    commlib.synchronize(model)
    assert_replicas_identical_weights(model)
    dist.barrier()
    train(model, optimizer, range(7, 9))
    commlib.synchronize(model)
    assert_replicas_identical_weights(model)
    commlib.unwrap(model)


def assert_replicas_identical_weights(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    assert_replicas_identical(model)


@pytest.mark.parametrize("name", AVERAGING)
@on_ranks(3)
def test_rounds_go_on_and_ranks_without_gradients_come_together(name: str) -> None:
    """With a learning rate of 0 the only thing that moves weights is the averaging."""
    import commlib

    model = seeded(Mlp, seed=dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    commlib.wrap(model, make(name, period=1), optimizer=optimizer, init_sync=False)
    spread_before = spread(start)
    until(model, optimizer, 20)
    dist.barrier()
    assert spread(torch.cat([p.detach().flatten() for p in model.parameters()])) < 0.05 * spread_before


def spread(own: torch.Tensor) -> float:
    """Return the largest distance of a rank from the mean."""
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    mean = torch.stack(everyone).mean(dim=0)
    return max(float(torch.dist(each, mean)) for each in everyone)


@pytest.mark.parametrize("name", NAMES)
@on_ranks(2)
def test_a_slow_rank_keeps_nobody_waiting(name: str) -> None:
    model, optimizer = wrapped(name, period=1)
    train(model, optimizer, range(2))
    if dist.get_rank() == 1:
        await_told("trained", [0])
    else:
        train(model, optimizer, range(50))
        tell("trained")
    dist.barrier()


@pytest.mark.parametrize("name", NAMES)
@on_ranks(2)
def test_saving_and_evaluation_ask_no_other_rank(name: str) -> None:
    import commlib

    model, optimizer = wrapped(name, period=1)
    train(model, optimizer, range(5))
    if dist.get_rank() == 1:
        await_told("evaluated", [0])
    else:
        state = commlib.state_dict(model)
        model.eval()
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for _ in range(10):
            model.module(data(0, 4, 8))
        time.sleep(0.2)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
        commlib.load_state_dict(model, state)
        tell("evaluated")
    dist.barrier()


@pytest.mark.parametrize("name", NAMES)
@on_ranks(2)
def test_a_rank_that_unwraps_ends_it_quietly(name: str) -> None:
    import commlib

    model, optimizer = wrapped(name, period=1)
    train(model, optimizer, range(5))
    if dist.get_rank() == 1:
        commlib.unwrap(model)
    dist.barrier()
    train(model, optimizer, range(5, 30), 0.005)
    if dist.get_rank() == 0:
        commlib.unwrap(model)
    dist.barrier()


@pytest.mark.parametrize("name", AVERAGING)
@on_ranks(2)
def test_warm_up_averages_gradients(name: str) -> None:
    model, optimizer = wrapped(name, period=50, warmup_steps=4)
    train(model, optimizer, range(4))
    assert_replicas_identical(model, buffers=False)
    train(model, optimizer, range(4, 8))
    own = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert spread(own) > 0


# --- asynchronous averaging under a scripted order of events ---------------------------------------------------------

NUMEL = 12
PERIOD = 2
LR = 0.1


class Vector(nn.Module):
    """One parameter, whose gradients a test gives."""

    def __init__(self, values: np.ndarray) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(values, dtype=torch.float32))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.weight * inputs


class ReferenceAveraging:
    """The ranks' weights, copies and rounds, in float64; one rank makes a step at a time."""

    def __init__(self, world_size: int) -> None:
        self.weights = [np.random.default_rng(rank).standard_normal(NUMEL) for rank in range(world_size)]
        self.steps = [0] * world_size
        self.started_at: list[int | None] = [None] * world_size
        self.round: list[int | None] = [None] * world_size  # under way
        self.copies: list[list[np.ndarray]] = [[] for _ in range(world_size)]  # by round
        self.num_taken = 0

    def is_there(self, rank: int) -> bool:
        number = self.round[rank]
        return number is not None and all(len(copies) > number for copies in self.copies)

    def step(self, rank: int, gradient: np.ndarray) -> None:
        self.weights[rank] = self.weights[rank] - LR * gradient
        self.steps[rank] += 1
        if self.is_there(rank):
            of_round = [copies[self.round[rank]] for copies in self.copies]  # type: ignore[index]
            self.weights[rank] = self.weights[rank] + np.mean(of_round, axis=0) - of_round[rank]
            self.round[rank] = None
            self.num_taken += 1
        started = self.started_at[rank]
        if self.round[rank] is None and (started is None or self.steps[rank] - started >= PERIOD):
            self.round[rank] = len(self.copies[rank])
            self.copies[rank].append(self.weights[rank].copy())
            self.started_at[rank] = self.steps[rank]


@on_ranks(1, 3, slow=(2, 4, 8))
def test_async_averaging_follows_the_reference() -> None:
    import commlib
    from commlib.replica import replica_of

    rank, world_size = dist.get_rank(), dist.get_world_size()
    reference = ReferenceAveraging(world_size)
    model = Vector(reference.weights[rank])
    optimizer = torch.optim.SGD(model.parameters(), LR)
    commlib.wrap(model, make("async_averaging", period=PERIOD), optimizer=optimizer, init_sync=False)
    rounds = replica_of(model).engine.channels[-1]
    order = random.Random(world_size)
    for number in range(max(60, 20 * world_size)):
        acting = order.randrange(world_size)
        gradient = np.random.default_rng((number, acting)).standard_normal(NUMEL)
        if acting == rank:
            model.weight.grad = torch.tensor(gradient, dtype=torch.float32)
            optimizer.step()
        reference.step(acting, gradient)
        np.testing.assert_allclose(model.weight.detach().numpy(), reference.weights[rank], rtol=1e-5, atol=1e-5)
        dist.barrier()
        if reference.is_there(rank):
            assert rounds._round.done.wait(60), "every rank has come to the round, and there is no result"
        assert rounds._round is None or rounds._round.done.is_set() == reference.is_there(rank)
        dist.barrier()
    assert reference.num_taken >= 5


# --- training --------------------------------------------------------------------------------------------------------


def digits_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


@pytest.mark.parametrize("name", fast([*NAMES, "hogwild"], "async_averaging", "async_sgd"))
@on_ranks(2, slow=(4,))
def test_digits_are_learnt(name: str) -> None:
    """Each rank has its own part of the data; the consensus model knows all of it."""
    import commlib

    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels = digits()
    model = seeded(digits_model)
    lr = 0.2 / world_size if name == "hogwild" else 0.2
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.5)
    commlib.wrap(model, make(name, **({} if name == "hogwild" else {"period": 2})), optimizer=optimizer)
    own = torch.arange(rank, len(images), world_size)
    order = torch.Generator().manual_seed(rank)
    for _ in range(300):
        batch = own[torch.randint(len(own), (32,), generator=order)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        time.sleep(0.001)  # ranks that share a core take turns
    commlib.synchronize(model)
    loss = nn.functional.cross_entropy(model.module(images), labels).item()
    assert loss < 0.25, f"loss {loss:.3f} after 300 steps"
    assert_replicas_identical_weights(model)
    dist.barrier()


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    found = pytest.importorskip("sklearn.datasets").load_digits()
    return torch.tensor(found.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(found.target)


# --- Hogwild, and refused configurations -----------------------------------------------------------------------------


@on_ranks(2)
def test_hogwild_shares_one_memory_until_unwrapped() -> None:
    import commlib

    model, _ = wrapped("hogwild")
    weight = model.first.weight
    if dist.get_rank() == 0:
        with torch.no_grad():
            weight[0, 0] = 42.0
    dist.barrier()
    assert weight[0, 0].item() == 42.0
    dist.barrier()
    commlib.unwrap(model)
    assert weight[0, 0].item() == 42.0
    with torch.no_grad():
        weight[0, 0] = dist.get_rank()
    dist.barrier()
    assert weight[0, 0].item() == dist.get_rank()
    assert not list(Path("/dev/shm").glob("commlib-hogwild-*"))


@on_ranks(2)
def test_hogwild_refuses_ranks_that_do_not_share_a_machine() -> None:
    import commlib
    from commlib.algorithms import hogwild
    from commlib.errors import ConfigError

    make_file = hogwild._make_file

    def elsewhere(nbytes: int, token: bytes) -> tuple[str | None, str | None]:
        path, error = make_file(nbytes, token)
        with open(str(path), "r+b") as file:
            file.write(bytes(len(token)))  # the content of this name on another machine
        return path, error

    hogwild._make_file = elsewhere
    try:
        model = seeded(Mlp)
        with raises_on_every_rank(ConfigError, "must be on one machine"):
            commlib.wrap(model, "hogwild", optimizer=torch.optim.SGD(model.parameters(), 0.1))
    finally:
        hogwild._make_file = make_file
    assert type(model) is Mlp
    assert not list(Path("/dev/shm").glob("commlib-hogwild-*"))


@on_ranks(2)
def test_what_async_sgd_cannot_do_is_refused_and_leaves_the_model_bare() -> None:
    import commlib
    from commlib.errors import ConfigError

    model = seeded(Mlp)
    before = set(threading.enumerate())
    with raises_on_every_rank(ConfigError, "elementwise optimizer", "got Adagrad"):
        optimizer = torch.optim.Adagrad(model.parameters(), 0.1)
        commlib.wrap(model, make("async_sgd", push="gradients"), optimizer=optimizer)
    assert type(model) is Mlp
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    commlib.wrap(model, make("async_sgd", push="gradients"), optimizer=optimizer)
    with raises_on_every_rank(ConfigError, "optimizer.step(closure)"):
        optimizer.step(lambda: mlp_loss(model, 0))
    commlib.unwrap(model)
    assert eventually(lambda: set(threading.enumerate()) <= before), threading.enumerate()


@pytest.mark.parametrize("name", [*AVERAGING, "async_sgd"])
@on_ranks(2)
def test_unfreezing_is_followed_or_refused(name: str) -> None:
    import commlib
    from commlib.errors import ConfigError

    model = seeded(Mlp)
    model.first.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    commlib.wrap(model, make(name), optimizer=optimizer)
    train(model, optimizer, range(3 + 20 * dist.get_rank()))
    model.first.weight.requires_grad_(True)
    if name == "async_averaging":
        train(model, optimizer, range(3))
        commlib.synchronize(model)
        assert_replicas_identical_weights(model)
    else:
        with raises_on_every_rank(ConfigError, "cannot change its parameters"):
            mlp_loss(model, 0)


@on_ranks(2, 3)
def test_a_round_that_some_came_to_before_weights_were_loaded_brings_no_old_ones_back() -> None:
    import commlib
    from commlib.replica import replica_of

    rank, early = dist.get_rank(), dist.get_world_size() - 1
    model = Vector(np.full(NUMEL, 5.0))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    commlib.wrap(model, make("async_averaging", period=1), optimizer=optimizer)
    channel = replica_of(model).engine.channels[-1]
    model.weight.grad = torch.zeros(NUMEL)
    if rank == early:
        optimizer.step()  # comes to the round with the old weights
    dist.barrier()
    model.load_state_dict({"weight": torch.full((NUMEL,), float(1))})
    dist.barrier()
    for _ in range(3):
        optimizer.step()
        assert channel._round is None or channel._round.done.wait(60)
        dist.barrier()
        assert float((model.weight.detach() - 1.0).abs().max()) == 0.0
    assert channel.num_rounds >= 2
    commlib.unwrap(model)
