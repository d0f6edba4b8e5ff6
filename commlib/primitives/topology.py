"""Topologies of decentralized averaging: the neighbours of each rank, and the mixing matrix over all ranks.

A mixing matrix W [N, N] replaces x_i by sum_j W_ij x_j. Its rows and columns sum to 1 (it is doubly stochastic), so the
mean over the ranks is preserved, and the ranks converge to it. The spectral gap gives the rate: asymptotically the
distance to the mean shrinks by a factor of (1 - gap) per step.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from commlib.errors import ConfigError

Matrix = npt.NDArray[np.float64]

#: Tolerance of the sums of a matrix's rows and columns, which are 1.
_TOLERANCE = 1e-9

#: Largest remaining fraction of the distance to the mean after a step that reaches the mean.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Neighbours:
    """The neighbours and weights of one rank in one step.

    Attributes:
        own: Weight of the rank's own value.
        sources: Weights of the received values by rank, ascending.
        targets: The ranks that it sends to, ascending; in an undirected graph the same ranks as in `sources`.
    """

    own: float
    sources: dict[int, float]
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Topology(ABC):
    """A mixing matrix for any number of ranks, which may depend on the step. Options are dataclass fields."""

    #: Whether the matrix is the same in every step.
    is_static: ClassVar[bool] = True

    def period(self, world_size: int) -> int | None:
        """Return the number of steps after which the matrices repeat, or None if they never do."""
        return 1

    @abstractmethod
    def neighbours(self, rank: int, world_size: int, step: int = 0) -> Neighbours:
        """Return the neighbours of `rank` in a step: its row and column of the matrix, without building the matrix.

        Raises:
            ConfigError: The topology does not support this number of ranks.
        """

    def matrix(self, world_size: int, step: int = 0) -> Matrix:
        """Return W [world_size, world_size] float64 of a step, doubly stochastic.

        Raises:
            ConfigError: The topology does not support this number of ranks.
        """
        matrix = np.zeros((world_size, world_size))
        for rank in range(world_size):
            own = self.neighbours(rank, world_size, step)
            matrix[rank, rank] = own.own
            matrix[rank, list(own.sources)] = list(own.sources.values())
        return matrix

    def representatives(self, world_size: int) -> list[int]:
        """Return, for each rank, a rank with at least as much work: as many neighbours, all of them of lower rank.

        A sum in rank order needs one more copy if it begins with another rank's value.
        """
        return [world_size - 1] * world_size

    def spectral_gap(self, world_size: int) -> float:
        """Return 1 - rho: asymptotically the distance to the mean shrinks by a factor of rho per step.

        rho^period is the largest magnitude of the eigenvalues of the product of a period's matrices, without the
        eigenvalue of the mean. 1 means that the mean is reached within a period, 0 that it is never reached.
        """
        period = self.period(world_size) or 1
        product = np.eye(world_size)
        for step in range(period):
            before = np.linalg.norm(product)
            # Subtract the component of the mean: it does not shrink, and its rounding errors would hide the rest.
            product = (self.matrix(world_size, step) - 1.0 / world_size) @ product
            if np.linalg.norm(product) <= _ROUNDING * before:
                return 1.0
        rho = float(np.abs(np.linalg.eigvals(product)).max()) ** (1.0 / period)
        return max(0.0, 1.0 - rho)


def _symmetric(rank: int, group: Iterable[int], weight: float, own: float) -> Neighbours:
    """Return the neighbours of a rank that exchanges values with all others of a group, with equal weights."""
    others = sorted(set(group) - {rank})
    return Neighbours(own, dict.fromkeys(others, weight), tuple(others))


def _paired(rank: int, partner: int) -> Neighbours:
    """Return the neighbours of a rank that averages with its partner; none if the partner is the rank itself."""
    return _symmetric(rank, [partner], 0.5, 1.0 if partner == rank else 0.5)


def _shifted(rank: int, world_size: int, hops: Sequence[int]) -> Neighbours:
    """Return the neighbours of a rank that receives from the ranks `hops` places ahead, all weights equal."""
    weight = 1.0 / (1 + len(hops))
    sources = sorted((rank + hop) % world_size for hop in hops)
    return Neighbours(weight, dict.fromkeys(sources, weight), tuple(sorted((rank - hop) % world_size for hop in hops)))


@dataclass(frozen=True)
class Ring(Topology):
    """Each rank averages with its two neighbours, with equal weights (1/3; 1/2 if there are two ranks)."""

    def neighbours(self, rank: int, world_size: int, step: int = 0) -> Neighbours:
        """See `Topology.neighbours`."""
        others = {(rank + 1) % world_size, (rank - 1) % world_size} - {rank}
        weight = 1.0 / (1 + len(others))
        return _symmetric(rank, others, weight, 1.0 - len(others) * weight)


@dataclass(frozen=True)
class FullyConnected(Topology):
    """Each rank averages with all others: the mean in one step."""

    def neighbours(self, rank: int, world_size: int, step: int = 0) -> Neighbours:
        """See `Topology.neighbours`."""
        return _symmetric(rank, range(world_size), 1.0 / world_size, 1.0 / world_size)


@dataclass(frozen=True)
class Exponential(Topology):
    """Each rank receives from the ranks 1, 2, 4, ... places ahead, with equal weights; directed.

    Ying et al., "Exponential graph is provably efficient for decentralized deep training" (NeurIPS 2021).
    """

    def neighbours(self, rank: int, world_size: int, step: int = 0) -> Neighbours:
        """See `Topology.neighbours`."""
        return _shifted(rank, world_size, [1 << k for k in range(_log2_ceil(world_size))])


@dataclass(frozen=True)
class OnePeerExponential(Topology):
    """Each rank averages with one other rank, 1, 2, 4, ... places ahead in turn; directed.

    If the number of ranks is a power of two, all ranks reach the mean within a period. Paper: see `Exponential`.
    """

    is_static = False

    def period(self, world_size: int) -> int:
        """Return the number of powers of two below the number of ranks."""
        return max(1, _log2_ceil(world_size))

    def neighbours(self, rank: int, world_size: int, step: int = 0) -> Neighbours:
        """See `Topology.neighbours`."""
        return _shifted(rank, world_size, [1 << step % self.period(world_size)] if world_size > 1 else [])


@dataclass(frozen=True)
class ShiftOne(Topology):
    """Ranks average in pairs that change in every step. Every two ranks meet once in a period.

    The pairs are those of a round-robin tournament: i and j meet if i + j equals k modulo the (odd) number of ranks,
    where k depends on the step. If the number is odd, one rank is idle in each step. If it is even, the last rank meets
    the rank that would be idle among the others.

    Deviations from BAGUA's shift-one: any number of ranks is supported, and k alternates (0, -1, 1, -2, ...). If k grew
    by one, as in BAGUA, values would propagate as on a ring: the spectral gap at 64 ranks would be 0.005 instead of
    0.31.
    """

    is_static = False

    def period(self, world_size: int) -> int:
        """Return the number of steps in which every two ranks meet once."""
        return max(1, world_size - 1 + world_size % 2)

    def representatives(self, world_size: int) -> list[int]:
        """Return the last two ranks alternately; at most one of them is idle."""
        return [world_size - 1 - (world_size - 1 - rank) % 2 for rank in range(world_size)]

    def neighbours(self, rank: int, world_size: int, step: int = 0) -> Neighbours:
        """See `Topology.neighbours`."""
        size = self.period(world_size)
        turn = step % size
        total = turn // 2 if turn % 2 == 0 else -1 - turn // 2
        last = world_size - 1
        if rank == size:  # even number: the last rank meets the rank that is its own partner, 2 rank = total
            return _paired(rank, total * (size + 1) // 2 % size)
        partner = (total - rank) % size
        return _paired(rank, last if partner == rank and world_size > size else partner)


@dataclass(frozen=True)
class RandomMatching(Topology):
    """Ranks average in random pairs, drawn in every step. If the number of ranks is odd, one is idle in each step.

    All ranks draw the same pairs from the same seed. Boyd et al., "Randomized gossip algorithms" (2006), with the
    largest possible number of simultaneous pairs.

    Args:
        seed: 0 to 2**64 - 1; the same on all ranks.
    """

    seed: int = 0

    is_static = False

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"RandomMatching.seed: expected 0..2**64 - 1, got {self.seed}")

    def period(self, world_size: int) -> None:
        """Return None: the pairs never repeat."""

    def representatives(self, world_size: int) -> list[int]:
        """Return the last two ranks alternately; at most one of them is idle."""
        return [world_size - 1 - (world_size - 1 - rank) % 2 for rank in range(world_size)]

    def neighbours(self, rank: int, world_size: int, step: int = 0) -> Neighbours:
        """See `Topology.neighbours`."""
        return _paired(rank, int(_matching(self.seed, world_size, step)[rank]))

    def spectral_gap(self, world_size: int) -> float:
        """Return 1 - rho, where the expected squared distance to the mean shrinks by a factor of rho^2 per step.

        rho^2 is the second eigenvalue of the expectation of W' W. W' W = W, because averaging a pair twice is the same
        as averaging it once.
        """
        if world_size == 1:
            return 1.0
        chance_to_meet = (world_size - world_size % 2) / (world_size * (world_size - 1))
        return 1.0 - math.sqrt(1.0 - chance_to_meet * world_size / 2)


@dataclass(frozen=True)
class Grid(Topology):
    """Ranks are on a grid. In each step the ranks that differ only in one coordinate average; coordinates take turns.

    All ranks reach the mean within a period. Ryabinin et al., "Moshpit SGD" (NeurIPS 2021), without dropped peers.

    Args:
        dims: Lengths of the grid's sides; their product is the number of ranks. By default two sides that are as equal
            as possible (one side if the number of ranks is prime).
    """

    dims: tuple[int, ...] | None = None

    is_static = False

    def __post_init__(self) -> None:
        if self.dims is not None:
            object.__setattr__(self, "dims", tuple(self.dims))

    def period(self, world_size: int) -> int:
        """Return the number of the grid's sides."""
        return len(self._sides(world_size))

    def neighbours(self, rank: int, world_size: int, step: int = 0) -> Neighbours:
        """See `Topology.neighbours`."""
        sides = self._sides(world_size)
        turn = step % len(sides)
        side, stride = sides[turn], math.prod(sides[turn + 1 :])
        first = rank - rank // stride % side * stride
        return _symmetric(rank, range(first, first + side * stride, stride), 1.0 / side, 1.0 / side)

    def _sides(self, world_size: int) -> tuple[int, ...]:
        if self.dims is None:
            short = next(side for side in range(math.isqrt(world_size), 0, -1) if world_size % side == 0)
            return (short, world_size // short) if short > 1 else (world_size,)
        if not self.dims or min(self.dims) < 1 or math.prod(self.dims) != world_size:
            raise ConfigError(f"Grid.dims: expected sides whose product is {world_size}, got {self.dims}")
        return self.dims


@dataclass(frozen=True)
class Graph(Topology):
    """An undirected graph with Metropolis-Hastings weights 1 / (1 + max(degree_i, degree_j)).

    A rank's own weight is 1 minus the sum of the weights of its neighbours.

    Xiao, Boyd, Lall, "A scheme for robust distributed sensor fusion based on average consensus" (2005).

    Args:
        edges: Pairs of ranks. The graph must be connected.
    """

    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "edges", tuple((int(one), int(other)) for one, other in self.edges))

    def representatives(self, world_size: int) -> list[int]:
        """Return, for each rank, the last rank with the same number of neighbours."""
        degrees = [len(each) for each in _adjacency(self.edges, world_size)]
        last = {degree: rank for rank, degree in enumerate(degrees)}
        return [last[degree] for degree in degrees]

    def neighbours(self, rank: int, world_size: int, step: int = 0) -> Neighbours:
        """See `Topology.neighbours`."""
        adjacent = _adjacency(self.edges, world_size)
        degree = len(adjacent[rank])
        row = np.zeros(world_size)
        for peer in adjacent[rank]:
            row[peer] = 1.0 / (1 + max(degree, len(adjacent[peer])))
        sources = {peer: float(row[peer]) for peer in adjacent[rank]}
        return Neighbours(float(1.0 - row.sum()), sources, adjacent[rank])


