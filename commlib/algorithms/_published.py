"""Tensors in one buffer of bytes, and copies of them that other ranks may read at any time."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence

import torch

_ALIGNMENT = 16


class Layout:
    """Where tensors of any shapes and dtypes lie in one buffer of bytes in host memory.

    Args:
        tensors: What lies there.
        dtype: That of all of them in the buffer, where they follow one another without gaps; None for each its own.

    Attributes:
        nbytes: The buffer's size.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> None:
        dtypes = [dtype or tensor.dtype for tensor in tensors]
        self._kinds = [
            (each.shape, kind, each.numel() * kind.itemsize) for each, kind in zip(tensors, dtypes, strict=True)
        ]
        alignment = _ALIGNMENT if dtype is None else dtype.itemsize
        sizes = [-(-nbytes // alignment) * alignment for _, _, nbytes in self._kinds]
        self._offsets = [0, *itertools.accumulate(sizes)]
        self.nbytes = self._offsets[-1]

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors that lie in `buffer` [nbytes] uint8, contiguous each."""
        return [
            buffer[offset : offset + nbytes].view(dtype).view(shape)
            for offset, (shape, dtype, nbytes) in zip(self._offsets, self._kinds, strict=False)
        ]


class Copy:
    """A buffer, the tensors in it, and who holds it.

    Attributes:
        buffer: [nbytes] uint8.
        tensors: What lies in it.
        number: The step or version of its contents.
    """

    def __init__(self, layout: Layout) -> None:
        self.buffer = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cpu")
        self.tensors = layout.views(self.buffer)
        self.number = 0
        self.num_readers = 0

    @property
    def payload(self) -> memoryview:
        """The buffer's bytes, for a message."""
        return self.buffer.numpy().data

    @property
    def flat(self) -> torch.Tensor:
        """The elements of all tensors, of a layout in fp32: [nbytes / 4]."""
        return self.buffer.view(torch.float32)


class Published:
    """The latest copy of some tensors. A reader's copy stays whole for as long as it holds it; a writer never waits.

    There are as many buffers as there were readers of different copies at once, and two.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.layout = Layout(tensors)
        self._lock = threading.Lock()
        self._copies = [Copy(self.layout)]
        self._latest = self._copies[0]
        self.publish(tensors, 0)

    def publish(self, tensors: Sequence[torch.Tensor], number: int) -> None:
        """Copy `tensors` and make the copy the latest."""
        with self._lock:
            free = [copy for copy in self._copies if copy is not self._latest and copy.num_readers == 0]
        copy = free[0] if free else Copy(self.layout)
        torch._foreach_copy_(copy.tensors, list(tensors))
        copy.number = number
        with self._lock:
            self._latest = copy
            if not free:
                self._copies.append(copy)

    def take(self) -> Copy:
        """Return the latest copy, which stays as it is until it is given back."""
        with self._lock:
            self._latest.num_readers += 1
            return self._latest

    def give_back(self, copy: Copy) -> None:
        """Say that a copy is not read any more."""
        with self._lock:
            copy.num_readers -= 1

    @contextlib.contextmanager
    def latest(self) -> Iterator[Copy]:
        """Hold the latest copy for the length of the block."""
        copy = self.take()
        try:
            yield copy
        finally:
            self.give_back(copy)
