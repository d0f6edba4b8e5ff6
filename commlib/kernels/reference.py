"""The codecs in plain NumPy: the reference for every executor, byte for byte (docs/reference/wire_format.md).

Written to be read alongside that page, not for speed. Arrays are one chunk: `x` [n] fp32, payloads [bytes] uint8.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from commlib.kernels.codec_table import BLOCK_BY_NAME, aligned

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

F32 = np.float32
QUIET_NAN = np.uint32(0x7FC00000).view(F32)
UNUSED_INDEX = 0xFFFFFFFF
_TOO_LARGE = np.uint32(0x7F000000)  # bits of 2**127
_TINY = F32(2.0**-100)
_WIDEST_RANGE = F32(2.0**127)


# --- numbers ----------------------------------------------------------------------------------------------------------


def magnitude_bits(x: Floats) -> npt.NDArray[np.uint32]:
    """Return the bits of `x` without the sign. As unsigned integers they order magnitudes, with NaN last."""
    return x.view(np.uint32) & np.uint32(0x7FFFFFFF)


def canonical(x: Floats) -> Floats:
    """Return `x` with every NaN replaced by the positive quiet NaN."""
    return np.where(np.isnan(x), QUIET_NAN, x).astype(F32)


def bf16_up(x: F32) -> int:
    """Return the bits of the smallest bf16 that is at least `x` (finite, non-negative)."""
    return (int(F32(x).view(np.uint32)) + 0xFFFF) >> 16


def bf16_bits(x: Floats) -> npt.NDArray[np.uint16]:
    """Return the bf16 bits nearest to `x`, ties to even; any NaN as 7FC0."""
    bits = np.asarray(x, F32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded).astype(np.uint16)


def bf16_value(bits: npt.NDArray[np.uint16] | int) -> Floats:
    """Return the fp32 value of bf16 bits."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).astype(np.uint32).view(F32)


@dataclass(frozen=True)
class Minifloat:
    """A float of at most 8 bits: sign, exponent, mantissa.

    Attributes:
        mantissa: Bits of the mantissa.
        min_exponent: Exponent of the smallest normal number.
        largest_code: The code (without sign) of the largest finite number.
        max_exponent: Exponent of that number.
        nan_from: Codes (without sign) from here on are NaN. If `has_infinity`, the one before is infinity.
        has_infinity: Whether the format has an infinity.
    """

    mantissa: int
    min_exponent: int
    largest_code: int
    max_exponent: int
    nan_from: int
    has_infinity: bool = False

    def encode(self, y: Floats, sign_bit: int) -> Bytes:
        """Return the codes nearest to `y` (finite), ties to even, saturating; the sign is at bit `sign_bit`."""
        magnitude = np.abs(y)
        exponent = np.maximum((magnitude.view(np.uint32) >> np.uint32(23)).astype(np.int64) - 127, self.min_exponent)
        steps = np.rint(np.ldexp(magnitude.astype(np.float64), self.mantissa - exponent)).astype(np.int64)
        code = np.minimum(((exponent - self.min_exponent) << self.mantissa) + steps, self.largest_code)
        return (code | (np.signbit(y).astype(np.int64) << sign_bit)).astype(np.uint8)

    def values(self, codes: Bytes, sign_bit: int) -> Floats:
        """Return the values of the codes."""
        code = (codes & ((1 << sign_bit) - 1)).astype(np.int64)
        exponent, fraction = code >> self.mantissa, code & ((1 << self.mantissa) - 1)
        steps = fraction + np.where(exponent > 0, 1 << self.mantissa, 0)
        value = np.ldexp(steps.astype(np.float64), np.maximum(exponent, 1) - 1 + self.min_exponent - self.mantissa)
        value = np.where(code >= self.nan_from, np.nan, value)
        if self.has_infinity:
            value = np.where(code == self.nan_from - 1, np.inf, value)
        return np.where(codes >> sign_bit & 1, -value, value).astype(F32)


