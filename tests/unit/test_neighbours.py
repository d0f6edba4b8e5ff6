"""Primitives over neighbours and by exchanges, with all ranks in one process, against NumPy references."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from commlib.codecs import BlockCodec, Int4, Int8, OneBit, UInt8MinMax
from commlib.kernels.reference import BLOCK_CODECS
from commlib.primitives.butterfly import butterfly_all_reduce, halving_all_reduce
from commlib.primitives.decentralized import (
    DifferenceWorkspace,
    FullWorkspace,
    QuantizedWorkspace,
    choco,
    dcd,
    decentralized_full_precision,
    decentralized_quantized,
)
from commlib.primitives.topology import RandomMatching, Topology, create
from commlib.transport.base import Communication, Communicator, Exchange

Floats = npt.NDArray[np.float64]
NUMEL = 700  # three blocks of 256, the last one short
STEPS = 50


def run(generators: Sequence[Communication]) -> float:
    """Run the ranks' generators, a request of each at a time; returns the bytes that were sent in all."""
    sent = 0.0
    while True:
        requests = [next(generator, None) for generator in generators]
        if all(request is None for request in requests):
            return sent
        messages: dict[tuple[int, int], list[torch.Tensor]] = {}
        for rank, request in enumerate(requests):
            assert isinstance(request, Exchange), "all ranks make as many requests"
            sent += request.wire_bytes()
            for to, tensor in request.sends:
                messages.setdefault((rank, to), []).append(tensor.clone())
        for rank, request in enumerate(requests):
            for by, tensor in request.receives:  # type: ignore[union-attr]
                tensor.copy_(messages[by, rank].pop(0))
        assert not any(messages.values()), "everything sent is received"


def comms(world_size: int) -> list[Communicator]:
    return [Communicator(rank, world_size) for rank in range(world_size)]


def values(world_size: int, numel: int = NUMEL, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator, dtype=torch.float64) for _ in range(world_size)]


def stacked(tensors: Sequence[torch.Tensor]) -> Floats:
    return np.stack([tensor.double().numpy().copy() for tensor in tensors])


def compress(codec: BlockCodec, rows: Floats) -> Floats:
    """Encode and decode each row."""
    reference = BLOCK_CODECS[codec.name]
    return np.stack([reference.decode(reference.encode(row.astype(np.float32)), len(row)) for row in rows]).astype(
        float
    )


def train(
    make: Callable[[Communicator, torch.Tensor], Callable[[int, torch.Tensor], Communication]],
    mix: Callable[[Floats, int], Floats],
    world_size: int,
    *,
    seed: int = 1,
) -> None:
    """Let the ranks drift at random and mix, 50 times; in every round the primitive's result is the reference's."""
    x = values(world_size)
    rounds = [make(comm, x[comm.rank]) for comm in comms(world_size)]
    rng = np.random.default_rng(seed)
    expected = stacked(x)
    for step in range(STEPS):
        drift = 0.01 * rng.standard_normal(expected.shape)
        expected = mix(expected + drift, step)
        for tensor, own in zip(x, drift, strict=True):
            tensor.add_(torch.from_numpy(own))
        run([round_(step, tensor) for round_, tensor in zip(rounds, x, strict=True)])
        np.testing.assert_allclose(stacked(x), expected, rtol=0, atol=1e-12)


NAMED = ["ring", "exponential", "one_peer_exponential", "fully_connected", "shift_one", "grid", "random_matching"]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("name", NAMED)
def test_full_precision_is_the_product_with_the_matrix(name: str, world_size: int) -> None:
    topology = create(name)

    def make(comm: Communicator, like: torch.Tensor) -> Callable[[int, torch.Tensor], Communication]:
        workspace = FullWorkspace(NUMEL, like.dtype, like.device)
        return lambda step, x: decentralized_full_precision(x, workspace, of(topology, comm, step), comm)

    train(make, lambda x, step: topology.matrix(world_size, step) @ x, world_size)


def of(topology: Topology, comm: Communicator, step: int) -> Any:
    return topology.neighbours(comm.rank, comm.world_size, step)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("codec", [Int8(), UInt8MinMax()])
@pytest.mark.parametrize("topology", [RandomMatching(4), create("exponential")])
def test_quantized_values_keep_the_mean(topology: Topology, codec: BlockCodec, world_size: int) -> None:
    def mix(x: Floats, step: int) -> Floats:
        known, matrix = compress(codec, x), topology.matrix(world_size, step)
        mixed = x + np.stack([sum(matrix[i, j] * (known[j] - known[i]) for j in range(len(x))) for i in range(len(x))])
        np.testing.assert_allclose(mixed.mean(axis=0), x.mean(axis=0), atol=1e-12)
        return mixed

    def make(comm: Communicator, like: torch.Tensor) -> Callable[[int, torch.Tensor], Communication]:
        workspace = QuantizedWorkspace(NUMEL, like.dtype, like.device, codec)
        return lambda step, x: decentralized_quantized(x, workspace, of(topology, comm, step), comm)

    train(make, mix, world_size)


