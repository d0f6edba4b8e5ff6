"""Centralized communication of the largest components of a momentum under a discrete cosine transform (DeMo)."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import torch

from commlib.kernels import meta
from commlib.primitives.finite import all_finite, mark_unless
from commlib.primitives.low_rank import matrix_shape
from commlib.primitives.parts import Part, Pieces, shaped
from commlib.transport.base import Communication, Communicator

#: Side of the largest chunk whose indices fit into an int16.
MAX_CHUNK = 181
_COMPONENT_BYTES = 4  # an int16 and a bf16


@functools.cache
def dct_basis(size: int, device: torch.device) -> torch.Tensor:
    """Return the orthonormal DCT-II matrix B [size, size] fp32: X = B x transforms a column, x = B' X inverts it."""
    rows = [
        [math.sqrt((2 if k else 1) / size) * math.cos(math.pi * (2 * i + 1) * k / (2 * size)) for i in range(size)]
        for k in range(size)
    ]
    return torch.tensor(rows, dtype=torch.float32, device=device)


def chunk_shape(shape: Sequence[int], chunk: int) -> tuple[int, int]:
    """Return rows and columns of a parameter's chunks: the largest divisors, up to `chunk`, of the matrix's sizes."""
    rows, columns = (
        next(divisor for divisor in range(min(size, chunk), 0, -1) if size % divisor == 0)
        for size in _matrix_shape(shape)
    )
    return rows, columns


def _matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    return matrix_shape(shape) if len(shape) > 1 else (1, math.prod(shape))


class _Batch:
    """All chunks of one shape in a bucket. Chunks and batches are adjacent in memory.

    Args:
        parts: The parameters that are cut into these chunks.
        shape: Rows and columns of a chunk.
        start: First element of the batch among all chunks of the bucket.
        kept: Largest number of components of a chunk that are sent.
        device: Device of the chunks.
    """

    def __init__(
        self, parts: Sequence[Part], shape: tuple[int, int], start: int, kept: int, device: torch.device
    ) -> None:
        self.parts, self._shape = parts, shape
        self._rows_basis, self._columns_basis = (dct_basis(size, device) for size in shape)
        self.start, self.end = start, start + sum(part.numel for part in parts)
        self.kept = min(kept, math.prod(shape))
        self.firsts = torch.arange(start, self.end, math.prod(shape), dtype=torch.int64, device=device)

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return a view of the batch's chunks [count, rows, columns] in `values` [numel of the bucket]."""
        return values[self.start : self.end].view(-1, *self._shape)

    def by_part(self, values: torch.Tensor) -> Iterator[tuple[Part, torch.Tensor]]:
        """Yield each parameter with a view of its chunks in the layout of its matrix: [.., rows, .., columns]."""
        at = self.start
        for part in self.parts:
            num_across = _matrix_shape(part.shape)[1] // self._shape[1]
            chunks = values[at : at + part.numel].view(-1, num_across, *self._shape)
            yield part, chunks.transpose(1, 2)
            at += part.numel

    def transform_(self, values: torch.Tensor, scratch: torch.Tensor, *, back: bool = False) -> None:
        """Transform the batch's chunks in place; `back` applies the inverse transform."""
        rows, columns = self._rows_basis, self._columns_basis.t()
        if back:
            rows, columns = rows.t(), columns.t()
        chunks, product = self.of(values), self.of(scratch)
        torch.bmm(rows.expand(len(chunks), -1, -1), chunks, out=product)
        torch.mm(product.flatten(0, 1), columns, out=chunks.flatten(0, 1))


