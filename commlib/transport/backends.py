"""torch's backend objects, their works and their shutdown; not in the transport, so that a finalizer can hold them."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # a separate class before Python 3.11
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch.distributed.nn.functional  # noqa: F401 (see [Note: exit])
from torch.distributed import distributed_c10d as c10d

from commlib import locks
from commlib.transport.base import AllToAll, EndedError, Exchange, Request, Work
from commlib.transport.lifelines import Lifelines, Peer, Word
from commlib.transport.point_to_point import GlooExchanges, close_connections, is_better_exchanged

T = TypeVar("T")

#: How long works and exchanges may take to end when their connection ends, in seconds.
_DRAIN_S = 3.0
#: How long works with a killed peer may continue, as its last messages may still be in flight, in seconds.
_MERCY_S = 0.3
#: How long works may take to end after their connections were closed, in seconds.
_STUCK_S = 0.3
#: The length of one wait for a Gloo work, between checks whether it was abandoned.
_SLICE = timedelta(seconds=0.1)


class _Done:
    """A work that is already complete."""

    def wait(self) -> None: ...

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        callback()


DONE: Work = _Done()


class _Failed:
    """Takes the place of a failed torch `Work`, which holds sockets and a thread as long as the error's traceback."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        raise self._error

    def get_future(self) -> Future[None]:
        future: Future[None] = Future()
        future.set_exception(self._error)
        return future


