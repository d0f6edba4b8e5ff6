"""Shared set-up of all tests: the pool of ranks ends with the session, slow tests run on request only."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

SLOW_TESTS = "COMMLIB_SLOW_TESTS"

# torch's store asks a name server for the peer of each connection, of which every process makes one: where an answer is
# lost, it asks again after one second, not after five.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")


def pytest_configure() -> None:
    # A background job of a shell starts with SIGINT ignored, and all that it starts would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get(SLOW_TESTS) == "1":
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason=f"slow: scripts/test --slow runs it (or {SLOW_TESTS}=1)"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.scheduler import Scheduler

    return Scheduler(config, log)


@pytest.fixture(scope="session", autouse=True)
def close_rank_pool() -> Iterator[None]:
    """End the processes of ranks, if a test started them, when the session ends."""
    yield
    from tests.multi.forker import FORKER
    from tests.multi.pool import POOL

    POOL.close()
    FORKER.close()
