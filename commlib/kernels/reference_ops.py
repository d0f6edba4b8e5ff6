"""The rest of docs/reference/wire_format.md in plain NumPy: casts, sparse codecs, feedback, sums, the rotation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from commlib.kernels.codec_table import TOP_K_BLOCK
from commlib.kernels.reference import (
    F32,
    UNUSED_INDEX,
    BlockCodec,
    Bytes,
    Floats,
    Stream,
    bf16_bits,
    bf16_value,
    canonical,
    magnitude_bits,
    pack_codes,
    unpack_codes,
)

_LARGEST_PIECE = 256
_TOO_LARGE = np.uint32(0x7F000000)  # bits of 2**127


# --- casts ------------------------------------------------------------------------------------------------------------


def cast_to_bf16(x: Floats) -> Bytes:
    """Return the payload of `bf16`."""
    return _padded(bf16_bits(x).view(np.uint8))


def cast_to_fp16(x: Floats) -> Bytes:
    """Return the payload of `fp16`."""
    with np.errstate(over="ignore"):
        half = np.asarray(x, F32).astype(np.float16).view(np.uint16)
    return _padded(np.where(np.isnan(x), np.uint16(0x7E00), half).astype(np.uint16).view(np.uint8))


def cast_from_bf16(payload: Bytes, numel: int) -> Floats:
    """Return the [numel] values of a payload of `bf16`."""
    return canonical(bf16_value(payload[: 2 * numel].view(np.uint16)))


def cast_from_fp16(payload: Bytes, numel: int) -> Floats:
    """Return the [numel] values of a payload of `fp16`."""
    return canonical(payload[: 2 * numel].view(np.float16).astype(F32))


# --- sparse codecs ----------------------------------------------------------------------------------------------------


def top_k(x: Floats, places: int) -> npt.NDArray[np.int64]:
    """Return the ascending indices that `topk` selects."""
    order = np.argsort(~magnitude_bits(canonical(x)), kind="stable")
    return np.sort(order[:places])


def random_k(numel: int, places: int, stream: Stream) -> npt.NDArray[np.int64]:
    """Return the ascending indices that `randomk` selects: one in each of `places` strata."""
    bounds = np.arange(places + 1, dtype=np.int64) * numel // max(places, 1)
    words = stream.places(places).astype(np.uint64)
    return bounds[:-1] + (words * np.diff(bounds).astype(np.uint64) >> np.uint64(32)).astype(np.int64)


def above(x: Floats, places: int, threshold: float) -> npt.NDArray[np.int64]:
    """Return the ascending indices that `threshold` selects; at most `places`."""
    return np.flatnonzero(magnitude_bits(x) >= F32(threshold).view(np.uint32))[:places]


def sparse_payload(x: Floats, indices: npt.NDArray[np.int64], places: int) -> Bytes:
    """Return the payload with these elements of `x`."""
    index, value = np.full(places, UNUSED_INDEX, np.uint32), np.zeros(places, F32)
    index[: len(indices)] = indices
    value[: len(indices)] = canonical(x[indices])
    return np.concatenate([_padded(index.view(np.uint8)), _padded(value.view(np.uint8))])


def sparse_values(payload: Bytes, places: int, numel: int) -> Floats:
    """Return the [numel] decoded values of a sparse payload.

    Raises:
        ValueError: The indices are out of range or do not ascend.
    """
    index = payload[: 4 * places].view(np.uint32)
    values_at = len(_padded(index.view(np.uint8)))
    value = payload[values_at : values_at + 4 * places].view(F32)
    used = index != UNUSED_INDEX
    count = int(used.sum())
    named = index[:count].astype(np.int64)
    if not used[:count].all() or (named >= numel).any() or (np.diff(named) <= 0).any():
        raise ValueError("the indices of a sparse payload must ascend and lie within the chunk")
    out = np.zeros(numel, F32)
    out[named] = canonical(value[:count] + F32(0))
    return out


# --- blocktopk --------------------------------------------------------------------------------------------------------


def block_top_k_sections(numel: int, kept: int) -> tuple[int, int, int]:
    """Return the start of indices and codes in a payload of `blocktopk` (levels start at 0), and its size."""
    full, rest = divmod(numel, TOP_K_BLOCK)
    last = min(kept, rest)
    indices_at = -(-4 * (full + (rest > 0)) // 16) * 16
    codes_at = -(-(indices_at + full * -(-12 * kept // 8) + -(-12 * last // 8)) // 16) * 16
    return indices_at, codes_at, -(-(codes_at + full * -(-2 * kept // 8) + -(-2 * last // 8)) // 16) * 16


def block_top_k_payload(x: Floats, kept: int) -> Bytes:
    """Return the payload of `blocktopk` with `kept` elements of each block."""
    index_at, code_at, size = block_top_k_sections(len(x), kept)
    payload = np.zeros(size, np.uint8)
    for number, start in enumerate(range(0, len(x), TOP_K_BLOCK)):
        block = x[start : start + TOP_K_BLOCK]
        named = top_k(block, kept)
        levels, codes = _levels_and_codes(canonical(block[named]))
        indices, packed = _pack_12_bits(named), pack_codes(codes, 2)
        payload[4 * number : 4 * number + 4] = levels.view(np.uint8)
        payload[index_at : index_at + len(indices)] = indices
        payload[code_at : code_at + len(packed)] = packed
        index_at, code_at = index_at + len(indices), code_at + len(packed)
    return payload


def block_top_k_values(payload: Bytes, kept: int, numel: int) -> Floats:
    """Return the [numel] decoded values of a payload of `blocktopk`.

    Raises:
        ValueError: The indices of a block are out of range or do not ascend.
    """
    out = np.zeros(numel, F32)
    index_at, code_at, _ = block_top_k_sections(numel, kept)
    for number, start in enumerate(range(0, numel, TOP_K_BLOCK)):
        block = out[start : start + TOP_K_BLOCK]
        places = min(kept, len(block))
        named = _unpack_12_bits(payload[index_at:], places)
        codes = unpack_codes(payload[code_at : code_at + -(-2 * places // 8)], 2, places)
        index_at, code_at = index_at + -(-12 * places // 8), code_at + -(-2 * places // 8)
        if (named >= len(block)).any() or (np.diff(named) <= 0).any():
            raise ValueError("the indices of a block must ascend and lie within it")
        levels = payload[4 * number : 4 * number + 4].view(np.uint16)
        bits = bf16_value(levels[codes & 1]).view(np.uint32) ^ (codes >> 1).astype(np.uint32) << np.uint32(31)
        block[named] = canonical(bits.astype(np.uint32).view(F32) + F32(0))
    return out


def _levels_and_codes(values: Floats) -> tuple[npt.NDArray[np.uint16], Bytes]:
    magnitude = np.abs(values)
    total = _folded_sum(magnitude)
    if magnitude_bits(values).max() >= _TOO_LARGE or not np.isfinite(total):
        return np.full(2, 0x7FC0, np.uint16), np.zeros(len(values), np.uint8)
    is_high = magnitude >= total / F32(len(values)) if magnitude.all() else magnitude > 0
    means = [
        _folded_sum(np.where(chosen, magnitude, F32(0))) / F32(max(1, chosen.sum())) for chosen in (~is_high, is_high)
    ]
    return bf16_bits(np.array(means, F32)), np.signbit(values).astype(np.uint8) * np.uint8(2) + is_high


def _folded_sum(terms: Floats) -> F32:
    fold = np.zeros(1 << (len(terms) - 1).bit_length(), F32)
    fold[: len(terms)] = terms
    with np.errstate(all="ignore"):
        while len(fold) > 1:
            fold = fold[: len(fold) // 2] + fold[len(fold) // 2 :]
    return fold[0]


def _pack_12_bits(indices: npt.NDArray[np.int64]) -> Bytes:
    bits = (indices[:, None] >> np.arange(12)) & 1
    return np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little")


def _unpack_12_bits(packed: Bytes, count: int) -> npt.NDArray[np.int64]:
    bits = np.unpackbits(packed, count=12 * count, bitorder="little").reshape(count, 12)
    return bits.astype(np.int64) @ (1 << np.arange(12))


# --- error feedback, sums ---------------------------------------------------------------------------------------------


def compensated(x: Floats, residual: Floats, beta: float = 1.0) -> Floats:
    """Return v = x + beta * e."""
    with np.errstate(all="ignore"):
        return x + F32(beta) * residual


def new_residual(v: Floats, decoded: Floats, residual: Floats, gamma: float = 1.0) -> Floats:
    """Return e' = (v - d) * gamma where v and d are finite, and e elsewhere."""
    with np.errstate(all="ignore"):
        return np.where(np.isfinite(v) & np.isfinite(decoded), (v - decoded) * F32(gamma), residual).astype(F32)


