"""Where parameters lie in a bucket, so that state kept by bucket can be saved by parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

#: By parameter name: the first element within the parameter, and the values from there on ([count]).
Pieces = dict[str, tuple[int, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Part:
    """One parameter's place in a bucket.

    Attributes:
        name: The parameter's name in the model.
        shape: Its shape.
        start: Its first element in the bucket's `flat`.
        numel: How many elements of `flat` it takes (complex ones take two each).
        offset: Its first element among all communicated parameters of the model, whatever the plan.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    offset: int


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
            pieces[part.name] = (begin - part.start, values[begin - first : end - first].clone())
    return pieces


def split_at(whole: torch.Tensor, first: int, values: torch.Tensor) -> torch.Tensor:
    """Copy the stretch of a bucket that begins at `first` into `values`, and return the rest, zeros in its place."""
    own = whole[first : first + values.numel()]
    values.copy_(own)
    own.zero_()
    return whole


def paste(pieces: Mapping[str, tuple[int, torch.Tensor]], values: torch.Tensor, parts: Sequence[Part]) -> None:
    """Add the pieces that belong to a bucket to its values.

    Args:
        pieces: As `cut` returned them, perhaps of other buckets.
        values: [numel of the bucket] Changed in place.
        parts: The bucket's parameters.
    """
    for part in parts:
        if part.name in pieces:
            start, piece = pieces[part.name]
            at = part.start + start
            values[at : at + piece.numel()] += piece.to(values.device)
