"""pytest hooks for a check on a GPU: immediate results, and shares of the tests for parallel processes."""

from __future__ import annotations

import os

import pytest

from tests.gpu import results

#: "1/4" runs every fourth test, from the second on.
SHARE_VARIABLE = "COMMLIB_GPU_SHARE"
_MOST_CHARS = 4000


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "timeout: of pytest-timeout, which need not be there")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share = os.environ.get(SHARE_VARIABLE)
    if share:
        place, _, count = share.partition("/")
        kept = items[int(place) :: int(count)]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


@pytest.hookimpl
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed:
        name = report.nodeid.rpartition("/")[2]
        results.add(name, report.outcome, seconds=round(report.duration, 3), **_text_of(report))


def _text_of(report: pytest.TestReport) -> dict[str, str]:
    """Return the end of the error, or the reason of a skip."""
    if report.passed:
        return {}
    is_reason = report.skipped and isinstance(report.longrepr, tuple)
    return {"text": str(report.longrepr[2]) if is_reason else report.longreprtext[-_MOST_CHARS:]}