def encode_with_feedback(
    codec: BlockCodec,
    x: Floats,
    residual: Floats,
    beta: float = 1.0,
    gamma: float = 1.0,
    stream: Stream | None = None,
) -> tuple[Bytes, Floats]:
    """Return the payload of `x + beta * residual` and the new residual."""
    v = compensated(x, residual, beta)
    payload = codec.encode(v, stream)
    return payload, new_residual(v, codec.decode(payload, len(x)), residual, gamma)


def sparse_with_feedback(
    v: Floats, residual: Floats, indices: npt.NDArray[np.int64], places: int, gamma: float = 1.0
) -> tuple[Bytes, Floats]:
    """Return the payload with the elements `indices` of the compensated `v`, and the new residual."""
    sent = np.zeros_like(v)
    sent[indices] = v[indices]  # including the sign of a zero, which decoding loses
    return sparse_payload(v, indices, places), new_residual(v, sent, residual, gamma)


def decode_add(out: Floats, decoded: Floats, weight: float = 1.0) -> Floats:
    """Return out + weight * d."""
    with np.errstate(all="ignore"):
        return canonical(out + F32(weight) * decoded)


def decode_sum(decoded: Sequence[Floats], divisor: float = 1.0) -> Floats:
    """Return (d_0 + d_1 + ...) / divisor, summed in this order."""
    total = decoded[0]
    with np.errstate(all="ignore"):
        for d in decoded[1:]:
            total = total + d
        return canonical(total if divisor == 1.0 else total / F32(divisor))


