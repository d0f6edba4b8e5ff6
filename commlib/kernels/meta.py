"""The codecs on `meta` tensors: arguments are checked, nothing is computed, and the work is reported.

A simulator listens (`reporting`) and computes the cost of the work. The executors are meta_codecs.py and
meta_sparse.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

import torch

from commlib.kernels.checks import Feedback

META = torch.device("meta")

#: The codec id in reports of sparse codec kernels.
SPARSE = -1


@dataclass(frozen=True, slots=True)
class Kernel:
    """A call of a codec kernel.

    Attributes:
        name: The function's name.
        codec: The block codec's id, or `SPARSE`.
        nbytes: Bytes read and written, each counted once: values, payloads and residual.
    """

    name: str
    codec: int
    nbytes: int


_listeners: list[Callable[[Kernel], None]] = []
_repeaters: list[Callable[[Hashable, Callable[[], object], int], None]] = []


@contextlib.contextmanager
def reporting(listener: Callable[[Kernel], None]) -> Iterator[None]:
    """Call `listener` with every kernel called on meta tensors within the context, in this process."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextlib.contextmanager
def repeating(repeater: Callable[[Hashable, Callable[[], object], int], None]) -> Iterator[None]:
    """Pass the arguments of `repeated` to `repeater` within the context."""
    _repeaters.append(repeater)
    try:
        yield
    finally:
        _repeaters.remove(repeater)


def repeated(work: Callable[[], object], *key: Hashable, times: int = 1) -> None:
    """Run work on meta tensors `times` times. The work must have no result and be the same for equal keys.

    A simulator runs it once per key and then counts the recorded result.
    """
    if _repeaters:
        _repeaters[-1](key, work, times)
    else:
        for _ in range(times):
            work()


def of_feedback(feedback: Feedback | None) -> int:
    """Return the number of bytes read and written for the residual."""
    return 0 if feedback is None else 2 * feedback.residual.nbytes


def report(name: str, codec: int, nbytes: int) -> None:
    """Report a call of a kernel to all listeners."""
    for listener in _listeners:
        listener(Kernel(name, codec, nbytes))
