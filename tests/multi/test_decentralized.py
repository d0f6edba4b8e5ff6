"""Averaging with neighbours against NumPy references of its equations, over 50 steps; consensus, nodes, resume.

The references hold all replicas in one process. Gradients are torch's, in float64, so that rounding decides nothing: a
code of a quantizer that falls on the other side would show at once.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commlib
from commlib.algorithms import Algorithm, Decentralized, Gossip, LowPrecisionDecentralized, NoLoCo
from commlib.codecs import Int4, Int8, OneBit, UInt8MinMax
from commlib.errors import ConfigError
from commlib.kernels.reference import BLOCK_CODECS
from commlib.primitives.topology import Graph, MixingMatrix, RandomMatching, Ring, Topology
from commlib.replica import replica_of
from tests.multi.common import SMALL_BUCKET_MB, Mlp, data, raises_on_every_rank, seeded, sgd
from tests.multi.equations import against_equations
from tests.multi.pool import on_ranks

Floats = npt.NDArray[Any]
STEPS = 50
PATH = Graph(((0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7)))


def double_mlp() -> nn.Module:
    return Mlp().double()


def loss_of(model: nn.Module, step: int, rank: int | None = None) -> Tensor:
    dtype = next(model.parameters()).dtype
    return model(data(step, 5, 8, rank=rank).to(dtype)).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def start(
    algorithm: Algorithm | str, build: Callable[[], nn.Module] = double_mlp, seed: int = 7, **options: Any
) -> Any:
    """Return a wrapped model and its optimizer."""
    model = seeded(build, seed)
    optimizer = sgd(model)
    return commlib.wrap(model, algorithm, optimizer=optimizer, **options), optimizer


def layout(model: nn.Module) -> list[list[str]]:
    """Return the parameters of each bucket of weights, in its order."""
    return [[part.name for part in bucket.parts] for bucket in replica_of(model).engine.channels[-1].buckets]


# --- Independent references -----------------------------------------------------------------------------


class Replicas:
    """All ranks' replicas, trained in this process; `mix` averages the joined weights of a bucket, [N, numel].

    Args:
        build: Makes a replica.
        buckets: The parameters of each bucket.
        mix: Maps (values [N, numel], round, bucket) to the averaged values.
        period: Steps between averages.
        overlap: Whether the change of an average is added a step later.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        buckets: Sequence[Sequence[str]],
        mix: Callable[[Floats, int, int], Floats],
        *,
        period: int = 1,
        overlap: bool = True,
    ) -> None:
        self.models = [seeded(build) for _ in range(dist.get_world_size())]
        self.optimizers = [sgd(model) for model in self.models]
        self.buckets, self.mix, self.period, self.overlap = buckets, mix, period, overlap
        self.pending: list[Floats] = []
        self.num_rounds = 0

    def train(self, steps: range) -> None:
        for step in steps:
            for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
                optimizer.zero_grad()
                loss_of(model, step, rank).backward()
                optimizer.step()
            self.take()
            if (step + 1) % self.period == 0:
                self.pending = [
                    self.mix(values, self.num_rounds, index) - values for index, values in enumerate(self.values())
                ]
                self.num_rounds += 1
                if not self.overlap:
                    self.take()

    def values(self) -> list[Floats]:
        """Return the weights of each bucket, [N, numel]."""
        named = [dict(model.named_parameters()) for model in self.models]
        return [
            np.stack([np.concatenate([own[name].detach().numpy().reshape(-1) for name in names]) for own in named])
            for names in self.buckets
        ]

    def take(self) -> None:
        for names, change in zip(self.buckets, self.pending, strict=False):
            for model, row in zip(self.models, change, strict=True):
                own, at = dict(model.named_parameters()), 0
                for name in names:
                    flat = own[name].detach().view(-1)
                    flat += torch.from_numpy(row[at : at + flat.numel()])
                    at += flat.numel()
        self.pending = []

    def assert_like(self, model: nn.Module, tolerance: float) -> None:
        expected = dict(self.models[dist.get_rank()].named_parameters())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                parameter, expected[name], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )


