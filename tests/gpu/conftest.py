"""What a check on a GPU needs of pytest: results as they come, and shares of the tests for processes side by side."""

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
        text = {"text": report.longreprtext[-_MOST_CHARS:]} if not report.passed else {}
        results.add(name, report.outcome, seconds=round(report.duration, 3), **text)
