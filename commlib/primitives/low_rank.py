"""Centralized communication of matrices as low-rank factors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from commlib.primitives.finite import all_finite
from commlib.primitives.order import shaped
from commlib.primitives.orthogonal import orthonormalise_
from commlib.primitives.parts import Part, Pieces, pasted
from commlib.transport.base import Communication, Communicator


def matrix_shape(shape: Sequence[int], is_complex: bool = False) -> tuple[int, int]:
    """Return the rows and columns of a parameter viewed as a matrix: the first dimension by all others.

    The view follows the indices, independently of the parameter's memory format. A complex element takes two columns.
    """
    return shape[0], math.prod(shape[1:]) * (2 if is_complex else 1)


class _Batch:
    """Matrices of one shape: errors [count, rows, columns] and factors P [count, rows, r], Q' [count, r, columns].

    Q is stored transposed. At rank 2 on a CPU, the two products with the matrices then take 1/3 and 1/5 of the time.
    """

    def __init__(self, parts: Sequence[Part], p: torch.Tensor, q_rows: torch.Tensor, error: torch.Tensor) -> None:
        self.parts = parts
        self.p, self.q_rows, self.error = p, q_rows, error
        self._orthogonal = torch.empty_like(p)
        self._triangle = p.new_empty(len(parts), p.shape[2], p.shape[2])

    def orthogonalise(self) -> None:
        """Replace the columns of each P by an orthonormal basis of their span; see [Note: Gram-Schmidt]."""
        if not _qr_is_batched(self.p):
            orthonormalise_(self.p)
            return
        torch.linalg.qr(self.p, out=(self._orthogonal, self._triangle))
        self.p.copy_(self._orthogonal)


def _qr_is_batched(p: torch.Tensor) -> bool:
    """Return whether batched QR is fast on the device of `p`: only on a CPU."""
    return p.device.type == "cpu"


class LowRankWorkspace:
    """State of one bucket of matrices: factors, and the errors of the approximation (fp32).

    The factors of all matrices are in two flat buffers, so a bucket takes two all-reduces. Matrices of equal shape are
    multiplied and orthogonalised together.

    Args:
        parts: Places of the matrices in the tensor: a bucket, or a stretch of one.
        device: Device of the tensor.
        rank: Rank of the approximation, limited by the rows and columns of each matrix.
        seed: Seed of the first Q; the same on all ranks.
    """

    def __init__(self, parts: Sequence[Part], device: torch.device, rank: int, seed: int) -> None:
        by_shape: dict[tuple[int, int], list[Part]] = {}
        for part in parts:
            by_shape.setdefault(_matrix_shape(part), []).append(part)
        ranks = {shape: min(rank, *shape) for shape in by_shape}
        self._product = torch.zeros(0, dtype=torch.float32, device=device)
        self.p = self._product.new_zeros(sum(len(own) * s[0] * ranks[s] for s, own in by_shape.items()))
        self.q = self._product.new_zeros(sum(len(own) * s[1] * ranks[s] for s, own in by_shape.items()))
        self.batches: list[_Batch] = []
        p_at = q_at = 0
        for (rows, columns), own in by_shape.items():
            r = ranks[rows, columns]
            p_end, q_end = p_at + len(own) * rows * r, q_at + len(own) * columns * r
            p = self.p[p_at:p_end].view(len(own), rows, r)
            q_rows = self.q[q_at:q_end].view(len(own), r, columns)
            self.batches.append(_Batch(own, p, q_rows, p.new_zeros(len(own), rows, columns)))
            p_at, q_at = p_end, q_end
        self._parts = parts
        for batch in self.batches:  # one seed per Q: the same on all ranks and for every bucket plan
            for part, q_rows in zip(batch.parts, batch.q_rows, strict=True):
                generator = torch.Generator().manual_seed((seed * 0x9E3779B1 + part.offset) % 2**63)
                q_rows.t().copy_(torch.randn(q_rows.t().shape, generator=generator, dtype=torch.float32, device="cpu"))
        self._first_q = self.q.clone()

    def product_like(self, matrix: torch.Tensor, part: Part) -> torch.Tensor:
        """Return the target of a part's product P Q': `matrix` if it is fp32 and in index order, else a buffer."""
        if matrix.dtype == torch.float32 and not part.order:
            return matrix
        if not self._product.numel():
            self._product = self._product.new_empty(max(part.numel for part in self._parts))
        return self._product[: part.numel].view(_matrix_shape(part))

    def renew_unless_finite(self) -> None:
        """Reset Q to its first value if it overflowed. Q is a sum over all ranks, so all ranks do the same."""
        torch.where(all_finite(self.q), self.q, self._first_q, out=self.q)

    def forget(self) -> None:
        """Set errors to zero and Q to its first value."""
        for batch in self.batches:
            batch.error.zero_()
        self.q.copy_(self._first_q)

    def save(self, parts: Sequence[Part]) -> dict[str, Pieces]:
        """Return copies of the errors and Q by parameter."""
        errors: Pieces = {}
        factors: Pieces = {}
        for batch in self.batches:
            for idx, part in enumerate(batch.parts):
                errors[part.name] = (0, batch.error[idx].clone())
                factors[part.name] = (0, batch.q_rows[idx].t().clone(memory_format=torch.contiguous_format))
        return {"errors": errors, "factors": factors}

    def load(self, saved: dict[str, Pieces], parts: Sequence[Part], num_terms: float) -> torch.Tensor | None:
        """Load errors and factors, also of another bucket plan.

        A matrix that moves here from another local rank starts with the first Q, as on its new peers.

        Returns:
            [numel of the bucket] The errors of matrices that another local rank now owns, to be added to this rank's
            next values; None if the stretch is the whole bucket.
        """
        for batch in self.batches:
            for idx, part in enumerate(batch.parts):
                if part.name in saved["errors"]:
                    batch.error[idx].copy_(saved["errors"][part.name][1])
                q = batch.q_rows[idx].t()
                if part.name in saved["factors"] and saved["factors"][part.name][1].shape == q.shape:
                    q.copy_(saved["factors"][part.name][1])
        if len(self._parts) == len(parts):
            return None
        own = {part.name for part in self._parts}
        moved: Pieces = {n: (piece[0], piece[1].view(-1)) for n, piece in saved["errors"].items() if n not in own}
        return pasted(moved, parts, self.p)


def centralized_low_rank(
    tensor: torch.Tensor,
    workspace: LowRankWorkspace,
    comm: Communicator,
    *,
    divisor: float = 1.0,
    scale: float = 1.0,
    decay: float = 1.0,
) -> Communication:
    """Replace the matrices in `tensor` by a low-rank approximation of their sum over all ranks, divided by `divisor`.

    PowerSGD (Vogels et al., NeurIPS 2019, algorithms 1 and 2), with M_r the matrix of rank r and Q of the last round:

        M_r <- M_r + decay E_r,   P = orth(sum_r M_r Q),   Q = 1/divisor sum_r M_r' P,   M = P Q'
        E_r = M_r - divisor/K M

    K is the number of contributing ranks. For a mean it equals the divisor, unless each rank holds the sum of its node.

    Args:
        tensor: [numel] fp32, bf16, fp16 or fp64; changed in place.
        workspace: The bucket's factors and errors.
        comm: The group.
        divisor: Divisor of the sum.
        scale: Loss scale of the tensor; errors are kept unscaled.
        decay: Factor of the errors before they are added.
    """
    for batch in workspace.batches:
        if not comm.contributes:
            continue
        for idx, part in enumerate(batch.parts):
            error = batch.error[idx] if decay == 1.0 else batch.error[idx].mul_(decay)
            values = _by_index(tensor, part)
            error.view(values.shape).add_(values, alpha=1.0 / scale)
        torch.bmm(batch.error, batch.q_rows.transpose(1, 2), out=batch.p)
    if not comm.contributes:
        workspace.p.zero_()
    yield comm.all_reduce(workspace.p)
    for batch in workspace.batches:
        batch.orthogonalise()
        if comm.contributes:
            torch.bmm(batch.p.transpose(1, 2), batch.error, out=batch.q_rows)
    if not comm.contributes:
        workspace.q.zero_()
    yield comm.all_reduce(workspace.q)
    workspace.q.div_(divisor)
    for batch in workspace.batches:
        for idx, part in enumerate(batch.parts):
            values = _by_index(tensor, part)
            approximation = workspace.product_like(values, part)
            torch.mm(batch.p[idx], batch.q_rows[idx], out=approximation)
            if comm.contributes:
                batch.error[idx].sub_(approximation, alpha=divisor / comm.num_active)
            if approximation is not values or scale != 1.0:
                torch.mul(approximation.view(values.shape), scale, out=values)
        if comm.contributes:
            torch.nan_to_num(batch.error, nan=0.0, posinf=0.0, neginf=0.0, out=batch.error)
    workspace.renew_unless_finite()


def _matrix_shape(part: Part) -> tuple[int, int]:
    return matrix_shape(part.shape, is_complex=part.numel > math.prod(part.shape))


def _by_index(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """Return a part in index order: viewed as its matrix, or in its shape if the memory order needs other strides."""
    values = tensor[part.start : part.start + part.numel]
    return shaped(values, part.shape, part.order) if part.order else values.view(_matrix_shape(part))