def compress(codec: str, values: Floats) -> Floats:
    """Encode and decode each row."""
    reference = BLOCK_CODECS[codec]
    rows = [reference.decode(reference.encode(row.astype(np.float32)), len(row)) for row in values]
    return np.stack(rows).astype(np.float64)


class ChocoReference:
    """CHOCO-SGD with a replica of every rank; the first differences are not compressed."""

    def __init__(self, matrix: Floats, codec: str, gamma: float) -> None:
        self.matrix, self.codec, self.gamma = matrix, codec, gamma
        self.known: dict[int, Floats] = {}

    def __call__(self, x: Floats, round_: int, bucket: int) -> Floats:
        known = self.known[bucket] + compress(self.codec, x - self.known[bucket]) if round_ else x.copy()
        self.known[bucket] = known
        pulls = [sum(self.matrix[i, j] * (known[j] - known[i]) for j in range(len(x))) for i in range(len(x))]
        return x + self.gamma * np.stack(pulls)


class DcdReference:
    """Algorithm 1 of DCD-PSGD with a replica of every rank; the first round only makes the values known."""

    def __init__(self, matrix: Floats, codec: str) -> None:
        self.matrix, self.codec = matrix, codec
        self.x: dict[int, Floats] = {}

    def __call__(self, stepped: Floats, round_: int, bucket: int) -> Floats:
        if round_ == 0:
            self.x[bucket] = stepped.copy()
            return stepped
        x = self.x[bucket]
        half = self.matrix @ x + (stepped - x)  # x_{t+1/2} = sum_j W_ij x_j - lr g
        self.x[bucket] = x + compress(self.codec, half - x)
        return self.x[bucket]


class NoLoCoReference:
    """Slow weights and a momentum of every rank; what both of a pair moved, and the mean of their slow weights.

    Args:
        slow: By bucket, the weights that the ranks begin with, [N, numel].
        topology: The pairs.
        lr: The outer learning rate.
        momentum: The outer momentum.
    """

    def __init__(self, slow: list[Floats], topology: Topology, lr: float, momentum: float) -> None:
        self.slow, self.topology, self.lr, self.momentum = slow, topology, lr, momentum
        self.velocity = [np.zeros_like(each) for each in slow]

    def __call__(self, x: Floats, round_: int, bucket: int) -> Floats:
        pairs, slow = self.topology.matrix(len(x), round_), self.slow[bucket]
        moved, pull = pairs @ (x - slow), pairs @ slow - slow
        self.velocity[bucket] = self.momentum * self.velocity[bucket] + self.lr * (moved + pull)
        self.slow[bucket] = slow + self.velocity[bucket]
        return self.slow[bucket]


def matrix_mix(topology: Topology) -> Callable[[Floats, int, int], Floats]:
    return lambda x, round_, bucket: topology.matrix(len(x), round_) @ x


# --- Every algorithm against its reference --------------------------------------------------------------


def check(algorithm: Algorithm, mix: Callable[[Floats, int, int], Floats], **options: Any) -> None:
    """Train 50 steps; the weights are the reference's, within float64's rounding."""
    model, optimizer = start(algorithm, bucket_cap_mb=options.pop("bucket_cap_mb", SMALL_BUCKET_MB))
    train(model, optimizer, range(STEPS))
    replica_of(model).engine.drain()
    reference = Replicas(double_mlp, layout(model), mix, **options)
    reference.train(range(STEPS))
    reference.take()
    reference.assert_like(model, 1e-9)


@pytest.mark.thin
@against_equations(Decentralized)
@on_ranks(1, 3, slow=(2, 4))
@pytest.mark.parametrize("topology", ["exponential", "one_peer_exponential", "shift_one"])
def test_d_psgd_on_every_topology(topology: str) -> None:
    algorithm = Decentralized(topology)
    check(algorithm, matrix_mix(algorithm.topology))