@dataclass(frozen=True)
class MixingMatrix(Topology):
    """A user-defined matrix for one number of ranks.

    Args:
        rows: [N, N], doubly stochastic; W_ij is the weight that rank i gives to the value of rank j. Stored as tuples.

    Raises:
        ConfigError: The matrix is not square, not finite, not doubly stochastic within 1e-9, or its spectral gap is 0.
    """

    rows: tuple[tuple[float, ...], ...]

    def __init__(self, rows: Sequence[Sequence[float]] | Matrix) -> None:
        matrix = np.asarray(rows, dtype=np.float64)
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
            raise ConfigError(f"MixingMatrix: expected a square matrix, got the shape {matrix.shape}")
        worst = max(float(np.abs(matrix.sum(axis=axis) - 1).max()) for axis in (0, 1))
        if not worst <= _TOLERANCE:
            raise ConfigError(f"MixingMatrix: expected rows and columns with sum 1, one of them differs by {worst:.3g}")
        object.__setattr__(self, "rows", tuple(tuple(row) for row in matrix.tolist()))
        if self.spectral_gap(len(matrix)) <= _TOLERANCE:
            raise ConfigError("MixingMatrix: expected a spectral gap above 0, got 0: the ranks never come to the mean")

    def representatives(self, world_size: int) -> list[int]:
        """Return, for each rank, the last rank with the same number of sources and of targets."""
        is_used = np.array(self.rows) != 0
        degrees = list(zip(is_used.sum(axis=1).tolist(), is_used.sum(axis=0).tolist(), strict=True))
        last = {degree: rank for rank, degree in enumerate(degrees)}
        return [last[degree] for degree in degrees]

    def neighbours(self, rank: int, world_size: int, step: int = 0) -> Neighbours:
        """See `Topology.neighbours`."""
        if len(self.rows) != world_size:
            raise ConfigError(f"MixingMatrix: it is of {len(self.rows)} ranks, got {world_size}")
        row, column = self.rows[rank], [other[rank] for other in self.rows]
        sources = {peer: weight for peer, weight in enumerate(row) if weight and peer != rank}
        targets = tuple(peer for peer, weight in enumerate(column) if weight and peer != rank)
        return Neighbours(row[rank], sources, targets)


