"""Simulations on several cores: each is one thread of Python, so they run in processes of their own."""

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
        with _interrupts_held():  # processes are started in here
            return executor.map(function, *arguments)

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


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Start processes that leave interrupts to this one, undisturbed by an interrupt, which comes afterwards.

    Processes inherit that interrupts are blocked. Here that is not enough: the kernel gives them to any thread that
    does not block them, such as one of torch's, and Python raises them in the main thread all the same.
    """
    held: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()  # the only one that may set handlers
    handler = signal.getsignal(signal.SIGINT) if is_main else None  # None also for one that is not of Python
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
    """End when the process that asks is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:  # it has gone before
        os._exit(1)
