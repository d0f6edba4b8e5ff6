"""Simulations on several cores. Each is a single Python thread, so they run in separate processes."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

from commlib.errors import CommlibError

#: `map`, or that of an executor: yields results in the order of the arguments.
Map = Callable[..., Iterable[Any]]

#: Minimum number of simulations per process, because a process takes seconds to start.
_LEAST_SIMULATIONS = 8
_PR_SET_PDEATHSIG = 1


@contextmanager
def on_all_cores(num_simulations: int) -> Iterator[Map]:
    """Yield a `map` over one process per core, or the built-in one if there are too few simulations.

    The processes end with the context, and with this process however it ends. Simulations not started by then are
    cancelled.

    Raises:
        CommlibError: A process was killed.
    """
    num_workers = min(len(os.sched_getaffinity(0)), num_simulations // _LEAST_SIMULATIONS)
    if num_workers < 2:
        yield map
        return
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn"), initializer=_begin)
    resource_tracker.ensure_running()  # every process needs it, and its start unblocks interrupts

    def run(function: Callable[..., Any], *arguments: Iterable[Any]) -> Iterable[Any]:
        with _interrupts_held():  # starts the processes
            return executor.map(function, *arguments)

    try:
        yield run
    except BrokenProcessPool as error:
        raise CommlibError(
            "a simulation process was killed, for example by the kernel because memory was exhausted"
        ) from error
    except BaseException:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()  # without waiting for its current simulation
        raise
    finally:
        executor.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Start processes that ignore interrupts, and defer an interrupt of this process until they have started.

    The processes inherit the blocked signal mask. In this process, blocking is not enough: the kernel delivers the
    signal to any thread that does not block it, such as one of torch's, and Python still raises it in the main thread.
    """
    held: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()  # only the main thread may set handlers
    handler = signal.getsignal(signal.SIGINT) if is_main else None  # None also for a handler not set by Python
    if handler is not None:
        signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)


def _begin() -> None:
    """Exit this process when its parent exits."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:  # the parent has already exited
        os._exit(1)
