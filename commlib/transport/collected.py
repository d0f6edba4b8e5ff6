"""What ends the communication of an object that is collected without having been closed.

[Note: collected anywhere] The collector runs on whatever thread it happens to, between any two of its lines: within a
lock, too, and on the threads that an ending joins. An ending takes locks, joins threads and waits for works; done there
and then, it would wait for what it has interrupted. So what is called here only hands the ending over to a thread,
through a queue that takes no lock of Python's. At the interpreter's exit endings are done at once: no new thread can be
started there (Python 3.12), and nothing is interrupted.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable

_log = logging.getLogger(__name__)

#: How long the exit waits for endings that were begun before, in seconds.
_EXIT_S = 30.0
#: How long a thread that has nothing to do may take to end, in seconds.
_IDLE_S = 1.0


class Finalizer:
    """Has something ended when its owner is collected, or at the interpreter's exit, unless it was ended before.

    Args:
        owner: What is watched.
        end: What is to be done, once; it must not hold the owner. Called on a thread of its own, or at exit.
    """

    def __init__(self, owner: object, end: Callable[[], None]) -> None:
        self._reaper = _reapers.enter()
        self._finalize = weakref.finalize(owner, self._reaper.take, end)
        _reapers.await_exit()

    def detach(self) -> bool:
        """Leave the ending to the caller; return whether it is still to be done.

        The last one takes the thread with it: who has unwrapped everything finds no thread.
        """
        if self._finalize.detach() is None:
            return False
        if _reapers.leave(self._reaper):
            self._reaper.thread.join(_IDLE_S)
        return True


class _Reaper:
    """The thread that does endings; there while there is something that may have to be ended."""

    def __init__(self, leave: Callable[[_Reaper], object]) -> None:
        self.num_watched = 0
        self.is_over = False
        self.ends: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._leave = leave
        self.thread = threading.Thread(target=self._run, name="commlib-reaper", daemon=True)
        self.thread.start()

    def take(self, end: Callable[[], None]) -> None:
        """Have something ended, by the thread; after the interpreter's exit has begun, at once."""
        if self.is_over:
            end()
        else:
            self.ends.put(end)

    def _run(self) -> None:
        while (end := self.ends.get()) is not None:
            try:
                end()
            except Exception:
                _log.exception("the communication of a model that was collected did not end well")
            del end
            self._leave(self)


class _Reapers:
    """The reaper of this process, while there is one."""

    def __init__(self) -> None:
        self._current: _Reaper | None = None
        self._lock = threading.Lock()  # not taken by what the collector calls
        self._awaits_exit = False

    def enter(self) -> _Reaper:
        """Return the reaper, which has one thing more to watch."""
        with self._lock:
            if self._current is None:
                self._current = _Reaper(self.leave)
            self._current.num_watched += 1
            return self._current

    def leave(self, reaper: _Reaper) -> bool:
        """Take note that a reaper has one thing fewer to watch; the last one ends its thread. Return if that was it."""
        with self._lock:
            reaper.num_watched -= 1
            if reaper.num_watched == 0:
                reaper.ends.put(None)
                if reaper is self._current:
                    self._current = None
            return reaper.num_watched == 0

    def await_exit(self) -> None:
        """Be called at exit, before `weakref` does what it has left, now that it has registered itself."""
        if not self._awaits_exit:
            self._awaits_exit = True
            atexit.register(self._exit)

    def _exit(self) -> None:
        reaper = self._current
        if reaper is not None:
            reaper.is_over = True
            reaper.ends.put(None)
            reaper.thread.join(_EXIT_S)
            if reaper.thread.is_alive():
                _log.warning("communication that was being ended at exit did not end within %g s", _EXIT_S)

    def forked(self) -> None:
        """Start anew in a forked child: what was made before the fork is its parent's to end."""
        self._current, self._lock = None, threading.Lock()


_reapers = _Reapers()
os.register_at_fork(after_in_child=_reapers.forked)
