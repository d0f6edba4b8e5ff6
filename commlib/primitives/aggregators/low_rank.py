"""Aggregator of matrices as low-rank factors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from typing_extensions import override

from commlib.primitives.aggregators.base import Aggregator, Round, Stretch
from commlib.primitives.low_rank import LowRankWorkspace, centralized_low_rank
from commlib.primitives.parts import Part
from commlib.transport.base import Communication


class LowRank(Aggregator[LowRankWorkspace]):
    """Sends a low-rank approximation; see `centralized_low_rank`. All parameters of a bucket are matrices.

    Args:
        rank: Rank of the approximation.
        seed: Seed of the first Q; the same on all ranks.
    """

    kinds = ("errors", "factors")
    same = ("factors",)

    def __init__(self, rank: int, seed: int) -> None:
        self.rank = rank
        self.seed = seed

    @override
    def cuts(self, parts: Sequence[Part]) -> Sequence[int]:
        return [part.start for part in parts]

    @override
    def workspace(self, stretch: Stretch) -> LowRankWorkspace:
        begin, end = stretch.begin, stretch.begin + stretch.numel
        own = [dataclasses.replace(p, start=p.start - begin) for p in stretch.parts if begin <= p.start < end]
        return LowRankWorkspace(own, stretch.device, self.rank, self.seed)

    @override
    def average(self, tensor: torch.Tensor, workspace: LowRankWorkspace, of: Round) -> Communication:
        yield from centralized_low_rank(tensor, workspace, of.peers, divisor=of.divisor, scale=of.scale, decay=of.decay)
