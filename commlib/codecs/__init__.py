"""Codecs: compressed representations of tensors, defined in docs/reference/wire_format.md.

Codecs of other packages are found by the entry point group `commlib.codecs` (`my_codec = "package.module:MyCodec"`) or
passed to `register`; `commlib.wrap(model, algorithm=ByteGrad(codec="my_codec"))` then works.
"""

from __future__ import annotations

from commlib.codecs.base import BlockCodec, Feedback, Random
from commlib.codecs.envelope import Envelope, open_envelope, seal
from commlib.codecs.floats import BF16, FP16, Fp8E4M3, Fp8E5M2, MxFp4, MxFp8, OneBit
from commlib.codecs.in_torch import TorchBlockCodec, TorchSparseCodec, uniforms
from commlib.codecs.integer import Int2, Int4, Int8, UInt8Bagua, UInt8MinMax
from commlib.codecs.registry import block_codec, by_id, by_name, register
from commlib.codecs.sparse import BlockTopK, PairsCodec, RandomK, SparseCodec, Threshold, TopK, raise_if_damaged
from commlib.kernels.codec_table import FOREIGN_IDS

__all__ = [
    "BF16",
    "FOREIGN_IDS",
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
    "TorchBlockCodec",
    "TorchSparseCodec",
    "UInt8Bagua",
    "UInt8MinMax",
    "block_codec",
    "by_id",
    "by_name",
    "open_envelope",
    "raise_if_damaged",
    "register",
    "seal",
    "uniforms",
]
