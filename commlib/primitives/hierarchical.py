"""Communication in two levels: in full precision inside a node, in any way across nodes."""

from __future__ import annotations

from collections.abc import Callable

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

    Attributes:
        begin: Where this rank's stretch begins in the bucket.
        count: Its elements; 0 where a small bucket does not reach that far.
        owed: [numel] fp32, or None: what is added to this rank's values once (what a change of the plan left).
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, local: Communicator) -> None:
        self.chunk = -(-numel // (local.world_size * _CHUNK_STEP)) * _CHUNK_STEP
        self.begin = min(local.rank * self.chunk, numel)
        self.count = min(self.chunk, numel - self.begin)
        self.padded = torch.zeros(local.world_size * self.chunk, dtype=dtype, device=device)
        self.received = torch.zeros_like(self.padded)
        self.sum = torch.zeros(self.chunk, dtype=torch.promote_types(dtype, torch.float32), device=device)
        self.owed: torch.Tensor | None = None


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
    stage.padded[: tensor.numel()] = tensor
    yield local.all_to_all(stage.received, stage.padded)
    first, *others = stage.received.view(local.world_size, -1)
    stage.sum.copy_(first)
    for other in others:
        stage.sum.add_(other)
    yield from across(stage.sum[: stage.count])
    own = stage.received[: stage.chunk].copy_(stage.sum)
    yield local.all_gather(stage.padded, own)
    tensor.copy_(stage.padded[: tensor.numel()])
