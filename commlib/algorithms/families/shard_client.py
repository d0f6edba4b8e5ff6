"""A worker's part of one shard of the parameters: what it pushes, and what it takes over."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

import torch
from typing_extensions import override

from commlib.algorithms.families.published import Copy, Layout
from commlib.algorithms.families.shard_server import Piece, cut
from commlib.codecs.base import BlockCodec, Feedback
from commlib.transport.mailbox import Message

#: Questions: a push, answered with the whole weights; nothing, answered so; a push, answered with the weights' change.
PUSH, PULL, PUSH_FOR_CHANGE = 1, 2, 3


#: A question: made, or to be made on the thread that sends it, as copies from a device are waited for there.
Question = Message | Callable[[], Message]


class WholeWire:
    """How a shard's pushes and answers are sent: as they are.

    Attributes:
        is_remote: Whether the parameters are on a device.
        pending: What is pushed next.
        received: The weights that came last.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        layout = Layout(tensors)
        self.is_remote = layout.is_remote
        self.pending, self._sending, self.received = Copy(layout), Copy(layout), Copy(layout)

    def pack(self, num_steps: int) -> tuple[Question, memoryview]:
        """Return what is pending as a push, and where its answer goes; `pending` may be written again."""
        self.pending, self._sending = self._sending, self.pending
        message = Message(PUSH, self._sending.number, self._sending.payload, num_steps)
        return self.after_copies(message) if self.is_remote else message, self.received.payload

    def after_copies(self, message: Message) -> Callable[[], Message]:
        """Return what waits for the copies of what is sent and of the last answer, and returns the message."""

        def wait() -> Message:
            self._sending.wait()
            self.received.wait()
            return message

        return wait

    def unpack(self) -> None:
        """Make `received` the weights that have arrived."""


class CodedWire:
    """The same through a codec: pushes with error feedback, answers as the change since the last one."""

    def __init__(self, tensors: Sequence[torch.Tensor], codec: BlockCodec) -> None:
        layout = Layout(tensors, torch.float32)
        self.is_remote = layout.is_remote
        self.pending, self.received = Copy(layout), Copy(layout)
        self._sending = Copy(layout) if self.is_remote else self.pending
        self._codec = codec
        numel = self.pending.flat.numel()
        self.residual = torch.zeros(numel, dtype=torch.float32, device="cpu")
        nbytes = codec.payload_bytes(numel)
        self._push, self._change = (torch.empty(nbytes, dtype=torch.uint8, device="cpu") for _ in range(2))
        self._has_base = False  # whether the owner knows what is in `received`
        self._asked_for_change = False

    def pack(self, num_steps: int) -> tuple[Question, memoryview]:
        """Return the message that pushes what is pending, and where its answer is received."""
        self.pending, self._sending = self._sending, self.pending
        self._asked_for_change = self._has_base
        kind, into = (PUSH_FOR_CHANGE, self._change) if self._has_base else (PUSH, self.received.buffer)
        message = Message(kind, self._sending.number, self._push.numpy().data, num_steps)
        if self.is_remote:
            return self.after_copies(message), into.numpy().data
        self._encode()
        return message, into.numpy().data

    def after_copies(self, message: Message) -> Callable[[], Message]:
        """Return what waits for the copies of what is sent and of the last answer, encodes, and returns the message."""

        def encode() -> Message:
            self._sending.wait()
            self.received.wait()
            if message.kind != PULL:
                self._encode()
            return message

        return encode

    def _encode(self) -> None:
        self._codec.encode(self._sending.flat, self._push, feedback=Feedback(self.residual))

    def unpack(self) -> None:
        """Make the answer the weights that were received."""
        if self._asked_for_change:
            self._codec.decode_add(self._change, self.received.flat)
        self._has_base = True