class TorchWork:
    """A torch `Work` with completion callbacks that can be abandoned.

    [Note: stuck works] If a connection closes while Gloo is receiving a message, the thread that waits for the message
    is not woken before the backend's timeout. Gloo works are therefore waited for in slices. Works that have not ended
    soon after their connections were closed are abandoned: they count as failed. The backend's destructor would wait
    for them, so it is called once they have ended, when another connection ends.

    Args:
        work: torch's work, or an `ExchangeWork`.
        connection: The connection that it runs on.
        partners: The transport's ranks that it exchanges data with.
    """

    def __init__(self, work: Any, connection: Connection, partners: Sequence[int]) -> None:
        self.partners = partners
        self.is_abandoned = False
        self._work: Any = work
        self._connection = connection
        self._callbacks: list[Callable[[], None]] = []
        self._lock = locks.lock("work")
        self._began_s = time.monotonic()
        connection.pending[id(self)] = self

    def wait(self) -> None:
        """Wait for the data; raise the work's error, if any."""
        try:
            while not self._work.is_completed():
                with contextlib.suppress(RuntimeError, TimeoutError, FutureTimeout):
                    self._work.wait(_SLICE)
                    return
                if self.is_abandoned:
                    raise EndedError("it did not complete after its connections were closed")
            self._work.wait()  # does not block; raises the work's error, if any
        except Exception as error:
            error.after_s = time.monotonic() - self._began_s  # pyright: ignore[reportAttributeAccessIssue]
            if self._work.is_completed():
                self._work = _Failed(error)
            raise
        finally:
            self._connection.pending.pop(id(self), None)

    def due_s(self, peer: Peer) -> float:
        """Return when to end the work after a partner has ended; never if it left cleanly (`Lifelines.lost`)."""
        return math.inf if peer.ending == "left" else peer.ended_s + _MERCY_S

    def is_under_way(self) -> bool:
        """Return whether it has neither ended nor been abandoned."""
        return not (self.is_abandoned or self._work.is_completed())

    def is_stuck(self) -> bool:
        """Return whether it was abandoned and has still not ended."""
        return self.is_abandoned and not self._work.is_completed()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the work has ended."""
        with self._lock:
            self._callbacks.append(callback)
        self._work.get_future().add_done_callback(lambda _: self._call(callback))
        if self.is_abandoned:
            self._call(callback)

    def abandon(self) -> None:
        """Mark the work as failed and call its callbacks."""
        self.is_abandoned = True
        self._connection.abandoned.append(self)
        for callback in list(self._callbacks):
            self._call(callback)

    def _call(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if callback not in self._callbacks:
                return
            self._callbacks.remove(callback)
        callback()


class Connection:
    """One Gloo backend. `transport/nccl.py` has the subclass for NCCL.

    [Note: exit] Backend threads release tensors and call into Python when a work ends. At interpreter exit this aborts
    the process ("terminate called without an active exception"), so every connection is ended earlier: works are
    aborted and waited for, then the backend is destroyed, which joins its threads. The same applies to the user's own
    group: `destroy_process_group` ends its threads only if there are no other references to the group. So transports
    hold it weakly. The functions of `torch.distributed.nn.functional` hold, in default arguments, the group that exists
    at their first import (by torch._dynamo, in the first forward). They are therefore imported here. If this module is
    imported after the group was created, they still hold it.

    Args:
        members: The transport's ranks that take part, in the order of the backend's ranks.
    """

    is_nccl = False

    def __init__(self, members: Sequence[int]) -> None:
        self.members = members
        self.backend: Any = None
        self.exchanges: GlooExchanges | None = None  # created on first use
        self.abandoned: list[TorchWork] = []
        self.pending: dict[int, TorchWork] = {}  # works not yet waited for, by identity

    def partners(self, request: Request) -> Sequence[int]:
        """Return the transport's ranks that this rank exchanges data with in `request`."""
        if isinstance(request, Exchange):
            return [self.members[rank] for rank, tensor in (*request.sends, *request.receives) if tensor.numel()]
        return self.members

    def under_way(self) -> list[TorchWork]:
        """Return the works that have not ended."""
        return [work for work in list(self.pending.values()) if work.is_under_way()]

    def limit(self, timeout: timedelta) -> None:
        """Set the timeout of later works."""
        if self.backend is not None:
            self.backend._set_default_timeout(timeout)

    def abort(self) -> None:
        """End all works on this rank, and those at peers that notice the closed connections."""
        if self.backend is None:
            return
        close_connections(self.backend)
        with contextlib.suppress(Exception):
            self.backend.abort()

    def exchange(self, request: Exchange) -> Any:
        """Start sends and receives."""
        return self._gloo().issue(request)

    def all_to_all(self, request: AllToAll) -> Any:
        """Start an all-to-all."""
        if is_better_exchanged(request):
            return self._gloo().all_to_all(request)
        return self._all_to_all(request)

    def _all_to_all(self, request: AllToAll) -> Any:
        return self.backend.alltoall_base(request.output, request.input, [], [], options(c10d.AllToAllOptions))

    def _gloo(self) -> GlooExchanges:
        if self.exchanges is None:
            self.exchanges = GlooExchanges(self.backend)
        return self.exchanges

    def finish(self, may_go_on: Callable[[], bool]) -> None:
        """Wait for works that the host has not seen complete; on Gloo there are never any."""

    def wait_for_ends(self, deadline_s: float) -> None:
        """Wait until all works have ended or are abandoned, after `abort`. See [Note: stuck works]."""
        while self.under_way() and time.monotonic() < deadline_s:
            time.sleep(0.001)

    def end(self) -> None:
        """End all works and the backend."""
        if self.under_way():
            self.abort()
            self.wait_for_ends(time.monotonic() + _DRAIN_S)
        for work in self.under_way():
            work.abandon()
        _destroy_ended()
        has_stuck = any(work.is_stuck() for work in self.abandoned)
        if has_stuck:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.backend))  # the exit of the process does not destroy it
            _stuck.append((self.backend, list(self.abandoned)))
        if self.exchanges is not None:
            self.exchanges.end(0.0 if has_stuck else _DRAIN_S)
            self.exchanges = None
        self.pending.clear()
        self.abandoned.clear()
        self.backend = None


#: Backends with stuck works, each with one more reference, and these works. See [Note: stuck works].
_stuck: collections.deque[tuple[Any, list[TorchWork]]] = collections.deque()


def _destroy_ended() -> None:
    """Destroy the backends whose stuck works have ended in the meantime."""
    for _ in range(len(_stuck)):
        with contextlib.suppress(IndexError):  # another thread does the same
            backend, works = _stuck.popleft()
            if any(work.is_stuck() for work in works):
                _stuck.append((backend, works))
            else:
                ctypes.pythonapi.Py_DecRef(ctypes.py_object(backend))


class _Watch(Protocol):
    """The interface of `transport.watch.Watch`, which imports this module."""

    def close(self) -> None: ...


class _Island(Protocol):
    """The interface of `transport.island.Island`."""

    @property
    def failure(self) -> Exception | None: ...

    def hear(self, group: Lifelines, is_waiting: bool) -> float | None: ...

    def close(self, goodbye: Word) -> bool: ...


