"""Making tensors the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from commlib.transport.base import Communication, Communicator

_CHUNK_BYTES = 64 << 20


def broadcast_all(tensors: Sequence[torch.Tensor], comm: Communicator, source: int = 0) -> Communication:
    """Copy rank `source`'s tensors, of any dtypes, to all ranks, in place: one broadcast of bytes per 64 MiB."""
    for chunk in _chunks(tensors):
        data = torch.cat([_as_bytes(tensor) for tensor in chunk])
        yield comm.broadcast(data, source)
        start = 0
        for tensor in chunk:
            received = data[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            tensor.copy_(received)
            start += tensor.nbytes


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    # Large elements first: every piece of the byte buffer then starts at a multiple of its element size.
    ordered = sorted((t.detach() for t in tensors if t.numel()), key=lambda t: -t.element_size())
    chunk: list[torch.Tensor] = []
    held = 0
    for tensor in ordered:
        if chunk and held + tensor.nbytes > _CHUNK_BYTES:
            yield chunk
            chunk, held = [], 0
        chunk.append(tensor)
        held += tensor.nbytes
    if chunk:
        yield chunk


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
