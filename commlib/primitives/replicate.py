"""Making tensors the same on all ranks: bytes of any dtypes in one broadcast per 64 MiB."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from commlib.transport.base import Communication, Communicator

_CHUNK_BYTES = 64 << 20


def broadcast_all(tensors: Sequence[torch.Tensor], comm: Communicator, source: int = 0) -> Communication:
    """Copy rank `source`'s tensors, of any shapes and dtypes, to all ranks, in place."""
    for chunk, data in broadcast_bytes(tensors):
        yield comm.broadcast(data, source)
        for tensor, received in zip(chunk, split_bytes(data, chunk), strict=True):
            tensor.copy_(received)


def broadcast_bytes(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
    """Yield the tensors in chunks, each with the bytes of its tensors `[nbytes] uint8`. Zero-element ones are left out."""
    # Large elements first: every tensor's bytes then start at a multiple of its element size.
    ordered = sorted((t.detach() for t in tensors if t.numel()), key=lambda t: -t.element_size())
    while ordered:
        held = size = 0
        while size < len(ordered) and (size == 0 or held + ordered[size].nbytes <= _CHUNK_BYTES):
            held += ordered[size].nbytes
            size += 1
        chunk, ordered = ordered[:size], ordered[size:]
        yield chunk, torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in chunk])


def split_bytes(data: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors that `data` [nbytes] uint8 holds, shaped and typed as `tensors`, as views of it."""
    start = 0
    for tensor in tensors:
        yield data[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += tensor.nbytes