E4M3 = Minifloat(mantissa=3, min_exponent=-6, largest_code=0x7E, max_exponent=8, nan_from=0x7F)
E5M2 = Minifloat(mantissa=2, min_exponent=-14, largest_code=0x7B, max_exponent=15, nan_from=0x7D, has_infinity=True)
E2M1 = Minifloat(mantissa=1, min_exponent=0, largest_code=0x7, max_exponent=2, nan_from=0x8)


# --- random numbers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stream:
    """The random numbers of one encoding; see "Random numbers" in docs/reference/wire_format.md.

    Attributes:
        seed: 64 bits.
        step: 32 bits.
        rank: Below 2**24.
        stage: Below 2**8.
        offset: The global offset of the chunk's first element.
    """

    seed: int
    step: int = 0
    rank: int = 0
    stage: int = 0
    offset: int = 0

    def words(self, counters: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
        """Return [len(counters), 4] words of Philox4x32-10."""
        low, high = np.uint64(0xFFFFFFFF), np.uint64(32)
        c = [counters & low, counters >> high]
        c += [np.full_like(counters, self.step), np.full_like(counters, self.stage << 24 | self.rank)]
        key = [np.uint64(self.seed & 0xFFFFFFFF), np.uint64(self.seed >> 32)]
        for _ in range(10):
            first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
            c = [(second >> high) ^ c[1] ^ key[0], second & low, (first >> high) ^ c[3] ^ key[1], first & low]
            key = [(key[0] + np.uint64(0x9E3779B9)) & low, (key[1] + np.uint64(0xBB67AE85)) & low]
        return np.stack(c, axis=1).astype(np.uint32)

    def uniforms(self, start: int, count: int) -> Floats:
        """Return u in [0, 1), multiples of 2**-16, for elements `start` to `start + count` of the chunk."""
        offsets = np.arange(count, dtype=np.uint64) + np.uint64(self.offset + start)
        words = self.words(offsets >> np.uint64(3))
        halves = np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=2).reshape(count, 8)
        return (halves[np.arange(count), (offsets & np.uint64(7)).astype(int)] * 2.0**-16).astype(F32)

    def places(self, count: int) -> npt.NDArray[np.uint32]:
        """Return one random word for each of `count` places of `randomk`."""
        counters = np.arange((count + 3) // 4, dtype=np.uint64)
        return self.words(counters).reshape(-1)[:count]

    def signs(self, count: int) -> npt.NDArray[np.bool_]:
        """Return, for each of `count` elements, whether its sign is flipped before the rotation."""
        offsets = np.arange(count, dtype=np.uint64) + np.uint64(self.offset)
        words = self.words(offsets >> np.uint64(7))
        word = words[np.arange(count), ((offsets >> np.uint64(5)) & np.uint64(3)).astype(int)]
        return (word >> (offsets & np.uint64(31)).astype(np.uint32) & np.uint32(1)).astype(bool)


# --- block codecs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockCodec:
    """A codec of independent blocks.

    Attributes:
        name: As in the table of docs/reference/wire_format.md.
        block: Elements of a full block; 0 means the whole chunk.
        bits: Bits of a code.
        scale_bytes: Bytes of a block's scale: 2 (bf16), 1 (E8M0) or 0.
        minimum_bytes: Bytes of a block's minima.
        levels: The largest integer code.
        element: The format of float codes.
    """

    name: str
    block: int
    bits: int
    scale_bytes: int = 2
    minimum_bytes: int = 0
    levels: int = 0
    element: Minifloat | None = None

    def block_size(self, numel: int) -> int:
        """Return the number of elements of a full block in a chunk of `numel`."""
        return self.block or max(numel, 1)

    def sections(self, numel: int) -> tuple[int, int, int, int]:
        """Return the start of scales, the start and end of codes, and the payload's size (minima start at 0)."""
        full, rest = divmod(numel, self.block_size(numel))
        blocks = full + (rest > 0)
        scales = aligned(blocks * self.minimum_bytes)
        codes = scales + aligned(blocks * self.scale_bytes)
        end = codes + full * self.code_bytes(self.block_size(numel)) + self.code_bytes(rest)
        return scales, codes, end, aligned(end)

    def code_bytes(self, numel: int) -> int:
        """Return the size in bytes of the codes of a block of `numel` elements."""
        return -(-numel * self.bits // 8)

    def encode(self, x: Floats, stream: Stream | None = None) -> Bytes:
        """Return the payload. With a stream, integer codes are rounded stochastically."""
        x = np.ascontiguousarray(x, F32)
        scales_at, codes_at, _, size = self.sections(len(x))
        payload = np.zeros(size, np.uint8)
        block, code_at = self.block_size(len(x)), codes_at
        for idx, start in enumerate(range(0, len(x), block)):
            part = x[start : start + block]
            u = None if stream is None else stream.uniforms(start, len(part))
            minima, scale, codes = self._encode_block(part, u)
            _put(payload, idx * self.minimum_bytes, minima)
            _put(payload, scales_at + idx * self.scale_bytes, scale)
            packed = pack_codes(codes, self.bits)
            payload[code_at : code_at + len(packed)] = packed
            code_at += len(packed)
        return payload

    def decode(self, payload: Bytes, numel: int) -> Floats:
        """Return the [numel] decoded values."""
        scales_at, code_at, _, _ = self.sections(numel)
        out, block = np.zeros(numel, F32), self.block_size(numel)
        for idx, start in enumerate(range(0, numel, block)):
            count = min(block, numel - start)
            codes = unpack_codes(payload[code_at : code_at + self.code_bytes(count)], self.bits, count)
            code_at += self.code_bytes(count)
            minima = payload[idx * self.minimum_bytes : (idx + 1) * self.minimum_bytes].view(F32)
            scale = payload[scales_at + idx * self.scale_bytes : scales_at + (idx + 1) * self.scale_bytes]
            with np.errstate(all="ignore"):
                out[start : start + count] = canonical(self._decode_block(codes, scale, minima))
        return out

    # Implemented by subclasses: encode one block to (minima, scale bytes, codes), and decode it.

    def _encode_block(self, x: Floats, u: Floats | None) -> tuple[list[F32], Bytes, Bytes]:
        raise NotImplementedError

    def _decode_block(self, codes: Bytes, scale: Bytes, minima: Floats) -> Floats:
        raise NotImplementedError


class Integer(BlockCodec):
    """int8, int4, int2."""

    def _encode_block(self, x: Floats, u: Floats | None) -> tuple[list[F32], Bytes, Bytes]:
        a, zero = magnitude_bits(x).max(), _offset(self.bits)
        if a >= _TOO_LARGE:
            return [], _u16(0x7FC0), np.zeros(len(x), np.uint8)
        a = a.view(F32)
        if a < _TINY:
            return [], _u16(0), np.zeros(len(x), np.uint8)
        scale = bf16_up(a / F32(self.levels))
        q = np.clip(_rounded(x * (F32(1) / bf16_value(scale)), u), -self.levels, self.levels).astype(np.int64)
        return [], _u16(scale), ((q + zero) & 0xFF).astype(np.uint8)

    def _decode_block(self, codes: Bytes, scale: Bytes, minima: Floats) -> Floats:
        q = codes.view(np.int8).astype(F32) if self.bits == 8 else codes.astype(F32) - F32(_offset(self.bits))
        return q * bf16_value(scale.view(np.uint16)[0])


class MinMax(BlockCodec):
    """uint8_minmax."""

    def _encode_block(self, x: Floats, u: Floats | None) -> tuple[list[F32], Bytes, Bytes]:
        a, none = magnitude_bits(x).max(), np.zeros(len(x), np.uint8)
        with np.errstate(all="ignore"):
            spread = x.max() - x.min()
        if a >= _TOO_LARGE or spread > _WIDEST_RANGE:
            return [QUIET_NAN], _u16(0x7FC0), none
        if a.view(F32) < _TINY:
            return [F32(0)], _u16(0), none
        minimum = x.min() + F32(0)
        if spread < _TINY:
            return [minimum], _u16(0), none
        scale = bf16_up(spread / F32(255))
        q = np.clip(_rounded((x - x.min()) * (F32(1) / bf16_value(scale)), u), 0, 255)
        return [minimum], _u16(scale), q.astype(np.uint8)

    def _decode_block(self, codes: Bytes, scale: Bytes, minima: Floats) -> Floats:
        return minima[0] + codes.astype(F32) * bf16_value(scale.view(np.uint16)[0])


class Bagua(BlockCodec):
    """uint8_bagua."""

    def _encode_block(self, x: Floats, u: Floats | None) -> tuple[list[F32], Bytes, Bytes]:
        a = magnitude_bits(x).max()
        with np.errstate(all="ignore"):
            spread = x.max() - x.min()
            minimum, maximum = x.min() + F32(0), x.max() + F32(0)
            s, upper, lower = _bagua_levels(minimum, maximum)
            if a >= _TOO_LARGE or not np.isfinite(spread) or not np.isfinite(upper):
                return [QUIET_NAN, QUIET_NAN], _NO_SCALE, np.zeros(len(x), np.uint8)
            q = np.minimum(np.rint(x * s), upper) - lower
        return [minimum, maximum], _NO_SCALE, np.clip(q, 0, 255).astype(np.uint8)

    def _decode_block(self, codes: Bytes, scale: Bytes, minima: Floats) -> Floats:
        s, _, lower = _bagua_levels(minima[0], minima[1])
        return ((codes.astype(F32) + lower) / s).astype(F32)


class OneBit(BlockCodec):
    """onebit."""

    def _encode_block(self, x: Floats, u: Floats | None) -> tuple[list[F32], Bytes, Bytes]:
        fold = np.zeros(self.block, F32)
        fold[: len(x)] = np.abs(x)
        with np.errstate(all="ignore"):
            while len(fold) > 1:
                fold = fold[: len(fold) // 2] + fold[len(fold) // 2 :]
        if magnitude_bits(x).max() >= _TOO_LARGE or not np.isfinite(fold[0]):
            return [], _u16(0x7FC0), np.zeros(len(x), np.uint8)
        scale = bf16_bits((fold / F32(len(x))).astype(F32))
        return [], scale.view(np.uint8), np.signbit(x).astype(np.uint8)

    def _decode_block(self, codes: Bytes, scale: Bytes, minima: Floats) -> Floats:
        bits = bf16_value(scale.view(np.uint16)).view(np.uint32)[0] ^ (codes.astype(np.uint32) << np.uint32(31))
        return bits.astype(np.uint32).view(F32)


class Float8(BlockCodec):
    """fp8_e4m3, fp8_e5m2."""

    def _encode_block(self, x: Floats, u: Floats | None) -> tuple[list[F32], Bytes, Bytes]:
        assert self.element is not None
        a = magnitude_bits(x).max()
        if a >= _TOO_LARGE or a.view(F32) < _TINY:
            return [], _u16(0 if a < _TOO_LARGE else 0x7FC0), np.zeros(len(x), np.uint8)
        largest = self.element.values(np.array([self.element.largest_code], np.uint8), 7)[0]
        scale = bf16_up(a.view(F32) / largest)
        return [], _u16(scale), self.element.encode(x * (F32(1) / bf16_value(scale)), 7)

    def _decode_block(self, codes: Bytes, scale: Bytes, minima: Floats) -> Floats:
        assert self.element is not None
        return self.element.values(codes, 7) * bf16_value(scale.view(np.uint16)[0])


class Microscaling(BlockCodec):
    """mxfp8, mxfp4."""

    def _encode_block(self, x: Floats, u: Floats | None) -> tuple[list[F32], Bytes, Bytes]:
        assert self.element is not None
        a = magnitude_bits(x).max()
        if a >= _TOO_LARGE or a.view(F32) < _TINY:
            return [], np.array([0 if a < _TOO_LARGE else 0xFF], np.uint8), np.zeros(len(x), np.uint8)
        exponent = int(a >> np.uint32(23)) - 127 - self.element.max_exponent
        codes = self.element.encode(x * F32(2.0**-exponent), self.bits - 1)
        return [], np.array([exponent + 127], np.uint8), codes

    def _decode_block(self, codes: Bytes, scale: Bytes, minima: Floats) -> Floats:
        assert self.element is not None
        factor = QUIET_NAN if scale[0] == 0xFF else F32(2.0 ** (int(scale[0]) - 127))
        return self.element.values(codes, self.bits - 1) * factor


# --- helpers ----------------------------------------------------------------------------------------------------------

_NO_SCALE = np.zeros(0, np.uint8)


def pack_codes(codes: Bytes, bits: int) -> Bytes:
    """Return the bytes of one block's codes, of `bits` bits each."""
    if bits == 8:
        return codes
    if bits == 1:
        return np.packbits(codes, bitorder="little")
    per_byte = 8 // bits
    stride = -(-len(codes) // per_byte)
    padded = np.zeros(stride * per_byte, np.uint8)
    padded[: len(codes)] = codes
    packed = np.zeros(stride, np.uint8)
    for place, run in enumerate(padded.reshape(per_byte, stride)):
        packed |= run << np.uint8(place * bits)
    return packed


def unpack_codes(packed: Bytes, bits: int, count: int) -> Bytes:
    """Return the `count` codes of one block."""
    if bits == 8:
        return packed[:count]
    if bits == 1:
        return np.unpackbits(packed, bitorder="little")[:count]
    mask = np.uint8((1 << bits) - 1)
    runs = [(packed >> np.uint8(place * bits)) & mask for place in range(8 // bits)]
    return np.concatenate(runs)[:count]


def _rounded(y: Floats, u: Floats | None) -> Floats:
    return np.rint(y) if u is None else np.floor(y + u)


def _offset(bits: int) -> int:
    return 0 if bits == 8 else 1 << (bits - 1)


def _bagua_levels(minimum: F32, maximum: F32) -> tuple[F32, F32, F32]:
    s = F32(255) / ((maximum - minimum) + F32(1e-7))
    upper = np.rint(maximum * s)
    return s, upper, upper - F32(255)


def _u16(value: int) -> Bytes:
    return np.array([value], np.uint16).view(np.uint8)


def _put(payload: Bytes, at: int, values: list[F32] | Bytes) -> None:
    raw = np.array(values, F32).view(np.uint8) if isinstance(values, list) else values
    payload[at : at + len(raw)] = raw


def _shape(name: str) -> tuple[str, int, int, int, int]:
    """Return the first fields of a codec, from the table."""
    row = BLOCK_BY_NAME[name]
    return row.name, row.block, row.bits, row.scale_bytes, row.minimum_bytes


BLOCK_CODECS: dict[str, BlockCodec] = {
    codec.name: codec
    for codec in (
        Integer(*_shape("int8"), levels=127),
        MinMax(*_shape("uint8_minmax")),
        Bagua(*_shape("uint8_bagua")),
        Integer(*_shape("int4"), levels=7),
        Integer(*_shape("int2"), levels=1),
        OneBit(*_shape("onebit")),
        Float8(*_shape("fp8_e4m3"), element=E4M3),
        Float8(*_shape("fp8_e5m2"), element=E5M2),
        Microscaling(*_shape("mxfp8"), element=E4M3),
        Microscaling(*_shape("mxfp4"), element=E2M1),
    )
}
