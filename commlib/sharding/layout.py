"""The layout of FSDP2's flat buffers, and of the payloads that replace them on the wire.

[Note: flat buffers] FSDP2 gathers the parameters of a module, and scatters their gradients, in one flat buffer of
equal rows, one per rank. A row has one piece per parameter: the rank's shard, padded to the size of the largest.
commlib sends a payload per row, with one section per piece. Each piece is encoded on its own, so no block of a codec
contains elements of two parameters. Pieces without a codec are sent as they are.

If parameters have several dtypes, FSDP2's buffer is uint8, and pieces may begin at any byte. All offsets are therefore
in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from commlib.codecs.base import BlockCodec, Feedback

#: The name that stands for no codec.
FULL_PRECISION = "fp32"
#: Sections of a payload begin at multiples of this number of bytes, as codecs require.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Piece:
    """A parameter's part of a row.

    Attributes:
        name: The parameter's name.
        numel: Number of elements.
        dtype: Their dtype.
        codec: The codec; None sends the elements as they are.
    """

    name: str
    numel: int
    dtype: torch.dtype
    codec: BlockCodec | None


#: Returns the error feedback of a piece.
FeedbackOf = Callable[[Piece], Feedback]


@dataclass(frozen=True)
class _Section:
    """A piece's bytes in a row and in its payload."""

    piece: Piece
    row: slice
    payload: slice


class Layout:
    """The pieces of a row, and the sections of its payload; see [Note: flat buffers].

    Args:
        pieces: The pieces, in the order of the row.

    Attributes:
        row_bytes: Bytes of a row.
        payload_bytes: Bytes of its payload.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.row_bytes = self.payload_bytes = 0
        self._encoded: list[_Section] = []
        self._plain: list[_Section] = []
        for piece in pieces:
            nbytes = piece.numel * piece.dtype.itemsize
            row = slice(self.row_bytes, self.row_bytes + nbytes)
            self.row_bytes += nbytes
            size = _size_of(piece)
            has_codec = piece.codec is not None and size < nbytes
            payload = slice(self.payload_bytes, self.payload_bytes + (size if has_codec else nbytes))
            self.payload_bytes += -(-(payload.stop - payload.start) // _ALIGNMENT) * _ALIGNMENT
            if nbytes:
                (self._encoded if has_codec else self._plain).append(_Section(piece, row, payload))

    def encode(
        self,
        row: torch.Tensor,
        payload: torch.Tensor,
        *,
        feedback_of: FeedbackOf | None = None,
        reference: torch.Tensor | None = None,
    ) -> None:
        """Encode a row, or its difference to a reference. Pieces without a codec are copied.

        Args:
            row: [row_bytes] uint8.
            payload: [payload_bytes] uint8; written.
            feedback_of: Returns the error feedback of a piece.
            reference: [row_bytes] uint8; subtracted from the pieces with a codec, in fp32.
        """
        for each in self._plain:
            payload[each.payload].copy_(row[each.row])
        for each in self._encoded:
            piece = each.piece
            assert piece.codec is not None
            values = _values(row, each)
            if reference is not None:
                values = values.float() - _values(reference, each).float()
            feedback = None if feedback_of is None else feedback_of(piece)
            piece.codec.encode(values, payload[each.payload], feedback=feedback)

    def decode(self, payloads: torch.Tensor, rows: torch.Tensor) -> None:
        """Decode the payloads of all shards.

        Args:
            payloads: [number of shards, payload_bytes] uint8.
            rows: [number of ranks, shards per rank * row_bytes] uint8; written. A rank's shards of one parameter are
                next to each other.
        """
        times = payloads.shape[0] // rows.shape[0]
        for each in self._plain:
            _spread(payloads[:, each.payload], rows, each, times)
        for each in self._encoded:
            assert each.piece.codec is not None
            nbytes = each.row.stop - each.row.start
            for idx, payload in enumerate(payloads):
                start = each.row.start * times + idx % times * nbytes
                where = slice(start, start + nbytes)
                values = _values(rows[idx // times], each, where)
                each.piece.codec.decode(payload[each.payload], values)
                _put(values, rows[idx // times], where)

    def add_differences(self, payloads: torch.Tensor, reference: torch.Tensor) -> None:
        """Add the decoded differences of all shards to the reference, rounded to the pieces' dtypes.

        Args:
            payloads: [number of shards, payload_bytes] uint8.
            reference: [number of shards, row_bytes] uint8; changed in place.
        """
        for each in self._plain:
            reference[:, each.row].copy_(payloads[:, each.payload])
        for each in self._encoded:
            assert each.piece.codec is not None
            for payload, row in zip(payloads, reference, strict=True):
                values = _values(row, each)
                each.piece.codec.decode_add(payload[each.payload], values)
                _put(values, row, each.row)

    def arrange(self, reference: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy the rows of all shards to rows of fewer ranks; see `decode`.

        Args:
            reference: [number of shards, row_bytes] uint8.
            rows: [number of ranks, shards per rank * row_bytes] uint8; written.
        """
        times = reference.shape[0] // rows.shape[0]
        for each in (*self._plain, *self._encoded):
            _spread(reference[:, each.row], rows, each, times)

    def decode_sum(self, payloads: torch.Tensor, row: torch.Tensor, divisor: float) -> None:
        """Decode the payloads that all ranks sent for one row; write their sum, in rank order, divided.

        Args:
            payloads: [world_size, payload_bytes] uint8.
            row: [row_bytes] uint8; written.
            divisor: Divides the sum; a true division.
        """
        for each in self._plain:
            terms = [_values(payload, each, each.payload) for payload in payloads]
            total = terms[0].to(torch.promote_types(each.piece.dtype, torch.float32), copy=True)
            for term in terms[1:]:
                total += term
            _values(row, each).copy_(total.div_(divisor))
        for each in self._encoded:
            piece = each.piece
            assert piece.codec is not None
            piece.codec.decode_sum(payloads[:, each.payload].contiguous(), _values(row, each), divisor=divisor)


def _spread(sections: torch.Tensor, rows: torch.Tensor, section: _Section, times: int) -> None:
    """Copy a piece's section of all shards [number of shards, n] to its place in rows of `times` shards each."""
    where = rows[:, section.row.start * times : section.row.stop * times]
    where.unflatten(1, (times, -1)).copy_(sections.unflatten(0, (-1, times)))


def _size_of(piece: Piece) -> int:
    if piece.codec is None:
        return 0
    return piece.codec.payload_bytes(piece.numel)


def _values(row: torch.Tensor, section: _Section, where: slice | None = None) -> torch.Tensor:
    """Return a piece's elements: a view of the row, or a copy if they are not aligned."""
    found = row[where or section.row]
    dtype = section.piece.dtype
    return (found if found.storage_offset() % dtype.itemsize == 0 else found.clone()).view(dtype)


def _put(values: torch.Tensor, row: torch.Tensor, where: slice) -> None:
    """Write a piece's elements if `_values` returned a copy."""
    target = row[where]
    if target.storage_offset() % values.dtype.itemsize:
        target.copy_(values.view(torch.uint8))
