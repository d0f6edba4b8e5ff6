"""All-reduce from sends and receives: by parts, which may be unequal, and by recursive halving."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from commlib.errors import ConfigError
from commlib.transport.base import Communication, Communicator


def split(numel: int, fractions: Sequence[float]) -> list[tuple[int, int]]:
    """Cut `numel` elements into ranges (begin, end) in proportion to `fractions`. A fraction of 0 gets an empty range.

    Raises:
        ConfigError: A fraction is negative or not finite, or all are 0.
    """
    total = sum(fractions)
    if not total > 0 or total == float("inf") or min(fractions) < 0:
        raise ConfigError(f"fractions: expected numbers of 0 and more, not all 0, got {list(fractions)}")
    ends = [round(numel * (upto / total)) for upto in itertools.accumulate(fractions)]
    return list(itertools.pairwise([0, *ends[:-1], numel]))


def butterfly_all_reduce(
    tensor: torch.Tensor, comm: Communicator, fractions: Sequence[float] | None = None
) -> Communication:
    """Sum `tensor` over all ranks, in place: rank i receives part i of all ranks, adds them, and sends the sum to all.

    Parts may be unequal, so that a rank on a slow link sends less, or nothing. Each rank sends its tensor except its
    own part, then the sum of its own part to every other rank. With equal parts this is as much as in a ring. Sums are
    computed in rank order, in fp32 or wider, so the result is bit-identical on all ranks. Ryabinin et al.,
    "Moshpit SGD" (NeurIPS 2021).

    Args:
        tensor: [numel] of any floating dtype; changed in place.
        comm: The group.
        fractions: [world_size] Proportions of the parts; the same on all ranks. Equal parts by default.

    Raises:
        ConfigError: The number of fractions is not the number of ranks, or `split` rejects them.
    """
    fractions = [1.0] * comm.world_size if fractions is None else fractions
    if len(fractions) != comm.world_size:
        raise ConfigError(f"fractions: expected one for each of {comm.world_size} ranks, got {len(fractions)}")
    parts = [tensor[begin:end] for begin, end in split(tensor.numel(), fractions)]
    own = parts[comm.rank]
    peers = [rank for rank in range(comm.world_size) if rank != comm.rank]
    received = {rank: torch.empty_like(own) for rank in peers}
    yield comm.exchange([(rank, parts[rank]) for rank in peers], list(received.items()))
    received[comm.rank] = own
    total = torch.zeros_like(own, dtype=torch.promote_types(own.dtype, torch.float32))
    for rank in range(comm.world_size):
        total.add_(received[rank])
    own.copy_(total)
    yield comm.exchange([(rank, own) for rank in peers], [(rank, parts[rank]) for rank in peers])


def halving_all_reduce(tensor: torch.Tensor, comm: Communicator) -> Communication:
    """Sum `tensor` over all ranks, in place, in about 2 log2 N steps: recursive halving, then doubling.

    In each step of the halving, two ranks exchange halves of their current range and add. The doubling returns the sums
    in the reverse order. Ranks beyond the largest power of two first send their tensor to another rank and receive the
    sum at the end. The sum of each element is completed on one rank, so the result is bit-identical on all ranks. The
    additions form a tree, and narrow dtypes are rounded in every step. Thakur, Rabenseifner, Gropp, "Optimization of
    collective communication operations in MPICH" (2005).

    Args:
        tensor: [numel] of any floating dtype; changed in place.
        comm: The group.
    """
    core = 1 << (comm.world_size.bit_length() - 1)  # number of ranks in the recursion
    excess = comm.world_size - core
    folds_with = comm.rank + core if comm.rank < excess else comm.rank - core if comm.rank >= core else None
    if excess:
        yield from _give(tensor, comm, folds_with, is_giver=comm.rank >= core, adds=True)
    held, steps = tensor, []
    for distance in _halves(core):
        if comm.rank >= core:
            yield comm.exchange([], [])
            continue
        peer, middle = comm.rank ^ distance, held.numel() // 2
        kept, given = (held[:middle], held[middle:]) if comm.rank < peer else (held[middle:], held[:middle])
        incoming = torch.empty_like(kept)
        yield comm.exchange([(peer, given)], [(peer, incoming)])
        kept.add_(incoming)
        steps.append((peer, kept, given))
        held = kept
    for _ in _halves(core):
        if comm.rank >= core:
            yield comm.exchange([], [])
            continue
        peer, kept, given = steps.pop()
        yield comm.exchange([(peer, kept)], [(peer, given)])
    if excess:
        yield from _give(tensor, comm, folds_with, is_giver=comm.rank < excess, adds=False)


def _halves(core: int) -> list[int]:
    return [core >> k for k in range(1, core.bit_length())]


def _give(tensor: torch.Tensor, comm: Communicator, peer: int | None, *, is_giver: bool, adds: bool) -> Communication:
    """Send `tensor` from the giver of a pair to its peer, which adds or copies it; no-op without a peer."""
    if peer is None:
        yield comm.exchange([], [])
    elif is_giver:
        yield comm.exchange([(peer, tensor)], [])
    else:
        incoming = torch.empty_like(tensor) if adds else tensor
        yield comm.exchange([], [(peer, incoming)])
        if adds:
            tensor.add_(incoming)