@on_ranks(slow=(8,))
def test_eight_ranks() -> None:
    check(Decentralized("one_peer_exponential"), matrix_mix(Decentralized("one_peer_exponential").topology))
    check(Decentralized(PATH, overlap=False), matrix_mix(PATH), overlap=False)
    check(LowPrecisionDecentralized(), ChocoReference(Ring().matrix(8), "int8", 1.0))
    check(Gossip(period=3, seed=5), matrix_mix(RandomMatching(5)), period=3)


@on_ranks(3, slow=(4,))
@pytest.mark.parametrize(("period", "overlap"), [(1, False), (3, True), (3, False)])
def test_period_and_overlap(period: int, overlap: bool) -> None:
    algorithm = Decentralized("shift_one", period=period, overlap=overlap)
    check(algorithm, matrix_mix(algorithm.topology), period=period, overlap=overlap, bucket_cap_mb=1.0)


@on_ranks(3)
def test_a_users_mixing_matrix() -> None:
    own = MixingMatrix([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.3, 0.2, 0.5]])  # directed
    check(Decentralized(own), matrix_mix(own))
    with raises_on_every_rank(ConfigError, "of 2 ranks, got 3"):
        start(Decentralized(MixingMatrix([[0.5, 0.5], [0.5, 0.5]])))


@pytest.mark.thin
@against_equations(LowPrecisionDecentralized)
@on_ranks(1, 3, slow=(2, 4))
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("topology", ["ring", "exponential"])
def test_choco_sgd(topology: str, overlap: bool) -> None:
    algorithm = LowPrecisionDecentralized(topology=topology, overlap=overlap)
    matrix = algorithm.topology.matrix(dist.get_world_size())
    check(algorithm, ChocoReference(matrix, "int8", 1.0), overlap=overlap)


@on_ranks(4)
@pytest.mark.parametrize(("codec", "step"), [(Int4(), 0.7), (OneBit(), 0.2)])
def test_choco_sgd_with_coarse_codecs(codec: Any, step: float) -> None:
    algorithm = LowPrecisionDecentralized(codec, Graph(((0, 1), (1, 2), (2, 3))), consensus_step=step)
    check(algorithm, ChocoReference(algorithm.topology.matrix(4), codec.name, step), bucket_cap_mb=1.0)


@pytest.mark.thin
@on_ranks(1, 3, slow=(2, 4))
@pytest.mark.parametrize("overlap", [False, True])
def test_dcd_psgd(overlap: bool) -> None:
    algorithm = LowPrecisionDecentralized(method="dcd", overlap=overlap)
    matrix = algorithm.topology.matrix(dist.get_world_size())
    check(algorithm, DcdReference(matrix, "int8"), overlap=overlap)


@pytest.mark.thin
@against_equations(Gossip)
@on_ranks(1, 3, slow=(2, 4))
@pytest.mark.parametrize("period", [1, 4])
def test_gossip(period: int) -> None:
    check(Gossip(period=period, seed=11), matrix_mix(RandomMatching(11)), period=period)


@pytest.mark.thin
@against_equations(NoLoCo)
@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    "options",
    [
        {"period": 3},
        {"period": 1, "outer_lr": 0.5, "outer_momentum": 0.8},
        {"period": 2, "outer_lr": 0.9, "outer_momentum": 0.0},
        {"period": 3, "overlap": True},
    ],
    ids=str,
)
def test_noloco(options: dict[str, Any]) -> None:
    algorithm = NoLoCo(seed=13, **options)
    model, optimizer = start(algorithm, bucket_cap_mb=SMALL_BUCKET_MB)
    reference = Replicas(
        double_mlp, layout(model), lambda x, *_: x, period=options["period"], overlap=options.get("overlap", False)
    )
    lr, momentum = algorithm.outer_lr, algorithm.outer_momentum
    reference.mix = NoLoCoReference(reference.values(), RandomMatching(13), lr, momentum)
    train(model, optimizer, range(STEPS))
    replica_of(model).engine.drain()
    reference.train(range(STEPS))
    reference.take()
    reference.assert_like(model, 1e-9)