class ComponentWorkspace:
    """State of one bucket: payload buffers and the transformed momentum [numel] fp32, unscaled.

    Args:
        parts: Places of the parameters in the bucket.
        device: Device of the bucket.
        comm: The ranks that exchange the bucket.
        chunk: Largest side of a chunk.
        kept: Largest number of components of a chunk that are sent.
    """

    def __init__(
        self, parts: Sequence[Part], device: torch.device, comm: Communicator, *, chunk: int, kept: int
    ) -> None:
        by_shape: dict[tuple[int, int], list[Part]] = {}
        for part in parts:
            if part.numel:  # a rank may have no elements of a sharded parameter
                by_shape.setdefault(chunk_shape(part.shape, chunk), []).append(part)
        self._batches: list[_Batch] = []
        for shape, own in by_shape.items():
            start = self._batches[-1].end if self._batches else 0
            self._batches.append(_Batch(own, shape, start, kept, device))
        numel = self._batches[-1].end if self._batches else 0
        self.momentum = torch.zeros(numel, dtype=torch.float32, device=device)
        self._nothing = torch.zeros(0, dtype=torch.int64, device=device)  # input of `cat` if there are no batches
        firsts = [batch.firsts.repeat_interleave(batch.kept) for batch in self._batches]
        #: For each component that is sent, the first element of its chunk.
        self._firsts = torch.cat([self._nothing, *firsts])
        nbytes = _COMPONENT_BYTES * self._firsts.numel()
        self.own = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.everyone = torch.zeros(comm.world_size, nbytes, dtype=torch.uint8, device=device)

    def add(self, tensor: torch.Tensor, decay: float, factor: float) -> torch.Tensor:
        """Decay the momentum and add `factor` times the transform of a gradient [numel], which is used as scratch.

        Returns:
            Whether the transform is finite: a bool tensor of one element. Values that are not finite count as 0.
        """
        chunks = torch.empty_like(self.momentum)
        for batch in self._batches:
            for part, view in batch.by_part(chunks):
                view.copy_(shaped(tensor, part).reshape(view.shape))
        self._transform(chunks, tensor)
        is_finite = all_finite(chunks)
        torch.nan_to_num(chunks, nan=0.0, posinf=0.0, neginf=0.0, out=chunks)
        self.momentum.mul_(decay).add_(chunks, alpha=factor)
        return is_finite

    def take(self) -> torch.Tensor:
        """Move the largest components of each chunk to `own`; the rounding errors of bf16 stay in the momentum.

        Returns:
            A view of their values in `own`, [count] bf16.
        """
        places, values = _components(self.own)
        chosen = [
            torch.topk(batch.of(self.momentum).flatten(1).abs(), batch.kept, sorted=False).indices.view(-1)
            for batch in self._batches
        ]
        places.copy_(torch.cat([self._nothing, *chosen]))
        indices = self._firsts + places
        components = self.momentum.index_select(0, indices)
        values.copy_(components)
        rest = components.sub_(values).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        self.momentum.index_copy_(0, indices, rest)
        return values

    def decode_sum(self, tensor: torch.Tensor, factor: float) -> None:
        """Replace `tensor` by `factor` times the sum of the components of all ranks, added in rank order."""
        chunks = torch.zeros_like(self.momentum)
        if chunks.is_meta:
            add = functools.partial(self._add_components, chunks, self.own, factor)
            meta.repeated(add, "DeMo", chunks.shape, self.own.shape, times=len(self.everyone))
        else:
            for payload in self.everyone.unbind():
                self._add_components(chunks, payload, factor)
        self._transform(chunks, tensor, back=True)
        for batch in self._batches:
            for part, view in batch.by_part(chunks):
                target = shaped(tensor, part)
                if part.order:
                    target.copy_(view.reshape(target.shape))
                else:
                    target.view(view.shape).copy_(view)

    def _add_components(self, chunks: torch.Tensor, payload: torch.Tensor, factor: float) -> None:
        places, values = _components(payload)
        chunks.index_add_(0, self._firsts + places, values.float(), alpha=factor)

    def _transform(self, chunks: torch.Tensor, tensor: torch.Tensor, *, back: bool = False) -> None:
        """Transform all chunks in place, or back. `tensor` is used as scratch if it is fp32."""
        scratch = tensor if tensor.dtype == torch.float32 else torch.empty_like(chunks)
        for batch in self._batches:
            batch.transform_(chunks, scratch, back=back)

    def save(self, parts: Sequence[Part]) -> dict[str, Pieces]:
        """Return a copy of the transformed momentum by parameter, in chunk order."""
        return {"momentum": {name: (0, own.clone()) for name, own in self._by_name()}}

    def load(self, saved: dict[str, Pieces], parts: Sequence[Part], num_terms: float) -> None:
        """Load the momentum, also of another bucket plan."""
        for name, own in self._by_name():
            if name in saved["momentum"]:
                own.copy_(saved["momentum"][name][1])
            else:
                own.zero_()

    def forget(self) -> None:
        """Set the momentum to zero."""
        self.momentum.zero_()

    def _by_name(self) -> Iterator[tuple[str, torch.Tensor]]:
        for batch in self._batches:
            at = batch.start
            for part in batch.parts:
                yield part.name, self.momentum[at : at + part.numel]
                at += part.numel


def _components(payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the indices within chunks [count] int16 and the values [count] bf16 in a payload."""
    places, values = payload.view(2, payload.numel() // 2).unbind()
    return places.view(torch.int16), values.view(torch.bfloat16)


def centralized_components(
    tensor: torch.Tensor,
    workspace: ComponentWorkspace,
    comm: Communicator,
    *,
    divisor: float = 1.0,
    scale: float = 1.0,
    decay: float = 1.0,
    sign: bool = False,
) -> Communication:
    """Replace `tensor` by the sum of the largest components of each rank's momentum, divided by `divisor`.

        m_r <- decay m_r + x_r
        q_r = the largest components of each chunk of DCT(m_r),   m_r <- m_r - IDCT(q_r)
        x = IDCT(1/divisor sum_r q_r), or its sign

    Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization" (2024), algorithm 1. Every rank gathers all
    components and adds them in rank order.

    Args:
        tensor: [numel] of any floating dtype; changed in place.
        workspace: The bucket's buffers and momentum.
        comm: The group.
        divisor: Divisor of the sum.
        scale: Loss scale of the tensor; the momentum is kept unscaled.
        decay: Decay of the momentum.
        sign: Whether the result is the sign of the sum, times the scale.
    """
    if comm.contributes:
        is_finite = workspace.add(tensor, decay, 1.0 / scale)
        mark_unless(is_finite, workspace.take())
    else:
        workspace.own.zero_()
    yield comm.all_gather(workspace.everyone.view(-1), workspace.own)
    if sign:
        workspace.decode_sum(tensor, 1.0 / divisor)
        signs = torch.sign(tensor)
        tensor.mul_(0.0).add_(signs, alpha=scale)  # NaN, whose sign is 0, stays
    else:
        workspace.decode_sum(tensor, scale / divisor)
