"""What contracts look through: counted collectives, errors that all ranks must raise, and faults on one rank."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.contract.subjects import Training, gathered


def is_victim() -> bool:
    """Return whether this is the rank to which something happens: the last one."""
    return dist.get_rank() == dist.get_world_size() - 1


def words_of(error: BaseException | None) -> str | None:
    """Return an error as text."""
    return None if error is None else f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def raises_alike(kind: type[BaseException], *words: str) -> Iterator[None]:
    """Check that the block raises `kind` on every rank, with all `words` in its message."""
    gathered(None)  # what came before has ended on all ranks: an error here may end it where it has not
    caught: BaseException | None = None
    try:
        yield
    except BaseException as error:
        caught = error
    everyone = gathered(words_of(caught))
    assert all(everyone), f"expected {kind.__name__} on all ranks, got {everyone}"
    assert isinstance(caught, kind), f"expected {kind.__name__}, got {everyone}"
    assert all(word in str(caught) for word in words), f"expected {words} in the message: {caught}"


class Collecting:
    """A lock in whose place it is; when it is first held, what `dropped` alone holds is dropped and collected."""

    def __init__(self, lock: Any, dropped: list[Training]) -> None:
        self._lock, self._dropped = lock, dropped

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._dropped:
            self._dropped.clear()
            gc.collect()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def locked(self) -> bool:
        """Return whether it is held."""
        return self._lock.locked()


@contextlib.contextmanager
def counted(training: Training) -> Iterator[Callable[[], int]]:
    """Count the collectives on the model's communicator in the block; rounds in the background have another."""
    transport = training.engine.transport
    with mock.patch.object(transport, "issue", side_effect=transport.issue) as issue:
        yield lambda: issue.call_count


def transports(training: Training) -> list[Any]:
    """Return the communicators that the model uses."""
    engine = training.engine
    return list({id(channel.line): channel.line.transport for channel in engine.channels}.values())


class _Once:
    """Raises at its first call; passes later ones on."""

    def __init__(self, function: Callable[..., Any], error: Exception, has_raised: threading.Event) -> None:
        self._function, self._error, self._has_raised = function, error, has_raised

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._has_raised.is_set():
            self._has_raised.set()
            raise self._error
        return self._function(*args, **kwargs)


@contextlib.contextmanager
def failing_allocation() -> Iterator[None]:
    """Let the next tensor that is made in the block fail for want of memory, on one rank."""
    with contextlib.ExitStack() as stack:
        if is_victim():
            once, error = threading.Event(), MemoryError("no memory, says the test")
            for name in ("zeros", "empty"):
                stack.enter_context(mock.patch.object(torch, name, _Once(getattr(torch, name), error, once)))
        yield


@contextlib.contextmanager
def failing_collective(training: Training) -> Iterator[None]:
    """Let the next collective of the model in the block fail, on one rank."""
    with contextlib.ExitStack() as stack:
        if is_victim():
            once, error = threading.Event(), RuntimeError("the network is down, says the test")
            for transport in transports(training):
                stack.enter_context(mock.patch.object(transport, "issue", _Once(transport.issue, error, once)))
        yield
