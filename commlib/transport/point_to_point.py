"""Sends and receives on Gloo, whose works complete only inside `wait()` and ignore the backend's `abort`."""

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

#: Upper bound of the tags of sends and receives; never sent itself.
_UNUSED_TAG = 2**31 - 1

#: Gloo's own all-to-all runs those with smaller chunks, in bytes.
_LEAST_CHUNK = 128 << 10


def is_better_exchanged(request: AllToAll) -> bool:
    """Return whether an exchange is faster than Gloo's own all-to-all; see [Note: all-to-all]."""
    return request.input.nbytes >= _LEAST_CHUNK * request.size


def close_connections(backend: Any) -> None:
    """End all works of a Gloo backend, on this rank and at its peers. The backend is unusable afterwards.

    [Note: ending Gloo's receives] A send or receive on Gloo completes only inside `wait()`, which ends when the data
    arrives, when the connection to the peer closes, or after the backend's timeout. Collectives consist of sends and
    receives, so the same applies to them. The backend's `abort()` does not end them. A receive that times out closes
    all connections of its backend, which ends all other works on it, here and at peers that wait for this rank. This
    function therefore issues a receive that times out at once.
    """
    for peer in range(backend.size()):  # a receive from a closed connection fails at once, and closes nothing
        if peer != backend.rank():
            with contextlib.suppress(Exception):
                backend.recv([torch.empty(1, device="cpu")], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


class ExchangeWork:
    """Sends and receives in progress on Gloo, with the interface of a torch `Work` that `TorchWork` uses."""

    def __init__(self, works: list[Any], limit: timedelta) -> None:
        self.works = works  # receives first; a second wait for a send would not return
        self._limit = limit
        self._future: Future[None] = Future()

    def run(self) -> None:
        """Wait for the works one after the other, for at most the limit each.

        The default limit would be the timeout that the backend was created with.
        """
        try:
            for work in self.works:
                work.wait(self._limit)
        except Exception as error:
            self._future.set_exception(error.with_traceback(None))  # the traceback would keep the backend's sockets
        else:
            self._future.set_result(None)
        finally:
            self.works.clear()

    def wait(self, limit: timedelta | None = None) -> None:
        """Wait for completion; raise the error of the exchange, if any.

        Raises:
            concurrent.futures.TimeoutError: The exchange did not complete within `limit`.
        """
        self._future.result(None if limit is None else limit.total_seconds())

    def is_completed(self) -> bool:
        """Return whether the exchange has completed or failed."""
        return self._future.done()

    def get_future(self) -> Future[None]:
        """Return the future, whose callbacks run on the waiting thread."""
        return self._future


class GlooExchanges:
    """Sends and receives of one Gloo backend: tags, and a daemon thread that waits for them in order of issue.

    [Note: all-to-all] Gloo's own all-to-all posts each send before its receives. The "ready to receive" notice then
    queues behind data on the same connection, and a third of the link's bandwidth stays unused
    (docs/explanation/emulation.md, "What Gloo reaches"). An exchange posts its receives first.

    A work completes only inside `wait()`; to end it early, see `close_connections`.

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
        """Post the receives, then the sends: an expected message needs no copy and no second round trip."""
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
            self._queue.put(work)  # if a call raises, the works posted so far are still waited for
        return work

    def all_to_all(self, request: AllToAll) -> ExchangeWork:
        """Run an all-to-all as an exchange with every other rank."""
        rank, size = self._backend.rank(), request.size
        sources, targets = request.input.view(size, -1), request.output.view(size, -1)
        targets[rank].copy_(sources[rank])
        hops = range(1, size)
        sends = [(peer, sources[peer]) for peer in ((rank + hop) % size for hop in hops)]
        receives = [(peer, targets[peer]) for peer in ((rank - hop) % size for hop in hops)]
        return self.issue(Exchange(sends, receives, size=size))

    def end(self, timeout_s: float) -> None:
        """End the thread once all issued works have ended, and join it unless `timeout_s` is 0."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
            if self._thread.is_alive() and timeout_s:
                _log.warning("exchanges had not completed after %g s; closing the connection anyway", timeout_s)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work.run()
            del work  # an idle thread must not keep tensors alive
