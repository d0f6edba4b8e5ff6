"""Aggregators that send some elements of each bucket and keep the others as a residual."""

from __future__ import annotations

import torch
from typing_extensions import override

from commlib.codecs.base import Random
from commlib.codecs.sparse import RandomK, SparseCodec, TopK
from commlib.errors import ConfigError
from commlib.primitives.aggregators.base import Aggregator, Round, Stretch
from commlib.primitives.sparse import SparseWorkspace, centralized_aligned_sparse, centralized_sparse
from commlib.transport.base import Communication


class Gathered(Aggregator[SparseWorkspace]):
    """Each rank gathers the chosen elements of all ranks; see `centralized_sparse`.

    Args:
        codec: Chooses the elements; the codec with the largest payload if it changes from round to round.
    """

    kinds = ("worker",)

    def __init__(self, codec: SparseCodec) -> None:
        self.codec = codec

    @override
    def workspace(self, stretch: Stretch) -> SparseWorkspace:
        return SparseWorkspace(stretch.numel, stretch.device, self.codec, stretch.comm, begin=stretch.begin)

    @override
    def average(self, tensor: torch.Tensor, workspace: SparseWorkspace, of: Round) -> Communication:
        yield from centralized_sparse(
            tensor, workspace, self.codec, of.peers, divisor=of.divisor, scale=of.scale, decay=of.decay
        )


class Balanced(Gathered):
    """Sums the chosen elements by regions and gathers the largest sums; see `BalancedSum`.

    Args:
        codec: Chooses the elements.
    """

    kinds = ("worker", "regions")
    same = ("regions",)

    def __init__(self, codec: TopK) -> None:
        super().__init__(codec)

    @override
    def workspace(self, stretch: Stretch) -> SparseWorkspace:
        return SparseWorkspace(
            stretch.numel, stretch.device, self.codec, stretch.comm, begin=stretch.begin, balanced=True
        )


class Aligned(Aggregator[SparseWorkspace]):
    """All-reduces the same random elements of all ranks; see `centralized_aligned_sparse`.

    Args:
        codec: Chooses the elements.
        seed: Seed of the choice, 0 to 2**64 - 1; the same on all ranks.
    """

    kinds = ("worker",)

    def __init__(self, codec: RandomK, seed: int) -> None:
        self.codec = codec
        self.seed = seed

    @override
    def workspace(self, stretch: Stretch) -> SparseWorkspace:
        return SparseWorkspace(
            stretch.numel, stretch.device, self.codec, stretch.comm, begin=stretch.begin, gathers=False
        )

    @override
    def average(self, tensor: torch.Tensor, workspace: SparseWorkspace, of: Round) -> Communication:
        yield from centralized_aligned_sparse(
            tensor,
            workspace,
            self.codec,
            of.peers,
            Random(self.seed, of.comm.step, stage=of.bucket_idx % 256),
            divisor=of.divisor,
            scale=of.scale,
            decay=of.decay,
        )


def is_balanced(owner: str, exchange: str) -> bool:
    """Return whether an algorithm's option `exchange` is "balanced", not "gathered".

    Args:
        owner: The algorithm's name, for errors.
        exchange: The option.

    Raises:
        ConfigError: `exchange` is neither.
    """
    if exchange not in ("gathered", "balanced"):
        raise ConfigError(f"{owner}.exchange: expected 'gathered' or 'balanced', got {exchange!r}")
    return exchange == "balanced"
