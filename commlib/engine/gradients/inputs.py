"""The values of buckets before a round, kept so that the round can be repeated with other ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commlib.engine.buckets.bucket import Bucket


class Inputs:
    """Copies of the dense buckets of one model, one set of buffers for all rounds."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Create the buffers for the buckets of a plan."""
        self._kept = {bucket.index: torch.empty_like(bucket.payload) for bucket in buckets}

    def keep(self, bucket: Bucket) -> None:
        """Copy the values and the flags of a bucket, before the algorithm changes them."""
        self._kept[bucket.index].copy_(bucket.payload)

    def restore(self, buckets: Sequence[Bucket], predivisor: float) -> None:
        """Copy the values back.

        Args:
            buckets: The buckets.
            predivisor: The divisor that gathered gradients have in the group as it is now.
        """
        for bucket in buckets:
            bucket.payload.copy_(self._kept[bucket.index])
            if bucket.predivisor != predivisor:
                bucket.flat.mul_(bucket.predivisor / predivisor)
