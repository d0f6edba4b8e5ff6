"""Replication of tensors on all ranks: broadcast or mean, in chunks of up to 64 MiB."""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Iterator, Sequence

import torch

from commlib.kernels import native
from commlib.transport.base import Communication, Communicator

_CHUNK_BYTES = 64 << 20
#: Number of tensors that are copied together.
_PORTION = 16


def broadcast_all(tensors: Sequence[torch.Tensor], comm: Communicator, source: int = 0) -> Communication:
    """Broadcast tensors of any shapes and dtypes from rank `source` to all ranks, in place."""
    for chunk, nbytes in _chunks(tensors):
        data = _gathered(chunk, nbytes)
        yield comm.broadcast(data, source)
        _scatter(data, chunk)


def mean_all(tensors: Sequence[torch.Tensor], comm: Communicator) -> Communication:
    """Replace tensors of any shapes and floating or complex dtypes by their mean over the ranks, in place."""
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        for chunk, nbytes in _chunks([tensor for tensor in tensors if tensor.dtype == dtype]):
            data = _gathered(chunk, nbytes)
            flat = data.view(dtype.to_real() if dtype.is_complex else dtype)
            yield comm.all_reduce(flat)
            flat.div_(comm.world_size)
            _scatter(data, chunk)


def _gathered(chunk: list[torch.Tensor], nbytes: int) -> torch.Tensor:
    """Return the concatenated bytes of the tensors, [nbytes] uint8."""
    data = torch.empty(nbytes, dtype=torch.uint8, device=chunk[0].device)
    if not native.gather_bytes(data, chunk):
        for own, places in _portions(data, chunk):
            torch._foreach_copy_(places, own)
    return data


def _scatter(data: torch.Tensor, chunk: list[torch.Tensor]) -> None:
    """Copy the result of `_gathered` back to the tensors."""
    if not native.scatter_bytes(data, chunk):
        for own, places in _portions(data, chunk):
            torch._foreach_copy_(own, places)


def _portions(
    data: torch.Tensor, chunk: Sequence[torch.Tensor]
) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Yield the tensors and views of their places in `data`, few at a time: thousands of views take a megabyte."""
    start = 0
    for first in range(0, len(chunk), _PORTION):
        own = [tensor.detach() for tensor in chunk[first : first + _PORTION]]
        places = []
        for tensor in own:
            places.append(data[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            start += tensor.nbytes
        yield own, places


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[list[torch.Tensor], int]]:
    """Yield lists of tensors that are communicated together, with their size in bytes."""
    # This runs in every step, for the buffers. Large elements come first, so that every tensor starts at a multiple of
    # its element size.
    ordered = sorted(filter(torch.Tensor.numel, tensors), key=torch.Tensor.element_size, reverse=True)
    ends = list(itertools.accumulate(map(operator.attrgetter("nbytes"), ordered), initial=0))
    start = 0
    while start < len(ordered):
        stop = max(start + 1, bisect.bisect_right(ends, ends[start] + _CHUNK_BYTES) - 1)
        yield ordered[start:stop], ends[stop] - ends[start]
        start = stop
