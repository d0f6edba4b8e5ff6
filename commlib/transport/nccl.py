"""NCCL's backends: their names, their works, in which order their kernels start, and how they end.

Who notices that a work is late or broken, and what follows: [Note: NCCL works] in `transport/watch.py`.

[Note: ending NCCL] A kernel that has ended here may still have data on the way: NCCL's proxy threads send it. An
abort would cut that off for peers that are later. So a communicator that is whole is given time for what is
outstanding, while the lifelines say that its peers are well, and is then shut down, which flushes; else it is aborted.
Both may hang in NCCL, so each connection has a thread for either, from its start, as none can be started at the
interpreter's exit (Python 3.12); a backend that does not come back is never destroyed.

[Note: launch order] NCCL wants the kernels of all communicators of a device in one order, the same on all ranks: where
two wait for a place on the device in opposite orders, both ranks may wait for ever. commlib issues in the order of the
program, which is the same on all ranks, but on a stream per bucket, so the device's order could differ. So each
collective waits, on its stream, for the one issued before on another communicator. NCCL since 2.26 does that itself,
with less waiting, if `NCCL_LAUNCH_ORDER_IMPLICIT=1` is set for the process; then this does nothing. It cannot be set
here: NCCL reads it once, and the user's own communicators may have begun. Those are in our order only with it.

Rounds that begin when all ranks have come to them (`Transport.in_order` is False) have no place in the program, so they
are left out: in a chain, another order on another rank would be a certain deadlock. Little of commlib's runs beside
them: their algorithms communicate weights only, what a model agrees on goes over Gloo, and `commlib.synchronize` takes
part in all of them before it communicates. What is left is what ranks tell each other in a `Join` context, which is a
collective on NCCL in each forward; without NCCL's own order it may meet such a round in another order on another rank.
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

#: How long a communicator that is whole may take for what is outstanding when it is closed, in seconds.
_FINISH_S = 30.0
#: How long a work may take to end with what a partner that left in good order has sent, in seconds.
_LEFT_S = 5.0
#: How long NCCL may take to shut a communicator down, or to abort one, in seconds.
_SHUT_DOWN_S = 10.0
#: How much longer torch's watchdog waits than the watch, and at least, in seconds.
_LAST_RESORT_TIMES, _LAST_RESORT_S = 10, 3600.0

#: What is said to torch's watchdog of our backends, while they are made: to log an error, not to end the process, and
#: not to sleep a minute before.
_QUIET = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0"}


def make(
    store: dist.Store, rank: int, device: torch.device, timeout: timedelta, name: str, ranks: Sequence[int]
) -> Any:
    """Return a backend that is connected to its peers. Collective; nothing ends its waiting for them.

    Args:
        store: Of this backend only.
        rank: This rank within the backend.
        device: The CUDA device.
        timeout: Of the transport.
        name: What torch's logs call it; the same on all ranks.
        ranks: Its ranks in the default group, for torch's logs.
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
    """Set what backends read when they are made, where the user has not."""
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
    """Return an event at the current end of the current stream."""
    return torch.cuda.current_stream(device).record_event()


class NcclWork(TorchWork):
    """A collective on NCCL, from its issue until the watch has seen its end.

    Args:
        work: torch's.
        connection: What carries it.
        partners: The transport's ranks with which it moves data.
        what: Names it in errors.
    """

    def __init__(self, work: Any, connection: NcclConnection, partners: Sequence[int], what: str) -> None:
        self.what = what
        self.issued_s = time.monotonic()
        self.has_ended = False  # as far as anyone has looked
        self.nccl = connection
        self._mark: Any = None
        super().__init__(work, connection, partners)
        self._work: Any = work
        connection.follow(self, work)

    @override
    def wait(self) -> None:
        """Make the current stream wait; raise what went wrong, as far as that is known."""
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
        """Make the current stream wait, beside whoever waits for the data."""
        work, mark = self._work, self._mark  # in this order: the mark is there before the work goes
        (mark or work).wait()

    def query(self) -> bool:
        """Return whether it has ended."""
        work, mark = self._work, self._mark  # as in `hold_back`
        return mark.query() if mark is not None else work.is_completed()

    @override
    def due_s(self, peer: Peer) -> float:
        """Return when it is to be ended as a partner has ended: at once, before NCCL's own error ends the process.

        Of one that left the last data may be there, but nothing says so where that is not enough.
        """
        return max(peer.ended_s, self.issued_s) + _LEFT_S if peer.ending == "left" else peer.ended_s

    @override
    def is_under_way(self) -> bool:
        return not (self.has_ended or self.is_abandoned)

    @override
    def is_stuck(self) -> bool:
        return self.is_abandoned and not self.has_ended

    @override
    def abandon(self) -> None:  # its backend is aborted, which is all that can be done
        self.is_abandoned = True


