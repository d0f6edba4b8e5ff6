"""Waiting in tests for other threads and processes, clocks that a test controls, and counted work."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: How long a test waits for a required event, in seconds. A guard against hangs: no load comes near it.
LIMIT_S = 60.0
#: A limit that no test reaches: a test that waits for it hangs.
ENDLESS_S = 3600.0


def eventually(condition: Callable[[], bool]) -> bool:
    """Return whether the condition holds within `LIMIT_S`."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def in_time(call: Callable[[], T]) -> T:
    """Return or raise the result of a call that must not wait; fail if it takes longer than `LIMIT_S`.

    It runs in a separate thread. Anything it must not wait for has a limit of `ENDLESS_S`, or is blocked by the test.
    """
    made: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            made.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="in-time", daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), f"it still waits after {LIMIT_S:g} s"
    if failed:
        raise failed[0]
    return made[0]


def num_calls(act: Callable[[], object]) -> int:
    """Return how many functions this thread calls in `act`: work that can be compared, however busy the machine is."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
    return count


class Clock:
    """Replaces the module `time` in a module under test: it advances when the test says so, or with a sleep.

    Args:
        real_sleep_s: Real duration of a sleep, for modules whose threads poll; the clock does not advance then.
    """

    def __init__(self, real_sleep_s: float | None = None) -> None:
        self.now_s = 1000.0
        self._real_sleep_s = real_sleep_s

    def monotonic(self) -> float:
        return self.now_s

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        if self._real_sleep_s is None:
            self.now_s += seconds
        else:
            time.sleep(self._real_sleep_s)


class Alarm(Clock):
    """A clock that does not advance until an event; then every limit has passed, and it advances by sleeps.

    Args:
        has_happened: Whether the event has happened.
    """

    def __init__(self, has_happened: Callable[[], bool]) -> None:
        super().__init__(real_sleep_s=0.01)
        self._has_happened = has_happened
        self._is_over = False

    def monotonic(self) -> float:
        if not self._is_over and self._has_happened():
            self._is_over = True
            self.now_s += ENDLESS_S
        return self.now_s

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.now_s += seconds if self._is_over else 0.0
