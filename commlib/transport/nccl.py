"""NCCL backends: their creation, their works, the order of their kernels, and their shutdown.

See [Note: NCCL works] in `transport/watch.py` for the detection and handling of late and broken works.

[Note: ending NCCL] A kernel that has completed on this rank may still have data in flight, which NCCL's proxy threads
send. An abort would cut that data off for slower peers. So a healthy communicator waits for its outstanding works while
the lifelines report that its peers are alive, and is then shut down, which flushes the data. Otherwise it is aborted.
Both calls may hang in NCCL. Each connection therefore has a thread for this call, started in advance because no thread
can start at the interpreter's exit (Python 3.12). A backend whose call does not return is never destroyed.

[Note: launch order] NCCL requires that the kernels of all communicators on a device start in the same order on all
ranks. If two kernels wait for resources of the device in opposite orders on two ranks, both ranks may deadlock. commlib
issues collectives in program order, which is the same on all ranks, but on one stream per bucket, so the device may
reorder them. So each collective waits, on its stream, for the previous one on another communicator. NCCL 2.26 and later
does this with less waiting if `NCCL_LAUNCH_ORDER_IMPLICIT=1` is set for the process; commlib then adds no waits.
commlib cannot set the variable: NCCL reads it once, and the user's communicators may already exist. Only NCCL's own
ordering includes the user's communicators.

Rounds that start when all ranks have reached them (`Transport.in_order` is False) have no fixed place in program order,
so they add no waits: ranks that chained them in different orders would certainly deadlock. Few other NCCL collectives
of commlib run at the same time. The algorithms with such rounds communicate weights only, model-wide agreement uses
Gloo, and `commlib.synchronize` joins all such rounds before it communicates. The exception is the collective that a
`Join` context adds to each forward: without NCCL's own ordering, it may run before such a round on one rank and after
it on another.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from commlib import locks
from commlib.transport.backends import Connection, TorchWork
from commlib.transport.base import AllToAll, Exchange
from commlib.transport.lifelines import Peer

_log = logging.getLogger("commlib")

#: How long a healthy communicator may take to complete its outstanding works when it is closed, in seconds.
_FINISH_S = 30.0
#: How long a work may take to complete after a partner has left cleanly, in seconds.
_LEFT_S = 5.0
#: How long NCCL may take to shut down or abort a communicator, in seconds.
_SHUT_DOWN_S = 10.0
#: The timeout of torch's watchdog, as a multiple of the transport's, and its minimum, in seconds.
_LAST_RESORT_TIMES, _LAST_RESORT_S = 10, 3600.0

#: Environment variables that are set while a backend is created: torch's watchdog then only logs an error, instead of
#: ending the process, and does not sleep for a minute first.
_QUIET = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0"}


def make(
    store: dist.Store, rank: int, device: torch.device, timeout: timedelta, name: str, ranks: Sequence[int]
) -> Any:
    """Return a backend that is connected to its peers. Collective; waits for the peers without a timeout.

    Args:
        store: A store for this backend only.
        rank: This rank within the backend.
        device: The CUDA device.
        timeout: The transport's timeout.
        name: The name in torch's logs; the same on all ranks.
        ranks: The backend's ranks in the default group, for torch's logs.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = max(_LAST_RESORT_TIMES * timeout, timedelta(seconds=_LAST_RESORT_S))
    options.group_name = name  # pyright: ignore[reportAttributeAccessIssue] (a `str` by another name)
    options.global_ranks_in_group = list(ranks)
    with _quiet_watchdog():
        backend = dist.ProcessGroupNCCL(store, rank, len(ranks), options)
    index = torch.cuda.current_device() if device.index is None else device.index
    backend.eager_connect_single_device(torch.device("cuda", index))
    return backend


@contextlib.contextmanager
def _quiet_watchdog() -> Iterator[None]:
    """Set the environment variables of `_QUIET` that the user has not set."""
    ours = {key: value for key, value in _QUIET.items() if key not in os.environ}
    if "NCCL_ASYNC_ERROR_HANDLING" in os.environ:  # the older name
        ours.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING", None)
    os.environ.update(ours)
    try:
        yield
    finally:
        for key in ours:
            os.environ.pop(key, None)


