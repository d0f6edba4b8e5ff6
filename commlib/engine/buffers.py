"""Buffers (batch-norm statistics and the like): rank 0's are copied to all ranks with every synchronised backward.

DDP copies them before the next forward and waits for it. Here they travel behind the last gradients, so that a forward
never communicates: evaluation may run on one rank alone, and sees the same buffers on all of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from commlib.engine.scheduler import Task
from commlib.primitives.replicate import broadcast_bytes, split_bytes
from commlib.transport.base import Communication, Communicator


class BufferSync:
    """The task of a round that carries the buffers.

    Args:
        buffers: Returns the model's buffers, in the same order on all ranks.
        comm: The group.
    """

    def __init__(self, buffers: Callable[[], list[torch.Tensor]], comm: Communicator) -> None:
        self._buffers = buffers
        self._comm = comm
        self._received: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.source = 0

    def task(self) -> Task:
        """Return the task of one round; ready once backward has ended."""
        return Task(lambda: "the buffers", self._communicate)

    def _communicate(self) -> Communication:
        self._received = []
        for tensors, data in broadcast_bytes(self._buffers()):
            yield self._comm.broadcast(data, self.source)
            self._received += zip(tensors, split_bytes(data, tensors), strict=True)

    def publish(self) -> None:
        """Write what came into the buffers.

        Only where it differs, and without a new version of the tensor: another backward through the same graph
        (`retain_graph=True`) must go on, and batch norm's does not read its running statistics.
        """
        if self._comm.rank != self.source:
            for buffer, received in self._received:
                if not torch.equal(buffer, received):
                    buffer.data.copy_(received)
        self._received = []
