"""Waiting in tests for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT_S = 10.0


def eventually(condition: Callable[[], bool]) -> bool:
    """Return whether the condition holds within `LIMIT_S`."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
