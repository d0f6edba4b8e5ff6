"""`commlib.stats` is correct for every algorithm, and only the model changes in the user's process."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commlib
from commlib import algorithms, tuner
from commlib.algorithms import Algorithm, AllReduce, Auto
from commlib.engine.gradients import reducer
from commlib.engine.stats import Stats
from commlib.replica import replica_of
from commlib.transport import base, mailbox
from commlib.transport.torch_dist import TorchTransport
from tests.contract.subjects import REPRESENTATIVES, of_each_kind
from tests.multi.common import Mlp, OneParameter, data, mlp_loss, seeded
from tests.multi.pool import on_ranks
from tests.thin import fast
from tests.waiting import eventually

#: So that every kind of round is seen within a few steps.
OPTIONS: dict[str, dict[str, Any]] = {
    "async_averaging": {"period": 2},
    "async_sgd": {"period": 1, "rest": 0.0},
    "decentralized": {},
    "diloco": {"period": 2},
    "hierarchical_local_sgd": {"period": 2, "global_every": 1},
    "local_sgd": {"period": 2},
    "noloco": {"period": 2},
    "onebit_adam": {"warmup_steps": 2},
    "passive_gossip": {"period": 2},
    "post_local_sgd": {"period": 2, "warmup_steps": 2},
    "qadam": {"warmup_steps": 2},
    "sparse_loco": {"period": 2},
    "streaming_diloco": {"period": 4, "fragments": 2, "delay": 1},
    "zero_one_adam": {"warmup_steps": 2},
}
NAMES = [name for name in algorithms.list() if name != "auto"]
WITHOUT_ROUNDS = "hogwild"  # which sends nothing
STEPS = 6


def wrapped(name: str, model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    algorithm = algorithms.get(name)(**OPTIONS.get(name, {}))
    model = model or seeded(Mlp)
    optimizer = (algorithm.optimizer_type or torch.optim.SGD)(model.parameters(), lr=0.01)
    options = {"bucket_cap_mb": 0.001, **options}
    return commlib.wrap(model, algorithm, optimizer=optimizer, **options), optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        mlp_loss(model, step).backward()
        optimizer.step()


# --- bytes and rounds ------------------------------------------------------------------------------------------------


class Counter:
    """The bytes that this rank gives to the network, from the tensors and payloads themselves."""

    def __init__(self) -> None:
        self.nbytes = 0.0
        self._adding = threading.Lock()  # several threads send

    def add(self, nbytes: float) -> None:
        with self._adding:
            self.nbytes += nbytes

    def request(self, request: base.Request) -> None:
        size = request.size
        match request:
            case _ if size == 1:
                return
            case base.AllReduce(tensor=tensor):
                self.add(2 * (size - 1) / size * tensor.numel() * tensor.element_size())
            case base.AllGather(output=output, input=input):
                assert output.numel() == size * input.numel()
                self.add((size - 1) * input.numel() * input.element_size())
            case base.AllToAll(input=tensor) | base.Broadcast(tensor=tensor):
                self.add((size - 1) / size * tensor.numel() * tensor.element_size())
            case base.Exchange(sends=sends):
                self.add(sum(tensor.numel() * tensor.element_size() for _, tensor in sends))


@contextlib.contextmanager
def counting() -> Iterator[Counter]:
    counter, issue, send = Counter(), TorchTransport.issue, mailbox._send

    def issued(transport: TorchTransport, request: base.Request) -> base.Work:
        counter.request(request)
        return issue(transport, request)

    def sent(connection: Any, message: mailbox.Message) -> None:
        counter.add(len(message.payload))
        send(connection, message)

    with mock.patch.object(TorchTransport, "issue", issued), mock.patch.object(mailbox, "_send", sent):
        yield counter


def check_bytes(found: Callable[[], float], counter: Counter, at: str) -> None:
    """Compare after pending work has ended: one counts a payload just before the other does."""
    assert eventually(lambda: abs(found() - counter.nbytes) <= 0.5), f"{at}: {found()}, not {counter.nbytes}"


@pytest.mark.parametrize("name", NAMES)
@on_ranks(3)
def test_bytes_are_those_given_to_the_network(name: str) -> None:
    with counting() as counter, mock.patch.object(TorchTransport, "_await_all"):
        model, optimizer = wrapped(name)
        channels = list(replica_of(model).engine.channels)
        train(model, optimizer)
        dist.barrier()
        check_bytes(lambda: commlib.stats(model).wire_bytes, counter, "after training")
        assert commlib.stats(model).wire_bytes > 0 or name == WITHOUT_ROUNDS
        commlib.synchronize(model)
        check_bytes(lambda: commlib.stats(model).wire_bytes, counter, "after synchronize")
        commlib.unwrap(model)
        check_bytes(lambda: sum(channel.bytes_sent for channel in channels), counter, "when nothing is sent any more")


@pytest.mark.parametrize("name", fast(NAMES, "allreduce", "powersgd", "onebit_adam", *REPRESENTATIVES.values()))
@on_ranks(2)
def test_bytes_of_a_step_are_those_of_its_round_over_gradients(name: str) -> None:
    model, optimizer = wrapped(name, broadcast_buffers=False)
    train(model, optimizer, 3)
    optimizer.zero_grad()
    loss = mlp_loss(model, 3)
    before = commlib.stats(model)
    clock = mock.Mock(perf_counter=mock.Mock(side_effect=itertools.count(100.0, 7.0)))
    with counting() as counter, mock.patch.object(reducer, "time", clock):
        loss.backward()
        nbytes = counter.nbytes
    stats = commlib.stats(model)
    if algorithms.get(name)(**OPTIONS.get(name, {})).channel.syncs_gradients(STEPS):
        assert stats.wire_bytes_per_step == pytest.approx(nbytes)
        assert stats.wire_bytes - before.wire_bytes == pytest.approx(nbytes)
        assert stats.raw_bytes_per_step == sum(p.nbytes for p in model.parameters())
        assert stats.compression_ratio == pytest.approx(stats.raw_bytes_per_step / nbytes)
        assert sum(bucket.wire_bytes for bucket in stats.buckets) <= stats.wire_bytes_per_step
        assert stats.exposed_s == 7.0  # the clock is read before and after the wait
        assert stats.rounds == before.rounds + 1
    else:
        assert stats.rounds == before.rounds or "async" in name or "gossip" in name
        assert stats.exposed_s == before.exposed_s
    dist.barrier()
    commlib.synchronize(model)
    commlib.unwrap(model)


@pytest.mark.parametrize("name", of_each_kind(NAMES))
@on_ranks(2)
def test_rounds_are_counted_and_loggers_get_plain_numbers(name: str) -> None:
    model, optimizer = wrapped(name)
    assert commlib.stats(model).rounds == 0
    train(model, optimizer)
    rounds, channel = commlib.stats(model).rounds, replica_of(model).engine.algorithm.channel
    if channel.syncs_gradients(STEPS):
        assert rounds == STEPS
    elif not channel.keeps_step:
        assert 0 <= rounds <= 2 * STEPS
    else:
        started = (STEPS - channel.warmup_steps) // channel.period
        under_way = 1 if channel.in_background and (STEPS - channel.warmup_steps) % channel.period == 0 else 0
        assert rounds == channel.warmup_steps + started - under_way
    check_plain_numbers(commlib.stats(model))
    dist.barrier()
    commlib.synchronize(model)
    commlib.unwrap(model)


def check_plain_numbers(stats: Stats) -> None:
    found = stats.as_dict(prefix="comm/")
    assert all(key.startswith("comm/") and type(entry) in (int, float) for key, entry in found.items()), found
    assert (found["comm/rounds"], found["comm/world_size"]) == (stats.rounds, stats.world_size)
    assert ("comm/consensus_distance" in found) == (stats.consensus_distance is not None)
    assert not {"comm/algorithm", "comm/plan", "comm/buckets", "comm/cost"} & found.keys()
    assert stats.as_dict().keys() == {key.removeprefix("comm/") for key in found}


# --- baselines of comparisons ----------------------------------------------------------------------------------------


class Lookup(nn.Module):
    """An embedding with sparse gradients, and a linear layer, if asked for."""

    def __init__(self, rows: int = 50, has_head: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 4, sparse=True)
        self.head = nn.Linear(4, 4) if has_head else nn.Identity()

    def forward(self, indices: Tensor) -> Tensor:
        return self.head(self.table(indices)).square().mean()


@pytest.mark.parametrize("has_head", [True, False], ids=["mixed", "sparse only"])
@on_ranks(2, 3)
def test_sparse_gradients_are_compared_with_dense_ones(has_head: bool) -> None:
    model = commlib.wrap(seeded(lambda: Lookup(has_head=has_head)), bucket_cap_mb=1.0)
    size = dist.get_world_size()
    assert commlib.stats(model).compression_ratio is None
    assert "compression" not in str(commlib.stats(model))
    assert commlib.stats(model).raw_bytes_per_step == commlib.stats(model).wire_bytes_per_step == 0.0
    num_indices = 5
    for _ in range(3):
        model(torch.arange(num_indices)).backward()
    stats = commlib.stats(model)
    # From each rank to each other one: the number of rows, their indices, their values.
    sparse = (size - 1) * (8 + num_indices * (8 + 4 * 4))
    dense_numel = sum(p.numel() for p in model.parameters()) - 50 * 4
    dense = 2 * (size - 1) / size * 4 * (dense_numel + (2 if has_head else 0))  # and a flag for each parameter
    raw = 2 * (size - 1) / size * sum(p.nbytes for p in model.parameters())
    assert stats.wire_bytes_per_step == round(sparse + dense)
    assert stats.raw_bytes_per_step == round(raw)
    assert stats.compression_ratio == pytest.approx(raw / (sparse + dense))
    assert stats.compression_ratio > 1


@on_ranks(2)
def test_sparse_gradients_that_are_more_than_dense_ones() -> None:
    model = commlib.wrap(seeded(lambda: Lookup(rows=6, has_head=False)))
    for _ in range(2):
        model(torch.arange(6)).backward()
    assert 0.3 < commlib.stats(model).compression_ratio < 1


@on_ranks(2, 3)
def test_complex_parameters_count_both_parts() -> None:
    model = commlib.wrap(seeded(lambda: OneParameter(torch.randn(30, 3, dtype=torch.complex64))), bucket_cap_mb=1.0)
    for step in range(2):
        model(data(step, 30, 3)).backward()
    stats, size = commlib.stats(model), dist.get_world_size()
    assert stats.raw_bytes_per_step == round(2 * (size - 1) / size * (30 * 3 * 8 + 3 * 4))
    assert 0.95 < stats.compression_ratio <= 1


@pytest.mark.parametrize(
    ("dtype", "wire", "ratio"),
    [("float32", "fp32", 1), ("float32", "bf16", 2), ("float64", "fp16", 4), ("bfloat16", "bf16", 1)],
)
@on_ranks(2)
def test_the_wires_dtype_shows_in_the_ratio(dtype: str, wire: str, ratio: int) -> None:
    model = seeded(lambda: nn.Linear(64, 64)).to(getattr(torch, dtype))
    commlib.wrap(model, AllReduce(wire_dtype=wire), bucket_cap_mb=1.0)
    model(torch.ones(2, 64, dtype=model.weight.dtype)).sum().backward()
    assert commlib.stats(model).compression_ratio == pytest.approx(ratio, rel=0.001)


@on_ranks(1)
def test_one_rank_sends_nothing() -> None:
    model, optimizer = wrapped("allreduce")
    train(model, optimizer, 2)
    stats = commlib.stats(model)
    assert (stats.wire_bytes, stats.wire_bytes_per_step, stats.raw_bytes_per_step) == (0, 0, 0)
    assert stats.compression_ratio == 1.0


@on_ranks(2)
def test_a_logger_gets_the_measured_cost() -> None:
    model = commlib.wrap(seeded(Mlp))
    train(model, torch.optim.SGD(model.parameters(), 0.01), 4)
    stats = commlib.stats(model)
    assert stats.cost is not None
    assert stats.as_dict()["cost_latency_s"] == stats.cost.latency_s


class Mixed(nn.Module):
    """Sparse, frozen, complex and ordinary parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)
        self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.head = nn.Linear(4, 2)

    def forward(self, indices: Tensor) -> Tensor:
        return self.head((self.table(indices) * self.turn).abs() + self.frozen).square().mean()


