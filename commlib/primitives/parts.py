"""Where parameters lie in a bucket, so that state kept by bucket can be saved by parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from commlib.primitives.order import Order, reordered

#: A stretch of one parameter: the first element within the parameter, the values from there on ([count]), and, where
#: that is not the order of the parameter's indices, the order that both are in.
Piece = tuple[int, torch.Tensor] | tuple[int, torch.Tensor, Order]

#: Pieces by parameter name.
Pieces = dict[str, Piece]


@dataclass(frozen=True, slots=True)
class Part:
    """One parameter's place in a bucket.

    Its elements lie there in the order of the parameter's memory, where it fills a stretch of it, else in that of its
    indices ([Note: the order of elements] in `primitives/order.py`); so does all state that is kept by bucket.

    Attributes:
        name: The parameter's name in the model.
        shape: Its shape.
        start: Its first element in the bucket's `flat`.
        numel: How many elements of `flat` it takes (complex ones take two each).
        offset: Its first element among all communicated parameters of the model, taken whole, whatever the plan.
        order: The order of its elements in `flat`: dimensions from the outermost to the innermost; () for that of its
            indices.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    offset: int
    order: Order = ()


def cut(values: torch.Tensor, first: int, parts: Sequence[Part]) -> Pieces:
    """Return copies of the pieces of a stretch of a bucket, by parameter.

    Args:
        values: [count] The stretch.
        first: Its first element in the bucket.
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
    """Return a view of a parameter's part of a bucket's values, in its shape; flat where it is complex."""
    own = values[part.start : part.start + part.numel]
    if part.numel != math.prod(part.shape):
        return own
    if not part.order:
        return own.view(part.shape)
    places = sorted(range(len(part.order)), key=part.order.__getitem__)
    return own.view([part.shape[dim] for dim in part.order]).permute(places)


def split_at(whole: torch.Tensor, first: int, values: torch.Tensor) -> torch.Tensor:
    """Copy the stretch of a bucket that begins at `first` into `values`, and return the rest, zeros in its place."""
    own = whole[first : first + values.numel()]
    values.copy_(own)
    own.zero_()
    return whole


def paste(pieces: Mapping[str, Piece], values: torch.Tensor, parts: Sequence[Part]) -> None:
    """Add the pieces that belong to a bucket to its values.

    Args:
        pieces: As `cut` returned them, perhaps of other buckets, or of a model in another memory format.
        values: [numel of the bucket] Changed in place.
        parts: The bucket's parameters.
    """
    for part in parts:
        if part.name in pieces:
            start, piece = placed(pieces[part.name], part)
            at = part.start + start
            values[at : at + piece.numel()] += piece.to(values.device)


def pasted(pieces: Mapping[str, Piece], parts: Sequence[Part], like: torch.Tensor) -> torch.Tensor:
    """Return a whole bucket [numel] of the pieces that belong to it, zeros elsewhere; type and device are `like`'s."""
    whole = like.new_zeros(max(part.start + part.numel for part in parts))
    paste(pieces, whole, parts)
    return whole


def placed(piece: Piece, part: Part) -> tuple[int, torch.Tensor]:
    """Return a piece in the order of the part: its first element, and the values; all of them, if the order changed.

    A stretch in one order is scattered in another; elements that are not in the piece are then zeros.
    """
    start, values = piece[:2]
    order = order_of_piece(piece)
    if order == part.order:
        return start, values
    whole = values.new_zeros(part.numel)
    whole[start : start + values.numel()] = values
    return 0, reordered(whole, part.shape, order, part.order)


def with_values(piece: Piece, values: torch.Tensor) -> Piece:
    """Return the same stretch of the same parameter with other values [count]."""
    return (piece[0], values, piece[2]) if len(piece) > 2 else (piece[0], values)


def order_of_piece(piece: Piece) -> Order:
    """Return the order that a piece is in."""
    return tuple(piece[2]) if len(piece) > 2 else ()