def differences(
    topology: Topology, codec: BlockCodec, step_size: float | None
) -> Callable[[Communicator, torch.Tensor], Callable[[int, torch.Tensor], Communication]]:
    """Make the rounds of choco, or of dcd without a step size."""

    def make(comm: Communicator, like: torch.Tensor) -> Callable[[int, torch.Tensor], Communication]:
        workspace = DifferenceWorkspace(len(like), like.dtype, like.device, codec, of(topology, comm, 0))
        if step_size is None:
            return lambda step, x: dcd(x, workspace, comm)
        return lambda step, x: choco(x, workspace, comm, step_size)

    return make


class ChocoReference:
    """CHOCO-SGD with a replica of every rank; the first differences are not compressed."""

    def __init__(self, matrix: Floats, codec: BlockCodec, gamma: float) -> None:
        self.matrix, self.codec, self.gamma = matrix, codec, gamma

    def __call__(self, x: Floats, step: int) -> Floats:
        self.known = self.known + compress(self.codec, x - self.known) if step else x.copy()
        known = self.known
        pulls = [sum(self.matrix[i, j] * (known[j] - known[i]) for j in range(len(x))) for i in range(len(x))]
        return x + self.gamma * np.stack(pulls)


class DcdReference:
    """Algorithm 1 of DCD-PSGD with a replica of every rank; the first round only makes the values known."""

    def __init__(self, matrix: Floats, codec: BlockCodec) -> None:
        self.matrix, self.codec = matrix, codec

    def __call__(self, stepped: Floats, step: int) -> Floats:
        if step == 0:
            self.x = stepped.copy()
        else:
            half = self.matrix @ self.x + (stepped - self.x)  # x_{t+1/2} = sum_j W_ij x_j - lr g
            self.x = self.x + compress(self.codec, half - self.x)
        return self.x


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("name", ["ring", "exponential"])
@pytest.mark.parametrize(("codec", "step_size"), [(Int8(), 1.0), (Int4(), 0.7), (OneBit(), 0.2)])
def test_choco(name: str, codec: BlockCodec, step_size: float, world_size: int) -> None:
    reference = ChocoReference(create(name).matrix(world_size), codec, step_size)
    train(differences(create(name), codec, step_size), reference, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("name", ["ring", "exponential"])
def test_dcd(name: str, world_size: int) -> None:
    reference = DcdReference(create(name).matrix(world_size), Int8())
    train(differences(create(name), Int8(), None), reference, world_size)


@pytest.mark.parametrize("step_size", [1.0, None])
def test_weights_of_two_bytes_reach_the_mean_within_their_rounding(step_size: float | None) -> None:
    x = [tensor.bfloat16() for tensor in values(6)]
    mean = torch.stack(x).double().mean(dim=0)
    rounds = [differences(create("ring"), Int8(), step_size)(comm, x[0]) for comm in comms(6)]
    for step in range(60):
        run([round_(step, tensor) for round_, tensor in zip(rounds, x, strict=True)])
    error = torch.stack([tensor.double() - mean for tensor in x]).abs().max()
    drift = 0.03 if step_size is None else 0.0  # with DCD the mean moves by the encoding errors
    assert error <= 8 * torch.finfo(torch.bfloat16).eps * mean.abs().max() + drift


def test_rounding_hardly_moves_the_mean_in_many_rounds() -> None:
    """See [Note: the pull]: a plain sum of the neighbours' replicas moves it 30 times as far in these 300 rounds."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(NUMEL, generator=generator)
    x = [start + 0.001 * torch.randn(NUMEL, generator=generator) for _ in range(6)]
    rounds = [differences(create("ring"), Int8(), 1.0)(comm, x[0]) for comm in comms(6)]
    moved = torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(300):
        before = torch.stack(x).double().mean(dim=0)
        run([round_(step, tensor) for round_, tensor in zip(rounds, x, strict=True)])
        moved += torch.stack(x).double().mean(dim=0) - before
        for tensor in x:
            tensor.add_(0.001 * torch.randn(NUMEL, generator=generator))
    assert moved.square().mean().sqrt() < 1.5e-6


def test_a_round_after_the_first_sends_payloads_only() -> None:
    world_size = 5
    x = values(world_size)
    rounds = [differences(create("ring"), Int8(), 1.0)(comm, x[0]) for comm in comms(world_size)]
    sent = [run([r(step, t) for r, t in zip(rounds, x, strict=True)]) for step in range(3)]
    assert sent == [world_size * 2 * NUMEL * 8, *[world_size * 2 * Int8().payload_bytes(NUMEL)] * 2]


@pytest.mark.parametrize("world_size", range(1, 17))
@pytest.mark.parametrize("numel", [0, 1, 5, 1000])
def test_butterfly_all_reduces_for_any_number_of_ranks(world_size: int, numel: int) -> None:
    """Small integers, whose sums are exact in every order."""
    generator = torch.Generator().manual_seed(world_size)
    fractions: list[list[float] | None] = [None, [float(rank) for rank in range(world_size)]]
    ways = [lambda t, comm, f=f: butterfly_all_reduce(t, comm, f) for f in fractions if f is None or sum(f)]
    for way, dtype in itertools.product([*ways, halving_all_reduce], [torch.float32, torch.bfloat16]):
        x = [torch.randint(-4, 5, (numel,), generator=generator).to(dtype) for _ in range(world_size)]
        expected = torch.stack(x).sum(dim=0)
        run([way(tensor, comm) for tensor, comm in zip(x, comms(world_size), strict=True)])
        assert all(torch.equal(tensor, expected) for tensor in x)
