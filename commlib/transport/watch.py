"""Who notices that a collective on NCCL is late or broken.

[Note: NCCL works] A collective on NCCL is a kernel on a stream of the backend's own. To wait for it is to make another
stream wait, so the host sees neither its end, nor that it is late, nor that a peer broke it. torch's watchdog would,
and ends the process. So each transport has a *watch*, a thread that polls what is outstanding:

    issue    issuing thread   the work goes to the end of its connection's `outstanding`, in the order of the kernels
    wait     the same         the stream waits; a mark on the stream takes the work's place, as a work keeps its tensors
                              alive. The newest work stays, as its connection's *witness*: it knows NCCL's errors
    look     watch            what has ended is forgotten. Late is the first that is left, once the timeout has passed
                              since its issue and since the end of the one before
    fail     watch            (1) the transport says that it is failing, so that nothing is issued any more; (2) it is
                              diagnosed as on Gloo: the peers are told, the works ended, the culprits found; (3) the
                              error is the transport's `failure`, and whoever asked is called

A peer that died is news of the lifelines, whose thread ends the works at once: before torch's watchdog, which looks ten
times a second, finds NCCL's own error. An aborted kernel ends like any other, so what was outstanding when the works
were aborted has failed. What the streams held behind it runs all the same, on whatever lies there: the step in which a
peer is lost is void, and so are the weights that the optimizer makes of it.

The watch holds the connections, never the transport; it is blocked while nothing is outstanding, and ends with the
connections: before they are closed, so that it takes no end for a failure. torch's watchdog is a last resort: its limit
lies far behind ours, and where the user has not said otherwise it only logs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from commlib import locks
from commlib.transport.backends import Connections
from commlib.transport.base import EndedError
from commlib.transport.nccl import NcclConnection, NcclWork

_log = logging.getLogger("commlib")

#: How often the watch looks at what is outstanding, in seconds.
_POLL_S = 0.02


class Watch:
    """Follows the works of one transport's NCCL backends; see [Note: NCCL works].

    Args:
        connections: The transport's; NCCL's are added by `add`.
        timeout_s: How long a collective may wait for its peers.
        fail: Called once, on the watch's thread, with the error and the name of the collective. It must not hold the
            transport.
    """

    def __init__(self, connections: Connections, timeout_s: float, fail: Callable[[Exception, str], None]) -> None:
        self.is_failing = False
        self._connections = connections
        self._timeout_s = timeout_s
        self._fail = fail
        self._followed: list[NcclConnection] = []
        self._is_closed = self._is_idle = False
        self._settled = threading.Event()
        self._news = locks.condition("watch.news")
        self._thread = threading.Thread(target=self._run, name="commlib-watch", daemon=True)
        self._thread.start()

    def add(self, connection: NcclConnection) -> None:
        """Follow the works of one more connection."""
        connection.wake = self.wake
        self._followed.append(connection)

    def wake(self) -> None:
        """Look, if nothing was outstanding so far: something is."""
        if self._is_idle:
            with self._news:
                self._news.notify_all()

    def settle(self, limit_s: float) -> None:
        """Wait until a failure that is being diagnosed is known."""
        if self.is_failing and threading.current_thread() is not self._thread:
            self._settled.wait(limit_s)

    def close(self, limit_s: float = 5.0) -> None:
        """End the thread. Harmless when called twice, or from it."""
        with self._news:
            self._is_closed = True
            self._news.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(limit_s)

    def _run(self) -> None:
        while self._sleep():
            what = "a collective"
            try:
                late = None
                for connection in self._followed:
                    first = next(iter(connection.outstanding), None)
                    what = what if first is None else first.what
                    connection.look()
                    self._raise_if_aborted(first)
                    late = late or connection.late(self._timeout_s)
                if late is None:
                    continue
                what = late.what
                error: Exception = TimeoutError(f"timed out: it did not end within {self._timeout_s:g} s")
            except Exception as raised:
                error = raised
            if not self._is_closed:
                self._failed(error, what)
            return

    def _raise_if_aborted(self, first: NcclWork | None) -> None:
        if first is not None and self._connections.aborted_s is not None:
            raise EndedError("it was ended here, as a peer had ended or given up")

    def _failed(self, error: Exception, what: str) -> None:
        self.is_failing = True
        try:
            self._fail(error, what)
        except Exception:
            _log.exception("a failure of %s could not be reported", what)
        finally:
            self._settled.set()

    def _sleep(self) -> bool:
        """Sleep until there is something to look at; return whether to go on."""
        with self._news:
            self._is_idle = True
            while not self._is_closed and not any(connection.outstanding for connection in self._followed):
                self._news.wait()
            self._is_idle = False
            if not self._is_closed:
                self._news.wait(_POLL_S)
            return not self._is_closed
