"""The lower bound of an algorithm: its bytes through its collectives, without its work."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import torch

from commlib.algorithms import Algorithm, BucketView, Context
from commlib.transport.base import Communication, Communicator, Request


class Bound(Algorithm):
    """Repeats the collectives that another algorithm asked for in its first round, and does nothing else.

    What arrives is ignored: gradients are as good as the rank's own. Only its time means something.

    Args:
        inner: The algorithm; its buffers must stay the same from round to round.
    """

    def __init__(self, inner: Algorithm) -> None:
        self.inner = inner
        self.traits = dataclasses.replace(inner.traits, prompt=True)
        self._requests: dict[int, list[Request]] = {}

    def group(self, name: str, parameter: torch.Tensor) -> Hashable:
        """Return the inner algorithm's group."""
        return self.inner.group(name, parameter)

    def setup(self, context: Context) -> None:
        """Forget what was recorded."""
        self._requests.clear()
        self.inner.setup(context)

    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        """Record in the first round, repeat in the others."""
        if bucket.index in self._requests:
            yield from self._requests[bucket.index]
            return
        recorded = []
        for request in self.inner.communicate(bucket, comm):
            recorded.append(request)
            yield request
        self._requests[bucket.index] = recorded