def _mark(device: torch.device) -> Any:
    """Record an event on the current stream."""
    return torch.cuda.current_stream(device).record_event()


class NcclWork(TorchWork):
    """A collective on NCCL, from its issue until the watch has seen it complete.

    Args:
        work: torch's work.
        connection: The connection that it runs on.
        partners: The transport's ranks that it exchanges data with.
        what: Its name in errors.
    """

    def __init__(self, work: Any, connection: NcclConnection, partners: Sequence[int], what: str) -> None:
        self.what = what
        self.issued_s = time.monotonic()
        self.has_ended = False  # as of the last poll
        self.nccl = connection
        self._mark: Any = None
        super().__init__(work, connection, partners)
        self._work: Any = work
        connection.follow(self, work)

    @override
    def wait(self) -> None:
        """Make the current stream wait; raise the error, if it is already known."""
        if self._mark is not None:
            self._mark.wait()
            return
        try:
            self._work.wait()
            self._mark = _mark(self.nccl.device)
            self._work = None
        finally:
            self._connection.pending.pop(id(self), None)

    def hold_back(self) -> None:
        """Make the current stream wait, without consuming the work."""
        work, mark = self._work, self._mark  # in this order: `wait` sets the mark before it clears the work
        (mark or work).wait()

    def query(self) -> bool:
        """Return whether the collective has completed."""
        work, mark = self._work, self._mark  # as in `hold_back`
        return mark.query() if mark is not None else work.is_completed()

    @override
    def due_s(self, peer: Peer) -> float:
        """Return when to end the work after a partner has ended: at once, before NCCL's own error ends the process.

        If the partner left cleanly, its last data may have arrived already; `_LEFT_S` limits the wait for it.
        """
        return max(peer.ended_s, self.issued_s) + _LEFT_S if peer.ending == "left" else peer.ended_s

    @override
    def is_under_way(self) -> bool:
        return not (self.has_ended or self.is_abandoned)

    @override
    def is_stuck(self) -> bool:
        return self.is_abandoned and not self.has_ended

    @override
    def abandon(self) -> None:  # nothing more to do: its backend is aborted
        self.is_abandoned = True


class NcclConnection(Connection):
    """One NCCL backend.

    Args:
        members: The transport's ranks that take part, in the order of the backend's ranks.
        device: The CUDA device.

    Attributes:
        outstanding: The works not yet seen to complete, in order of issue.
        num_issued: The number of works issued so far.
        wake: Called after each issue.
    """

    is_nccl = True

    def __init__(self, members: Sequence[int], device: torch.device) -> None:
        super().__init__(members)
        self.device = device
        self.outstanding: deque[NcclWork] = deque()
        self.num_issued = 0
        self.wake: Callable[[], None] = lambda: None
        self._witness: Any = None
        self._ended_s = 0.0  # when the last completion was noticed
        self._looking = locks.lock("nccl.looking")  # allows one thread to poll at a time
        self._keeping = locks.lock("nccl.keeping")  # held only briefly
        self._ending = Ending()

    def follow(self, work: NcclWork, witness: Any) -> None:
        """Add a work, issued after all outstanding ones."""
        with self._keeping:
            self.num_issued += 1
            self.outstanding.append(work)
            self._witness = witness
        self.wake()

    def look(self) -> None:
        """Drop the works that have completed; raise NCCL's error, if any."""
        with self._looking:
            witness = self._witness
            if witness is not None and witness.is_completed():
                witness.wait()  # raises NCCL's error if there was one
            while self.outstanding and self.outstanding[0].query():
                self.outstanding.popleft().has_ended = True
                self._ended_s = time.monotonic()
            with self._keeping:
                if not self.outstanding:
                    self._witness = None

    def late(self, timeout_s: float) -> NcclWork | None:
        """Return the first outstanding work if it has exceeded the timeout."""
        try:
            first = self.outstanding[0]
        except IndexError:
            return None
        return first if time.monotonic() - max(first.issued_s, self._ended_s) > timeout_s else None

    @override
    def limit(self, timeout: timedelta) -> None:  # the watch already has the timeout
        pass

    @override
    def under_way(self) -> list[TorchWork]:
        return [work for work in list(self.outstanding) if work.is_under_way()]

    @property
    def is_aborted(self) -> bool:
        """Whether its works were aborted."""
        return self._ending.what == "abort"

    @override
    def abort(self) -> None:
        """Abort all works. Does not block."""
        if self.backend is not None:
            self._ending.begin("abort", self.backend.abort)

    @override
    def exchange(self, request: Exchange) -> Any:
        self.backend._start_coalescing()
        try:
            for rank, tensor in request.receives:
                self.backend.recv([tensor], rank, 0)
            for rank, tensor in request.sends:
                self.backend.send([tensor], rank, 0)
        except BaseException:
            # A later call would join the open coalescing group. Closing the group issues a partial exchange that no
            # peer can match, so the backend is unusable afterwards.
            with contextlib.suppress(Exception):
                self.backend._end_coalescing()
            self.abort()
            raise
        return self.backend._end_coalescing()

    @override
    def all_to_all(self, request: AllToAll) -> Any:
        return self._all_to_all(request)

    def finish(self, may_go_on: Callable[[], bool]) -> None:
        """Wait for the outstanding works, at most `_FINISH_S` and while `may_go_on()`. See [Note: ending NCCL]."""
        deadline = time.monotonic() + _FINISH_S
        while self.backend is not None and not self.is_aborted and may_go_on() and time.monotonic() < deadline:
            try:
                self.look()
            except Exception as error:
                _log.warning("a collective had failed when its communicator was closed: %s", error)
                return
            if not self.outstanding:
                return
            time.sleep(0.002)

    @override
    def end(self) -> None:
        """Shut down the backend if all works have completed, else abort it."""
        if self.backend is None:
            self._ending.begin("leave", lambda: None)
            return
        launches.forget(self)
        if self.outstanding:
            self.abort()
        self._ending.begin("shut down", self.backend.shutdown)
        if not self._ending.wait(_SHUT_DOWN_S):
            what = self._ending.what
            _log.warning("NCCL did not %s a communicator within %g s; it is abandoned", what, _SHUT_DOWN_S)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.backend))
        self._witness = None
        self.outstanding.clear()
        self.pending.clear()
        self.backend = None


