"""The header of a payload that leaves its process group (docs/reference/wire_format.md, "Files")."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import torch

from commlib.codecs.base import BlockCodec
from commlib.codecs.registry import by_id
from commlib.codecs.sparse import SparseCodec
from commlib.errors import CodecError

_MAGIC = b"CMLB"
_VERSION = 1
_HEADER = struct.Struct("<4sHHHHIQQQ")
_CRC_AT = 12


@dataclass(frozen=True)
class Envelope:
    """The contents of a header, and its payload.

    Attributes:
        codec: The id of the codec.
        numel: Elements of the chunk.
        places: Number of places of a sparse payload (for `blocktopk`: of a full block), else 0.
        payload: [bytes] uint8, a copy aligned for the decoders.
    """

    codec: int
    numel: int
    places: int
    payload: torch.Tensor


def seal(codec: BlockCodec | SparseCodec, payload: torch.Tensor, numel: int) -> bytes:
    """Return header and payload of one chunk of `numel` elements.

    Raises:
        CodecError: The size or dtype of the payload does not match `numel` elements.
    """
    places = codec.capacity(numel) if isinstance(codec, SparseCodec) else 0
    expected = codec.payload_bytes(numel)
    if payload.dtype != torch.uint8 or payload.numel() != expected:
        raise CodecError(f"payload: expected {expected} bytes of uint8, got {payload.numel()} of {payload.dtype}")
    body = payload.cpu().contiguous().numpy().tobytes()
    fields = (_MAGIC, _VERSION, codec.id, codec.version, 0)
    crc = zlib.crc32(_HEADER.pack(*fields, 0, numel, places, len(body)) + body)
    return _HEADER.pack(*fields, crc, numel, places, len(body)) + body


def open_envelope(data: bytes) -> Envelope:
    """Check and parse a header and its payload.

    Args:
        data: The bytes that `seal` returned.

    Raises:
        CodecError: The bytes are truncated, too long, damaged, or of an unknown version or codec.
    """
    if len(data) < _HEADER.size:
        raise CodecError(f"header: expected {_HEADER.size} bytes, got {len(data)}")
    magic, version, codec, codec_version, reserved, crc, numel, places, nbytes = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise CodecError(f"header: expected the bytes {_MAGIC!r} first, got {magic!r}")
    if version != _VERSION or reserved != 0:
        raise CodecError(f"header: expected version {_VERSION}, got {version} (reserved field {reserved})")
    if len(data) != _HEADER.size + nbytes:
        raise CodecError(f"payload: expected {nbytes} bytes as in the header, got {len(data) - _HEADER.size}")
    if crc != zlib.crc32(data[:_CRC_AT] + bytes(4) + data[_CRC_AT + 4 :]):
        raise CodecError("CRC: header and payload do not match the checksum")
    if codec not in by_id:
        raise CodecError(f"header: expected the id of a known codec ({sorted(by_id)}), got {codec}")
    kind = by_id[codec]
    if codec_version != kind.version:
        raise CodecError(f"header: expected version {kind.version} of codec {codec}, got {codec_version}")
    expected = kind.bytes_of(numel, places) if issubclass(kind, SparseCodec) else kind().payload_bytes(numel)
    if nbytes != expected:
        raise CodecError(f"payload: expected {expected} bytes for {numel} elements, got {nbytes}")
    payload = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    payload.numpy()[:] = memoryview(data)[_HEADER.size :]
    return Envelope(codec, numel, places, payload)
