"""A stand-in of torch's NCCL backend for ranks without GPUs: Gloo's collectives, waited for as NCCL's are.

`wait` returns at once, as it only makes a stream wait; a work is asked whether it has ended; `abort` ends all works,
well, as far as a stream can see. A test that reads values makes sure of the ends before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commlib.transport import nccl, ranks
from commlib.transport.point_to_point import close_connections

CALLS: list[str] = []  # of backends of this process, in order


class Kernel:
    """One collective."""

    def __init__(self, backend: Backend, work: Any) -> None:
        self._backend = backend
        self._work = work

    def wait(self) -> None:
        _waited.append(self)

    def is_completed(self) -> bool:
        # Gloo's work ends with an error when a peer is gone; a kernel goes on waiting for it.
        return self._backend.is_aborted or (self._work.is_completed() and self._work.is_success())


class Backend:
    """What `nccl.make` returns."""

    def __init__(self, store: dist.Store, rank: int, timeout: timedelta, name: str, ranks: Sequence[int]) -> None:
        self.name, self.ranks = name, list(ranks)
        self.is_aborted = False
        self._gloo = dist.ProcessGroupGloo(store, rank, len(ranks), 10 * timeout)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Kernel:
        CALLS.append(f"{self.name.rpartition('.')[2]} allreduce")
        return Kernel(self, self._gloo.allreduce(tensors, options))

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, options: Any) -> Kernel:
        CALLS.append(f"{self.name.rpartition('.')[2]} allgather")
        return Kernel(self, self._gloo._allgather_base(output, input, options))

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Kernel:
        CALLS.append(f"{self.name.rpartition('.')[2]} broadcast")
        return Kernel(self, self._gloo.broadcast(tensors, options))

    def abort(self) -> None:
        CALLS.append("abort")
        self.is_aborted = True
        close_connections(self._gloo)

    def shutdown(self) -> None:
        CALLS.append("shutdown")


_waited: list[Kernel] = []  # by "streams", the latest last


class _Mark:
    """The end of a stream that has just been made to wait for a kernel."""

    def __init__(self) -> None:
        self._kernel = _waited.pop()

    def query(self) -> bool:
        return self._kernel.is_completed()

    def wait(self) -> None: ...


@contextlib.contextmanager
def in_place_of_nccl() -> Iterator[None]:
    """Have every transport that is made in the block take the stand-in for the backend of the user's group."""
    CALLS.clear()

    def make(store: Any, rank: int, device: Any, timeout: timedelta, name: str, ranks: Sequence[int]) -> Backend:
        return Backend(store, rank, timeout, name, ranks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "kind_of_backend", lambda group, device: "nccl")
        patch.setattr(nccl, "make", make)
        patch.setattr(nccl, "_mark", lambda device: _Mark())
        yield
