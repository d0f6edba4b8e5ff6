"""The interface of block codecs, and the choice of the executor by device."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeVar

import torch

from commlib.arguments import Recorded
from commlib.errors import CodecError
from commlib.kernels import native_codecs
from commlib.kernels.checks import Feedback, Random
from commlib.kernels.codec_table import BY_NAME
from commlib.kernels.executor import block_executor

__all__ = ["BlockCodec", "Feedback", "Random"]

C = TypeVar("C", bound=type)


def from_table(name: str) -> Callable[[C], C]:
    """Return a decorator that sets a class's attributes from the codec table (kernels/codec_table.py) entry `name`."""
    row = BY_NAME[name]

    def fill(cls: C) -> C:
        for field in ("id", "name", "version", "block", "rounds_stochastically"):
            if hasattr(row, field):
                setattr(cls, field, getattr(row, field))
        return cls

    return fill


class BlockCodec(Recorded):
    """A codec of independent blocks. Bytes and values follow docs/reference/wire_format.md on every device.

    A tensor of `numel` elements is split into chunks of `chunk` elements (by default one chunk). The payload of chunk i
    starts at byte `i * payload_bytes(chunk)`. The caller provides every buffer; nothing else is allocated (except for
    `uint8_bagua` on a CUDA device, which takes a little memory from torch's allocator). Payload buffers are uint8 and
    aligned to 16 bytes, as torch's own are.

    Attributes:
        id: The codec's number on the wire.
        version: The version of its payload format.
        name: The codec's name on the wire.
        block: Number of elements that share parameters: 0 means the whole chunk, 1 means no parameters are shared.
        rounds_stochastically: Whether the codec accepts `random`.
    """

    id: ClassVar[int]
    version: ClassVar[int] = 1
    name: ClassVar[str]
    block: ClassVar[int]
    rounds_stochastically: ClassVar[bool] = False

    def __init__(self) -> None:
        """Take no options. A subclass with options defines its own `__init__`."""

    def payload_bytes(self, numel: int) -> int:
        """Return the bytes of the payload of a chunk of `numel` elements."""
        return native_codecs.payload_bytes(self.id, numel)

    def buffer_bytes(self, numel: int, chunk: int) -> int:
        """Return the bytes of the payloads of all chunks of a tensor of `numel` elements."""
        return native_codecs.buffer_bytes(self.id, numel, chunk)

    def ratio(self, numel: int) -> float:
        """Return the compression ratio: the size of `numel` fp32 elements divided by that of their payload."""
        return 4 * numel / self.payload_bytes(numel) if numel else 1.0

    def encode(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        chunk: int | None = None,
        feedback: Feedback | None = None,
        random: Random | None = None,
    ) -> None:
        """Encode `x` ([numel] fp32, bf16, fp16 or fp64) into `out` ([buffer_bytes(numel, chunk)] uint8).

        Args:
            x: The values.
            out: Written completely, including gaps between sections.
            chunk: Elements of a chunk.
            feedback: Error feedback: `x + beta * residual` is encoded, and the encoding error becomes the residual.
            random: Source of stochastic rounding; None rounds to nearest.

        Raises:
            CodecError: An argument is not as described. Nothing was written.
        """
        self._check_random(random)
        block_executor(out).encode(self.id, x, out, chunk=chunk, feedback=feedback, random=random)

    def encode_sum(
        self,
        payloads: torch.Tensor,
        numel: int,
        out: torch.Tensor,
        *,
        divisor: float = 1.0,
        feedback: Feedback | None = None,
        random: Random | None = None,
        first: int = 0,
    ) -> None:
        """Encode the sum of payloads of one chunk, in order and divided, without an intermediate pass through memory.

        Args:
            payloads: [count, payload_bytes(numel)] uint8.
            numel: Elements of the chunk.
            out: [payload_bytes(numel)] uint8.
            divisor: Divides the sum; a true division.
            feedback: As in `encode`.
            random: As in `encode`.
            first: Offset of the chunk in its tensor, for `random`.

        Raises:
            CodecError: An argument is not as described. Nothing was written.
        """
        self._check_random(random)
        block_executor(out).encode_sum(
            self.id, payloads, numel, out, divisor=divisor, feedback=feedback, random=random, first=first
        )

    def decode(self, payload: torch.Tensor, out: torch.Tensor, *, chunk: int | None = None) -> None:
        """Decode the payloads of all chunks into `out` ([numel] fp32, bf16, fp16 or fp64).

        Raises:
            CodecError: An argument is not as described. Nothing was written.
        """
        block_executor(out).decode(self.id, payload, out, chunk=chunk)

    def decode_add(
        self, payload: torch.Tensor, out: torch.Tensor, *, weight: float = 1.0, chunk: int | None = None
    ) -> None:
        """Add `weight` times the decoded values to `out`.

        Raises:
            CodecError: An argument is not as described. Nothing was written.
        """
        block_executor(out).decode_add(self.id, payload, out, weight=weight, chunk=chunk)

    def decode_sum(self, payloads: torch.Tensor, out: torch.Tensor, *, divisor: float = 1.0) -> None:
        """Write the sum of payloads of one chunk ([count, payload_bytes(numel)]), in order, divided by `divisor`.

        Raises:
            CodecError: An argument is not as described. Nothing was written.
        """
        block_executor(out).decode_sum(self.id, payloads, out, divisor=divisor)

    def _check_random(self, random: Random | None) -> None:
        if random is not None and not self.rounds_stochastically:
            raise CodecError(f"random: {self.name} rounds to nearest only; expected None")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