@on_ranks(4)
def test_noloco_sends_the_weights_to_one_rank_and_the_replicas_stay_near_each_other() -> None:
    model, optimizer = start(NoLoCo(period=2))
    before = commlib.stats(model).wire_bytes
    train(model, optimizer, range(10))
    assert commlib.stats(model).wire_bytes - before == 5 * sum(p.nbytes for p in model.parameters())
    own = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    rows = torch.stack(everyone)
    alone = Replicas(double_mlp, layout(model), lambda x, *_: x)
    alone.train(range(10))
    apart = np.concatenate(alone.values(), axis=1).std(axis=0).mean()
    assert 0 < float(rows.std(dim=0, correction=0).mean()) < apart


@on_ranks(3, slow=(2,))
@pytest.mark.parametrize("codec", [Int8(), UInt8MinMax()])
def test_gossip_of_compressed_values(codec: Any) -> None:
    def mix(x: Floats, round_: int, bucket: int) -> Floats:
        known = compress(codec.name, x)
        partner = RandomMatching(2).neighbours
        pairs = [partner(rank, len(x), round_).targets for rank in range(len(x))]
        return np.stack([x[i] + (known[pair[0]] - known[i]) / 2 if pair else x[i] for i, pair in enumerate(pairs)])

    check(Gossip(seed=2, codec=codec), mix)


@pytest.mark.thin
@on_ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrower_weights_stay_near_the_reference(dtype: torch.dtype) -> None:
    """One average of fixed weights: rounded once to the weights' dtype."""
    for algorithm in (Decentralized("ring", overlap=False), Gossip(overlap=False)):
        model, optimizer = still(algorithm, dtype)
        before = [seeded_weights(rank).to(dtype).double() for rank in range(dist.get_world_size())]
        optimizer.step()
        expected = torch.from_numpy(algorithm.topology.matrix(len(before), 0)) @ torch.stack(before)
        error = (weights_of(model).double() - expected[dist.get_rank()]).abs().max()
        assert error <= expected.abs().max() * torch.finfo(dtype).eps


# --- Consensus ------------------------------------------------------------------------------------------

NUMEL = 2000


def seeded_weights(rank: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))


class Weights(nn.Module):
    """Nothing but weights, other ones on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(seeded_weights(dist.get_rank()))


def weights_of(model: nn.Module) -> Tensor:
    return next(model.parameters()).detach()


def still(algorithm: Algorithm, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model that differs between ranks and that its optimizer leaves alone."""
    model = Weights().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    commlib.wrap(model, algorithm, optimizer=optimizer, init_sync=False)
    weights_of(model)
    return model, optimizer


def everyones(model: nn.Module) -> Tensor:
    own = weights_of(model)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own.contiguous())
    return torch.stack(everyone).double()


def distance(values: Tensor) -> float:
    return float((values - values.mean(dim=0)).norm())


@pytest.mark.thin
@on_ranks(3, 4)
@pytest.mark.parametrize("name", ["ring", "path", "exponential", "shift_one"])
def test_the_distance_to_the_mean_shrinks_as_the_spectral_gap_predicts(name: str) -> None:
    world_size = dist.get_world_size()
    path = Graph(tuple((rank, rank + 1) for rank in range(world_size - 1)))
    algorithm = Decentralized(path if name == "path" else name, overlap=False)
    rho = 1 - algorithm.topology.spectral_gap(world_size)
    model, optimizer = still(algorithm)
    values = [everyones(model)]
    for _ in range(12):
        optimizer.step()
        values.append(everyones(model))
    torch.testing.assert_close(values[-1].mean(dim=0), values[0].mean(dim=0), rtol=0, atol=1e-12)
    if rho < 1e-9:
        period = algorithm.topology.period(world_size)
        assert period is not None
        assert distance(values[period]) < 1e-12
    else:
        rate = (distance(values[12]) / distance(values[6])) ** (1 / 6)
        assert rate == pytest.approx(rho, rel=0.02)