@pytest.mark.parametrize(
    "algorithm",
    [algorithms.LocalSGD(period=1), algorithms.Decentralized(overlap=False), algorithms.Decentralized(overlap=True)],
    ids=["local_sgd", "decentralized", "decentralized, overlapped"],
)
@on_ranks(2)
def test_the_distance_to_the_consensus_counts_every_parameter(algorithm: Algorithm) -> None:
    model = seeded(Mixed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    commlib.wrap(model, algorithm, optimizer=optimizer)
    assert commlib.stats(model).consensus_distance is None
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(dist.get_rank())  # the mean is half of that away from both
    own = sum(p.numel() for p in model.parameters() if p.requires_grad)
    for _ in range(2 if getattr(algorithm.channel, "in_background", False) else 1):
        model(torch.arange(3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert commlib.stats(model).consensus_distance == pytest.approx(0.5 * math.sqrt(own), rel=1e-4)
    commlib.synchronize(model)
    assert commlib.stats(model).consensus_distance == pytest.approx(0.0, abs=1e-5)
    commlib.unwrap(model)


# --- auto without a choice -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("auto", "name"),
    [
        (Auto(candidates=["bytegrad"]), "bytegrad"),
        (Auto(allow="exact"), "allreduce"),
        (Auto(allow="exact", candidates=["topk", "allreduce"]), "allreduce"),
        (Auto(allow="any", candidates=["local_sgd"]), "local_sgd"),
    ],
)
@on_ranks(1, 3, slow=(2,))
def test_a_single_candidate_is_taken_at_once(auto: Auto, name: str) -> None:
    model = seeded(Mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("commlib").addHandler(handler)
    try:
        with (
            mock.patch.object(tuner, "probe") as probe,
            mock.patch.object(tuner, "simulate") as simulate,
            mock.patch.object(tuner, "work_factor") as work,
            mock.patch.object(reducer, "measure_cost") as cost,
        ):
            commlib.wrap(model, auto, optimizer=optimizer, bucket_cap_mb=1.0)
            chosen = commlib.stats(model).algorithm
            train(model, optimizer, 60)
        for each in (probe, simulate, work, cost):
            each.assert_not_called()
    finally:
        logging.getLogger("commlib").removeHandler(handler)
    if dist.get_world_size() > 1:
        assert chosen == commlib.stats(model).algorithm == name
        said = [line for line in lines if line.startswith("commlib auto")]
        assert said == (
            [f"commlib auto: {name}: the only candidate; nothing is measured"] if dist.get_rank() == 0 else []
        )
    commlib.synchronize(model)
    commlib.unwrap(model)


@on_ranks(2)
def test_a_single_candidate_trains_and_resumes_as_if_it_had_been_named() -> None:
    models = [seeded(Mlp), seeded(Mlp)]
    for model, algorithm in zip(models, ("bytegrad", Auto(candidates=["bytegrad"])), strict=True):
        commlib.wrap(model, algorithm, bucket_cap_mb=1.0)
        train(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(mine, other)
    resumed = commlib.wrap(seeded(Mlp), Auto(candidates=["bytegrad"]), bucket_cap_mb=1.0)
    commlib.load_state_dict(resumed, commlib.state_dict(models[1]))
    assert commlib.stats(resumed).rounds == STEPS


# --- state of the user's process -------------------------------------------------------------------------------------


def of_the_user() -> dict[str, Any]:
    """Return the state of this process that commlib must not change."""
    return {
        "torch's generator": torch.get_rng_state().tolist(),
        "NumPy's": [str(each) for each in np.random.get_state()],
        "Python's": random.getstate(),
        "device": torch.get_default_device(),
        "dtype": torch.get_default_dtype(),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic),
        "benchmark": torch.backends.cudnn.benchmark,
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "matmul precision": torch.get_float32_matmul_precision(),
    }


def check_leaves_the_users_alone(algorithm: Algorithm, steps: int) -> None:
    model = seeded(Mlp)
    optimizer = (algorithm.optimizer_type or torch.optim.SGD)(model.parameters(), lr=0.01)
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    before = of_the_user()

    def check(what: str) -> None:
        now = of_the_user()
        changed = [key for key, entry in before.items() if now[key] != entry]
        assert not changed, f"{what} changed {changed}"

    commlib.wrap(model, algorithm, optimizer=optimizer)
    check("wrap")
    train(model, optimizer, steps)
    check("training")
    commlib.stats(model)
    state = commlib.state_dict(model)
    commlib.synchronize(model)
    check("stats, state_dict or synchronize")
    commlib.load_state_dict(model, state)
    check("load_state_dict")
    dist.barrier()
    commlib.unwrap(model)
    check("unwrap")


@pytest.mark.parametrize("name", of_each_kind(NAMES))
@on_ranks(2)
def test_random_numbers_and_settings_are_the_users(name: str) -> None:
    check_leaves_the_users_alone(algorithms.get(name)(**OPTIONS.get(name, {})), STEPS)


@on_ranks(2)
def test_the_choice_of_auto_draws_from_no_generator_of_the_users() -> None:
    check_leaves_the_users_alone(Auto(allow="8bit"), 8)
