"""Making tensors the same on all ranks: copies of one rank's, or the mean; up to 64 MiB at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from commlib.transport.base import Communication, Communicator

_CHUNK_BYTES = 64 << 20


def broadcast_all(tensors: Sequence[torch.Tensor], comm: Communicator, source: int = 0) -> Communication:
    """Copy rank `source`'s tensors, of any shapes and dtypes, to all ranks, in place."""
    for chunk in _chunks(tensors):
        data = torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in chunk])
        yield comm.broadcast(data, source)
        start = 0
        for tensor in chunk:
            tensor.copy_(data[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            start += tensor.nbytes


def mean_all(tensors: Sequence[torch.Tensor], comm: Communicator) -> Communication:
    """Replace tensors of any shapes and floating or complex dtypes by their mean over the ranks, in place."""
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        for chunk in _chunks([tensor for tensor in tensors if tensor.dtype == dtype]):
            flat = torch.cat([tensor.contiguous().reshape(-1) for tensor in chunk])
            flat = torch.view_as_real(flat) if flat.is_complex() else flat
            yield comm.all_reduce(flat)
            flat.div_(comm.world_size)
            flat = torch.view_as_complex(flat) if dtype.is_complex else flat
            for tensor, mean in zip(chunk, flat.split([tensor.numel() for tensor in chunk]), strict=True):
                tensor.copy_(mean.view(tensor.shape))


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    # Large elements first: every tensor's bytes then start at a multiple of its element size.
    ordered = sorted((t.detach() for t in tensors if t.numel()), key=lambda t: -t.element_size())
    while ordered:
        held = size = 0
        while size < len(ordered) and (size == 0 or held + ordered[size].nbytes <= _CHUNK_BYTES):
            held += ordered[size].nbytes
            size += 1
        yield ordered[:size]
        ordered = ordered[size:]
