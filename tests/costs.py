"""Counts the jobs on pooled ranks and the processes that the tests of a session start, by the file of the test.

[Note: budget] Jobs on several ranks and processes take most of the suite's time, and unlike time they can be counted.
`budget.json` records how many the fast part may start. A session over the budget fails and names the costliest files:
let the new test share the jobs of others, mark it slow, or raise the number with a reason in the commit.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

BUDGET_PATH = Path(__file__).parent / "budget.json"

#: The counters: jobs run on the pool of ranks, and processes (forked ranks, commands).
RANK_JOBS, PROCESSES = "rank jobs", "processes"


class Costs:
    """Counts by the file of the test that runs, for each kind."""

    def __init__(self) -> None:
        self.file = "(outside of tests)"
        self.by_kind: dict[str, Counter[str]] = {RANK_JOBS: Counter(), PROCESSES: Counter()}

    def add(self, kind: str) -> None:
        """Count one, for the test that runs now."""
        self.by_kind[kind][self.file] += 1

    def merge(self, counts: Mapping[str, Mapping[str, int]]) -> None:
        """Add the counts of another process, from its `as_dict`."""
        for kind, by_file in counts.items():
            self.by_kind[kind].update(by_file)

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return the counts as plain values."""
        return {kind: dict(by_file) for kind, by_file in self.by_kind.items()}


def over_budget(costs: Costs, budget: Mapping[str, int], num_named: int = 8) -> list[str]:
    """Return one line for each kind of which there are more than the budget has, with the costliest files."""
    lines = []
    for kind, by_file in costs.by_kind.items():
        total = sum(by_file.values())
        if total > budget[kind]:
            files = ", ".join(f"{file} ({count})" for file, count in by_file.most_common(num_named))
            lines.append(f"{total} {kind}, the budget is {budget[kind]}; most by {files}")
    return lines


def recorded_budget() -> dict[str, int]:
    """Return the budget of the fast part."""
    return json.loads(BUDGET_PATH.read_text())


COSTS = Costs()


def count_commands() -> None:
    """Count the processes that this process starts, from now on, by whatever library."""
    sys.addaudithook(lambda event, _: COSTS.add(PROCESSES) if event == "subprocess.Popen" else None)
