"""Orthonormal bases of the columns of many thin matrices at once."""

from __future__ import annotations

import functools

import torch

from commlib.kernels import meta

#: A column counts as dependent on the previous columns if its component outside of their span is at most this many ulps
#: of its length. That component is rounding noise.
_DEPENDENT_ULPS = 8.0
#: Number of times that a column is orthogonalised against the previous columns. Dependence is tested after the second.
_PASSES = 4


def orthonormalise_(p: torch.Tensor) -> torch.Tensor:
    """Replace the columns of each matrix by an orthonormal basis of their span: the Q of Householder QR, except signs.

    [Note: Gram-Schmidt] On CUDA `torch.linalg.qr` processes the matrices one after the other. This function performs
    each step on all matrices together: each column in turn is orthogonalised against the previous ones and normalised,
    four times. Two passes suffice for a column that is independent of the previous ones, by however little. Of a
    dependent column only noise or zeros remain; a fixed vector replaces it, so that the basis is complete, as in QR. No
    step synchronizes with the device. The same input gives the same bits, so replicas on equal devices stay equal. On a
    CPU QR is many times faster and is used instead; its results differ in the last bits.

    Args:
        p: [count, rows, r] fp32, r <= rows; changed in place. A value that is not finite sets its column and all later
            ones to NaN.

    Returns:
        `p`.
    """
    if p.is_meta:
        meta.repeated(functools.partial(_orthonormalise, p), "orthonormalise_", p.shape, p.dtype)
    else:
        _orthonormalise(p)
    return p


def _orthonormalise(p: torch.Tensor) -> None:
    _scale_(p, p.abs().amax(dim=1, keepdim=True))  # so that squares neither overflow nor underflow
    for j in range(p.shape[2]):
        column, before = p[:, :, j : j + 1], p[:, :, :j]
        if j == 0:
            column.copy_(torch.where(_length(column) == 0, _substitute(column, 0), column))
        kept = torch.ones_like(column[:, :1])  # remaining fraction of its length
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
    """Return a fixed vector for column `j` that is unlikely to lie in the span of other columns."""
    rows = column.shape[1]
    place = torch.arange(1, rows + 1, dtype=torch.float32, device=column.device)
    return torch.cos(place * (2.399963 + 0.618034 * j)).view(1, rows, 1).expand_as(column)
