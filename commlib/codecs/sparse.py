"""Sparse codecs: selected elements of a chunk, as indices and values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from typing_extensions import override

from commlib.arguments import Recorded
from commlib.codecs.base import Feedback, Random, from_table
from commlib.errors import CodecError
from commlib.kernels import checks, cuda_sparse, native_sparse
from commlib.kernels.executor import sparse_executor


class SparseCodec(Recorded, ABC):
    """A codec that sends at most `places(numel)` elements of a chunk. Bytes follow docs/reference/wire_format.md.

    The capacity is fixed, so the payload size is known in advance. Use it with error feedback, which keeps the elements
    that were not sent.

    Attributes:
        id: The codec's number on the wire.
        version: The version of its payload format.
        name: The codec's name on the wire.
    """

    id: ClassVar[int]
    version: ClassVar[int] = 1
    name: ClassVar[str]

    def __init__(self) -> None:
        """Take no options. A subclass with options defines its own `__init__`."""

    @abstractmethod
    def places(self, numel: int) -> int:
        """Return the maximum number of elements sent for a chunk of `numel`; at least one unless the chunk is empty."""

    @abstractmethod
    def capacity(self, numel: int) -> int:
        """Return the number that, with `numel`, determines the payload size. It is part of a file's header."""

    @classmethod
    @abstractmethod
    def bytes_of(cls, numel: int, capacity: int) -> int:
        """Return the size in bytes of a payload of `numel` elements and that `capacity`.

        Raises:
            CodecError: The numbers are not those of a valid payload.
        """

    def payload_bytes(self, numel: int) -> int:
        """Return the size in bytes of the payload of a chunk of `numel` elements."""
        return self.bytes_of(numel, self.capacity(numel))

    @abstractmethod
    def encode(
        self, x: torch.Tensor, out: torch.Tensor, *, feedback: Feedback | None = None, random: Random | None = None
    ) -> None:
        """Encode the chunk `x` ([numel] fp32, bf16, fp16 or fp64) into `out` ([payload_bytes(numel)] uint8).

        Args:
            x: The values.
            out: Written completely.
            feedback: Error feedback: elements of `x + beta * residual` are sent, and the residual keeps the rest.
            random: The random source; used by `RandomK` only.

        Raises:
            CodecError: An argument is not as described. Nothing was written.
        """

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """Decode a payload into `out` ([numel] fp32). Elements that are not in the payload become 0.

        On a CUDA device a damaged payload does not raise here, because the device is not synchronized: see
        `raise_if_damaged`.

        Raises:
            CodecError: An argument is not as described, or the payload is damaged. Nothing was written.
        """
        self.decode_sum(payload.view(1, -1), out)

    @abstractmethod
    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, *, weight: float = 1.0) -> None:
        """Add `weight` times the values to the elements that are in the payload.

        Raises:
            CodecError: As for `decode`.
        """

    @abstractmethod
    def decode_sum(self, payloads: torch.Tensor, out: torch.Tensor, *, divisor: float = 1.0) -> None:
        """Write the sum of payloads ([count, payload_bytes(numel)]), in order, divided by `divisor`.

        Raises:
            CodecError: As for `decode`.
        """