class Shard(ABC):
    """What a worker has to do with one shard: what it pushes to it, and its newest weights."""

    def __init__(
        self,
        owner: int,
        pieces: Sequence[Piece],
        tensors: Sequence[torch.Tensor],
        rest: float,
        wire: WholeWire | CodedWire,
    ) -> None:
        self.owner = owner
        self.pieces = pieces
        self.wire = wire
        self._rest = rest
        self._asked_s = self._rests_until_s = 0.0
        self._took_s = math.inf  # from the last question to its answer
        self._origin = [torch.empty_like(piece) for piece in cut(tensors, pieces)]
        self.num_pending = 0  # steps that the next push is of
        self.version = 0  # of the weights that were taken over last
        self.is_under_way = False
        self.is_stale = False  # what is under way is of weights that the user has replaced
        self.has_arrived = threading.Event()

    @abstractmethod
    def before_step(self, weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Note a step that the user's optimizer is about to make with gradients of all parameters."""

    @abstractmethod
    def _fill(self, weights: list[torch.Tensor]) -> None:
        """Write what is pushed into `wire.pending`, given the shard's own weights, and make them the origin."""

    def push(self, weights: Sequence[torch.Tensor], ask: Callable[..., None]) -> None:
        """Send what is pending. Returns at once."""
        self._fill(cut(weights, self.pieces))
        message, into = self.wire.pack(self.num_pending)
        self.num_pending = 0
        self._ask(message, into, ask)

    def pull(self, ask: Callable[..., None]) -> None:
        """Ask for the newest weights. Returns at once."""
        message = Message(PULL, self.version, b"")
        question = self.wire.after_copies(message) if self.wire.is_remote else message
        self._ask(question, self.wire.received.payload, ask)

    def has_rested(self) -> bool:
        """Return whether the next push may begin."""
        return time.monotonic() >= self._rests_until_s

    def _ask(self, message: Question, into: memoryview, ask: Callable[..., None]) -> None:
        self.is_under_way = True
        self._asked_s = time.monotonic()
        self.has_arrived.clear()
        ask(self.owner, message, self._on_reply, into)

    def _on_reply(self, message: Message) -> None:
        self.wire.received.number = message.number
        now_s = time.monotonic()
        before_s, self._took_s = self._took_s, now_s - self._asked_s
        self._rests_until_s = now_s + self._rest * min(before_s, self._took_s)
        self.has_arrived.set()

    def take_over(self, weights: Sequence[torch.Tensor], frozen: Collection[int] = ()) -> None:
        """Make the parameters the weights that have arrived, and what was done to them since the push.

        Args:
            weights: Of all parameters.
            frozen: Indices of those that stay as they are.
        """
        self.wire.unpack()
        own = cut(weights, self.pieces)
        if self.is_stale:
            torch._foreach_copy_(self._origin, own)
            self._end()
            return
        moving = [place for place, piece in enumerate(self.pieces) if piece.index not in frozen]
        if moving:
            own = [own[place] for place in moving]
            origin = [self._origin[place] for place in moving]
            torch._foreach_sub_(own, origin)
            self.wire.received.copy_to(origin, moving)
            torch._foreach_add_(own, origin)
        self._end()

    def begin_anew(self, weights: Sequence[torch.Tensor]) -> None:
        """The user has loaded weights: nothing that was done to others is pushed or taken over."""
        torch._foreach_copy_(self._origin, cut(weights, self.pieces))
        self.num_pending = 0
        self.is_stale = self.is_under_way

    def overwrite(self, weights: Sequence[torch.Tensor]) -> None:
        """Make the parameters the weights that have arrived, after `pull`."""
        self.wire.received.copy_to(cut(weights, self.pieces))
        self._end()

    def _end(self) -> None:
        self.version = self.wire.received.number
        self.is_under_way = self.is_stale = False
        self.has_arrived.clear()


class UpdateShard(Shard):
    """Pushes how far the weights have gone from the origin: where they were at the last push, or W since."""

    @override
    def before_step(self, weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        if not self.num_pending:
            torch._foreach_copy_(self._origin, cut(weights, self.pieces))  # the user may have loaded others
            self.wire.pending.number = self.version  # stays so, also when newer weights come before the push
        self.num_pending += 1

    @override
    def _fill(self, weights: list[torch.Tensor]) -> None:
        pending = self.wire.pending
        if self.wire.is_remote:  # what is to be sent is computed there
            pending.fill([w.to(p.dtype) - o for w, p, o in zip(weights, pending.tensors, self._origin, strict=True)])
        else:
            pending.fill(weights)
            torch._foreach_sub_(pending.tensors, self._origin)
        torch._foreach_copy_(self._origin, weights)


class GradientShard(Shard):
    """Pushes the mean of the gradients, which are added up where the parameters are."""

    def __init__(
        self,
        owner: int,
        pieces: Sequence[Piece],
        tensors: Sequence[torch.Tensor],
        rest: float,
        wire: WholeWire | CodedWire,
    ) -> None:
        super().__init__(owner, pieces, tensors, rest, wire)
        dtypes = [each.dtype for each in wire.pending.tensors]
        pairs = zip(self._origin, dtypes, strict=True) if wire.is_remote else ()
        self._remote_sum = [torch.empty_like(piece, dtype=dtype) for piece, dtype in pairs]

    @property
    def _sum(self) -> list[torch.Tensor]:
        return self._remote_sum if self.wire.is_remote else self.wire.pending.tensors

    @override
    def before_step(self, weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        own = cut(gradients, self.pieces)
        if self.num_pending:
            torch._foreach_add_(self._sum, own)
        else:
            torch._foreach_copy_(self._sum, own)
            self.wire.pending.number = self.version
        self.num_pending += 1

    @override
    def _fill(self, weights: list[torch.Tensor]) -> None:
        if self.num_pending > 1:
            torch._foreach_mul_(self._sum, 1 / self.num_pending)
        if self.wire.is_remote:
            self.wire.pending.fill(self._sum)
        torch._foreach_copy_(self._origin, weights)
