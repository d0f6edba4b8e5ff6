"""Communication in two levels: in full precision inside a node, in any way across nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from commlib.transport.base import Communication, Communicator

_CHUNK_STEP = 16


class NodeStage:
    """What one bucket keeps for the level inside a node: every local rank carries a stretch of it across nodes.

    Args:
        numel: Elements of the bucket.
        dtype: Their type.
        device: Where they are.
        local: The ranks of this node.
        cuts: Where a stretch may begin, ascending from 0; None cuts the bucket into equal stretches. With cuts far
            apart the stretches differ, and all travel inside the node at the size of the largest.

    Attributes:
        begin: Where this rank's stretch begins in the bucket.
        count: Its elements; 0 where a small bucket does not reach that far.
        owed: [numel] fp32, or None: what is added to this rank's values once (what a change of the plan left).
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
        self.chunk = max(end - start for start, end in zip(starts, self._ends, strict=True))
        self.begin, self.count = starts[local.rank], self._ends[local.rank] - starts[local.rank]
        self.padded = torch.zeros(local.world_size * self.chunk, dtype=dtype, device=device)
        self.received = torch.zeros_like(self.padded)
        self.sum = torch.zeros(self.chunk, dtype=torch.promote_types(dtype, torch.float32), device=device)
        self.owed: torch.Tensor | None = None

    def spread(self, tensor: torch.Tensor) -> None:
        """Copy `tensor` [numel] into `padded`, stretch r to the chunk of local rank r."""
        for row, stretch in zip(self.padded.view(-1, self.chunk), tensor.tensor_split(self._ends[:-1]), strict=True):
            row[: stretch.numel()] = stretch

    def collect(self, tensor: torch.Tensor) -> None:
        """Copy the stretches in `padded` back into `tensor` [numel]."""
        for row, stretch in zip(self.padded.view(-1, self.chunk), tensor.tensor_split(self._ends[:-1]), strict=True):
            stretch.copy_(row[: stretch.numel()])


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

    The sum goes by all-to-all and runs in rank order, in fp32 or wider. All local ranks use the network at once.

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
    stage.spread(tensor)
    yield local.all_to_all(stage.received, stage.padded)
    first, *others = stage.received.view(local.world_size, -1)
    stage.sum.copy_(first)
    for other in others:
        stage.sum.add_(other)
    yield from across(stage.sum[: stage.count])
    own = stage.received[: stage.chunk].copy_(stage.sum)
    yield local.all_gather(stage.padded, own)
    stage.collect(tensor)
