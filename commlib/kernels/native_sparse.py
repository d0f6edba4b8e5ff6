"""The sparse codecs on CPU tensors, in C++.

The extension checks tensors and numbers in every call. If one does not fit, `checks` raises the error that names it.
A payload has at most `places` elements of one chunk, by index and value, or `kept` elements of each of its blocks
(docs/reference/wire_format.md).
"""

from __future__ import annotations

from typing import NoReturn

import torch

from commlib.errors import CodecError
from commlib.kernels import checks
from commlib.kernels.checks import Feedback, Random
from commlib.kernels.native import load
from commlib.kernels.native_codecs import native_random


def payload_bytes(places: int) -> int:
    """Return the size in bytes of a payload of `places` places.

    Raises:
        CodecError: `places` is out of range.
    """
    checks.check_places(places)
    return load().sparse_payload_bytes(places)


def encode_top_k(x: torch.Tensor, places: int, out: torch.Tensor, feedback: Feedback | None = None) -> None:
    """Select the `places` elements of largest magnitude. Ties are broken by lower index.

    Args:
        x: [numel] fp32, bf16, fp16 or fp64, numel <= 2**32 - 2.
        places: At most `numel`.
        out: [payload_bytes(places)] uint8, aligned to 16 bytes.
        feedback: Error feedback; None disables it.

    Raises:
        CodecError: An argument is not as described. Nothing was written.
    """
    try:
        load().encode_top_k(x, places, out, feedback, torch.get_num_threads())
    except (TypeError, ValueError):
        checks.check_sparse_encoding(x, places, payload_bytes(places), out, feedback)
        raise


def encode_above(
    x: torch.Tensor, threshold: float, places: int, out: torch.Tensor, feedback: Feedback | None = None
) -> None:
    """Select the first `places` elements whose magnitude is at least `threshold` (positive); see `encode_top_k`.

    Raises:
        CodecError: An argument is not as described. Nothing was written.
    """
    bits = checks.threshold_bits(threshold)
    try:
        load().encode_above(x, bits, places, out, feedback, torch.get_num_threads())
    except (TypeError, ValueError):
        checks.check_sparse_encoding(x, places, payload_bytes(places), out, feedback)
        raise


def encode_random_k(
    x: torch.Tensor, places: int, out: torch.Tensor, random: Random, feedback: Feedback | None = None
) -> None:
    """Select one random element in each of `places` strata of the chunk; otherwise like `encode_top_k`.

    Raises:
        CodecError: An argument is not as described. Nothing was written.
    """
    try:
        load().encode_random_k(x, places, out, native_random(random), feedback, torch.get_num_threads())
    except (TypeError, ValueError):
        checks.check_sparse_encoding(x, places, payload_bytes(places), out, feedback)
        raise


def decode_sum(payloads: torch.Tensor, places: int, out: torch.Tensor, divisor: float = 1.0) -> None:
    """Write the sum of the payloads of one chunk, in order, divided by `divisor`.

    Args:
        payloads: [count, payload_bytes(places)] uint8, aligned to 16 bytes.
        places: Places of each payload.
        out: [numel] fp32.
        divisor: Finite and not zero, used as a float32.

    Raises:
        CodecError: An argument is not as described, or the indices of a payload are not ascending or not in the chunk.
            Nothing was written.
    """
    _decode(payloads, places, out, divisor, adds=False, weight=1.0)


def decode_add(payload: torch.Tensor, places: int, out: torch.Tensor, weight: float = 1.0) -> None:
    """Add `weight` times the values to the elements of `out` ([numel] fp32) that are in one payload.

    Raises:
        CodecError: As for `decode_sum`.
    """
    _decode(payload.view(1, -1), places, out, 1.0, adds=True, weight=weight)


def block_top_k_bytes(numel: int, kept: int) -> int:
    """Return the size in bytes of a payload of `numel` elements with `kept` selected per block.

    Raises:
        CodecError: `numel` or `kept` is out of range.
    """
    checks.check_numel(numel)
    checks.check_kept(kept)
    return load().block_top_k_bytes(numel, kept)


def encode_block_top_k(x: torch.Tensor, kept: int, out: torch.Tensor, feedback: Feedback | None = None) -> None:
    """Select the `kept` elements of largest magnitude of each block. Ties are broken by lower index.

    Args:
        x: [numel] fp32, bf16, fp16 or fp64.
        kept: 1 to 4,096.
        out: [block_top_k_bytes(numel, kept)] uint8, aligned to 16 bytes.
        feedback: Error feedback; None disables it.

    Raises:
        CodecError: An argument is not as described. Nothing was written.
    """
    try:
        load().encode_block_top_k(x, kept, out, feedback, torch.get_num_threads())
    except (TypeError, ValueError):
        checks.check_block_encoding(x, block_top_k_bytes(x.numel(), kept), out, feedback)
        raise


def sum_block_top_k(payloads: torch.Tensor, kept: int, out: torch.Tensor, divisor: float = 1.0) -> None:
    """Write the sum of the payloads of one chunk, in order, divided by `divisor`; see `decode_sum`.

    Raises:
        CodecError: As for `decode_sum`.
    """
    _decode_block_top_k(payloads, kept, out, divisor, adds=False, weight=1.0)


def add_block_top_k(payload: torch.Tensor, kept: int, out: torch.Tensor, weight: float = 1.0) -> None:
    """Add `weight` times the values to the elements of `out` ([numel] fp32) that are in one payload.

    Raises:
        CodecError: As for `decode_sum`.
    """
    _decode_block_top_k(payload.view(1, -1), kept, out, 1.0, adds=True, weight=weight)


def _decode_block_top_k(
    payloads: torch.Tensor, kept: int, out: torch.Tensor, divisor: float, *, adds: bool, weight: float
) -> None:
    try:
        wrong = load().decode_block_top_k(payloads, kept, out, divisor, adds, weight, torch.get_num_threads())
    except (TypeError, ValueError):
        checks.check_sparse_decoding(payloads, block_top_k_bytes(out.numel(), kept), out)
        _check_factors(divisor, weight)
        raise
    if wrong >= 0:
        raise CodecError(
            f"payload {wrong}: expected ascending indices within each block; the bytes were damaged, or encoded for "
            "another number of elements"
        )


def _decode(
    payloads: torch.Tensor, places: int, out: torch.Tensor, divisor: float, *, adds: bool, weight: float
) -> None:
    try:
        wrong = load().decode_sparse(payloads, places, out, divisor, adds, weight, torch.get_num_threads())
    except (TypeError, ValueError):
        checks.check_sparse_decoding(payloads, payload_bytes(places), out)
        _check_factors(divisor, weight)
        raise
    if wrong >= 0:
        _refuse(wrong, out.numel())


def _check_factors(divisor: float, weight: float) -> None:
    checks.check_number("divisor", divisor, may_be_zero=False)
    checks.check_number("weight", weight)


def _refuse(index: int, numel: int) -> NoReturn:
    raise CodecError(
        f"payload {index}: expected ascending indices below {numel} and unused places (FFFFFFFF) last; the bytes were "
        "damaged, or encoded for another number of elements"
    )
