"""Sparse codecs: a few elements of a chunk, by index and value."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from typing_extensions import override

from commlib.arguments import Recorded
from commlib.codecs.base import Feedback, Random, from_table, sparse_executor_of
from commlib.errors import CodecError
from commlib.kernels import checks, cuda_sparse, native_sparse


class SparseCodec(Recorded, ABC):
    """A codec that names at most `places(numel)` elements of a chunk; bytes are those of docs/reference/wire_format.md.

    The capacity is fixed, so the size of a payload is known in advance. Use it with error feedback, which keeps what
    was not sent.

    Attributes:
        id: Its number on the wire.
        version: Of its bytes.
        name: Its name on the wire.
    """

    id: ClassVar[int]
    version: ClassVar[int] = 1
    name: ClassVar[str]

    def __init__(self) -> None:
        """Take no options; a subclass that has some defines its own."""

    @abstractmethod
    def places(self, numel: int) -> int:
        """Return how many elements of a chunk of `numel` can be named: at least one of a chunk that is not empty."""

    @abstractmethod
    def capacity(self, numel: int) -> int:
        """Return the number from which, with `numel`, the size of a payload follows; a file's header has it."""

    @classmethod
    @abstractmethod
    def bytes_of(cls, numel: int, capacity: int) -> int:
        """Return the bytes of a payload of `numel` elements and that `capacity`.

        Raises:
            CodecError: There is none with such numbers.
        """

    def payload_bytes(self, numel: int) -> int:
        """Return the bytes of the payload of a chunk of `numel` elements."""
        return self.bytes_of(numel, self.capacity(numel))

    @abstractmethod
    def encode(
        self, x: torch.Tensor, out: torch.Tensor, *, feedback: Feedback | None = None, random: Random | None = None
    ) -> None:
        """Encode the chunk `x` ([numel] fp32, bf16, fp16 or fp64) into `out` ([payload_bytes(numel)] uint8).

        Args:
            x: The values.
            out: Written wholly.
            feedback: Error feedback: elements are named of `x + beta * residual`, and the residual keeps the others.
            random: For `RandomK`.

        Raises:
            CodecError: An argument is not as described. Nothing was written.
        """

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """Decode a payload into `out` ([numel] fp32); elements that it does not name become 0.

        On a CUDA device a damaged payload does not raise, as nothing waits for the device: see `raise_if_damaged`.

        Raises:
            CodecError: An argument is not as described, or the payload is damaged. Nothing was written.
        """
        self.decode_sum(payload.view(1, -1), out)

    @abstractmethod
    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, *, weight: float = 1.0) -> None:
        """Add `weight` times the values to the elements that the payload names.

        Raises:
            CodecError: As `decode`.
        """

    @abstractmethod
    def decode_sum(self, payloads: torch.Tensor, out: torch.Tensor, *, divisor: float = 1.0) -> None:
        """Write the sum of payloads ([count, payload_bytes(numel)]), in their order, divided by `divisor`.

        Raises:
            CodecError: As `decode`.
        """


class PairsCodec(SparseCodec):
    """A sparse codec that sends an index and an fp32 value of each element: `k` places take 8 k bytes.

    A chunk has at most 2**32 - 2 elements.

    Args:
        ratio: The part of the elements that there are places for, above 0 and at most 1.

    Raises:
        CodecError: A ratio out of range.
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
        sparse_executor_of(out).decode_add(payload, self.places(out.numel()), out, weight)

    @override
    def decode_sum(self, payloads: torch.Tensor, out: torch.Tensor, *, divisor: float = 1.0) -> None:
        sparse_executor_of(out).decode_sum(payloads, self.places(out.numel()), out, divisor)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(ratio={self.ratio})"


def raise_if_damaged(device: torch.device) -> None:
    """Raise if a sparse payload that was decoded on `device` since the last call was damaged.

    Decoding on a CUDA device does not look at the outcome: a damaged payload touches no memory outside the tensors,
    which of its values count is not defined, and the device remembers it. This waits for torch's current stream of the
    device, so call it where that is no harm: after a step, or where values look wrong. On the CPU, decoding
    itself raises.

    Raises:
        CodecError: As described; it names one of the payloads.
    """
    if device.type == "cuda":
        cuda_sparse.raise_if_damaged(device)


@from_table("topk")
class TopK(PairsCodec):
    """The elements of largest magnitude, exactly: among equals those of lower index, whatever the threads.

    Error: that of the elements that are not named, at most the smallest magnitude that is. Named ones are exact.
    Compression: 1 / (2 ratio) of fp32.
    """

    def encode(
        self, x: torch.Tensor, out: torch.Tensor, *, feedback: Feedback | None = None, random: Random | None = None
    ) -> None:
        """Encode; see `SparseCodec.encode`."""
        sparse_executor_of(out).encode_top_k(x, self.places(x.numel()), out, feedback)


@from_table("randomk")
class RandomK(PairsCodec):
    """One random element of each of `places` neighbourhoods of the chunk (stratified random-k).

    Ranks that give the same `random` (rank 0 in all of them) name the same elements. Values are not scaled: with error
    feedback nothing is lost; without it, multiply by 1 / ratio for an unbiased estimate.
    Error: that of the elements that are not named.
    Compression: 1 / (2 ratio) of fp32.
    """

    def encode(
        self, x: torch.Tensor, out: torch.Tensor, *, feedback: Feedback | None = None, random: Random | None = None
    ) -> None:
        """Encode; see `SparseCodec.encode`. `random` is required."""
        if random is None:
            raise CodecError("random: expected a Random for randomk, got None")
        sparse_executor_of(out).encode_random_k(x, self.places(x.numel()), out, random, feedback)


@from_table("threshold")
class Threshold(PairsCodec):
    """The first elements whose magnitude reaches a threshold, as many as there are places.

    Args:
        threshold: Above 0.
        ratio: The part of the elements that there are places for.

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
        sparse_executor_of(out).encode_above(x, self.threshold, self.places(x.numel()), out, feedback)

    def __repr__(self) -> str:
        return f"Threshold(threshold={self.threshold}, ratio={self.ratio})"


@from_table("blocktopk")
class BlockTopK(SparseCodec):
    """The elements of largest magnitude of each block of 4,096: 12 bits of index and 2 of value for each.

    The value is a sign and which of two levels of the block it has: the mean of the named magnitudes that reach the
    mean of all of them, or that of the others (0, if some are 0: all but these then have the other level). Among
    equals those of lower index are named, whatever the threads.

    Args:
        kept: Elements named of each block (of a shorter last one all, if it has no more), 1 to 4,096.

    Attributes:
        block: Elements of a block.

    Error: of a named element at most the width of its class of magnitudes, and 2^-8 of its level; of the others what
        they are, at most the smallest magnitude that is named.
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
        """Encode; see `SparseCodec.encode`. The residual of a named element keeps what its value lost."""
        sparse_executor_of(out).encode_block_top_k(x, self.kept, out, feedback)

    @override
    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, *, weight: float = 1.0) -> None:
        sparse_executor_of(out).add_block_top_k(payload, self.kept, out, weight)

    @override
    def decode_sum(self, payloads: torch.Tensor, out: torch.Tensor, *, divisor: float = 1.0) -> None:
        sparse_executor_of(out).sum_block_top_k(payloads, self.kept, out, divisor)

    def __repr__(self) -> str:
        return f"BlockTopK(kept={self.kept})"
