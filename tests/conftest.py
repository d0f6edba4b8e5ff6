"""Shared set-up of all tests: the pool of ranks ends with the session, long tests run on request only."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

LONG_TESTS = "COMMLIB_LONG_TESTS"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"long: takes minutes; runs only where {LONG_TESTS}=1 is set")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get(LONG_TESTS) == "1":
        return
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason=f"takes minutes: set {LONG_TESTS}=1 to run it"))


@pytest.fixture(scope="session", autouse=True)
def close_rank_pool() -> Iterator[None]:
    """End the pooled ranks, if a test started them, when the session ends."""
    yield
    from tests.multi.pool import POOL

    POOL.close()