@pytest.mark.thin
@on_ranks(3, 4)
@pytest.mark.parametrize(("method", "drift"), [("choco", 1e-12), ("dcd", 0.02)])
def test_compressed_differences_lead_to_the_mean_as_well(method: str, drift: float) -> None:
    """Far below the resolution of codes of the values themselves. In DCD the errors of C move the mean."""
    model, optimizer = still(LowPrecisionDecentralized(method=method, overlap=False))
    first = everyones(model)
    for _ in range(25):
        optimizer.step()
    last = everyones(model)
    torch.testing.assert_close(last.mean(dim=0), first.mean(dim=0), rtol=0, atol=drift)
    assert distance(last) < 1e-7 * distance(first)


@on_ranks(4)
def test_fully_connected_replicas_have_the_same_bits() -> None:
    model, optimizer = still(Decentralized("fully_connected", overlap=False), torch.float32)
    optimizer.step()
    everyone = everyones(model)
    assert all(torch.equal(everyone[0], other) for other in everyone)


@on_ranks(2, 3)
def test_a_weight_that_is_not_finite_is_seen_at_the_neighbours() -> None:
    algorithms = [LowPrecisionDecentralized(overlap=False), Gossip(codec=Int8(), overlap=False)]
    for algorithm in [*algorithms, LowPrecisionDecentralized(method="dcd", overlap=False)]:
        model, optimizer = still(algorithm)
        for _ in range(2):
            optimizer.step()
        if dist.get_rank() == 0:
            weights_of(model)[5] = float("nan")
        for _ in range(6):
            optimizer.step()
        assert everyones(model)[:, 5].isnan().all()
        assert everyones(model)[:, 1000:].isfinite().all(), "other blocks are as they were"


@on_ranks(2, 3)
def test_synchronize_gives_the_mean_and_training_goes_on() -> None:
    for name in ("decentralized", "low_precision_decentralized", "gossip"):
        model, optimizer = start(name)
        train(model, optimizer, range(7))
        commlib.synchronize(model)
        values = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        everyone = [torch.empty_like(values) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, values)
        assert all(torch.equal(everyone[0], other) for other in everyone)
        losses = train(model, optimizer, range(7, 30))
        assert np.mean(losses[-5:]) < np.mean(losses[:5])
        assert commlib.stats(model).rounds == 29, "the round of the last step is under way"