TOPOLOGIES: dict[str, type[Topology]] = {
    "exponential": Exponential,
    "fully_connected": FullyConnected,
    "grid": Grid,
    "one_peer_exponential": OnePeerExponential,
    "random_matching": RandomMatching,
    "ring": Ring,
    "shift_one": ShiftOne,
}
"""Topologies by name. `Graph` and `MixingMatrix` are not included, because they need arguments."""


def create(topology: str | Topology) -> Topology:
    """Return `topology` itself, or create the topology of that name.

    Raises:
        ConfigError: No topology has that name.
    """
    if isinstance(topology, Topology):
        return topology
    if topology not in TOPOLOGIES:
        raise ConfigError(f"topology: expected a Topology or one of {', '.join(TOPOLOGIES)}, got {topology!r}")
    return TOPOLOGIES[topology]()


def _log2_ceil(world_size: int) -> int:
    return (world_size - 1).bit_length()


@functools.lru_cache(maxsize=64)
def _matching(seed: int, world_size: int, step: int) -> npt.NDArray[np.int64]:
    """Return the partner of each rank, [world_size]; an idle rank is its own partner.

    The raw words of Philox are the same in every version of NumPy.
    """
    words = np.random.Philox(key=seed, counter=[0, step, 0, 0]).random_raw(world_size)
    order = np.argsort(words, kind="stable")
    partners = np.arange(world_size)
    some, others = order[: world_size - 1 : 2], order[1::2]
    partners[some], partners[others] = others, some
    return partners


@functools.lru_cache(maxsize=64)
def _adjacency(edges: tuple[tuple[int, int], ...], world_size: int) -> tuple[tuple[int, ...], ...]:
    """Return each rank's neighbours in a connected graph, ascending."""
    outside = [edge for edge in edges if not all(0 <= rank < world_size for rank in edge)]
    if outside:
        raise ConfigError(f"Graph.edges: expected ranks from 0 to {world_size - 1}, got the edge {outside[0]}")
    adjacent: list[set[int]] = [set() for _ in range(world_size)]
    for one, other in edges:
        if one != other:
            adjacent[one].add(other)
            adjacent[other].add(one)
    reached, last = {0}, {0}
    while last:
        last = set().union(*(adjacent[rank] for rank in last)) - reached
        reached |= last
    if len(reached) < world_size:
        raise ConfigError(f"Graph.edges: expected a path between any two of {world_size} ranks; some have none")
    return tuple(tuple(sorted(each)) for each in adjacent)
