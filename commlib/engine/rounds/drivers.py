"""The drivers of this process: one per device, for as long as an engine uses it.

On the CPU, one thread runs every model's rounds. On CUDA, the thread that runs backward issues collectives onto one
stream per bucket in flight, and the host never waits.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import torch

from commlib import locks
from commlib.engine.rounds.driver import Driver
from commlib.engine.rounds.streams import StreamDriver
from commlib.engine.rounds.threads import ThreadDriver


class _Shared:
    """The drivers of this process, by device, with reference counts."""

    def __init__(self) -> None:
        self._lock = locks.lock("drivers", is_of_process=True)
        self._drivers: dict[torch.device, tuple[Driver, set[int]]] = {}
        self._tokens = itertools.count()

    def acquire(self, device: torch.device) -> tuple[Driver, Callable[[], None]]:
        """Return the device's driver, and an idempotent function that releases it."""
        with self._lock:
            token = next(self._tokens)
            if device not in self._drivers:
                driver: Driver = ThreadDriver() if device.type == "cpu" else StreamDriver(device)
                self._drivers[device] = (driver, set())
            driver, users = self._drivers[device]
            users.add(token)
        return driver, lambda: self._release(device, token)

    def _release(self, device: torch.device, token: int) -> None:
        with self._lock:
            driver, users = self._drivers.get(device, (None, set()))
            if token not in users:
                return
            users.discard(token)
            if users or driver is None:
                return
            del self._drivers[device]
        driver.close()

    def forked(self) -> None:
        """Drop all drivers in a forked child, where their threads do not exist."""
        self._drivers = {}


_shared = _Shared()
acquire = _shared.acquire
os.register_at_fork(after_in_child=_shared.forked)
