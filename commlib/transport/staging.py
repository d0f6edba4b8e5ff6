"""Tensors of a device over a backend that knows host memory only: Gloo under CUDA tensors.

    issue   the inputs are copied into pinned buffers, on the current stream, which the host then waits for;
            the backend gets a request on the buffers
    wait    the host waits for the backend; then the outputs are copied back on the current stream, not waited for

So the data is there for whatever the current stream does next, as after a wait on NCCL, but the host waits for the
network: nothing overlaps. That is for several ranks on one GPU, for machines without NCCL, and for tests. Pinned
buffers come from torch's cache, which hands one out again only once the copies that use it have ended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from commlib.transport.base import AllGather, AllReduce, AllToAll, Broadcast, Exchange, Request, Work

#: Tensors of the device, each with its buffer.
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class Staging:
    """Makes requests on host buffers of requests on a device's tensors.

    Args:
        device: Where the tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def is_staged(self, tensor: torch.Tensor) -> bool:
        """Return whether the backend cannot take a tensor as it is."""
        return tensor.device.type != "cpu"

    def buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a host buffer of a tensor's shape and dtype, from and to which copies need no host."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)

    def finish_copies(self) -> None:
        """Wait until the copies into buffers that the current stream has been given are done."""
        torch.cuda.current_stream(self.device).synchronize()

    def stage(self, request: Request, rank: int) -> Staged:
        """Return a request as the backend can take it, its inputs copied.

        Args:
            request: On tensors of the device; one on host tensors is left as it is.
            rank: This rank within the request's group.

        Raises:
            TypeError: It is no request of `transport.base`.
        """
        staged = Staged(self, request)
        match request:
            case AllReduce(tensor=tensor):
                staged.request = dataclasses.replace(request, tensor=staged.both_ways(tensor))
            case Broadcast(tensor=tensor, source=source):
                buffer = staged.outgoing(tensor) if rank == source else staged.incoming(tensor)
                staged.request = dataclasses.replace(request, tensor=buffer)
            case AllGather(output=output, input=input) | AllToAll(output=output, input=input):
                into, of = staged.incoming(output), staged.outgoing(input)
                staged.request = dataclasses.replace(request, output=into, input=of)
            case Exchange(sends=sends, receives=receives):
                of, into = _each(staged.outgoing, sends), _each(staged.incoming, receives)
                staged.request = dataclasses.replace(request, sends=of, receives=into)
            case _:
                raise TypeError(f"{type(request).__name__} is not a request that can be staged")
        if staged.has_copied:
            self.finish_copies()
        return staged


def _each(
    move: Callable[[torch.Tensor], torch.Tensor], tensors: Sequence[tuple[int, torch.Tensor]]
) -> list[tuple[int, torch.Tensor]]:
    return [(rank, move(tensor)) for rank, tensor in tensors]


class Staged:
    """One request under way in buffers.

    Attributes:
        request: What the backend is given.
        has_copied: Whether copies into buffers have been begun.
    """

    def __init__(self, staging: Staging, request: Request) -> None:
        self.request = request
        self.has_copied = False
        self._staging = staging
        self._outputs: Pairs = []

    def outgoing(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the buffer of an input, which is being copied into it."""
        if not self._staging.is_staged(tensor):
            return tensor
        buffer = self._staging.buffer(tensor)
        buffer.copy_(tensor, non_blocking=True)
        self.has_copied = True
        return buffer

    def incoming(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the buffer of an output."""
        if not self._staging.is_staged(tensor):
            return tensor
        buffer = self._staging.buffer(tensor)
        self._outputs.append((tensor, buffer))
        return buffer

    def both_ways(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the buffer of what is input and output."""
        buffer = self.outgoing(tensor)
        if buffer is not tensor:
            self._outputs.append((tensor, buffer))
        return buffer

    def deliver(self) -> None:
        """Copy the outputs back on the current stream."""
        outputs, self._outputs = self._outputs, []
        for tensor, buffer in outputs:
            tensor.copy_(buffer, non_blocking=True)


class StagedWork:
    """The work of a staged request."""

    def __init__(self, work: Work, staged: Staged) -> None:
        self._work = work
        self._staged = staged

    def wait(self) -> None:
        """Wait on the host, and copy the outputs back on the current stream; raise what went wrong."""
        self._work.wait()
        self._staged.deliver()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the data is in the buffers, or will never be."""
        self._work.add_done_callback(callback)


def staging_of(device: torch.device) -> Staging | None:
    """Return how Gloo gets at tensors on `device`; None: as they are."""
    return None if device.type == "cpu" else Staging(device)
