"""Communication in two levels: in full precision inside a node, by any primitive across nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from commlib.transport.base import Communication, Communicator

_CHUNK_STEP = 16


class NodeStage:
    """Buffers of one bucket for the level inside a node. Each local rank communicates one stretch of it across nodes.

    Args:
        numel: Number of elements of the bucket.
        dtype: Type of the bucket.
        device: Device of the bucket.
        local: The ranks of this node.
        cuts: Elements at which a stretch may begin, ascending from 0; None cuts the bucket into equal stretches.

    Attributes:
        begin: First element of this rank's stretch in the bucket.
        count: Number of elements of this rank's stretch; may be 0 in a small bucket.
        sum: [count or more] fp32 or wider: the stretch, summed over the node.
        owed: [numel] fp32, or None: residuals from before a change of the bucket plan, added to this rank's values
            once.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        local: Communicator,
        cuts: Sequence[int] | None = None,
    ) -> None:
        self._ends = _stretch_ends(numel, local.world_size, cuts)
        starts = [0, *self._ends[:-1]]
        self.begin, self.count = starts[local.rank], self._ends[local.rank] - starts[local.rank]
        self._is_even = cuts is None
        # Equal stretches use an all-to-all and an all-gather, with padding at the end of the bucket. Unequal ones use
        # sends and receives.
        width = self._ends[0] if self._is_even else self.count
        self._has_padding = self._is_even and local.world_size * width > numel
        # `_padded`: the bucket with zeros at its end, if it does not divide into equal stretches. `_received`: a
        # stretch from each local rank, first of its values, then of its sum. `sum`: the sum of the own stretch.
        self._padded = torch.zeros(local.world_size * width if self._has_padding else 0, dtype=dtype, device=device)
        self._received = torch.zeros(local.world_size, width, dtype=dtype, device=device)
        self.sum = torch.zeros(width, dtype=torch.promote_types(dtype, torch.float32), device=device)
        self.owed: torch.Tensor | None = None

    def share_out(self, tensor: torch.Tensor, local: Communicator) -> Communication:
        """Reduce-scatter `tensor` [numel] in the node, in rank order: `sum` receives this rank's stretch of the sum."""
        if self._is_even:
            if self._has_padding:
                self._padded[: tensor.numel()] = tensor
            yield local.all_to_all(self._received.view(-1), self._padded if self._has_padding else tensor)
        else:
            stretches = self._stretches(tensor)
            self._received[local.rank] = stretches[local.rank]
            yield local.exchange(_to_others(stretches, local), _to_others(self._received, local))
        first, *others = self._received
        self.sum.copy_(first)
        for other in others:
            self.sum.add_(other)

    def gather(self, tensor: torch.Tensor, local: Communicator) -> Communication:
        """Replace `tensor` [numel] by the stretches in `sum` of all local ranks."""
        if self._has_padding:
            own = self._padded[: self.sum.numel()].copy_(self.sum)
            yield local.all_gather(self._received.view(-1), own)
            tensor.copy_(self._received.view(-1)[: tensor.numel()])
        elif self._is_even:
            yield local.all_gather(tensor, self._received[0].copy_(self.sum))
        else:
            own = self._received[0].copy_(self.sum)
            stretches = self._stretches(tensor)
            stretches[local.rank].copy_(own)
            yield local.exchange(_to_others([own] * local.world_size, local), _to_others(stretches, local))

    def _stretches(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        return tensor.tensor_split(self._ends[:-1])


def _to_others(tensors: Sequence[torch.Tensor] | torch.Tensor, local: Communicator) -> list[tuple[int, torch.Tensor]]:
    """Return (rank, tensor) of all other ranks, without empty tensors."""
    return [(rank, each) for rank, each in enumerate(tensors) if rank != local.rank and each.numel()]


def _stretch_ends(numel: int, num: int, cuts: Sequence[int] | None) -> list[int]:
    """Return the ends of `num` stretches: the cuts that are nearest to equal parts."""
    if cuts is None:
        chunk = -(-numel // (num * _CHUNK_STEP)) * _CHUNK_STEP
        return [min(idx * chunk, numel) for idx in range(1, num + 1)]
    allowed = [*cuts, numel]
    return [min(allowed, key=lambda cut: abs(cut - idx * numel / num)) for idx in range(1, num)] + [numel]


def hierarchical(
    tensor: torch.Tensor,
    stage: NodeStage,
    local: Communicator,
    across: Callable[[torch.Tensor], Communication],
    *,
    scale: float = 1.0,
) -> Communication:
    """Reduce-scatter `tensor` inside the node, communicate each local rank's stretch across nodes, all-gather.

    The sum is computed in rank order, in fp32 or wider. All local ranks use the network at the same time.

    Args:
        tensor: [numel] of the bucket's dtype; changed in place.
        stage: The bucket's buffers.
        local: The ranks of this node.
        across: Communicates a stretch [count] in place.
        scale: Loss scale of the tensor.
    """
    if stage.owed is not None:
        tensor.add_(stage.owed, alpha=scale)
        stage.owed = None
    yield from stage.share_out(tensor, local)
    yield from across(stage.sum[: stage.count])
    yield from stage.gather(tensor, local)
