"""torch's backend objects, their works and their end, apart from the transport so that a finalizer can hold them."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch.distributed.nn.functional  # noqa: F401 (see [Note: exit])
from torch.distributed import distributed_c10d as c10d

from commlib.transport.base import AllToAll, Exchange, Request
from commlib.transport.lifelines import Lifelines, Word
from commlib.transport.point_to_point import GlooExchanges, close_connections, is_better_exchanged

_log = logging.getLogger("commlib")

T = TypeVar("T")

#: How long aborted works may take to end, in seconds.
_DRAIN_S = 5.0
#: How long works with a peer that was killed may take to end by themselves, as its last messages may be on their way.
_MERCY_S = 0.3


class TorchWork:
    """A torch `Work` whose completion can call back."""

    def __init__(self, work: Any, connection: Connection) -> None:
        self._work = work
        self._connection = connection

    def wait(self) -> None:
        """Wait for the data; raise what went wrong."""
        try:
            self._work.wait()
        finally:
            self._connection.pending.pop(id(self._work), None)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the work has ended."""
        self._work.get_future().add_done_callback(lambda _: callback())


class Connection:
    """One backend object.

    [Note: exit] Backend threads drop tensors and call back into Python when a work ends. At interpreter exit that
    aborts the process ("terminate called without an active exception"), so every connection is ended before: works
    are aborted and waited for, then the backend is destroyed, which joins its threads. The same holds of the user's own
    group: `destroy_process_group` ends its threads only where nobody else holds the group. So transports refer to it
    weakly; and the functions of `torch.distributed.nn.functional`, whose default arguments hold the group that exists
    when they are first imported (by torch._dynamo, in the first forward), are imported here. Where this module is
    itself imported after the group was made, they hold it all the same.

    Args:
        members: The transport's ranks that take part, in the order of the backend's ranks.
    """

    def __init__(self, members: Sequence[int]) -> None:
        self.members = members
        self.backend: Any = None
        self.exchanges: GlooExchanges | None = None  # made at the first one
        self.pending: dict[int, tuple[Any, Sequence[int]]] = {}  # works that nobody has waited for, and who takes part

    @property
    def is_nccl(self) -> bool:
        """Whether it is NCCL's; else it is Gloo's."""
        return self.backend.name().lower() == "nccl"

    def partners(self, request: Request) -> Sequence[int]:
        """Return the transport's ranks with which this one moves data in `request`."""
        if isinstance(request, Exchange):
            return [self.members[rank] for rank, tensor in (*request.sends, *request.receives) if tensor.numel()]
        return self.members

    def has_pending(self) -> bool:
        """Return whether a work has not ended."""
        return next(self.under_way(), None) is not None

    def under_way(self) -> Iterator[Sequence[int]]:
        """Yield who takes part in each work that has not ended."""
        return (partners for work, partners in list(self.pending.values()) if not work.is_completed())

    def abort(self) -> None:
        """End all works, here and, where the peers see it, there."""
        if self.backend is None:
            return
        if not self.is_nccl:
            close_connections(self.backend)
        with contextlib.suppress(Exception):
            self.backend.abort()

    def exchange(self, request: Exchange) -> Any:
        """Start sends and receives."""
        if self.is_nccl:
            self.backend._start_coalescing()
            for rank, tensor in request.receives:
                self.backend.recv([tensor], rank, 0)
            for rank, tensor in request.sends:
                self.backend.send([tensor], rank, 0)
            return self.backend._end_coalescing()
        return self._gloo().issue(request)

    def all_to_all(self, request: AllToAll) -> Any:
        """Start an all-to-all."""
        if is_better_exchanged(request) and not self.is_nccl:
            return self._gloo().all_to_all(request)
        return self.backend.alltoall_base(request.output, request.input, [], [], options(c10d.AllToAllOptions))

    def _gloo(self) -> GlooExchanges:
        if self.exchanges is None:
            self.exchanges = GlooExchanges(self.backend)
        return self.exchanges

    def end(self) -> None:
        """End all works and the backend."""
        if self.has_pending():
            self.abort()
            deadline = time.monotonic() + _DRAIN_S
            while self.has_pending() and time.monotonic() < deadline:
                time.sleep(0.005)
            if self.has_pending():
                _log.warning("aborted collectives had not ended after %g s; closing the connection anyway", _DRAIN_S)
        if self.exchanges is not None:
            self.exchanges.end(_DRAIN_S)
            self.exchanges = None
        self.pending.clear()
        self.backend = None


class Connections:
    """All of one transport: its backends by group, and its lifelines (None for one rank alone)."""

    def __init__(self) -> None:
        self.by_group: dict[str, Connection] = {}
        self.lifelines: Lifelines | None = None
        self.was_aborted = False
        self._pid = os.getpid()

    def react(self, lifelines: Lifelines) -> float | None:
        """End works that are in vain; return in how many seconds to look again. See [Note: lifelines]."""
        under_way = [set(partners) for each in self.by_group.values() for partners in each.under_way()]
        if not under_way:
            return None
        if lifelines.has_broken:
            self.abort()
            return None
        due_s = [
            peer.ended_s + _MERCY_S
            for rank, peer in lifelines.ended().items()  # one that left in order may have completed what we have not
            if peer.ending != "left" and any(rank in partners for partners in under_way)
        ]
        if not due_s:
            return None
        left_s = min(due_s) - time.monotonic()
        if left_s > 0:
            return left_s
        self.abort()
        return None

    def abort(self) -> None:
        """End all works."""
        self.was_aborted = True
        for connection in self.by_group.values():
            connection.abort()

    def end(self, goodbye: Word | None = None) -> None:
        """Say goodbye and end everything.

        Args:
            goodbye: None finds out whether an exception ends the process.
        """
        if os.getpid() != self._pid:  # a forked child holds copies; the works and connections are its parent's
            return
        if self.lifelines is not None:
            failed = goodbye is None and getattr(sys, "last_value", None) is not None
            self.lifelines.close(goodbye or (Word.FAILED if failed else Word.LEFT))
        for connection in self.by_group.values():
            connection.end()


@functools.cache
def options(cls: type, **fields: Any) -> Any:
    """Return the options object of a collective that runs on the backend's own thread or stream; it is not changed."""
    made = cls()
    for name, value in fields.items():
        setattr(made, name, value)
    made.asyncOp = True
    return made


def attend(make: Callable[[], T], check: Callable[[], None]) -> T:
    """Return what `make` makes in a thread, which nothing can end; raise what `check` raises meanwhile."""
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
