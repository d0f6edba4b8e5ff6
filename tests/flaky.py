"""Decide whether a few failures of a run of continuous integration may be tried again, and report them.

    python -m tests.flaky FAILURES.json      prints the tests to run again, one a line; exit status 1 if none may be

A test that fails once and passes alone has a fault, or the library has. It does not block a merge, but it is reported:
it is printed as `FLAKY` with the first failure's traceback. Its name is then added to `known_flaky.txt` by hand. From
then on its failures stay red until it is fixed and removed there.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KNOWN_PATH = Path(__file__).parent / "known_flaky.txt"
#: The exit status of a session that is over the budget of `costs.py`, and in which no test failed.
OVER_BUDGET = 7
#: With more failures than this something is broken.
MOST = 3

#: Failures that are never tried again, by their text: they are faults of the library, however rare.
NEVER = {
    "a crash by a signal": re.compile(
        r"died with (?:exit code|signal) -?\d|returncode[ =]+-\d|crashed while running"
        r"|Segmentation|SIG(?:SEGV|ABRT|BUS)"
    ),
    "a hang": re.compile(r"RankHang|Failed: Timeout|Timeout >|did not exit within|--- rank \d+ hung in"),
    "values that should have had the same bits": re.compile(
        r"torch\.equal|array_equal|assert_array_equal|Tensor-likes are not equal|replicas differ|bit for bit|digest"
        r"|assert_same_tensors|rtol=0(?:\.0)?[,)]|golden"
    ),
}


@dataclass
class Failures:
    """The failures of a session: the whole report by the test's node id."""

    by_test: dict[str, str] = field(default_factory=dict)

    def add(self, report: Any) -> None:
        """Take a report of pytest's, if it is of a failure."""
        if report.failed:
            earlier = self.by_test.get(report.nodeid)
            self.by_test[report.nodeid] = "\n".join(filter(None, [earlier, report.longreprtext]))

    def write(self, path: Path) -> None:
        """Write them as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.by_test, indent=1))

    @classmethod
    def read(cls, path: Path) -> Failures:
        """Read the output of `write`."""
        return cls(json.loads(path.read_text()))

    def stay_red(self, known: set[str]) -> list[str]:
        """Return why these failures may not be tried again; empty where they may."""
        if not self.by_test:
            return ["no test failed; something else did"]
        if len(self.by_test) > MOST:
            return [f"{len(self.by_test)} tests failed; at most {MOST} are run again"]
        reasons = [f"{test}: {why}" for test, text in self.by_test.items() for why in _never(text)]
        reasons += [f"{test}: its file could not be collected" for test in self.by_test if "::" not in test]
        return reasons + [
            f"{test}: is in {KNOWN_PATH.name}, and is not run again until it is mended"
            for test in self.by_test
            if test.partition("[")[0] in known
        ]

    def as_flaky(self) -> list[str]:
        """Return lines on tests that have failed and now passed."""
        lines = []
        for test, text in self.by_test.items():
            lines += [f"FLAKY {test} failed, then passed alone; add it to tests/{KNOWN_PATH.name}. First:", text]
        return lines


def _never(text: str) -> list[str]:
    return [f"{what} is not tried again" for what, pattern in NEVER.items() if pattern.search(text)]


def known_flaky() -> set[str]:
    """Return the tests that are known to be flaky, as node ids without parameters."""
    lines = [line.partition("#")[0].strip() for line in KNOWN_PATH.read_text().splitlines()]
    return {line for line in lines if line}


def main(path: str) -> int:
    """Print the tests to run again, or the reason for running no test again."""
    failures = Failures.read(Path(path))
    if reasons := failures.stay_red(known_flaky()):
        print("not run again:", *reasons, sep="\n  ", file=sys.stderr)
        return 1
    print(*failures.by_test, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
