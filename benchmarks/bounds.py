"""The lower bound of an algorithm: its bytes through its collectives, without its work."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import torch

from commlib.algorithms import Algorithm, BucketView, Context
from commlib.transport.base import Communication, Communicator, Request


class Bound(Algorithm):
    """Repeats the collectives that another algorithm asked for in its second round, and does nothing else.

    The first may be another than all that follow: replicas of the neighbours' weights begin in full precision.

    What arrives is ignored: gradients are as good as the rank's own. Only its time means something.

    Args:
        inner: The algorithm; its buffers must stay the same from round to round.
    """

    def __init__(self, inner: Algorithm) -> None:
        self.inner = inner
        self.traits = dataclasses.replace(inner.traits, prompt=True)
        self._recorded: dict[int, list[list[Request]]] = {}  # by bucket, the first two rounds

    def group(self, name: str, parameter: torch.Tensor) -> Hashable:
        """Return the inner algorithm's group."""
        return self.inner.group(name, parameter)

    def setup(self, context: Context) -> None:
        """Forget what was recorded."""
        self._recorded.clear()
        self.inner.setup(context)

    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        """Record in the first two rounds, repeat the second in the others."""
        rounds = self._recorded.setdefault(bucket.index, [])
        if len(rounds) == 2:
            yield from rounds[1]
            return
        rounds.append([])
        for request in self.inner.communicate(bucket, comm):
            rounds[-1].append(request)
            yield request