class NcclConnection(Connection):
    """One backend of NCCL's.

    Args:
        members: The transport's ranks that take part, in the order of the backend's ranks.
        device: The CUDA device.

    Attributes:
        outstanding: The works that nobody has seen end, in the order of their issue.
        num_issued: How many works there have been.
        wake: Called when there is one more.
    """

    is_nccl = True

    def __init__(self, members: Sequence[int], device: torch.device) -> None:
        super().__init__(members)
        self.device = device
        self.outstanding: deque[NcclWork] = deque()
        self.num_issued = 0
        self.wake: Callable[[], None] = lambda: None
        self._witness: Any = None
        self._ended_s = 0.0  # when the end of the last one that has ended was seen
        self._looking = locks.lock("nccl.looking")  # one at a time looks
        self._keeping = locks.lock("nccl.keeping")  # for a moment only
        self._ending = Ending()

    def follow(self, work: NcclWork, witness: Any) -> None:
        """Take a work that was issued after all that are outstanding."""
        with self._keeping:
            self.num_issued += 1
            self.outstanding.append(work)
            self._witness = witness
        self.wake()

    def look(self) -> None:
        """Forget the works that have ended; raise NCCL's error, if it has one."""
        with self._looking:
            witness = self._witness
            if witness is not None and witness.is_completed():
                witness.wait()  # raises the error, if that is why
            while self.outstanding and self.outstanding[0].query():
                self.outstanding.popleft().has_ended = True
                self._ended_s = time.monotonic()
            with self._keeping:
                if not self.outstanding:
                    self._witness = None

    def late(self, timeout_s: float) -> NcclWork | None:
        """Return the first outstanding work, if it has not ended within the timeout."""
        try:
            first = self.outstanding[0]
        except IndexError:
            return None
        return first if time.monotonic() - max(first.issued_s, self._ended_s) > timeout_s else None

    @override
    def limit(self, timeout: timedelta) -> None:  # the watch has it, since it was made
        pass

    @override
    def under_way(self) -> list[TorchWork]:
        return [work for work in list(self.outstanding) if work.is_under_way()]

    @property
    def is_aborted(self) -> bool:
        """Whether its works were ended."""
        return self._ending.what == "abort"

    @override
    def abort(self) -> None:
        """End all works. Returns at once."""
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
            # What follows would be taken into the group that is open. To end it issues a part of the exchange, which
            # no peer can match, so the backend is of no more use.
            with contextlib.suppress(Exception):
                self.backend._end_coalescing()
            self.abort()
            raise
        return self.backend._end_coalescing()

    @override
    def all_to_all(self, request: AllToAll) -> Any:
        return self._all_to_all(request)

    def finish(self, may_go_on: Callable[[], bool]) -> None:
        """Wait for what is outstanding, at most `_FINISH_S` and while `may_go_on`. See [Note: ending NCCL]."""
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
        """Shut the backend down if everything has ended, else abort it."""
        if self.backend is None:
            self._ending.begin("leave", lambda: None)
            return
        launches.forget(self)
        if self.outstanding:
            self.abort()
        self._ending.begin("shut down", self.backend.shutdown)
        if not self._ending.wait(_SHUT_DOWN_S):
            what = self._ending.what
            _log.warning("NCCL did not %s a communicator within %g s; it is left behind", what, _SHUT_DOWN_S)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.backend))
        self._witness = None
        self.outstanding.clear()
        self.pending.clear()
        self.backend = None


class Ending:
    """A daemon thread for one call, which may hang; there from the start, see [Note: ending NCCL].

    Attributes:
        what: The call; "" so far.
    """

    def __init__(self) -> None:
        self.what = ""
        self._choosing = locks.lock("nccl.choosing")
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="commlib-nccl-end", daemon=True)
        self._thread.start()

    def begin(self, what: str, act: Callable[[], None]) -> None:
        """Have the call made, unless there was one. Returns at once."""
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
        """Return whether it has come to an end within `limit_s`."""
        self._thread.join(limit_s)
        return not self._thread.is_alive()


class Launches:
    """One order of kernels per device, over all communicators of this process; see [Note: launch order]."""

    def __init__(self) -> None:
        self._lock = locks.lock("nccl.launches", is_of_process=True)
        self._last: dict[torch.device, NcclWork] = {}

    def issue(self, connection: NcclConnection, act: Callable[[], NcclWork], in_order: bool) -> NcclWork:
        """Issue a collective by `act`, after the one before it on the device if `in_order`."""
        if not in_order or _nccl_keeps_order():
            return act()
        with self._lock:
            last = self._last.get(connection.device)
            if last is not None and last.nccl is not connection and not last.has_ended:
                last.hold_back()
            self._last[connection.device] = work = act()
            return work

    def forget(self, connection: NcclConnection) -> None:
        """Let go of a connection that ends."""
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
