"""Sends and receives on Gloo, whose works neither complete by themselves nor end with the backend's `abort`."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch

from commlib.transport.base import AllToAll, Exchange

_log = logging.getLogger("commlib")

#: Tags of sends and receives are below it; it is never sent.
_UNUSED_TAG = 2**31 - 1

#: Bytes; an all-to-all of smaller chunks is left to Gloo.
_LEAST_CHUNK = 128 << 10


def is_better_exchanged(request: AllToAll) -> bool:
    """Return whether an exchange moves this faster than Gloo's own all-to-all; see [Note: all-to-all]."""
    return request.input.nbytes >= _LEAST_CHUNK * request.size


def close_connections(backend: Any) -> None:
    """End all works of a Gloo backend, here and at the peers. It is of no more use.

    [Note: ending Gloo's receives] A send or receive on Gloo completes only inside `wait()`, which ends with the data,
    with the connection to its peer, or with the backend's timeout; collectives, which are made of them, likewise.
    The backend's `abort()` ends none. A receive that times out closes all connections of its backend, which ends every
    other work on it, here and, where a peer waits for this rank, there. So this makes one that times out at once.
    """
    for peer in range(backend.size()):  # one whose connection is gone fails at once, and closes nothing
        if peer != backend.rank():
            with contextlib.suppress(Exception):
                backend.recv([torch.empty(1, device="cpu")], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


class ExchangeWork:
    """Sends and receives under way on Gloo, with what `_TorchWork` needs of a torch `Work`."""

    def __init__(self, works: list[Any], limit: timedelta) -> None:
        self.works = works  # receives first; a second wait for a send would not return
        self._limit = limit
        self._future: Future[None] = Future()

    def run(self) -> None:
        """Wait for the works one after the other; each may take the limit.

        Without one Gloo would take that with which its backend was made.
        """
        try:
            for work in self.works:
                work.wait(self._limit)
        except Exception as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(None)

    def wait(self, limit: timedelta | None = None) -> None:
        """Wait for the end; raise what went wrong.

        Raises:
            concurrent.futures.TimeoutError: It has not ended within `limit`.
        """
        self._future.result(None if limit is None else limit.total_seconds())

    def is_completed(self) -> bool:
        """Return whether it has ended, well or not."""
        return self._future.done()

    def get_future(self) -> Future[None]:
        """Return the future, whose callbacks run on the waiter's thread."""
        return self._future


class GlooExchanges:
    """Sends and receives of one Gloo backend: tags, and a daemon thread that waits for them in order of their issue.

    [Note: all-to-all] Gloo's own all-to-all posts each send before its receives, so the notice "ready to receive" waits
    behind data on the same connection and a third of the link stays unused (docs/explanation/emulation.md, "What Gloo
    reaches"). An exchange posts its receives first.

    A work completes only inside `wait()`; to end it before its time see `close_connections`.

    Args:
        backend: A `ProcessGroupGloo`.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._sent: dict[int, Iterator[int]] = defaultdict(itertools.count)
        self._received: dict[int, Iterator[int]] = defaultdict(itertools.count)
        self._queue: queue.SimpleQueue[ExchangeWork | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="commlib-exchange", daemon=True)
        self._thread.start()

    def issue(self, exchange: Exchange) -> ExchangeWork:
        """Post the receives, then the sends: a message that is expected needs no copy and no second trip."""
        works: list[Any] = []
        work = ExchangeWork(works, self._backend.options._timeout)
        try:
            for rank, tensor in exchange.receives:
                if tensor.numel():
                    works.append(self._backend.recv([tensor], rank, next(self._received[rank]) % _UNUSED_TAG))
            for rank, tensor in exchange.sends:
                if tensor.numel():
                    works.append(self._backend.send([tensor], rank, next(self._sent[rank]) % _UNUSED_TAG))
        finally:
            self._queue.put(work)  # where one raises, what was posted is waited for all the same
        return work

    def all_to_all(self, request: AllToAll) -> ExchangeWork:
        """Exchange with every other rank."""
        rank, size = self._backend.rank(), request.size
        sources, targets = request.input.view(size, -1), request.output.view(size, -1)
        targets[rank].copy_(sources[rank])
        hops = range(1, size)
        sends = [(peer, sources[peer]) for peer in ((rank + hop) % size for hop in hops)]
        receives = [(peer, targets[peer]) for peer in ((rank - hop) % size for hop in hops)]
        return self.issue(Exchange(sends, receives, size=size))

    def end(self, timeout_s: float) -> None:
        """Let the thread end once everything issued has, and wait for it, if `timeout_s` is not 0."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
            if self._thread.is_alive() and timeout_s:
                _log.warning("exchanges had not ended after %g s; closing the connection anyway", timeout_s)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work.run()
            del work  # an idle thread must not keep tensors alive
