"""Staging of device tensors in host memory for a backend without device support: CUDA tensors on Gloo.

    issue   the inputs are copied into pinned buffers on the current stream, and the host waits for the copies;
            the backend receives a request on the buffers
    wait    the host waits for the backend, then starts the copies of the outputs on the current stream

The current stream can use the data, as after a wait on NCCL. The host waits for the network, so nothing overlaps. This
mode serves several ranks on one GPU, machines without NCCL, and tests. Pinned buffers come from torch's cache, which
reuses a buffer only after its copies have completed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from commlib.transport.base import AllGather, AllReduce, AllToAll, Broadcast, Exchange, Request, Work

#: Device tensors, each with its buffer.
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class Staging:
    """Converts requests on device tensors to requests on host buffers.

    Args:
        device: The device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def is_staged(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has to be staged."""
        return tensor.device.type != "cpu"

    def buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a pinned host buffer of a tensor's shape and dtype."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)

    def finish_copies(self) -> None:
        """Wait for the copies on the current stream."""
        torch.cuda.current_stream(self.device).synchronize()

    def stage(self, request: Request, rank: int) -> Staged:
        """Return a request that the backend can execute, with its inputs copied.

        Args:
            request: On device tensors; host tensors are used directly.
            rank: This rank within the request's group.

        Raises:
            TypeError: Not a request of `transport.base`.
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
    """A staged request in progress.

    Attributes:
        request: The request for the backend.
        has_copied: Whether copies into buffers have started.
    """

    def __init__(self, staging: Staging, request: Request) -> None:
        self.request = request
        self.has_copied = False
        self._staging = staging
        self._outputs: Pairs = []

    def outgoing(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the buffer of an input, after starting the copy into it."""
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
        """Return the buffer of a tensor that is both input and output."""
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
        """Wait on the host, then copy the outputs back on the current stream; raise the request's error, if any."""
        self._work.wait()
        self._staged.deliver()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the request has completed or failed."""
        self._work.add_done_callback(callback)


def staging_of(device: torch.device) -> Staging | None:
    """Return the staging of tensors on `device` for Gloo; None if Gloo can use them directly."""
    return None if device.type == "cpu" else Staging(device)
