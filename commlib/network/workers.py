"""Simulations on several cores: each is one thread of Python, so they run in processes of their own."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

from commlib.errors import CommlibError

#: `map`, or the same of an executor: results in the order of the arguments, as they come.
Map = Callable[..., Iterable[Any]]

#: A process takes seconds to start; it is worth that for so many simulations.
_LEAST_SIMULATIONS = 8
_PR_SET_PDEATHSIG = 1


@contextmanager
def on_all_cores(num_simulations: int) -> Iterator[Map]:
    """Yield `map` over as many processes as there are cores, or the plain one where so few are not worth it.

    Processes end with the context, and with this one however it ends; what they have not begun by then is not done.

    Raises:
        CommlibError: One of them was killed.
    """
    num_workers = min(len(os.sched_getaffinity(0)), num_simulations // _LEAST_SIMULATIONS)
    if num_workers < 2:
        yield map
        return
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn"), initializer=_begin)
    resource_tracker.ensure_running()  # which every process needs, and whose start lets interrupts through

    def run(function: Callable[..., Any], *arguments: Iterable[Any]) -> Iterable[Any]:
        # Processes are started in here. An interrupt is this one's to handle: they inherit that it is blocked.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return executor.map(function, *arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    try:
        yield run
    except BrokenProcessPool as error:
        raise CommlibError(
            "a process that simulates has ended before its time, as the kernel does without memory"
        ) from error
    except BaseException:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()  # rather than wait for what it simulates
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _begin() -> None:
    """End when the process that asks is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:  # it has gone before
        os._exit(1)
