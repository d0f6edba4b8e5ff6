"""Every codec by its number and by its name on the wire."""

from __future__ import annotations

import difflib

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
    known = {each.name: each for each in _BLOCK_CODECS}
    if isinstance(codec, str) and codec in known:
        return known[codec]()
    near = difflib.get_close_matches(codec, known, n=1, cutoff=0.5) if isinstance(codec, str) else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"codec: expected a block codec or the name of one ({', '.join(known)}), got {codec!r}{hint}")