# --- Nodes ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def two_nodes() -> Iterator[None]:
    os.environ["COMMLIB_NODE"] = str(2 * dist.get_rank() // dist.get_world_size())
    try:
        yield
    finally:
        del os.environ["COMMLIB_NODE"]


@pytest.mark.thin
@on_ranks(4)
@pytest.mark.parametrize("kind", ["decentralized", "gossip", "choco"])
@pytest.mark.parametrize("bucket_cap_mb", [SMALL_BUCKET_MB, 1.0])
def test_nodes_average_inside_first(kind: str, bucket_cap_mb: float) -> None:
    """Two nodes of two ranks; compressed, each local rank carries a stretch with blocks of its own."""
    matrix = np.full((2, 2), 0.5)
    compressed = ChocoReference(matrix, "int8", 1.0)
    options = {"hierarchical": True, "overlap": False}
    algorithm: Any = {
        "decentralized": lambda: Decentralized("ring", **options),
        "gossip": lambda: Gossip(**options),
        "choco": lambda: LowPrecisionDecentralized(**options),
    }[kind]()
    with two_nodes():
        model, optimizer = start(algorithm, bucket_cap_mb=bucket_cap_mb)

    def mix(x: Floats, round_: int, bucket: int) -> Floats:
        nodes = x.reshape(2, 2, -1).mean(axis=1)
        if kind != "choco":
            return np.repeat(matrix @ nodes, 2, axis=0)
        chunk = -(-nodes.shape[1] // 32) * 16
        stretches = [nodes[:, at : at + chunk] for at in (0, chunk)]
        mixed = [compressed(own, round_, 2 * bucket + k) for k, own in enumerate(stretches) if own.shape[1]]
        return np.repeat(np.concatenate(mixed, axis=1), 2, axis=0)

    train(model, optimizer, range(STEPS))
    reference = Replicas(double_mlp, layout(model), mix, overlap=False)
    reference.train(range(STEPS))
    reference.assert_like(model, 1e-9)


# --- State and options ----------------------------------------------------------------------------------


@pytest.mark.thin
@on_ranks(3, slow=(2,))
@pytest.mark.parametrize("build", [double_mlp, Mlp])
@pytest.mark.parametrize(
    "algorithm",
    [
        Decentralized("one_peer_exponential"),
        LowPrecisionDecentralized(),
        LowPrecisionDecentralized(method="dcd", overlap=False, period=2),
        Gossip(period=2, seed=3),
        NoLoCo(period=2, seed=3),
        NoLoCo(period=4, seed=3, overlap=True),
    ],
    ids=["decentralized", "choco", "dcd", "gossip", "noloco", "noloco in the background"],
)
def test_a_resumed_run_is_bit_identical(algorithm: Algorithm, build: Callable[[], nn.Module]) -> None:
    whole, optimizer = start(algorithm, build, bucket_cap_mb=SMALL_BUCKET_MB)
    train(whole, optimizer, range(7))
    saved = copy.deepcopy((commlib.state_dict(whole), whole.state_dict(), optimizer.state_dict()))
    rest = train(whole, optimizer, range(7, 15))

    resumed = seeded(build, 99)
    resumed.load_state_dict(saved[1])
    own = sgd(resumed)
    own.load_state_dict(saved[2])
    commlib.wrap(resumed, algorithm, optimizer=own, init_sync=False, bucket_cap_mb=SMALL_BUCKET_MB)
    commlib.load_state_dict(resumed, saved[0])
    assert train(resumed, own, range(7, 15)) == rest
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


@on_ranks(2)
def test_replicas_move_to_other_buckets() -> None:
    """Loaded into another plan: where a bucket's replicas are all there, nothing is sent uncompressed."""
    model, optimizer = start(LowPrecisionDecentralized(overlap=False), bucket_cap_mb=SMALL_BUCKET_MB)
    train(model, optimizer, range(5))
    saved = copy.deepcopy((commlib.state_dict(model), model.state_dict()))
    other = double_mlp()
    other.load_state_dict(saved[1])
    own = sgd(other)
    commlib.wrap(other, LowPrecisionDecentralized(overlap=False), optimizer=own, init_sync=False, bucket_cap_mb=1.0)
    assert len(layout(other)) < len(layout(model))
    commlib.load_state_dict(other, saved[0])
    before = commlib.stats(other).wire_bytes
    train(other, own, range(5, 6))
    numel = sum(p.numel() for p in other.parameters())
    assert commlib.stats(other).wire_bytes - before < 1.1 * numel
    replicas = commlib.state_dict(other)["state"]["replica"]
    assert set(replicas) == {name for name, _ in other.named_parameters()}


@on_ranks(3)
def test_options_that_cannot_be_are_refused_and_must_be_alike() -> None:
    for topology in ("one_peer_exponential", "shift_one", "random_matching", "grid"):
        with pytest.raises(ConfigError, match="changes from step to step"):
            LowPrecisionDecentralized(topology=topology)
    for options in ({"method": "ecd"}, {"consensus_step": 0.0}, {"consensus_step": 1.5}):
        with pytest.raises(ConfigError, match="expected method 'choco'"):
            LowPrecisionDecentralized(**options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'dcd' with 1; got 'dcd' with 0.5"):
        LowPrecisionDecentralized(method="dcd", consensus_step=0.5)
    with pytest.raises(ConfigError, match="rings"):
        Decentralized("rings")
    with raises_on_every_rank(ConfigError, "topology"):
        start(Decentralized("ring" if dist.get_rank() else "exponential"))
    with raises_on_every_rank(ConfigError, "seed"):
        start(Gossip(seed=dist.get_rank()))
    with raises_on_every_rank(ConfigError, "optimizer="):
        commlib.wrap(double_mlp(), "decentralized")
