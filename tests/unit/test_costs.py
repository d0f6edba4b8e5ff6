"""The budget of ranks and processes: which ones count, and the report of a session that exceeds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests import costs
from tests.costs import COSTS, PROCESSES, RANK_JOBS, Costs
from tests.multi.pool import run_ranks


def counted(*per_file: tuple[str, str, int]) -> Costs:
    found = Costs()
    for file, kind, count in per_file:
        found.file = file
        for _ in range(count):
            found.add(kind)
    return found


def test_a_session_within_the_budget_is_not_spoken_of() -> None:
    found = counted(("tests/a.py", RANK_JOBS, 3), ("tests/b.py", PROCESSES, 2))
    assert costs.over_budget(found, {RANK_JOBS: 3, PROCESSES: 2}) == []


def test_a_session_over_the_budget_names_the_costliest_files() -> None:
    found = counted(("tests/a.py", RANK_JOBS, 3), ("tests/b.py", RANK_JOBS, 5), ("tests/c.py", RANK_JOBS, 1))
    (line,) = costs.over_budget(found, {RANK_JOBS: 8, PROCESSES: 0}, num_named=2)
    assert line == "9 rank jobs, the budget is 8; most by tests/b.py (5), tests/a.py (3)"


def test_counts_of_several_processes_add_up() -> None:
    found = counted(("tests/a.py", RANK_JOBS, 3))
    found.merge(counted(("tests/a.py", RANK_JOBS, 1), ("tests/b.py", PROCESSES, 2)).as_dict())
    assert found.as_dict() == {RANK_JOBS: {"tests/a.py": 4}, PROCESSES: {"tests/b.py": 2}}


def nothing() -> None:
    """Run on the ranks."""


def test_jobs_and_commands_count_for_the_test_that_starts_them() -> None:
    assert COSTS.file == Path(__file__).relative_to(Path.cwd()).as_posix()
    before = {kind: by_file[COSTS.file] for kind, by_file in COSTS.by_kind.items()}
    run_ranks(nothing, 2)
    subprocess.run([sys.executable, "-c", ""], check=True)
    after = {kind: by_file[COSTS.file] for kind, by_file in COSTS.by_kind.items()}
    assert after[RANK_JOBS] - before[RANK_JOBS] == 1
    assert after[PROCESSES] - before[PROCESSES] >= 1


def test_the_recorded_budget_has_every_kind() -> None:
    assert costs.recorded_budget().keys() == Costs().by_kind.keys()
