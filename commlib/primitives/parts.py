"""Places of parameters in a bucket. State that is kept by bucket is saved by parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from commlib.primitives.order import Order, reordered

#: A range of one parameter: its first element within the parameter, its values [count], and, unless both are in index
#: order, their order.
Piece = tuple[int, torch.Tensor] | tuple[int, torch.Tensor, Order]

#: Pieces by parameter name.
Pieces = dict[str, Piece]


@dataclass(frozen=True, slots=True)
class Part:
    """One parameter's place in a bucket.

    Its elements are in memory order if the parameter is dense, else in index order ([Note: the order of elements] in
    `primitives/order.py`). The same holds for all state that is kept by bucket.

    Attributes:
        name: Name of the parameter in the model.
        shape: Shape of the parameter.
        start: First element in the bucket's `flat`.
        numel: Number of elements of `flat` (two for each complex element).
        offset: First element among all communicated, unsharded parameters of the model; independent of the bucket plan.
        order: Order of the elements in `flat`: dimensions from the outermost to the innermost; () for index order.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    offset: int
    order: Order = ()


def cut(values: torch.Tensor, first: int, parts: Sequence[Part]) -> Pieces:
    """Return copies of the pieces of a stretch of a bucket by parameter.

    Args:
        values: [count] Values of the stretch.
        first: First element of the stretch in the bucket.
        parts: The bucket's parameters.
    """
    pieces: Pieces = {}
    for part in parts:
        begin, end = max(part.start, first), min(part.start + part.numel, first + values.numel())
        if begin < end:
            start, piece = begin - part.start, values[begin - first : end - first].clone()
            pieces[part.name] = (start, piece, part.order) if part.order else (start, piece)
    return pieces


def shaped(values: torch.Tensor, part: Part) -> torch.Tensor:
    """Return a view of a parameter's values in a bucket, in its shape; flat if the parameter is complex."""
    own = values[part.start : part.start + part.numel]
    if part.numel != math.prod(part.shape):
        return own
    if not part.order:
        return own.view(part.shape)
    places = sorted(range(len(part.order)), key=part.order.__getitem__)
    return own.view([part.shape[dim] for dim in part.order]).permute(places)


def split_at(whole: torch.Tensor, first: int, values: torch.Tensor) -> torch.Tensor:
    """Copy the stretch of `whole` that begins at `first` into `values`, set it to zero, and return `whole`."""
    own = whole[first : first + values.numel()]
    values.copy_(own)
    own.zero_()
    return whole


def paste(pieces: Mapping[str, Piece], values: torch.Tensor, parts: Sequence[Part]) -> None:
    """Add the pieces that belong to a bucket to its values.

    Args:
        pieces: Results of `cut`, also of other buckets or of a model in another memory format.
        values: [numel of the bucket] Changed in place.
        parts: The bucket's parameters.
    """
    for part in parts:
        if part.name in pieces:
            start, piece = placed(pieces[part.name], part)
            at = part.start + start
            values[at : at + piece.numel()] += piece.to(values.device)


def pasted(pieces: Mapping[str, Piece], parts: Sequence[Part], like: torch.Tensor) -> torch.Tensor:
    """Return a bucket [numel] with the pieces that belong to it and zeros elsewhere, of `like`'s dtype and device."""
    whole = like.new_zeros(max(part.start + part.numel for part in parts))
    paste(pieces, whole, parts)
    return whole


def placed(piece: Piece, part: Part) -> tuple[int, torch.Tensor]:
    """Return a piece in the order of the part: its first element and its values.

    If the order changes, the elements of the piece are not adjacent in the new order. Then the result is the whole
    parameter, with zeros for elements that are not in the piece.
    """
    start, values = piece[:2]
    order = order_of_piece(piece)
    if order == part.order:
        return start, values
    whole = values.new_zeros(part.numel)
    whole[start : start + values.numel()] = values
    return 0, reordered(whole, part.shape, order, part.order)


def with_values(piece: Piece, values: torch.Tensor) -> Piece:
    """Return `piece` with other values [count]."""
    return (piece[0], values, piece[2]) if len(piece) > 2 else (piece[0], values)


def order_of_piece(piece: Piece) -> Order:
    """Return the order of the elements of a piece."""
    return tuple(piece[2]) if len(piece) > 2 else ()
