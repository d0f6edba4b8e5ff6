"""Orthonormal bases of the columns of many thin matrices at once."""

from __future__ import annotations

import functools

import torch

from commlib.kernels import meta

#: A column of which the part outside of the span of those before it is at most so many units in the last place of its
#: length depends on them: that part is rounding noise.
_DEPENDENT_ULPS = 8.0
#: How often a column is made orthogonal to those before it; whether it depends on them is known after the second time.
_PASSES = 4


def orthonormalise_(p: torch.Tensor) -> torch.Tensor:
    """Replace the columns of each matrix by an orthonormal basis of theirs: Householder QR's Q, but for signs.

    [Note: Gram-Schmidt] On CUDA `torch.linalg.qr` processes one matrix at a time. Here all matrices take each step
    together: column after column is made orthogonal to the previous ones and scaled, four times. Two passes suffice for
    a column that is independent of the previous ones. A dependent column leaves only noise and is replaced by a fixed
    vector, so the basis is always complete, like QR's. No step waits for the device, and the result is a function of
    the input, so replicas on equal devices stay equal. On a CPU, QR is many times faster and is used instead; the two
    differ in the last bits.

    Args:
        p: [count, rows, r] fp32, r <= rows; changed in place. Non-finite values make their column and later ones NaN.

    Returns:
        `p`.
    """
    if p.is_meta:
        meta.repeated(functools.partial(_orthonormalise, p), "orthonormalise_", p.shape, p.dtype)
    else:
        _orthonormalise(p)
    return p


def _orthonormalise(p: torch.Tensor) -> None:
    _scale_(p, p.abs().amax(dim=1, keepdim=True))  # so that squares neither overflow nor vanish
    for j in range(p.shape[2]):
        column, before = p[:, :, j : j + 1], p[:, :, :j]
        if j == 0:
            column.copy_(torch.where(_length(column) == 0, _substitute(column, 0), column))
        kept = torch.ones_like(column[:, :1])  # which part of its length, so far
        whole = _length(column)
        for number in range(_PASSES if j else 1):
            if j:
                column.sub_(before @ (before.transpose(1, 2) @ column))
            left = _length(column)
            if number == 0:
                kept = left
            if number == 1:
                is_dependent = kept * left <= _DEPENDENT_ULPS * torch.finfo(p.dtype).eps * whole
                column.copy_(torch.where(is_dependent, _substitute(column, j), column))
                left = torch.where(is_dependent, _length(column), left)
            _scale_(column, left)


def _scale_(columns: torch.Tensor, by: torch.Tensor) -> None:
    columns.div_(torch.where(by == 0, torch.ones_like(by), by))


def _length(column: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(column, dim=1, keepdim=True)


def _substitute(column: torch.Tensor, j: int) -> torch.Tensor:
    """Return a fixed vector, another one for each place, which is in no likely span of others."""
    rows = column.shape[1]
    place = torch.arange(1, rows + 1, dtype=torch.float32, device=column.device)
    return torch.cos(place * (2.399963 + 0.618034 * j)).view(1, rows, 1).expand_as(column)
