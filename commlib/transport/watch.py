"""Detection of late and broken collectives on NCCL.

[Note: NCCL works] A collective on NCCL is a kernel on a stream of the backend. Waiting for it makes another stream
wait, so the host sees neither its completion, nor a delay, nor an error caused by a peer. torch's watchdog would see
them, but it ends the process. Each transport therefore has a *watch*, a thread that polls the outstanding works:

    issue    issuing thread   appends the work to its connection's `outstanding`, in the order of the kernels
    wait     issuing thread   makes the stream wait; an event on the stream replaces the work, because a work keeps its
                              tensors alive. The newest work is kept as its connection's *witness*: it reports NCCL's
                              errors
    look     watch            drops completed works. The first remaining work is late once the timeout has passed since
                              its issue and since the completion of the work before it
    fail     watch            (1) sets `is_failing`, so that nothing more is issued; (2) diagnoses the error as on Gloo:
                              notifies the peers, ends the works, finds the ranks to blame; (3) stores the error as the
                              transport's `failure` and calls the registered callbacks

The lifelines report a peer that died, and their thread ends the works at once, before torch's watchdog (which polls ten
times a second) finds NCCL's own error. An aborted kernel completes like any other, so all works that were outstanding
at the abort count as failed. Kernels queued behind them still run on undefined data: the step in which a peer is lost
is void, and so are the weights that the optimizer computes in it.

The watch references the connections, never the transport. It blocks while nothing is outstanding. It ends before the
connections are closed, so that it does not report the close as a failure. torch's watchdog is the last resort: its
timeout is far longer, and unless the user configured it otherwise it only logs.
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

#: The polling interval, in seconds.
_POLL_S = 0.02


class Watch:
    """Monitors the works of one transport's NCCL backends; see [Note: NCCL works].

    Args:
        connections: The transport's connections; `add` registers those on NCCL.
        timeout_s: How long a collective may wait for its peers.
        fail: Called once, on the watch's thread, with the error and the name of the collective. It must not hold a
            reference to the transport.
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
        """Monitor the works of one more connection."""
        connection.wake = self.wake
        self._followed.append(connection)

    def wake(self) -> None:
        """Wake the thread if it is idle."""
        if self._is_idle:
            with self._news:
                self._news.notify_all()

    def settle(self, limit_s: float) -> None:
        """Wait for a diagnosis in progress, at most `limit_s` seconds."""
        if self.is_failing and threading.current_thread() is not self._thread:
            self._settled.wait(limit_s)

    def close(self, limit_s: float = 5.0) -> None:
        """End the thread. Idempotent; the thread itself may call it."""
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
            raise EndedError("it was aborted on this rank, as a peer had ended or given up")

    def _failed(self, error: Exception, what: str) -> None:
        self.is_failing = True
        try:
            self._fail(error, what)
        except Exception:
            _log.exception("a failure of %s could not be reported", what)
        finally:
            self._settled.set()

    def _sleep(self) -> bool:
        """Sleep until there is something to poll; return False once closed."""
        with self._news:
            self._is_idle = True
            while not self._is_closed and not any(connection.outstanding for connection in self._followed):
                self._news.wait()
            self._is_idle = False
            if not self._is_closed:
                self._news.wait(_POLL_S)
            return not self._is_closed
