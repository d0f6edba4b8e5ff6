"""Codecs: how tensors become fewer bytes (docs/reference/wire_format.md defines each)."""

from __future__ import annotations

from commlib.codecs.base import BlockCodec, Feedback, Random
from commlib.codecs.envelope import Envelope, open_envelope, seal
from commlib.codecs.floats import BF16, FP16, Fp8E4M3, Fp8E5M2, MxFp4, MxFp8, OneBit
from commlib.codecs.integer import Int2, Int4, Int8, UInt8Bagua, UInt8MinMax
from commlib.codecs.registry import block_codec, by_id, by_name
from commlib.codecs.sparse import BlockTopK, PairsCodec, RandomK, SparseCodec, Threshold, TopK, raise_if_damaged

__all__ = [
    "BF16",
    "FP16",
    "BlockCodec",
    "BlockTopK",
    "Envelope",
    "Feedback",
    "Fp8E4M3",
    "Fp8E5M2",
    "Int2",
    "Int4",
    "Int8",
    "MxFp4",
    "MxFp8",
    "OneBit",
    "PairsCodec",
    "Random",
    "RandomK",
    "SparseCodec",
    "Threshold",
    "TopK",
    "UInt8Bagua",
    "UInt8MinMax",
    "block_codec",
    "by_id",
    "by_name",
    "open_envelope",
    "raise_if_damaged",
    "seal",
]
