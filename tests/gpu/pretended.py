"""Simulated ranks: a transport on one device whose collectives take time, as a network's do.

The data of the other ranks is computed from this rank's, by operations that round identically on every device. On CUDA
a collective runs on a separate stream, in order, after a delay. Until then its outputs hold bytes that no correct
result has, so that code which does not wait for it computes with those.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commlib.transport.base import AllGather, AllReduce, AllToAll, Broadcast, Exchange, Request, Work
from commlib.transport.simulated import SimulatedTransport

NUM_RANKS = 4
#: The factor from our numbers to those of each simulated rank: powers of two, so that products are exact.
_FACTORS = (1.0, 0.5, -0.25, 2.0)
_DELAYS = (200_000, 0, 1_000_000, 50_000, 3_000_000)  # clock cycles
_POISON = 0xCB


class PretendedTransport(SimulatedTransport):
    """Rank 0 of NUM_RANKS.

    Args:
        device: Where the tensors are.
        delays: How long collectives take, in turns, in clock cycles of the device.
    """

    stands_for_all = True

    def __init__(self, device: torch.device, delays: Sequence[int] = _DELAYS) -> None:
        super().__init__(0, NUM_RANKS)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._delays = itertools.cycle(delays)
        self.num_issued = 0

    def issue(self, request: Request) -> Work:
        """Begin a collective; its inputs are copied now, its outputs are poisoned now and filled later."""
        if request.size == 1 or request.is_empty():
            return super().issue(request)
        self.bytes_sent += request.wire_bytes()
        self.num_issued += 1
        if self._stream is None:
            carry_out(request, lambda: None)
            return super().issue(request)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            carry_out(request, lambda: torch.cuda._sleep(next(self._delays)))
            return StreamWork(self._stream.record_event(), request)


class StreamWork:
    """A collective on a stream: a wait for it is the current stream's.

    Args:
        event: Recorded at its end.
        request: Kept until then, with its tensors.
    """

    def __init__(self, event: Any, request: Request) -> None:
        self._event = event
        self._request: Request | None = request

    def wait(self) -> None:
        """Make the current stream wait."""
        torch.cuda.current_stream().wait_event(self._event)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Raise: no code asks for the end time of a work on CUDA."""
        raise NotImplementedError("the host does not wait for works on a stream")


def carry_out(request: Request, delay: Callable[[], None]) -> None:
    """Run a collective on the current stream, with `delay` between reading the inputs and writing the outputs."""
    results = list(_results(request))
    for tensor, _ in results:
        tensor.reshape(-1).view(torch.uint8).fill_(_POISON)  # of tensors that lie in one piece, as a request's do
    delay()
    for tensor, result in results:
        tensor.copy_(result)


def _results(request: Request) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each output with its expected contents."""
    match request:
        case AllReduce(tensor=tensor, op="sum"):
            yield tensor, _sum(tensor, request.size)
        case AllReduce(tensor=tensor):
            yield tensor, tensor.clone()
        case AllGather(output=output, input=input):
            yield output, input.repeat(request.size)
        case AllToAll(output=output, input=input):
            yield output, input[: input.numel() // request.size].repeat(request.size)
        case Exchange(sends=sends, receives=receives):
            sent = [tensor.clone() for _, tensor in sends]
            for idx, (_, tensor) in enumerate(receives):
                yield tensor, sent[idx % len(sent)]
        case Broadcast():
            return
        case _:
            raise TypeError(f"{type(request).__name__} is not pretended")


def _sum(tensor: torch.Tensor, size: int) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor * size
    total = tensor * _FACTORS[0]
    for factor in _FACTORS[1:size]:
        total = total + tensor * factor
    return total


@contextlib.contextmanager
def pretended_ranks(delays: Sequence[int] = _DELAYS) -> Iterator[list[PretendedTransport]]:
    """Let models that are wrapped in the block have pretended ranks; gives the transports that were made."""
    made: list[PretendedTransport] = []

    def connect(group: Any, device: torch.device, *timeouts: timedelta) -> PretendedTransport:
        made.append(PretendedTransport(device, delays))
        return made[-1]

    module = sys.modules["commlib.wrap"]
    before = module.TorchTransport  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    module.TorchTransport = connect  # type: ignore[attr-defined]
    try:
        yield made
    finally:
        module.TorchTransport = before  # type: ignore[attr-defined]
        dist.destroy_process_group()