def accumulate(sums: Floats, x: Floats, decay: float, factor: float) -> Floats:
    """Return decay * sums + factor * x. Non-finite elements of x count as 0."""
    with np.errstate(all="ignore"):
        kept = sums * F32(decay)
        return np.where(np.isfinite(x), kept + x * F32(factor), kept)


# --- the Hadamard rotation --------------------------------------------------------------------------------------------


def rotate(x: Floats, stream: Stream) -> Floats:
    """Return the rotated chunk."""
    return _hadamard(np.where(stream.signs(len(x)), -x, x).astype(F32))


def rotate_back(y: Floats, stream: Stream) -> Floats:
    """Invert `rotate`, up to rounding."""
    x = _hadamard(y)
    return canonical(np.where(stream.signs(len(x)), -x, x).astype(F32))


def pieces(numel: int) -> list[int]:
    """Return the lengths of the pieces that are rotated independently."""
    full, rest = divmod(numel, _LARGEST_PIECE)
    return [_LARGEST_PIECE] * full + [1 << bit for bit in range(7, -1, -1) if rest >> bit & 1]


def _hadamard(x: Floats) -> Floats:
    out, start = x.copy(), 0
    with np.errstate(all="ignore"):
        for length in pieces(len(x)):
            piece, half = out[start : start + length], 1
            while half < length:
                pairs = piece.reshape(-1, 2, half)
                first, second = pairs[:, 0].copy(), pairs[:, 1].copy()
                pairs[:, 0], pairs[:, 1] = first + second, first - second
                half *= 2
            piece *= F32(length**-0.5)
            start += length
    return canonical(out)


def _padded(raw: Bytes) -> Bytes:
    return np.concatenate([raw, np.zeros(-len(raw) % 16, np.uint8)])
