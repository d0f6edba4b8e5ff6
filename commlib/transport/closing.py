"""Ends the communication of models that are dropped without `unwrap`, or still there when the interpreter exits.

[Note: closing] The collector runs on any thread, between any two lines: within a lock, and on threads that an ending
joins. To end communication takes locks, joins threads and waits for the network. Done by a finalizer, it would wait for
what it has interrupted. So a finalizer here does one thing: it puts the ending into a `queue.SimpleQueue`, whose `put`
is made for this (in C, it waits for nothing and may interrupt itself). No other finalizer is in commlib: no `__del__`,
no `weakref.finalize`, no weak reference with a callback (`tests/unit/test_finalizers.py`).

*Who ends.* One thread per process, the closing thread, takes endings from the queue, one after the other, in the order
in which they came. Whoever ends something in the program (`unwrap`, a set-up that fails) detaches the finalizer and
does the work itself.

*Lifetime.* The thread is started when the first object is watched, which is in `wrap`, and ends when none is watched
any more: told so by the call that detached the last one, which waits for it, or by itself after the last ending. It is
a daemon. A finalizer never starts or ends it. It cannot be missing where it is needed: an object that is watched has
it.

*Draining.* `drain` waits until all is done that was in the queue before, and what came of it (a model that is forgotten
frees its communicators, whose endings follow), and for the thread, if nothing is watched any more. `wrap` does so
first, so that what was dropped is gone before new connections are made; `unwrap` does so last, so that the last one
leaves no thread; and so does the exit. Called on the closing thread it does nothing.

*Deadline.* An ending may hang, in the backend of a device that does not answer. Once one has taken `LIMIT_S`, whoever
drains logs its name, leaves the thread behind and goes on. The next object that is watched gets a new thread, which
takes over the queue. No other call starts one, as `unwrap` may come at the exit.

*Exit.* No thread can be started then (Python 3.12), but the closing thread, where there is something to end, is there.
A function that was registered with `atexit` when the first object was watched detaches all finalizers, puts their
endings into the queue, the latest first, and drains it. `weakref.finalize` has such a function of its own, which runs
after this one or before, depending on who else in the process has used it first. It leaves ours out: their `atexit` is
False.

*Fork.* A child has its parent's objects, and none of its threads. What the parent watched is forgotten there, so
nothing is drained, and finalizers of the parent's objects put into a queue that nobody reads. The first object that the
child itself watches starts a thread of its own. The lock here is free in a child (`[Note: locks]` in `locks.py`).
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

#: How long one ending may take, in seconds; its parts have limits of their own, such as 30 s for what NCCL has to send.
LIMIT_S = 60.0
#: How long a thread that has nothing left to do may take to end, in seconds.
_IDLE_S = 5.0
#: How often whoever drains looks how long the ending under way has taken, in seconds.
_LOOK_S = 1.0


class _Ending(NamedTuple):
    """What the queue holds."""

    number: int
    what: str
    end: Callable[[], object]


class _Mark:
    """What `drain` puts into the queue and waits for.

    Attributes:
        has_passed: Set when everything before it is done, and what came of that.
        num_done: How many endings were done when it was put there.
    """

    def __init__(self, num_done: int) -> None:
        self.has_passed = threading.Event()
        self.num_done = num_done


class _Watched(NamedTuple):
    """An object that is watched."""

    finalize: weakref.finalize[Any, Any]
    ending: _Ending
    is_ended_at_exit: bool


class Finalizer:
    """Has something ended when its owner is collected, or at the interpreter's exit, unless it was ended before.

    Args:
        owner: What is watched.
        end: What is to be done, once, on the closing thread. It must not hold the owner.
        what: Names what ends, in the warning that it did not.
        is_ended_at_exit: Whether it is to be ended at the exit, too.
    """

    def __init__(self, owner: object, end: Callable[[], object], what: str, *, is_ended_at_exit: bool = True) -> None:
        self._number = _closing.watch(owner, end, what, is_ended_at_exit)

    def detach(self) -> bool:
        """Leave the ending to the caller; return whether it is still to be done.

        The last one ends the closing thread, and waits for it.
        """
        return _closing.detach(self._number)


class _Closing:
    """What is watched in this process, and the closing thread, while there is one; see [Note: closing]."""

    def __init__(self) -> None:
        self._lock = locks.lock("closing", is_of_process=True)
        self._numbers = itertools.count()
        self._awaits_exit = False
        self.forked()

    def forked(self) -> None:
        """Begin with nothing, as in a forked child."""
        self._watched: dict[int, _Watched] = {}
        self._queue: queue.SimpleQueue[_Ending | _Mark | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None  # the one that reads the queue
        self._last: threading.Thread | None = None  # the last one that was told to end
        self._num_done = 0
        self._under_way: tuple[int, str, float] | None = None  # what the thread is ending, and since when

    def watch(self, owner: object, end: Callable[[], object], what: str, is_ended_at_exit: bool) -> int:
        """Watch an object; return the number by which it can be detached."""
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
        """Watch one object fewer; tell the thread to end if that was the last one. The lock is held."""
        self._watched.pop(number, None)
        if not self._watched and self._thread is not None:
            self._queue.put(None)
            self._last, self._thread, self._queue = self._thread, None, queue.SimpleQueue()

    def _join_last(self) -> None:
        last = self._last
        if last is not None and last is not threading.current_thread():
            last.join(_IDLE_S)

    def _run(self, endings: queue.SimpleQueue[_Ending | _Mark | None]) -> None:
        """Do endings as they come. The body of the thread."""
        while (item := endings.get()) is not None:
            if isinstance(item, _Mark):
                self._pass(item)
                continue
            number, self._under_way = item.number, (item.number, item.what, time.monotonic())
            try:
                item.end()
            except BaseException:
                _log.exception("%s, which was dropped without commlib.unwrap, did not end well", item.what)
            del item  # an idle thread must not keep anything alive
            with self._lock:
                if self._thread is not threading.current_thread():  # it was left behind
                    return
                self._under_way = None
                self._num_done += 1
                self._forget(number)  # which may tell this thread to end; what comes before that word is still done

    def _pass(self, mark: _Mark) -> None:
        """Say that all before a mark is done, or put it last again: behind what has come of that."""
        with self._lock:
            if self._thread is threading.current_thread() and self._num_done > mark.num_done:
                mark.num_done = self._num_done
                self._queue.put(mark)
            else:
                mark.has_passed.set()

    def drain(self) -> None:
        """Wait until all endings have been done that were in the queue before; if it was the last, for the thread."""
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
        """Return how long what is being ended may still take, in seconds."""
        under_way = self._under_way
        return LIMIT_S if under_way is None else max(0.0, under_way[2] + LIMIT_S - time.monotonic())

    def _leave_behind(self, thread: threading.Thread) -> None:
        """Go on without the thread, if what it is ending has taken too long."""
        with self._lock:
            under_way = self._under_way
            if self._thread is not thread or under_way is None or self._left_s() > 0:
                return
            self._thread = None
            self._forget(under_way[0])
        _log.warning("%s did not end within %g s; it is left behind", under_way[1], LIMIT_S)

    def _exit(self) -> None:
        """End all that is watched, at the interpreter's exit."""
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
            _log.warning("at exit these did not end: %s", ", ".join(left))


_closing = _Closing()
drain = _closing.drain
os.register_at_fork(after_in_child=_closing.forked)
