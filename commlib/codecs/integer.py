"""Block codecs with integer codes. `a` is the largest magnitude of a block, `s` its scale."""

from __future__ import annotations

from commlib.codecs.base import BlockCodec, from_table


@from_table("int8")
class Int8(BlockCodec):
    """Signed 8-bit codes and one bf16 scale per 256 elements. The default codec.

    Error of an element: at most 0.5001 s to nearest, below 1.0001 s with stochastic rounding, with s <= a / 126.
    Compression: 3.97 of fp32 (258 bytes for 256 elements).
    """


@from_table("int4")
class Int4(BlockCodec):
    """Signed 4-bit codes (-7 to 7) and one bf16 scale per 128 elements. Needs error feedback or stochastic rounding.

    Error of an element: at most 0.5001 s to nearest, below 1.0001 s with stochastic rounding, with s <= a / 6.9.
    Compression: 7.76 of fp32 (66 bytes for 128 elements).
    """


@from_table("int2")
class Int2(BlockCodec):
    """2-bit codes -1, 0, 1 and one bf16 scale per 128 elements. With stochastic rounding this is blockwise TernGrad.

    Error of an element: at most 0.5001 s to nearest, below 1.0001 s with stochastic rounding, with s <= 1.008 a.
    Compression: 15.1 of fp32 (34 bytes for 128 elements).
    """


@from_table("uint8_minmax")
class UInt8MinMax(BlockCodec):
    """Unsigned 8-bit codes between the minimum and the maximum of 256 elements (fp32 minimum, bf16 scale).

    For blocks that are far from symmetric about zero: weights, activations.
    Error of an element: at most 0.5001 s + 2^-23 |x| to nearest, below 1.0001 s + 2^-23 |x| with stochastic rounding,
    with s <= (max - min) / 253.
    Compression: 3.91 of fp32 (262 bytes for 256 elements).
    """


@from_table("uint8_bagua")
class UInt8Bagua(BlockCodec):
    """BAGUA's MinMaxUInt8: unsigned 8-bit codes between the minimum and the maximum of the whole chunk.

    For comparison with BAGUA. One scale per chunk loses small values next to large ones, and near-constant chunks are
    coarse (an absolute 1e-7 is added to the range): prefer `UInt8MinMax`.
    Error of an element: about (max - min + 1e-7) / 510, more where |x| is large relative to the range.
    Compression: 4 of fp32 for large chunks (16 bytes plus one per element).
    """
