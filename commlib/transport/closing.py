"""Cleanup of communication that was not ended by `unwrap`: of collected models, and at the interpreter's exit.

[Note: closing] The garbage collector can run on any thread between any two lines: while a lock is held, and on threads
that a cleanup joins. Cleanup takes locks, joins threads and waits for the network, so inside a finalizer it could
deadlock with the code that it interrupted. A finalizer here therefore does one thing: it puts the cleanup, an *ending*,
into a `queue.SimpleQueue`. Its `put` is reentrant (implemented in C, it never blocks). commlib has no other finalizers:
no `__del__`, no `weakref.finalize`, no weak reference with a callback (`tests/unit/test_finalizers.py`).

*Threads.* One thread per process, the closing thread, runs the endings from the queue in order. Code that ends
communication explicitly (`unwrap`, a failed set-up) detaches the finalizer and does the cleanup itself.

*Lifetime.* `wrap` registers objects, and the first registration starts the thread. The thread ends when no object is
registered any more: the call that detaches the last object stops it and waits for it, or it ends after the last ending.
It is a daemon. A finalizer never starts or stops it. The thread always exists while an object is registered.

*Draining.* `drain` waits until all endings in the queue are done, including those that they cause (freeing a model
frees its communicators). If no object is registered any more, it also waits for the thread. `wrap` drains first, so
that collected models are closed before it opens connections. `unwrap` drains last, so that no thread remains after the
last model. The exit drains too. Called on the closing thread, `drain` has no effect.

*Deadline.* An ending may hang in the backend of a device that does not answer. After `LIMIT_S`, a thread that drains
logs the ending's name, abandons the closing thread and continues. The next registration starts a new thread, which
takes over the queue. No other call starts one, because `unwrap` may run at the exit.

*Exit.* No thread can start at the exit (Python 3.12), but the closing thread exists if there is anything to end. The
first registration also registers an `atexit` function. It detaches all finalizers, puts their endings into the queue,
latest first, and drains it. `weakref.finalize` has its own `atexit` function, which may run before or after this one.
It skips our finalizers, because their `atexit` is False.

*Fork.* A child inherits its parent's objects but not its threads. It forgets the parent's registrations, so it drains
nothing, and finalizers of the parent's objects put into a queue that is never read. The first registration in the child
starts a new thread. The lock of this module is free in a child (`[Note: locks]` in `locks.py`).
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from commlib import locks

_log = logging.getLogger("commlib")

#: The limit for one ending, in seconds. Its steps have their own limits, such as 30 s for outstanding works on NCCL.
LIMIT_S = 60.0
#: How long an idle thread may take to end, in seconds.
_IDLE_S = 5.0
#: How often a thread that drains checks the duration of the current ending, in seconds.
_LOOK_S = 1.0


class _Ending(NamedTuple):
    """A cleanup in the queue."""

    number: int
    what: str
    end: Callable[[], object]


class _Mark:
    """An item of the queue that `drain` waits for.

    Attributes:
        has_passed: Set when all earlier endings are done, and those that they caused.
        num_done: The number of completed endings when it was put into the queue.
    """

    def __init__(self, num_done: int) -> None:
        self.has_passed = threading.Event()
        self.num_done = num_done


class _Watched(NamedTuple):
    """A registered object."""

    finalize: weakref.finalize[Any, Any]
    ending: _Ending
    is_ended_at_exit: bool


class Finalizer:
    """Runs a cleanup when its owner is collected, or at the interpreter's exit, unless it is detached first.

    Args:
        owner: The object to register.
        end: The cleanup, called once, on the closing thread. It must not hold a reference to the owner.
        what: The name of the cleaned-up object in warnings.
        is_ended_at_exit: Whether the cleanup also runs at the exit.
    """

    def __init__(self, owner: object, end: Callable[[], object], what: str, *, is_ended_at_exit: bool = True) -> None:
        self._number = _closing.watch(owner, end, what, is_ended_at_exit)

    def detach(self) -> bool:
        """Leave the cleanup to the caller; return whether it is still pending.

        The call for the last registered object stops the closing thread and waits for it.
        """
        return _closing.detach(self._number)


class _Closing:
    """The registered objects of this process and its closing thread, if any; see [Note: closing]."""

    def __init__(self) -> None:
        self._lock = locks.lock("closing", is_of_process=True)
        self._numbers = itertools.count()
        self._awaits_exit = False
        self.forked()

    def forked(self) -> None:
        """Reset to no registrations, as in a forked child."""
        self._watched: dict[int, _Watched] = {}
        self._queue: queue.SimpleQueue[_Ending | _Mark | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None  # the thread that reads the queue
        self._last: threading.Thread | None = None  # the last thread that was told to end
        self._num_done = 0
        self._under_way: tuple[int, str, float] | None = None  # the current ending, and when it began

    def watch(self, owner: object, end: Callable[[], object], what: str, is_ended_at_exit: bool) -> int:
        """Register an object; return the number for `detach`."""
        with self._lock:
            if self._thread is None:
                self._under_way = None
                thread = threading.Thread(target=self._run, args=(self._queue,), name="commlib-closing", daemon=True)
                thread.start()
                self._thread = thread
            if not self._awaits_exit:
                self._awaits_exit = True
                atexit.register(self._exit)
            ending = _Ending(next(self._numbers), what, end)
            finalize = weakref.finalize(owner, self._queue.put, ending)
            finalize.atexit = False
            self._watched[ending.number] = _Watched(finalize, ending, is_ended_at_exit)
            return ending.number

    def detach(self, number: int) -> bool:
        """See `Finalizer.detach`."""
        with self._lock:
            watched = self._watched.get(number)
            if watched is None or watched.finalize.detach() is None:
                return False
            self._forget(number)
            is_last = not self._watched
        if is_last:
            self._join_last()
        return True

    def _forget(self, number: int) -> None:
        """Remove a registration; tell the thread to end if it was the last one. The lock is held."""
        self._watched.pop(number, None)
        if not self._watched and self._thread is not None:
            self._queue.put(None)
            self._last, self._thread, self._queue = self._thread, None, queue.SimpleQueue()

    def _join_last(self) -> None:
        last = self._last
        if last is not None and last is not threading.current_thread():
            last.join(_IDLE_S)

    def _run(self, endings: queue.SimpleQueue[_Ending | _Mark | None]) -> None:
        """Run the endings in the queue. The body of the thread."""
        while (item := endings.get()) is not None:
            if isinstance(item, _Mark):
                self._pass(item)
                continue
            number, self._under_way = item.number, (item.number, item.what, time.monotonic())
            try:
                item.end()
            except BaseException:
                _log.exception("ending %s, which was dropped without commlib.unwrap, failed", item.what)
            del item  # an idle thread must not keep anything alive
            with self._lock:
                if self._thread is not threading.current_thread():  # this thread was abandoned
                    return
                self._under_way = None
                self._num_done += 1
                self._forget(number)  # this may tell the thread to end; earlier items of the queue are still processed

    def _pass(self, mark: _Mark) -> None:
        """Complete a mark, or requeue it behind the endings that earlier endings caused."""
        with self._lock:
            if self._thread is threading.current_thread() and self._num_done > mark.num_done:
                mark.num_done = self._num_done
                self._queue.put(mark)
            else:
                mark.has_passed.set()

    def drain(self) -> None:
        """Wait for all endings in the queue, and for the thread if no object is registered any more."""
        with self._lock:
            thread, mark = self._thread, _Mark(self._num_done)
            if thread is threading.current_thread():
                return
            if thread is not None:
                self._queue.put(mark)
        while thread is not None and self._thread is thread and not mark.has_passed.wait(min(self._left_s(), _LOOK_S)):
            self._leave_behind(thread)
        if thread is None or self._thread is not thread:
            self._join_last()

    def _left_s(self) -> float:
        """Return the remaining time of the current ending, in seconds."""
        under_way = self._under_way
        return LIMIT_S if under_way is None else max(0.0, under_way[2] + LIMIT_S - time.monotonic())

    def _leave_behind(self, thread: threading.Thread) -> None:
        """Abandon the thread if its current ending has exceeded the limit."""
        with self._lock:
            under_way = self._under_way
            if self._thread is not thread or under_way is None or self._left_s() > 0:
                return
            self._thread = None
            self._forget(under_way[0])
        _log.warning("%s did not end within %g s; it is abandoned", under_way[1], LIMIT_S)

    def _exit(self) -> None:
        """End all registered objects, at the interpreter's exit."""
        with self._lock:
            for number, (finalize, ending, is_ended_at_exit) in reversed(self._watched.copy().items()):
                if finalize.detach() is None:
                    continue
                if is_ended_at_exit:
                    self._queue.put(ending)
                else:
                    self._forget(number)
        self.drain()
        left = [watched.ending.what for watched in self._watched.copy().values()]
        if left:
            _log.warning("these had not ended at exit: %s", ", ".join(left))


_closing = _Closing()
drain = _closing.drain
os.register_at_fork(after_in_child=_closing.forked)