class PairsCodec(SparseCodec):
    """A sparse codec that sends the index and fp32 value of each element: `k` places take 8 k bytes.

    A chunk has at most 2**32 - 2 elements.

    Args:
        ratio: Fraction of the elements that are sent, above 0 and at most 1.

    Raises:
        CodecError: `ratio` is out of range.
    """

    def __init__(self, ratio: float = 0.01) -> None:
        if not 0 < ratio <= 1:
            raise CodecError(f"{type(self).__name__}.ratio: expected a number above 0 and at most 1, got {ratio}")
        self.ratio = ratio

    @override
    def places(self, numel: int) -> int:
        return min(numel, max(1, round(numel * self.ratio)))

    @override
    def capacity(self, numel: int) -> int:
        return self.places(numel)

    @classmethod
    @override
    def bytes_of(cls, numel: int, capacity: int) -> int:
        checks.check_places(capacity, numel)
        return native_sparse.payload_bytes(capacity)

    def values(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        """Return the values in a payload of a chunk of `numel` elements: a view, [places(numel)] fp32."""
        return payload[payload.numel() // 2 :].view(torch.float32)[: self.places(numel)]

    def indices(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        """Return the indices in a payload of a chunk of `numel` elements: a view, [places(numel)] int32.

        Unused places are -1; indices of 2**31 and more are negative too.
        """
        return payload[: payload.numel() // 2].view(torch.int32)[: self.places(numel)]

    @override
    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, *, weight: float = 1.0) -> None:
        sparse_executor(out).decode_add(payload, self.places(out.numel()), out, weight)

    @override
    def decode_sum(self, payloads: torch.Tensor, out: torch.Tensor, *, divisor: float = 1.0) -> None:
        sparse_executor(out).decode_sum(payloads, self.places(out.numel()), out, divisor)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(ratio={self.ratio})"


def raise_if_damaged(device: torch.device) -> None:
    """Raise if a sparse payload decoded on `device` since the last call was damaged.

    Decoding on a CUDA device does not wait for the result. A damaged payload accesses no memory outside the tensors,
    leaves undefined values, and sets an error on the device. This function synchronizes with torch's current stream of
    the device, so call it rarely: after a step, or when values look wrong. On the CPU, decoding itself raises.

    Raises:
        CodecError: A payload was damaged; the message names one of them.
    """
    if device.type == "cuda":
        cuda_sparse.raise_if_damaged(device)


@from_table("topk")
class TopK(PairsCodec):
    """The elements of largest magnitude, exactly. Ties are broken by lower index, for any number of threads.

    Error: the values of elements that are not sent, each at most the smallest magnitude sent. Sent values are exact.
    Compression: 1 / (2 ratio) of fp32.
    """

    def encode(
        self, x: torch.Tensor, out: torch.Tensor, *, feedback: Feedback | None = None, random: Random | None = None
    ) -> None:
        """Encode; see `SparseCodec.encode`."""
        sparse_executor(out).encode_top_k(x, self.places(x.numel()), out, feedback)


@from_table("randomk")
class RandomK(PairsCodec):
    """One random element of each of `places` neighborhoods of the chunk (stratified random-k).

    Ranks that pass the same `random` (with rank 0 on all of them) select the same elements. Values are not scaled: with
    error feedback nothing is lost; without it, multiply by 1 / ratio for an unbiased estimate.
    Error: the values of elements that are not sent.
    Compression: 1 / (2 ratio) of fp32.
    """

    def encode(
        self, x: torch.Tensor, out: torch.Tensor, *, feedback: Feedback | None = None, random: Random | None = None
    ) -> None:
        """Encode; see `SparseCodec.encode`. `random` is required."""
        if random is None:
            raise CodecError("random: expected a Random for randomk, got None")
        sparse_executor(out).encode_random_k(x, self.places(x.numel()), out, random, feedback)


@from_table("threshold")
class Threshold(PairsCodec):
    """The first elements whose magnitude reaches a threshold, as many as there are places.

    Args:
        threshold: The threshold, above 0.
        ratio: Fraction of the elements that there are places for.

    Error: below the threshold, unless more elements reach it than there are places.
    Compression: 1 / (2 ratio) of fp32.
    """

    def __init__(self, threshold: float, ratio: float = 0.01) -> None:
        super().__init__(ratio)
        if not threshold > 0:
            raise CodecError(f"Threshold.threshold: expected a positive number, got {threshold}")
        self.threshold = threshold

    def encode(
        self, x: torch.Tensor, out: torch.Tensor, *, feedback: Feedback | None = None, random: Random | None = None
    ) -> None:
        """Encode; see `SparseCodec.encode`."""
        sparse_executor(out).encode_above(x, self.threshold, self.places(x.numel()), out, feedback)

    def __repr__(self) -> str:
        return f"Threshold(threshold={self.threshold}, ratio={self.ratio})"


@from_table("blocktopk")
class BlockTopK(SparseCodec):
    """The elements of largest magnitude of each block of 4,096: 12 index bits and 2 value bits per element.

    The value is a sign and the choice between two levels per block. The first level is the mean of the selected
    magnitudes that reach the mean of all selected ones, the second the mean of the rest (0 if some of these are 0: all
    others then have the first level). Ties are broken by lower index, for any number of threads.

    Args:
        kept: Number of elements selected per block, 1 to 4,096. A shorter last block may have fewer.

    Attributes:
        block: Elements of a block.

    Error of a selected element: at most the width of its class of magnitudes, plus 2^-8 of its level. Error of any
    other element: its value, at most the smallest magnitude selected.
    Compression: 16,384 bytes of fp32 become 1.75 kept + 4: 141 times with 64.
    """

    block: ClassVar[int]

    def __init__(self, kept: int = 64) -> None:
        checks.check_kept(kept)
        self.kept = kept

    @override
    def places(self, numel: int) -> int:
        full, rest = divmod(numel, self.block)
        return full * self.kept + min(self.kept, rest)

    @override
    def capacity(self, numel: int) -> int:
        return self.kept

    @classmethod
    @override
    def bytes_of(cls, numel: int, capacity: int) -> int:
        return native_sparse.block_top_k_bytes(numel, capacity)

    def encode(
        self, x: torch.Tensor, out: torch.Tensor, *, feedback: Feedback | None = None, random: Random | None = None
    ) -> None:
        """Encode; see `SparseCodec.encode`. The residual of a selected element keeps its quantization error."""
        sparse_executor(out).encode_block_top_k(x, self.kept, out, feedback)

    @override
    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, *, weight: float = 1.0) -> None:
        sparse_executor(out).add_block_top_k(payload, self.kept, out, weight)

    @override
    def decode_sum(self, payloads: torch.Tensor, out: torch.Tensor, *, divisor: float = 1.0) -> None:
        sparse_executor(out).sum_block_top_k(payloads, self.kept, out, divisor)

    def __repr__(self) -> str:
        return f"BlockTopK(kept={self.kept})"
