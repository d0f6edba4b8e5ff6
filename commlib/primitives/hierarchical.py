"""Communication in two levels: in full precision inside a node, in any way across nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from commlib.transport.base import Communication, Communicator

_CHUNK_STEP = 16


class NodeStage:
    """The buffers of one bucket for the level inside a node. Each local rank exchanges a stretch of it across nodes.

    Args:
        numel: Elements of the bucket.
        dtype: Their type.
        device: Where they are.
        local: The ranks of this node.
        cuts: Where a stretch may begin, ascending from 0; None cuts the bucket into equal stretches.

    Attributes:
        begin: Where this rank's stretch begins in the bucket.
        count: Its elements; 0 where a small bucket does not reach that far.
        sum: [count or more] fp32 or wider: the stretch, summed over the node.
        owed: [numel] fp32, or None: residuals from a change of the plan, added to this rank's next values.
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
        # Equal stretches go by all-to-all and all-gather, from the bucket with padding at its end; others by messages
        # of their own sizes.
        width = self._ends[0] if self._is_even else self.count
        self._has_padding = self._is_even and local.world_size * width > numel
        # The bucket's values with zeros behind them, where it does not divide into equal stretches; a stretch from each
        # local rank, first of its values, then of its sum; the own stretch's sum.
        self._padded = torch.zeros(local.world_size * width if self._has_padding else 0, dtype=dtype, device=device)
        self._received = torch.zeros(local.world_size, width, dtype=dtype, device=device)
        self.sum = torch.zeros(width, dtype=torch.promote_types(dtype, torch.float32), device=device)
        self.owed: torch.Tensor | None = None

    def share_out(self, tensor: torch.Tensor, local: Communicator) -> Communication:
        """Sum over the node, in rank order: leaves this rank's stretch of the sum of `tensor` [numel] in `sum`."""
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
        """Replace `tensor` [numel] by the `sum` of all local ranks."""
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
    """Return each other rank's tensor with its rank, but for those of no elements."""
    return [(rank, each) for rank, each in enumerate(tensors) if rank != local.rank and each.numel()]


def _stretch_ends(numel: int, num: int, cuts: Sequence[int] | None) -> list[int]:
    """Return where each of `num` stretches ends: at the cuts that are nearest to equal parts."""
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
    """Sum `tensor` inside the node, have each local rank communicate its stretch across nodes, gather the stretches.

    The sum runs in rank order, in fp32 or wider. All local ranks use the network at once.

    Args:
        tensor: [numel] Changed in place.
        stage: The bucket's buffers.
        local: The ranks of this node.
        across: Communicates a stretch [count] in place.
        scale: By which the tensor is scaled (a loss scale).
    """
    if stage.owed is not None:
        tensor.add_(stage.owed, alpha=scale)
        stage.owed = None
    yield from stage.share_out(tensor, local)
    yield from across(stage.sum[: stage.count])
    yield from stage.gather(tensor, local)
