"""Shared set-up of all tests: the pool of ranks ends with the session, slow tests run on request only."""

from __future__ import annotations

import os
import signal
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tests
from tests import costs, flaky
from tests.costs import COSTS
from tests.scheduler import is_timing, scope_of
from tests.thin import thinned

SLOW_TESTS = "COMMLIB_SLOW_TESTS"
SHARD = "COMMLIB_TEST_SHARD"

# torch's store asks a name server for the peer of each connection, of which every process makes one, and a lost answer
# costs seconds. Nothing here needs one: all peers are on this machine.
os.environ["RES_OPTIONS"] = "attempts:0"


tests.IS_COLLECTING = True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failures", type=Path, metavar="FILE", help="write what failed to FILE, for tests/flaky.py")
    parser.addoption("--again", type=Path, metavar="FILE", help="run what failed of FILE, and report it as flaky")


def pytest_configure(config: pytest.Config) -> None:
    # A background job of a shell starts with SIGINT ignored, and all that it starts would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    costs.count_commands()
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Controller(config))


def pytest_report_header() -> list[str]:
    return [f"commit: {_commit()}"] + ([f"shard: {os.environ[SHARD]}"] if SHARD in os.environ else [])


def _commit() -> str:
    """Return the tested commit, for stored results."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    asked = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown (no git checkout)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selected = items if os.environ.get(SLOW_TESTS) == "1" else thinned([item for item in items if not _is_slow(item)])
    selected = [item for item in selected if _is_of_shard(item)]
    if len(selected) < len(items):
        chosen = set(selected)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = sorted(selected, key=lambda item: is_timing(item.nodeid))


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def _is_of_shard(item: pytest.Item) -> bool:
    """Return whether a test is of the shard that runs; groups stay together."""
    if SHARD not in os.environ:
        return True
    number, _, count = os.environ[SHARD].partition("/")
    return zlib.crc32(scope_of(item.nodeid).encode()) % int(count) == int(number) - 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.xdist_scheduler import Scheduler

    return Scheduler(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid: str) -> None:
    COSTS.file = nodeid.partition("::")[0]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["costs"] = COSTS.as_dict()


class _Controller:
    """Hooks of the process that prints: adds up the costs of all processes, and keeps the failures."""

    def __init__(self, config: pytest.Config) -> None:
        self._failures = flaky.Failures()
        self._over: list[str] = []
        self._path: Path | None = config.getoption("--failures")
        again: Path | None = config.getoption("--again")
        self._earlier = None if again is None else flaky.Failures.read(again)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        COSTS.merge(getattr(node, "workeroutput", {}).get("costs", {}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failures.add(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._failures.add(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if os.environ.get(SLOW_TESTS) != "1":
            self._over = costs.over_budget(COSTS, costs.recorded_budget())
        if self._over and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = flaky.OVER_BUDGET
        if self._path is not None:
            self._failures.write(self._path)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for kind, by_file in COSTS.by_kind.items():
            terminalreporter.write_line(f"{sum(by_file.values())} {kind} were started")
        for line in self._over:
            terminalreporter.write_line(f"OVER BUDGET (tests/budget.json): {line}", red=True)
        if self._earlier is not None and not self._failures.by_test:
            for line in self._earlier.as_flaky():
                terminalreporter.write_line(line, yellow=line.startswith("FLAKY"))


@pytest.fixture(scope="session", autouse=True)
def close_rank_pool() -> Iterator[None]:
    """End the processes of ranks, if a test started them, when the session ends."""
    yield
    from tests.multi.forker import FORKER
    from tests.multi.pool import POOL

    POOL.close()
    FORKER.close()