class Ending:
    """A daemon thread for one call that may hang. It starts in advance; see [Note: ending NCCL].

    Attributes:
        what: The name of the call; "" before there is one.
    """

    def __init__(self) -> None:
        self.what = ""
        self._choosing = locks.lock("nccl.choosing")
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="commlib-nccl-end", daemon=True)
        self._thread.start()

    def begin(self, what: str, act: Callable[[], None]) -> None:
        """Run the call on the thread, unless there was one before. Does not block."""
        with self._choosing:
            if not self.what:
                self.what = what
                self._calls.put(act)

    def _run(self) -> None:
        act = self._calls.get()
        try:
            act()
        except Exception as error:
            _log.warning("NCCL could not %s a communicator: %s", self.what, error)

    def wait(self, limit_s: float) -> bool:
        """Return whether the call returned within `limit_s`."""
        self._thread.join(limit_s)
        return not self._thread.is_alive()


class Launches:
    """Keeps one order of kernels per device over all communicators of this process; see [Note: launch order]."""

    def __init__(self) -> None:
        self._lock = locks.lock("nccl.launches", is_of_process=True)
        self._last: dict[torch.device, NcclWork] = {}

    def issue(self, connection: NcclConnection, act: Callable[[], NcclWork], in_order: bool) -> NcclWork:
        """Issue a collective by `act`, after the previous one on the device if `in_order`."""
        if not in_order or _nccl_keeps_order():
            return act()
        with self._lock:
            last = self._last.get(connection.device)
            if last is not None and last.nccl is not connection and not last.has_ended:
                last.hold_back()
            self._last[connection.device] = work = act()
            return work

    def forget(self, connection: NcclConnection) -> None:
        """Drop the reference to a connection that is ending."""
        with self._lock:
            last = self._last.get(connection.device)
            if last is not None and last.nccl is connection:
                del self._last[connection.device]


def _nccl_keeps_order() -> bool:
    """Return whether NCCL itself orders the kernels of different communicators."""
    if os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") != "1":
        return False
    import torch.cuda.nccl as torch_nccl

    return torch_nccl.version() >= (2, 26)


launches = Launches()
