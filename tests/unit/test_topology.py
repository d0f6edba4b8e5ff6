"""Topologies: doubly stochastic for any number of ranks; every send has its receive; spectral gaps are true."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable

import numpy as np
import pytest

from commlib.errors import ConfigError
from commlib.primitives import topology as topologies
from commlib.primitives.topology import (
    TOPOLOGIES,
    Exponential,
    FullyConnected,
    Graph,
    Grid,
    MixingMatrix,
    OnePeerExponential,
    RandomMatching,
    Ring,
    ShiftOne,
    Topology,
)

SIZES = range(1, 17)
PINNED = [2, 1, 1, 3, 5, 6, 7, 6]
NAMED = pytest.mark.parametrize("name", sorted(TOPOLOGIES))


def star(world_size: int) -> Graph:
    return Graph(tuple((0, rank) for rank in range(1, world_size)))


def product(topology: Topology, world_size: int, num_steps: int | None = None) -> topologies.Matrix:
    """Multiply the matrices of so many steps, by default of a period."""
    steps = range(num_steps or topology.period(world_size) or 1)
    return functools.reduce(lambda total, step: topology.matrix(world_size, step) @ total, steps, np.eye(world_size))


@NAMED
@pytest.mark.parametrize("world_size", SIZES)
def test_matrices_are_doubly_stochastic_and_lead_to_the_mean(name: str, world_size: int) -> None:
    topology = topologies.create(name)
    num_steps = topology.period(world_size) or 50
    for step in range(num_steps):
        matrix = topology.matrix(world_size, step)
        assert matrix.shape == (world_size, world_size)
        assert matrix.min() >= 0
        np.testing.assert_allclose(matrix.sum(axis=0), 1, atol=1e-12)
        np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-12)
    assert np.linalg.norm(product(topology, world_size, num_steps) - 1 / world_size, 2) < 1 - 1e-9 or world_size == 1
    assert 0 < topology.spectral_gap(world_size) <= 1


@NAMED
@pytest.mark.parametrize("world_size", SIZES)
def test_every_send_has_its_receive(name: str, world_size: int) -> None:
    topology = topologies.create(name)
    for step in range(12):
        matrix = topology.matrix(world_size, step)
        everyone = [topology.neighbours(rank, world_size, step) for rank in range(world_size)]
        for rank, own in enumerate(everyone):
            row = np.zeros(world_size)
            row[rank] = own.own
            for peer, weight in own.sources.items():
                row[peer] = weight
                assert rank in everyone[peer].targets
            np.testing.assert_array_equal(row, matrix[rank])
            assert all(rank in everyone[peer].sources for peer in own.targets)
            assert rank not in own.sources


def metropolis_hastings(world_size: int, edges: Iterable[tuple[int, int]]) -> topologies.Matrix:
    adjacent = np.zeros((world_size, world_size), dtype=bool)
    for one, other in edges:
        adjacent[one, other] = adjacent[other, one] = one != other
    degrees = adjacent.sum(axis=1)
    matrix = np.where(adjacent, 1.0 / (1.0 + np.maximum.outer(degrees, degrees)), 0.0)
    np.fill_diagonal(matrix, 1.0 - matrix.sum(axis=1))
    return matrix


def paired(world_size: int, pairs: Iterable[tuple[int, int]]) -> topologies.Matrix:
    matrix = np.eye(world_size)
    for one, other in pairs:
        matrix[[[one], [other]], [one, other]] = 0.5
    return matrix


def shift(world_size: int, hop: int) -> topologies.Matrix:
    return np.roll(np.eye(world_size), hop, axis=1)


def tournament(world_size: int, step: int) -> topologies.Matrix:
    size = max(1, world_size - 1 + world_size % 2)
    turn = step % size
    total = turn // 2 if turn % 2 == 0 else -1 - turn // 2
    partner = [(total - rank) % size for rank in range(size)]
    pairs = [(rank, other) for rank, other in enumerate(partner) if rank < other]
    resting = [rank for rank, other in enumerate(partner) if rank == other]
    return paired(world_size, pairs + ([(resting[0], world_size - 1)] if world_size > size else []))


def matched(world_size: int, step: int) -> topologies.Matrix:
    order = np.argsort(np.random.Philox(key=0, counter=[0, step, 0, 0]).random_raw(world_size), kind="stable")
    return paired(world_size, zip(order[0::2].tolist(), order[1::2].tolist(), strict=False))


def grid(world_size: int, step: int) -> topologies.Matrix:
    short = next(side for side in range(math.isqrt(world_size), 0, -1) if world_size % side == 0)
    sides = (short, world_size // short) if short > 1 else (world_size,)
    factors = [np.full((n, n), 1.0 / n) if idx == step % len(sides) else np.eye(n) for idx, n in enumerate(sides)]
    return functools.reduce(np.kron, factors)


def hops_of(world_size: int) -> list[int]:
    return [1 << k for k in range((world_size - 1).bit_length())]


def circle(world_size: int) -> list[tuple[int, int]]:
    return [(rank, (rank + 1) % world_size) for rank in range(world_size)]


#: Each topology's matrix as a whole, without its neighbours.
DENSE = {
    "exponential": lambda n, _: (
        sum((shift(n, hop) for hop in [0, *hops_of(n)]), np.zeros((n, n))) / (1 + len(hops_of(n)))
    ),
    "fully_connected": lambda n, _: np.full((n, n), 1.0 / n),
    "grid": grid,
    "one_peer_exponential": lambda n, step: (
        (np.eye(n) + shift(n, (hops_of(n) or [0])[step % max(1, len(hops_of(n)))])) / 2
    ),
    "random_matching": matched,
    "ring": lambda n, _: metropolis_hastings(n, circle(n)),
    "shift_one": tournament,
}


def check_rows_and_columns(topology: Topology, expected: topologies.Matrix, step: int) -> None:
    """Bit for bit."""
    world_size = len(expected)
    np.testing.assert_array_equal(topology.matrix(world_size, step), expected)
    for rank in range(world_size):
        own = topology.neighbours(rank, world_size, step)
        others = [peer for peer in range(world_size) if peer != rank]
        assert own.own == expected[rank, rank]
        assert list(own.sources.items()) == [(peer, expected[rank, peer]) for peer in others if expected[rank, peer]]
        assert own.targets == tuple(peer for peer in others if expected[peer, rank])


@NAMED
def test_each_rank_has_row_and_column_of_the_matrix(name: str) -> None:
    for world_size in range(1, 34):
        for step in (*range(12), 1000):
            check_rows_and_columns(topologies.create(name), DENSE[name](world_size, step), step)


@pytest.mark.parametrize("world_size", range(1, 34))
def test_each_rank_has_row_and_column_of_a_users_graph_and_matrix(world_size: int) -> None:
    drawn = np.random.default_rng(world_size).integers(0, world_size, (2 * world_size, 2))
    edges = [*circle(world_size), *((int(one), int(other)) for one, other in drawn)]
    expected = metropolis_hastings(world_size, edges)
    check_rows_and_columns(Graph(tuple(edges)), expected, 0)
    check_rows_and_columns(MixingMatrix(expected), expected, 0)
    check_rows_and_columns(MixingMatrix(DENSE["exponential"](world_size, 0)), DENSE["exponential"](world_size, 0), 0)


@pytest.mark.parametrize(
    "topology",
    [*map(topologies.create, sorted(TOPOLOGIES)), Graph(tuple(circle(1 << 15)))],
    ids=lambda each: type(each).__name__,
)
def test_the_neighbours_of_one_of_many_ranks_need_no_matrix(topology: Topology) -> None:
    world_size = 1 << 15  # whose matrix takes 8 GB
    own = topology.neighbours(world_size - 1, world_size, 5)
    assert own.own + sum(own.sources.values()) == pytest.approx(1.0)


@NAMED
def test_periods_are_true_and_static_ones_have_one(name: str) -> None:
    topology = topologies.create(name)
    for world_size in SIZES:
        period = topology.period(world_size)
        if period is None:
            continue
        for step in range(2 * period):
            np.testing.assert_array_equal(topology.matrix(world_size, step), topology.matrix(world_size, step + period))
        assert topology.is_static <= (period == 1)


@pytest.mark.parametrize("world_size", range(3, 17))
def test_the_spectral_gap_of_a_ring_is_the_known_one(world_size: int) -> None:
    rho = max(abs(1 + 2 * math.cos(2 * math.pi * k / world_size)) / 3 for k in range(1, world_size))
    assert Ring().spectral_gap(world_size) == pytest.approx(1 - rho, abs=1e-12)


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
def test_the_spectral_gap_of_the_exponential_graph_is_the_papers(world_size: int) -> None:
    """Ying et al. (2021): 2 / (1 + ceil(log2 n)) for an even number of ranks."""
    expected = min(1.0, 2 / (1 + math.ceil(math.log2(world_size))))
    assert Exponential().spectral_gap(world_size) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
def test_a_period_of_the_one_peer_exponential_graph_is_the_mean(world_size: int) -> None:
    np.testing.assert_allclose(product(OnePeerExponential(), world_size), 1 / world_size, atol=1e-15)
    assert OnePeerExponential().spectral_gap(world_size) == 1


@pytest.mark.parametrize("world_size", SIZES)
def test_a_period_of_a_grid_is_the_mean(world_size: int) -> None:
    np.testing.assert_allclose(product(Grid(), world_size), 1 / world_size, atol=1e-15)
    assert Grid().spectral_gap(world_size) == 1
    assert FullyConnected().spectral_gap(world_size) == 1


def test_a_grid_of_the_users_sides() -> None:
    cube = Grid((2, 3, 2))
    assert cube.period(12) == 3
    np.testing.assert_allclose(product(cube, 12), 1 / 12, atol=1e-15)
    assert cube.neighbours(0, 12, 1).sources == pytest.approx({2: 1 / 3, 4: 1 / 3})
    with pytest.raises(ConfigError, match="product is 8"):
        cube.matrix(8)


@pytest.mark.parametrize("world_size", SIZES)
def test_shift_one_pairs_every_two_ranks_once_in_a_period(world_size: int) -> None:
    topology, met = ShiftOne(), []
    for step in range(topology.period(world_size)):
        peers = [topology.neighbours(rank, world_size, step).targets for rank in range(world_size)]
        assert sum(not own for own in peers) == world_size % 2, "of an odd number one rests"
        met += [(rank, own[0]) for rank, own in enumerate(peers) if own and rank < own[0]]
    assert sorted(met) == list(itertools.combinations(range(world_size), 2))


@pytest.mark.parametrize("world_size", range(4, 70, 5))
def test_shift_one_mixes_fast_with_many_ranks_too(world_size: int) -> None:
    assert ShiftOne().spectral_gap(world_size) > 0.3


def test_random_matchings_depend_on_seed_and_step_alone() -> None:
    first = [RandomMatching(3).matrix(9, step) for step in range(20)]
    assert all(np.array_equal(a, RandomMatching(3).matrix(9, step)) for step, a in enumerate(first))
    assert sum(np.array_equal(a, RandomMatching(4).matrix(9, step)) for step, a in enumerate(first)) < 3
    assert len({a.tobytes() for a in first}) > 15
    pinned = [RandomMatching(0).neighbours(0, 8, step).targets[0] for step in range(8)]
    assert pinned == PINNED, "ranks with other versions of NumPy must draw the same pairs"
    with pytest.raises(ConfigError, match="seed"):
        RandomMatching(-1)


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_random_matchings_shrink_the_distance_as_their_gap_says(world_size: int) -> None:
    topology, shares = RandomMatching(1), []
    start = np.random.default_rng(0).standard_normal(world_size)
    start -= start.mean()
    for step in range(4000):
        shares.append(np.square(topology.matrix(world_size, step) @ start).sum() / np.square(start).sum())
    predicted = (1 - topology.spectral_gap(world_size)) ** 2
    assert np.mean(shares) == pytest.approx(predicted, abs=5 * np.std(shares) / len(shares) ** 0.5 + 1e-12)


@pytest.mark.parametrize("topology", [Ring(), Exponential(), OnePeerExponential(), ShiftOne(), star(7)])
@pytest.mark.parametrize("world_size", [5, 7, 12])
def test_the_distance_to_the_mean_shrinks_as_the_spectral_gap_says(topology: Topology, world_size: int) -> None:
    """In the long run, whatever the start: fitted over many periods from a random one."""
    topology = star(world_size) if isinstance(topology, Graph) else topology
    period = topology.period(world_size)
    assert period is not None
    values = np.random.default_rng(5).standard_normal(world_size)
    values -= values.mean()
    logs = []
    for step in range(60 * period):
        values = topology.matrix(world_size, step) @ values
        scale = np.linalg.norm(values)
        if scale < 1e-200:
            return  # the mean was reached
        logs.append(np.log(scale) + (logs[-1] if logs else 0.0))
        values /= scale
        values -= values.mean()
    rate = (logs[-1] - logs[20 * period - 1]) / (40 * period)
    assert math.exp(rate) == pytest.approx(1 - topology.spectral_gap(world_size), rel=0.02)


def test_metropolis_hastings_weights_of_a_path() -> None:
    expected = [[2 / 3, 1 / 3, 0], [1 / 3, 1 / 3, 1 / 3], [0, 1 / 3, 2 / 3]]
    np.testing.assert_allclose(Graph(((0, 1), (1, 2))).matrix(3), expected)


def test_what_is_wrong_with_a_users_graph_is_said() -> None:
    wrong = {
        "square": np.ones((2, 3)) / 3,
        "differs by 0.5": [[1.0, 0.0], [0.5, 0.5]],
        "differs by nan": [[math.nan, 0.0], [0.0, 1.0]],
        "spectral gap": np.eye(3),
    }
    for words, matrix in wrong.items():
        with pytest.raises(ConfigError, match=re.escape(words)):
            MixingMatrix(matrix)
    own = MixingMatrix([[0.75, 0.25], [0.25, 0.75]])
    assert own.spectral_gap(2) == pytest.approx(0.5)
    with pytest.raises(ConfigError, match="expected 2 ranks, got 3"):
        own.matrix(3)
    with pytest.raises(ConfigError, match="path between"):
        Graph(((0, 1), (2, 3))).matrix(4)
    with pytest.raises(ConfigError, match=re.escape("(1, 4)")):
        Graph(((0, 1), (1, 4))).matrix(4)
    with pytest.raises(ConfigError, match=r"ring, shift_one, got 'rings'"):
        topologies.create("rings")


def test_a_topology_is_told_apart_by_its_options() -> None:
    """`wrap` compares options among ranks by their text."""
    assert repr(RandomMatching(1)) != repr(RandomMatching(2))
    assert repr(MixingMatrix(np.eye(2) / 2 + 0.25)) == repr(MixingMatrix([[0.75, 0.25], [0.25, 0.75]]))
    assert repr(star(3)) != repr(star(4))
