"""Every codec by its number and by its name on the wire."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from commlib.codecs.base import BlockCodec
from commlib.codecs.floats import BF16, FP16, Fp8E4M3, Fp8E5M2, MxFp4, MxFp8, OneBit
from commlib.codecs.integer import Int2, Int4, Int8, UInt8Bagua, UInt8MinMax
from commlib.codecs.sparse import BlockTopK, RandomK, SparseCodec, Threshold, TopK
from commlib.errors import ConfigError

_BLOCK_CODECS = (Int8, UInt8MinMax, UInt8Bagua, Int4, Int2, OneBit, Fp8E4M3, Fp8E5M2, MxFp8, MxFp4, BF16, FP16)
_CODECS = (*_BLOCK_CODECS, TopK, RandomK, Threshold, BlockTopK)

by_id: dict[int, type[BlockCodec | SparseCodec]] = {codec.id: codec for codec in _CODECS}
"""Every codec by its number on the wire."""

by_name: dict[str, type[BlockCodec | SparseCodec]] = {codec.name: codec for codec in _CODECS}
"""Every codec by its name on the wire."""

if len(by_id) < len(_CODECS) or len(by_name) < len(_CODECS):
    raise AssertionError("two codecs share an id or a name")


def block_codec(codec: BlockCodec | str) -> BlockCodec:
    """Return `codec`, or a new one of that name.

    Raises:
        ConfigError: It is neither a block codec nor the name of one.
    """
    if isinstance(codec, BlockCodec):
        return codec
    return _named(codec, {each.name: each for each in _BLOCK_CODECS}, "a block codec")


def gathered_codec(codec: BlockCodec | SparseCodec | str) -> BlockCodec | SparseCodec:
    """Return `codec`, or a new one of that name: a block codec, or a sparse one with which each rank names its own.

    Raises:
        ConfigError: It is neither such a codec nor the name of one that needs no arguments.
    """
    if isinstance(codec, BlockCodec | SparseCodec) and not isinstance(codec, RandomK):
        return codec
    known = {each.name: each for each in (*_BLOCK_CODECS, TopK, BlockTopK)}
    return _named(codec, known, "a block codec, TopK, BlockTopK, Threshold")


C = TypeVar("C")


def _named(codec: Any, known: Mapping[str, Callable[[], C]], what: str) -> C:
    if isinstance(codec, str) and codec in known:
        return known[codec]()
    near = difflib.get_close_matches(codec, known, n=1, cutoff=0.5) if isinstance(codec, str) else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"codec: expected {what} or the name of one ({', '.join(known)}), got {codec!r}{hint}")
