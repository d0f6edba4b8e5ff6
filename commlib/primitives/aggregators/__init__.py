"""Aggregators: replacement of a bucket by the mean of all ranks' buckets, and the state for it."""

from commlib.primitives.aggregators.base import Aggregator, FullPrecision, Round, Stretch, Workspace
from commlib.primitives.aggregators.components import Components
from commlib.primitives.aggregators.feedback import EF21, Smoothed
from commlib.primitives.aggregators.low_precision import LowPrecision, MajorityVote
from commlib.primitives.aggregators.low_rank import LowRank
from commlib.primitives.aggregators.momentum import CorrectedMomentum, LocalMomentum
from commlib.primitives.aggregators.sparse import Aligned, Balanced, Gathered

__all__ = [
    "EF21",
    "Aggregator",
    "Aligned",
    "Balanced",
    "Components",
    "CorrectedMomentum",
    "FullPrecision",
    "Gathered",
    "LocalMomentum",
    "LowPrecision",
    "LowRank",
    "MajorityVote",
    "Round",
    "Smoothed",
    "Stretch",
    "Workspace",
]
