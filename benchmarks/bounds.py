"""The lower bound of an algorithm: its bytes, in the way that it sends them, without its work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence

import torch

from commlib.algorithms import Algorithm, AsyncSGD, BucketView, Context
from commlib.algorithms._shard_server import Rule
from commlib.algorithms.async_sgd import _Shard, _Worker
from commlib.algorithms.base import Attachment, Runner
from commlib.codecs.base import BlockCodec
from commlib.transport.base import Communication, Communicator, Request
from commlib.transport.mailbox import Message


def bound_of(algorithm: Algorithm) -> Algorithm:
    """Return the lower bound of an algorithm.

    Raises:
        ValueError: It sends by itself, in a way that is not known here.
    """
    if isinstance(algorithm, AsyncSGD):
        return AsyncBound(algorithm)
    if algorithm.traits.tensors == "none":
        raise ValueError(f"{type(algorithm).__name__} sends by itself, and has no lower bound")
    return Bound(algorithm)


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


class AsyncBound(Algorithm):
    """Sends what `AsyncSGD` sends, as often and to the same ranks, and neither adds nor updates nor takes over.

    Args:
        inner: Its period, rest and codec count.
    """

    def __init__(self, inner: AsyncSGD) -> None:
        self.inner = inner
        self.traits = inner.traits

    def attach(self, attachment: Attachment) -> Runner:
        """Connect the ranks."""
        rule = Rule(lr_scale=1.0, max_staleness=1, drops=False)
        return _Courier(attachment, rule, self.inner.period, self.inner.rest, self.inner.codec)


class _Package(_Shard):
    """A shard whose contents do not matter."""

    def __init__(self, like: _Shard, weights: Sequence[torch.Tensor], rest: float) -> None:
        super().__init__(like.owner, like.pieces, weights, rest)
        self._question, self._into = like._packed()

    def add(self, gradients: Sequence[torch.Tensor]) -> None:
        self.num_pending += 1

    def push(self, weights: Sequence[torch.Tensor], ask: Callable[..., None]) -> None:
        self.num_pending = 0
        self._ask(*self._packed(), ask)

    def _packed(self) -> tuple[Message, memoryview]:
        return self._question, self._into

    def _unpack(self) -> None: ...

    def take_over(self, weights: Sequence[torch.Tensor]) -> None:
        self._end()


class _Courier(_Worker):
    """Answers a push with what was pushed, which is as large as the answer."""

    def __init__(self, attachment: Attachment, rule: Rule, period: int, rest: float, codec: BlockCodec | None) -> None:
        super().__init__(attachment, rule, period, rest, codec)
        self._shards = [_Package(shard, self._weights, rest) for shard in self._shards]

    def _answer(self, peer: int, message: Message, reply: Callable[[Message], None]) -> None:
        # nothing of this class's own is read here: peers ask as soon as they are connected, before __init__ ends
        reply(Message(message.kind, 0, message.payload or bytes(self._server.layout.nbytes)))
