"""What every codec offers, on whatever device the tensors are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch

from commlib.arguments import Recorded
from commlib.errors import CodecError
from commlib.kernels import cuda_codecs, cuda_sparse, meta, native_codecs, native_sparse
from commlib.kernels.checks import Feedback, Random
from commlib.kernels.codec_table import BY_NAME

__all__ = ["BlockCodec", "Feedback", "Random"]

C = TypeVar("C", bound=type)


def from_table(name: str) -> Callable[[C], C]:
    """Give a class of this package what the table of codecs (kernels/codec_table.py) says of `name`."""
    row = BY_NAME[name]

    def fill(cls: C) -> C:
        for field in ("id", "name", "version", "block", "rounds_stochastically"):
            if hasattr(row, field):
                setattr(cls, field, getattr(row, field))
        return cls

    return fill


class BlockCodec(Recorded):
    """A codec of independent blocks: bytes and values are those of docs/reference/wire_format.md, on every device.

    A tensor of `numel` elements is cut into chunks of `chunk` elements (by default one chunk). Their payloads follow
    one another at the distance of `payload_bytes(chunk)`. The caller gives every buffer; nothing else is allocated (but
    for `uint8_bagua` on a CUDA device, which takes a little from torch's allocator). Payload buffers are uint8 and
    aligned to 16 bytes, which torch's own are.

    Attributes:
        id: Its number on the wire.
        version: Of its bytes.
        name: Its name on the wire.
        block: Elements that share parameters; 0 means the whole chunk, 1 none.
        rounds_stochastically: Whether it takes `random`.
    """

    id: ClassVar[int]
    version: ClassVar[int] = 1
    name: ClassVar[str]
    block: ClassVar[int]
    rounds_stochastically: ClassVar[bool] = False

    def __init__(self) -> None:
        """Take no options; a subclass that has some defines its own."""

    def payload_bytes(self, numel: int) -> int:
        """Return the bytes of the payload of a chunk of `numel` elements."""
        return native_codecs.payload_bytes(self.id, numel)

    def buffer_bytes(self, numel: int, chunk: int) -> int:
        """Return the bytes of the payloads of all chunks of a tensor of `numel` elements."""
        return native_codecs.buffer_bytes(self.id, numel, chunk)

    def ratio(self, numel: int) -> float:
        """Return how many times smaller the payload is than `numel` fp32 elements."""
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
            out: Written wholly, gaps between sections included.
            chunk: Elements of a chunk.
            feedback: Error feedback: `x + beta * residual` is encoded, and the residual becomes what was lost.
            random: Makes the rounding stochastic.

        Raises:
            CodecError: An argument is not as described. Nothing was written.
        """
        self._check_random(random)
        executor_of(out).encode(self.id, x, out, chunk=chunk, feedback=feedback, random=random)

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
        """Encode the sum of payloads of one chunk, in their order and divided, without a pass through memory.

        Args:
            payloads: [count, payload_bytes(numel)] uint8.
            numel: Elements of the chunk.
            out: [payload_bytes(numel)] uint8.
            divisor: Of the sum; a true division.
            feedback: As in `encode`.
            random: As in `encode`.
            first: Where the chunk begins in its tensor, for `random`.

        Raises:
            CodecError: An argument is not as described. Nothing was written.
        """
        self._check_random(random)
        executor_of(out).encode_sum(
            self.id, payloads, numel, out, divisor=divisor, feedback=feedback, random=random, first=first
        )

    def decode(self, payload: torch.Tensor, out: torch.Tensor, *, chunk: int | None = None) -> None:
        """Decode the payloads of all chunks into `out` ([numel] fp32, bf16, fp16 or fp64).

        Raises:
            CodecError: An argument is not as described. Nothing was written.
        """
        executor_of(out).decode(self.id, payload, out, chunk=chunk)

    def decode_add(
        self, payload: torch.Tensor, out: torch.Tensor, *, weight: float = 1.0, chunk: int | None = None
    ) -> None:
        """Add `weight` times the decoded values to `out`.

        Raises:
            CodecError: An argument is not as described. Nothing was written.
        """
        executor_of(out).decode_add(self.id, payload, out, weight=weight, chunk=chunk)

    def decode_sum(self, payloads: torch.Tensor, out: torch.Tensor, *, divisor: float = 1.0) -> None:
        """Write the sum of payloads of one chunk ([count, payload_bytes(numel)]), in their order, divided by `divisor`.

        Raises:
            CodecError: An argument is not as described. Nothing was written.
        """
        executor_of(out).decode_sum(self.id, payloads, out, divisor=divisor)

    def _check_random(self, random: Random | None) -> None:
        if random is not None and not self.rounds_stochastically:
            raise CodecError(f"random: {self.name} rounds to nearest only; expected None")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def executor_of(tensor: torch.Tensor) -> Any:
    """Return the executor of the block codecs whose kernels run where the tensor is.

    Raises:
        CodecError: There are none for its device.
    """
    return _choose(tensor, cpu=native_codecs, cuda=cuda_codecs, meta=meta)


def sparse_executor_of(tensor: torch.Tensor) -> Any:
    """Return the executor of the sparse codecs whose kernels run where the tensor is.

    Raises:
        CodecError: There are none for its device.
    """
    return _choose(tensor, cpu=native_sparse, cuda=cuda_sparse, meta=meta.Sparse)


def _choose(tensor: torch.Tensor, **executors: Any) -> Any:
    kind = tensor.device.type if hasattr(tensor, "device") else "cpu"
    if kind not in executors:
        raise CodecError(f"no codec kernels for tensors on {tensor.device}; expected the CPU or a CUDA device")
    return executors[kind]
