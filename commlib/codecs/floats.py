"""Block codecs with sign and floating-point codes. `a` is the largest magnitude of a block, `s` its scale."""

from __future__ import annotations

from commlib.codecs.base import BlockCodec, from_table


@from_table("onebit")
class OneBit(BlockCodec):
    """One sign bit per element and one bf16 mean magnitude per 512 elements. Use it only with error feedback.

    Error of an element: below 1.004 s + a, where s is the mean magnitude.
    Compression: 31.0 of fp32 (66 bytes for 512 elements).
    """


@from_table("fp8_e4m3")
class Fp8E4M3(BlockCodec):
    """OCP e4m3 codes and one bf16 scale per 128 elements, scaled to the largest number of the format, 448.

    Error of an element: at most 2^-4 |x| (1.0001 times), or 2^-10 s if that is larger, with s <= a / 444.
    Compression: 3.94 of fp32 (130 bytes for 128 elements).
    """


@from_table("fp8_e5m2")
class Fp8E5M2(BlockCodec):
    """OCP e5m2 codes and one bf16 scale per 128 elements, scaled to the largest number of the format, 57344.

    Error of an element: at most 2^-3 |x| (1.0001 times), or 2^-17 s if that is larger, with s <= a / 56800.
    Compression: 3.94 of fp32 (130 bytes for 128 elements).
    """


@from_table("mxfp8")
class MxFp8(BlockCodec):
    """OCP Microscaling MXFP8 (e4m3): one power-of-two scale per 32 elements.

    Error of an element: at most 2^-4 |x|, or 2^-10 times the scale if that is larger; up to 2^-3 |x| for elements that
    saturate (beyond 7/8 of the next power of two).
    Compression: 3.88 of fp32 (33 bytes for 32 elements).
    """


@from_table("mxfp4")
class MxFp4(BlockCodec):
    """OCP Microscaling MXFP4 (e2m1): one power-of-two scale per 32 elements.

    Error of an element: at most 2^-2 |x|, or a quarter of the scale if that is larger.
    Compression: 7.53 of fp32 (17 bytes for 32 elements).
    """


@from_table("bf16")
class BF16(BlockCodec):
    """A cast to bfloat16.

    Error of an element: at most 2^-8 |x| for normal results.
    Compression: 2 of fp32.
    """


@from_table("fp16")
class FP16(BlockCodec):
    """A cast to IEEE half precision. Magnitudes of 65520 and above become infinite.

    Error of an element: at most 2^-11 |x| for normal results (2^-14 and above), 2^-25 below.
    Compression: 2 of fp32.
    """
