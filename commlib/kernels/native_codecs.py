"""The block codecs on CPU tensors, in C++.

The extension checks tensors and numbers in every call. If one does not fit, `checks` raises the error that names it.
Tensors are dense, contiguous and on the CPU; payloads are uint8. A tensor of `numel` elements is split into chunks of
`chunk` elements. The payload of chunk i starts at i times the size of a full chunk's payload
(docs/reference/wire_format.md).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from commlib.errors import CodecError
from commlib.kernels import checks
from commlib.kernels.checks import Feedback, Random
from commlib.kernels.native import load


def payload_bytes(codec: int, numel: int) -> int:
    """Return the size in bytes of the payload of one chunk of `numel` elements.

    Raises:
        CodecError: No block codec has this id.
    """
    try:
        return load().payload_bytes(codec, numel)
    except ValueError as error:
        raise CodecError(f"codec: expected the id of a block codec, got {codec}") from error


def buffer_bytes(codec: int, numel: int, chunk: int) -> int:
    """Return the size in bytes of the payloads of all chunks of a tensor."""
    return checks.bytes_of_chunks(partial(payload_bytes, codec), numel, chunk)


def encode(
    codec: int,
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    chunk: int | None = None,
    feedback: Feedback | None = None,
    random: Random | None = None,
) -> None:
    """Encode `x` into `out`.

    Args:
        codec: The id of a block codec.
        x: [numel] fp32, bf16, fp16 or fp64.
        out: [buffer_bytes(codec, numel, chunk)] uint8, aligned to 16 bytes.
        chunk: Elements of a chunk; the whole tensor by default.
        feedback: Error feedback; None disables it.
        random: Source of stochastic rounding; None rounds to nearest.

    Raises:
        CodecError: An argument is not as described. Nothing was written.
    """
    try:
        load().encode(codec, x, out, chunk, feedback, native_random(random), torch.get_num_threads())
    except (TypeError, ValueError):
        checks.check_encoding(x, partial(payload_bytes, codec), out, chunk, feedback)
        raise


def encode_sum(
    codec: int,
    payloads: torch.Tensor,
    numel: int,
    out: torch.Tensor,
    *,
    divisor: float = 1.0,
    feedback: Feedback | None = None,
    random: Random | None = None,
    first: int = 0,
) -> None:
    """Encode the sum of the payloads, in order, divided by `divisor`: decode, sum and encode in one pass.

    Args:
        codec: The id of a block codec.
        payloads: [count, payload_bytes(codec, numel)] uint8, aligned to 16 bytes.
        numel: Elements of the chunk.
        out: [payload_bytes(codec, numel)] uint8, aligned to 16 bytes.
        divisor: Finite and not zero, used as a float32.
        feedback: Error feedback; None disables it.
        random: Source of stochastic rounding; None rounds to nearest.
        first: Offset of the chunk in its tensor, for `random`.

    Raises:
        CodecError: An argument is not as described. Nothing was written.
    """
    source, threads = native_random(random), torch.get_num_threads()
    try:
        load().encode_sum(codec, payloads, numel, out, divisor, feedback, source, first, threads)
    except (TypeError, ValueError):
        checks.check_sum_encoding(payloads, partial(payload_bytes, codec), numel, out, feedback)
        checks.check_number("divisor", divisor, may_be_zero=False)
        checks.check_first(first)
        raise


def decode(codec: int, payload: torch.Tensor, out: torch.Tensor, *, chunk: int | None = None) -> None:
    """Decode the payloads of all chunks into `out`.

    Args:
        codec: The id of a block codec.
        payload: [buffer_bytes(codec, numel, chunk)] uint8, aligned to 16 bytes.
        out: [numel] fp32, bf16, fp16 or fp64.
        chunk: Elements of a chunk; the whole tensor by default.

    Raises:
        CodecError: An argument is not as described. Nothing was written.
    """
    _decode(codec, payload, out, chunk, adds=False, weight=1.0)


def decode_add(
    codec: int, payload: torch.Tensor, out: torch.Tensor, *, weight: float = 1.0, chunk: int | None = None
) -> None:
    """Add `weight` times the decoded values to `out`; arguments as in `decode`.

    Raises:
        CodecError: An argument is not as described. Nothing was written.
    """
    _decode(codec, payload, out, chunk, adds=True, weight=weight)


def decode_sum(codec: int, payloads: torch.Tensor, out: torch.Tensor, *, divisor: float = 1.0) -> None:
    """Write the sum of the payloads of one chunk, in order, divided by `divisor`.

    Args:
        codec: The id of a block codec.
        payloads: [count, payload_bytes(codec, numel)] uint8, aligned to 16 bytes.
        out: [numel] fp32, bf16, fp16 or fp64.
        divisor: Finite and not zero, used as a float32.

    Raises:
        CodecError: An argument is not as described. Nothing was written.
    """
    try:
        load().decode_sum(codec, payloads, out, divisor, torch.get_num_threads())
    except (TypeError, ValueError):
        checks.check_sum_decoding(payloads, partial(payload_bytes, codec), out)
        checks.check_number("divisor", divisor, may_be_zero=False)
        raise


def rotate(x: torch.Tensor, out: torch.Tensor, random: Random, *, is_inverse: bool = False) -> None:
    """Apply the random Hadamard rotation of docs/reference/wire_format.md to a chunk, or undo it.

    Args:
        x: [numel] fp32.
        out: [numel] fp32; `x` itself, or a tensor that does not overlap it.
        random: Source of the signs.
        is_inverse: Undo the rotation of the same `random`.

    Raises:
        CodecError: An argument is not as described. Nothing was written.
    """
    try:
        load().rotate(x, out, native_random(random), is_inverse, torch.get_num_threads())
    except (TypeError, ValueError):
        checks.check_rotation(x, out)
        raise


def _decode(
    codec: int, payload: torch.Tensor, out: torch.Tensor, chunk: int | None, *, adds: bool, weight: float
) -> None:
    try:
        load().decode(codec, payload, out, chunk, adds, weight, torch.get_num_threads())
    except (TypeError, ValueError):
        checks.check_decoding(payload, partial(payload_bytes, codec), out, chunk)
        checks.check_number("weight", weight)
        raise


# --- arguments of the extension ---------------------------------------------------------------------------------------


def native_random(random: Random | None) -> Any:
    """Return the extension's form of `random`."""
    if random is None:
        return None
    return load().RandomSource(random.seed, random.step, random.stage_and_rank, list(random.segments))
