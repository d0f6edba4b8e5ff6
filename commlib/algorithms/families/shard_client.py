"""The worker side of one shard of the parameters: pushes, and updates from the answers."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

import torch
from typing_extensions import override

from commlib.algorithms.families.published import Packing, TensorBuffer
from commlib.algorithms.families.shard_server import Piece, cut
from commlib.codecs.base import BlockCodec, Feedback
from commlib.transport.mailbox import Message

#: Questions: push, answered with the weights; pull, answered with the weights; push, answered with their change.
PUSH, PULL, PUSH_FOR_CHANGE = 1, 2, 3


#: A question, or a function that creates it on the sending thread, which waits for copies from a device.
Question = Message | Callable[[], Message]


class WholeWire:
    """Sends a shard's pushes and answers uncompressed.

    Attributes:
        is_remote: Whether the parameters are on a device.
        pending: The contents of the next push.
        received: The weights received last.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        packing = Packing(tensors)
        self.is_remote = packing.is_remote
        self.pending, self._sending, self.received = TensorBuffer(packing), TensorBuffer(packing), TensorBuffer(packing)

    def pack(self, num_steps: int) -> tuple[Question, memoryview]:
        """Return `pending` as a push, and the buffer for its answer. `pending` may then be overwritten."""
        self.pending, self._sending = self._sending, self.pending
        message = Message(PUSH, self._sending.number, self._sending.payload, num_steps)
        return self.after_copies(message) if self.is_remote else message, self.received.payload

    def after_copies(self, message: Message) -> Callable[[], Message]:
        """Return a function that waits for the copies of the push and of the last answer, and returns the message."""

        def wait() -> Message:
            self._sending.wait()
            self.received.wait()
            return message

        return wait

    def unpack(self) -> None:
        """Update `received` from the answer."""


class CodedWire:
    """Sends pushes and answers through a codec: pushes with error feedback, answers as the change since the last."""

    def __init__(self, tensors: Sequence[torch.Tensor], codec: BlockCodec) -> None:
        packing = Packing(tensors, torch.float32)
        self.is_remote = packing.is_remote
        self.pending, self.received = TensorBuffer(packing), TensorBuffer(packing)
        self._sending = TensorBuffer(packing) if self.is_remote else self.pending
        self._codec = codec
        numel = self.pending.flat.numel()
        self.residual = torch.zeros(numel, dtype=torch.float32, device="cpu")
        nbytes = codec.payload_bytes(numel)
        self._push, self._change = (torch.empty(nbytes, dtype=torch.uint8, device="cpu") for _ in range(2))
        self._has_base = False  # whether the owner has a copy of `received`
        self._asked_for_change = False

    def pack(self, num_steps: int) -> tuple[Question, memoryview]:
        """Return `pending` as a push, and the buffer for its answer."""
        self.pending, self._sending = self._sending, self.pending
        self._asked_for_change = self._has_base
        kind, into = (PUSH_FOR_CHANGE, self._change) if self._has_base else (PUSH, self.received.buffer)
        message = Message(kind, self._sending.number, self._push.numpy().data, num_steps)
        if self.is_remote:
            return self.after_copies(message), into.numpy().data
        self._encode()
        return message, into.numpy().data

    def after_copies(self, message: Message) -> Callable[[], Message]:
        """Return a function that waits for the copies, encodes the push, and returns the message."""

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
        """Update `received` from the answer."""
        if self._asked_for_change:
            self._codec.decode_add(self._change, self.received.flat)
        self._has_base = True


class Shard(ABC):
    """A worker's view of one shard: the pending push and the newest weights."""

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
        self._took_s = math.inf  # time from the last question to its answer
        self._origin = [torch.empty_like(piece) for piece in cut(tensors, pieces)]
        self.num_pending = 0  # number of steps in the next push
        self.version = 0  # version of the weights applied last
        self.is_under_way = False
        self.is_stale = False  # whether the exchange in flight concerns weights that the user has replaced
        self.has_arrived = threading.Event()

    @abstractmethod
    def before_step(self, weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Record a step that the user's optimizer is about to make with the gradients of all parameters."""

    @abstractmethod
    def _fill(self, weights: list[torch.Tensor]) -> None:
        """Write the push into `wire.pending`, given the shard's own weights, which become the origin."""

    def push(self, weights: Sequence[torch.Tensor], ask: Callable[..., None]) -> None:
        """Send the pending push. Does not block."""
        self._fill(cut(weights, self.pieces))
        message, into = self.wire.pack(self.num_pending)
        self.num_pending = 0
        self._ask(message, into, ask)

    def pull(self, ask: Callable[..., None]) -> None:
        """Request the newest weights. Does not block."""
        message = Message(PULL, self.version, b"")
        question = self.wire.after_copies(message) if self.wire.is_remote else message
        self._ask(question, self.wire.received.payload, ask)

    def has_rested(self) -> bool:
        """Return whether the rest after the last answer is over."""
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
        """Set the parameters to the received weights plus the local steps since the push.

        Args:
            weights: The weights of all parameters.
            frozen: Indices of the parameters that do not change.
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
        """Restart from weights that the user has loaded; drop pending steps and the answer in flight."""
        torch._foreach_copy_(self._origin, cut(weights, self.pieces))
        self.num_pending = 0
        self.is_stale = self.is_under_way

    def overwrite(self, weights: Sequence[torch.Tensor]) -> None:
        """Copy the received weights to the parameters, after `pull`."""
        self.wire.received.copy_to(cut(weights, self.pieces))
        self._end()

    def _end(self) -> None:
        self.version = self.wire.received.number
        self.is_under_way = self.is_stale = False
        self.has_arrived.clear()


class UpdateShard(Shard):
    """Pushes the difference of the weights from the origin, which is their value at the last push, or a later W."""

    @override
    def before_step(self, weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        if not self.num_pending:
            torch._foreach_copy_(self._origin, cut(weights, self.pieces))  # the user may have loaded other weights
            self.wire.pending.number = self.version  # unchanged if newer weights arrive before the push
        self.num_pending += 1

    @override
    def _fill(self, weights: list[torch.Tensor]) -> None:
        pending = self.wire.pending
        if self.wire.is_remote:  # compute the difference on the device
            pending.fill([w.to(p.dtype) - o for w, p, o in zip(weights, pending.tensors, self._origin, strict=True)])
        else:
            pending.fill(weights)
            torch._foreach_sub_(pending.tensors, self._origin)
        torch._foreach_copy_(self._origin, weights)


class GradientShard(Shard):
    """Pushes the mean of the gradients, which are accumulated on the parameters' device."""

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
