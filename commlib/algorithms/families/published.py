"""Tensors in one byte buffer, and published copies of them that other ranks can read at any time."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from commlib import locks
from commlib.algorithms.families import transfers

_ALIGNMENT = 16


class Packing:
    """The packing of tensors of any shapes and dtypes in one byte buffer in host memory.

    Args:
        tensors: The tensors.
        dtype: A common dtype in the buffer, where they are stored without gaps; None keeps each tensor's dtype.

    Attributes:
        nbytes: The buffer's size in bytes.
        is_remote: Whether the tensors are on a device, so that buffers are pinned.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> None:
        self.is_remote = transfers.are_remote(tensors)
        dtypes = [dtype or tensor.dtype for tensor in tensors]
        self._kinds = [
            (each.shape, kind, each.numel() * kind.itemsize) for each, kind in zip(tensors, dtypes, strict=True)
        ]
        alignment = _ALIGNMENT if dtype is None else dtype.itemsize
        sizes = [-(-nbytes // alignment) * alignment for _, _, nbytes in self._kinds]
        self._offsets = [0, *itertools.accumulate(sizes)]
        self.nbytes = self._offsets[-1]

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return contiguous views of the tensors in `buffer` [nbytes] uint8."""
        return [
            buffer[offset : offset + nbytes].view(dtype).view(shape)
            for offset, (shape, dtype, nbytes) in zip(self._offsets, self._kinds, strict=False)
        ]


class TensorBuffer:
    """A buffer, the tensors in it, and the number of its readers.

    Attributes:
        buffer: [nbytes] uint8.
        tensors: Views of the tensors in the buffer.
        number: The step or version of its contents.
    """

    def __init__(self, packing: Packing) -> None:
        self.buffer = transfers.host_buffer(packing.nbytes, packing.is_remote)
        self.tensors = packing.views(self.buffer)
        self.number = 0
        self.num_readers = 0
        self._is_remote = packing.is_remote
        self._copied: Any = None  # the event of the last copies from or to a device

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy tensors into it. Asynchronous from a device; call `wait` before it is read."""
        self._copied = transfers.copy(self.tensors, tensors)

    def copy_to(self, tensors: Sequence[torch.Tensor], places: Sequence[int] | None = None) -> None:
        """Copy its tensors, or those at some places, to `tensors`. Call `wait` before it changes."""
        source = self.tensors if places is None else [self.tensors[place] for place in places]
        self._copied = transfers.copy(tensors, source)

    def on_device_of(self, tensors: Sequence[torch.Tensor], places: Sequence[int]) -> list[torch.Tensor]:
        """Return the tensors at some places: copies on the device of `tensors`, or its own tensors on the host."""
        if not self._is_remote:
            return [self.tensors[place] for place in places]
        copies = [torch.empty_like(tensor) for tensor in tensors]
        self.copy_to(copies, places)
        return copies

    def wait(self) -> None:
        """Wait for copies from and to a device. Not for the training thread."""
        copied = self._copied
        if copied is not None:
            copied.synchronize()

    @property
    def payload(self) -> memoryview:
        """The buffer's bytes, for a message."""
        return self.buffer.numpy().data

    @property
    def flat(self) -> torch.Tensor:
        """The elements of all tensors [nbytes / 4], for a packing in fp32."""
        return self.buffer.view(torch.float32)


class Snapshot(TensorBuffer):
    """A copy that other threads can read.

    Attributes:
        step: The number of steps of its rank at the time of the copy.
    """

    def __init__(self, packing: Packing) -> None:
        super().__init__(packing)
        self.step = 0


class Published:
    """The latest copies of some tensors. A copy does not change while a reader holds it; a writer never waits.

    There are `depth` buffers, plus one for each older copy that is still held.

    Args:
        tensors: The tensors, copied immediately with the number 0.
        depth: Number of copies to keep; the next copy replaces the oldest.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], depth: int = 2) -> None:
        self.packing = Packing(tensors)
        self._depth = depth
        self._lock = locks.lock("published")
        self._kept: list[Snapshot] = []  # the latest comes last
        self._copies: list[Snapshot] = []  # all buffers
        self.publish(tensors, 0)

    def publish(self, tensors: Sequence[torch.Tensor], number: int, step: int = 0) -> None:
        """Publish a copy of `tensors` as the latest."""
        with self._lock:
            if len(self._kept) == self._depth:
                del self._kept[0]
            free = [copy for copy in self._copies if copy not in self._available()]
        copy = free[0] if free else Snapshot(self.packing)
        copy.fill(tensors)
        copy.number, copy.step = number, step
        with self._lock:
            self._kept.append(copy)
            if not free:
                self._copies.append(copy)

    def _available(self) -> list[Snapshot]:
        """Return the kept copies and those that are held, the latest last."""
        held = [copy for copy in self._copies if copy.num_readers > 0 and copy not in self._kept]
        return [*sorted(held, key=lambda copy: copy.number), *self._kept]

    def forget(self) -> None:
        """Drop all copies, including those that are held, so that later readers do not get them."""
        with self._lock:
            self._kept.clear()
            self._copies.clear()

    def take(self, choose: Callable[[Sequence[Snapshot]], Snapshot | None]) -> Snapshot | None:
        """Return the copy chosen from those available, the latest last, and hold it until `give_back`."""
        with self._lock:
            copy = choose(self._available())
            if copy is not None:
                copy.num_readers += 1
            return copy

    def give_back(self, copy: Snapshot) -> None:
        """Release a copy that is no longer read."""
        with self._lock:
            copy.num_readers -= 1

    @contextlib.contextmanager
    def holding(self, choose: Callable[[Sequence[Snapshot]], Snapshot | None]) -> Iterator[Snapshot | None]:
        """Hold the chosen, complete copy within a `with` block."""
        copy = self.take(choose)
        try:
            if copy is not None:
                copy.wait()
            yield copy
        finally:
            if copy is not None:
                self.give_back(copy)
