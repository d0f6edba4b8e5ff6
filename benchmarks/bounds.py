"""The lower bound of an algorithm: its bytes, in the way that it sends them, without its work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Sequence

import torch

from commlib.algorithms import Algorithm, AsyncSGD, BucketView, Context
from commlib.algorithms.async_sgd import _Worker
from commlib.algorithms.base import Attachment, Runner
from commlib.algorithms.channels import Gradients
from commlib.algorithms.families.shard_client import Shard
from commlib.transport.base import Communication, Communicator, Request
from commlib.transport.mailbox import Message


def bound_of(algorithm: Algorithm) -> Algorithm:
    """Return the lower bound of an algorithm.

    Raises:
        ValueError: It sends outside of rounds, in an unknown way.
    """
    if isinstance(algorithm, AsyncSGD):
        return AsyncBound(algorithm)
    if not algorithm.channel.has_rounds:
        raise ValueError(f"{type(algorithm).__name__} sends outside of rounds, and has no lower bound")
    return Bound(algorithm)


class Bound(Algorithm):
    """Repeats the collectives that another algorithm issued in its second round, and does nothing else.

    The first round may differ from the others: replicas of the neighbours' weights begin in full precision.

    Received data is ignored, and gradients are the rank's own. Only the time is meaningful.

    Args:
        inner: The algorithm; its buffers must stay the same from round to round.
    """

    def __init__(self, inner: Algorithm) -> None:
        self.inner = inner
        channel = inner.channel
        self.channel = dataclasses.replace(channel, prompt=True) if isinstance(channel, Gradients) else channel
        self._recorded: dict[int, list[list[Request]]] = {}  # by bucket, the first two rounds

    def group(self, name: str, parameter: torch.Tensor) -> Hashable:
        """Return the inner algorithm's group."""
        return self.inner.group(name, parameter)

    def setup(self, context: Context) -> None:
        """Discard the records."""
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


class AsyncBound(Algorithm):
    """Sends the messages of `AsyncSGD`, as often and to the same ranks, without sums, updates and copies.

    Args:
        inner: Its period, rest and codec count.
    """

    def __init__(self, inner: AsyncSGD) -> None:
        self.inner = inner
        self.channel = inner.channel

    def attach(self, attachment: Attachment) -> Runner:
        """Connect the ranks."""
        return _Courier(attachment, self.inner)


class _Package(Shard):
    """A shard whose contents do not matter."""

    def before_step(self, weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        self.num_pending += 1

    def _fill(self, weights: list[torch.Tensor]) -> None: ...

    def push(self, weights: Sequence[torch.Tensor], ask: Callable[..., None]) -> None:
        if not self.version:
            self._packed = self.wire.pack(self.num_pending)
        self.num_pending = 0
        self._ask(*self._packed, ask)

    def take_over(self, weights: Sequence[torch.Tensor], frozen: Collection[int] = ()) -> None:
        self._end()


class _Courier(_Worker):
    """Answers a push with the pushed data, which is as large as the real answer."""

    def __init__(self, attachment: Attachment, algorithm: AsyncSGD) -> None:
        super().__init__(attachment, algorithm)
        shards, weights = self._shards, self._weights
        self._shards = [_Package(each.owner, each.pieces, weights, algorithm.rest, each.wire) for each in shards]

    def _answer(self, peer: int, message: Message, reply: Callable[[Message], None]) -> None:
        # nothing of this class's own is read here: peers ask as soon as they are connected, before __init__ ends
        reply(Message(message.kind, 1, message.payload or bytes(self._server.layout.nbytes)))
