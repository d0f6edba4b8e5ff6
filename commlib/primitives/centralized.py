"""Centralized communication: each rank communicates with all others."""

from __future__ import annotations

import torch

from commlib.transport.base import Communication, Communicator


def centralized_full_precision(
    tensor: torch.Tensor, comm: Communicator, *, wire: torch.Tensor | None = None
) -> Communication:
    """Sum `tensor` over all ranks, in place (BAGUA's C_FP_S).

    Args:
        tensor: [numel] of any floating dtype; holds the sum afterwards.
        comm: The group.
        wire: [numel] Send buffer of a narrower dtype. The tensor is cast to it, and the sum is cast back.
    """
    if wire is None:
        yield comm.all_reduce(tensor)
        return
    wire.copy_(tensor)
    yield comm.all_reduce(wire)
    tensor.copy_(wire)


def sparse_sum(gradient: torch.Tensor | None, like: torch.Tensor, comm: Communicator, out: list) -> Communication:
    """Sum sparse gradients over all ranks: gather sizes, then indices, then values.

    Args:
        gradient: A sparse COO tensor of `like`'s shape, or None if this rank has no gradient.
        like: The dense parameter.
        comm: The group.
        out: The result is appended here: the coalesced sum, or None if no rank has a gradient.
    """
    gradient = None if gradient is None else gradient.coalesce()
    sizes = torch.empty(comm.world_size, dtype=torch.int64, device=like.device)
    own = sizes.new_tensor([-1 if gradient is None else gradient._nnz()])
    yield comm.all_gather(sizes, own)
    counts = sizes.tolist()
    most = max(counts)
    if most < 0:
        out.append(None)
        return
    sparse_dim = 1 if gradient is None else gradient.sparse_dim()
    indices = torch.zeros(most, sparse_dim, dtype=torch.int64, device=like.device)
    values = torch.zeros(most, *like.shape[sparse_dim:], dtype=like.dtype, device=like.device)
    if gradient is not None:
        indices[: gradient._nnz()] = gradient.indices().t()
        values[: gradient._nnz()] = gradient.values()
    all_indices = indices.new_empty(comm.world_size * most, sparse_dim)
    all_values = values.new_empty(comm.world_size * most, *values.shape[1:])
    yield comm.all_gather(all_indices, indices)
    yield comm.all_gather(all_values, values)
    keep = torch.cat([torch.arange(most, device=like.device) < count for count in counts])
    own_indices, own_values = all_indices[keep].t(), all_values[keep]
    total = torch.sparse_coo_tensor(own_indices, own_values, like.shape, device=like.device, check_invariants=False)
    out.append(total.coalesce())
