"""The values of buckets before a round, kept so that the round can be repeated with other ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commlib.engine.buckets.bucket import Bucket


class Inputs:
    """Copies of the dense buckets of one model, one set of buffers for all rounds.

    A round can fail before the algorithm has begun with all buckets. The others are unchanged and have no copy.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, torch.Tensor] = {}
        self._predivisors: dict[int, float] = {}  # of the buckets that were copied in this round

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Create the buffers for the buckets of a plan."""
        self._buffers = {bucket.index: torch.empty_like(bucket.payload) for bucket in buckets}
        self._predivisors = {}

    def begin_round(self) -> None:
        """Forget the values of the last round."""
        self._predivisors.clear()

    def keep(self, bucket: Bucket) -> None:
        """Copy the values and the flags of a bucket, before the algorithm changes them for the first time."""
        if bucket.index not in self._predivisors:
            self._buffers[bucket.index].copy_(bucket.payload)
            self._predivisors[bucket.index] = bucket.predivisor

    def restore(self, buckets: Sequence[Bucket], predivisor: float) -> None:
        """Copy the values back.

        Args:
            buckets: The buckets.
            predivisor: The divisor that gathered gradients have in the group as it is now.
        """
        for bucket in buckets:
            before = self._predivisors.get(bucket.index)
            if before is None:
                before = bucket.predivisor
            else:
                bucket.payload.copy_(self._buffers[bucket.index])
            if before != predivisor:
                bucket.flat.mul_(before / predivisor)
            bucket.predivisor = predivisor