class Connections:
    """All connections of one transport.

    Attributes:
        by_group: The backends, by group name.
        watch: The watch, on NCCL.
        lifelines: The lifelines; None for a single rank.
        island: The island of a sharded model.
        aborted_s: When all works were ended, `time.monotonic()`.
    """

    def __init__(self) -> None:
        self.by_group: dict[str, Connection] = {}
        self.watch: _Watch | None = None
        self.lifelines: Lifelines | None = None
        self.island: _Island | None = None
        self.aborted_s: float | None = None
        self._pid = os.getpid()

    def react(self, lifelines: Lifelines) -> float | None:
        """End works that cannot complete; return the seconds until the next check, or None. See [Note: lifelines]."""
        under_way = [work for each in self.by_group.values() for work in each.under_way()]
        island_s = None if self.island is None else self.island.hear(lifelines, bool(under_way))
        works_s = self._end_vain(lifelines, under_way)
        return works_s if island_s is None else min(island_s, math.inf if works_s is None else works_s)

    def _end_vain(self, lifelines: Lifelines, under_way: Sequence[TorchWork]) -> float | None:
        if not under_way:
            return None
        if self.aborted_s is None:
            due_s = self._due_s(lifelines, under_way)
            if due_s > time.monotonic():
                return None if due_s == math.inf else due_s - time.monotonic()
            self.abort()
        assert self.aborted_s is not None
        left_s = self.aborted_s + _STUCK_S - time.monotonic()
        if left_s > 0:
            return left_s
        for work in under_way:
            work.abandon()
        return None

    def _due_s(self, lifelines: Lifelines, under_way: Sequence[TorchWork]) -> float:
        """Return when to end these works: never, if the peers are alive."""
        if lifelines.has_broken:
            return 0.0
        ended = [(rank, peer) for rank, peer in lifelines.peers.items() if peer.ending is not None]
        due = (work.due_s(peer) for rank, peer in ended for work in under_way if rank in work.partners)
        return min(due, default=math.inf)

    def abort(self) -> None:
        """End all works."""
        self.aborted_s = self.aborted_s or time.monotonic()
        for connection in self.by_group.values():
            connection.abort()
        if self.lifelines is not None:
            self.lifelines.ring()  # so that stuck works are abandoned later

    def wait_for_ends(self) -> None:
        """Wait until all works of all groups have ended or are abandoned, after `abort`."""
        deadline_s = time.monotonic() + _DRAIN_S
        for connection in self.by_group.values():
            connection.wait_for_ends(deadline_s)

    def _are_peers_well(self) -> bool:
        return self.lifelines is None or not (self.lifelines.has_broken or self.lifelines.lost())

    def end(self, goodbye: Word | None = None) -> None:
        """Send a goodbye and end everything.

        Args:
            goodbye: The goodbye; None selects it by whether an exception ends the process.
        """
        if os.getpid() != self._pid:  # a forked child holds copies; its parent owns the works and connections
            return
        failed = goodbye is None and getattr(sys, "last_value", None) is not None
        goodbye = goodbye or (Word.FAILED if failed else Word.LEFT)
        if self.watch is not None:
            self.watch.close()
        if goodbye is Word.LEFT and self.aborted_s is None:
            for connection in self.by_group.values():
                connection.finish(self._are_peers_well)
        if self.island is not None and self.island.close(goodbye) and self.lifelines is not None:
            self.lifelines.say(Word.ELSEWHERE)
        if self.lifelines is not None:
            self.lifelines.close(goodbye)
        for connection in self.by_group.values():
            connection.end()


@functools.cache
def options(cls: type, **fields: Any) -> Any:
    """Return the options of a collective that runs on the backend's own thread or stream; must not be modified."""
    made = cls()
    for name, value in fields.items():
        setattr(made, name, value)
    made.asyncOp = True
    return made


def attend(make: Callable[[], T], check: Callable[[], None]) -> T:
    """Run `make`, which may block without a timeout, in a thread and return its result; `check` may raise meanwhile."""
    made: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            made.append(make())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="commlib-set-up", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.02)
        if thread.is_alive():
            check()
    if failed:
        raise failed[0]
    return made[0]


def place_of(thread: int) -> str:
    """Return the Python function and line that a thread (by its identifier) is executing, for error messages."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "a thread that has ended"
    return f"{frame.f_code.co_name}, {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
