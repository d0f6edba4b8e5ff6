"""Instruments of the contracts: counted collectives, errors that all ranks must raise, and faults on one rank."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commlib import locks
from commlib.weak import WeakMembers
from tests.contract.subjects import Training, gathered
from tests.waiting import eventually


def is_victim() -> bool:
    """Return whether this is the rank to which something happens: the last one."""
    return dist.get_rank() == dist.get_world_size() - 1


def words_of(error: BaseException | None) -> str | None:
    """Return an error as text."""
    return None if error is None else f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def raises_alike(kind: type[BaseException], *words: str) -> Iterator[None]:
    """Check that the block raises `kind` on every rank, with all `words` in its message."""
    gathered(None)  # earlier work has ended on all ranks: an error here could interrupt it
    caught: BaseException | None = None
    try:
        yield
    except BaseException as error:
        caught = error
    everyone = gathered(words_of(caught))
    assert all(everyone), f"expected {kind.__name__} on all ranks, got {everyone}"
    assert isinstance(caught, kind), f"expected {kind.__name__}, got {everyone}"
    assert all(word in str(caught) for word in words), f"expected {words} in the message: {caught}"


class Probed:
    """A wrapper of a lock that reports when it is held."""

    def __init__(self, lock: Any, held: Callable[[], None]) -> None:
        self._lock, self._held = lock, held

    def acquire(self, *args: Any, **kwargs: Any) -> bool:
        got = self._lock.acquire(*args, **kwargs)
        if got:
            self._held()
        return got

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)  # `release`, and attributes that a condition needs


class Locks:
    """The locks of commlib: records those that are held, and runs actions while one is held for the first time.

    Attributes:
        held: The names of those that were held.
        armed: Pending actions within a lock, by its name.
    """

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.armed: dict[str, Callable[[], None]] = {}

    def _is_held(self, name: str) -> None:
        self.held.add(name)
        act = self.armed.pop(name, None)
        if act is not None:
            act()

    def _probe(self, name: str, lock: Any) -> Probed:
        return Probed(lock, functools.partial(self._is_held, name))

    @contextlib.contextmanager
    def probed(self) -> Iterator[Locks]:
        """Follow the locks of the process, and all that are made in the block."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(locks, "probe", self._probe)
            for name, lock in locks.of_process.items():
                for holder, attribute in _places_of(lock):
                    patch.setattr(holder, attribute, self._probe(name, lock))
            yield self


def _places_of(lock: Any) -> Iterator[tuple[Any, str]]:
    """Yield each owner of a lock of the process, a module or an object in one, and the name of the attribute."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "commlib":
            continue
        objects = [each for each in vars(module).values() if type(each).__module__.startswith("commlib.")]
        inner = [part for each in objects for part in getattr(each, "__dict__", {}).values()]
        for holder in (module, *objects, *(part for part in inner if isinstance(part, WeakMembers))):
            for attribute, value in list(getattr(holder, "__dict__", {}).items()):
                if value is lock:
                    yield holder, attribute


def lead_back(model: Any) -> None:
    """Let a model's attributes lead back to it, so that it goes when the collector comes and not before."""
    model.__dict__["owners"] = [model]


def drop(dropped: list[Any]) -> None:
    """Let go of a model, or a training, that a list alone holds, and have it collected here and now."""
    gone = weakref.ref(getattr(dropped[0], "model", dropped[0]))
    dropped.clear()

    def is_gone() -> bool:
        gc.collect()  # does nothing while another thread collects
        return gone() is None

    assert eventually(is_gone), "something keeps a model that was dropped"


@contextlib.contextmanager
def counted(training: Training) -> Iterator[Callable[[], int]]:
    """Count the collectives on the model's communicator in the block; rounds in the background have another."""
    transport = training.engine.transport
    with mock.patch.object(transport, "issue", side_effect=transport.issue) as issue:
        yield lambda: issue.call_count


def transports(training: Training) -> list[Any]:
    """Return the communicators that the model uses."""
    engine = training.engine
    return list({id(channel.session): channel.session.transport for channel in engine.channels}.values())


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
    """Let the next allocation of a tensor in the block run out of memory, on one rank."""
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
