"""Implementation of `scripts/mutants`: make one seeded fault after the other, and report which the fast tests catch.

[Note: mutants] `tests/mutants.toml` lists them: a line of a file, its replacement, and the related tests and contracts.
Each is made in a separate working tree of the last commit; uncommitted changes are not tested. A
fault is caught if a test fails, survives if all pass, and is an error if there is no verdict: then the list is
wrong, or the tests could not be run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".toml")
CONTRACTS = "tests/contract/test_algorithms.py"

_NUM_PROCESSES = 2
#: A guard against tests that hang beyond their own limits.
_LIMIT_S = 1800
#: pytest's exit codes if tests passed, or none is in the fast part; if some failed; if several processes stopped at
#: the first.
_PASSED, _FAILED, _STOPPED = (0, 5), 1, 2


@dataclass(frozen=True)
class Mutant:
    """A seeded fault.

    Attributes:
        file: Its file, relative to the checkout.
        what: A description of the fault.
        old: The line, without its indentation.
        new: The replacement.
        tests: The related fast tests: pytest's arguments.
        contracts: Selects contracts, as pytest's `-k` does.
    """

    file: str
    what: str
    old: str
    new: str
    tests: Sequence[str]
    contracts: str

    def applied(self, source: str) -> str:
        """Return a source with the fault.

        Raises:
            ValueError: The line is not there exactly once.
        """
        lines = source.splitlines(keepends=True)
        found = [idx for idx, line in enumerate(lines) if line.strip() == self.old]
        if len(found) != 1:
            raise ValueError(f"{self.file}: expected this line once, found it {len(found)} times: {self.old}")
        lines[found[0]] = lines[found[0]].replace(self.old, self.new)
        return "".join(lines)


def mutants() -> list[Mutant]:
    """Return all of the list."""
    return [Mutant(**each) for each in tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"]]


def main() -> int:
    """Test the mutants that are asked for; return 0 if all were caught (if none was made: if all tests passed)."""
    known = mutants()
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__.split("\n")[0])
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help=f"their numbers, 1 to {len(known)}")
    parser.add_argument("--unchanged", action="store_true", help="make no fault: all must survive")
    options = parser.parse_args()
    numbers = options.only or range(1, len(known) + 1)
    outside = [number for number in numbers if not 1 <= number <= len(known)]
    if outside:
        parser.error(f"--only: expected 1 to {len(known)}, got {outside[0]}")
    for ending in (signal.SIGINT, signal.SIGTERM):  # also in the background, where the first is ignored
        signal.signal(ending, lambda *_: sys.exit("ended; temporary files are removed"))
    outcomes = []
    with _working_tree() as tree:
        for number in numbers:
            mutant, began_s = known[number - 1], time.monotonic()
            outcome, why = _tested(mutant, tree, makes_fault=not options.unchanged)
            outcomes.append(outcome)
            taken_s = time.monotonic() - began_s
            print(f"{number:2} {outcome:8} {taken_s:6.0f} s  {mutant.file}: {mutant.what}{why}", flush=True)
    wanted = "survived" if options.unchanged else "caught"
    print(f"{outcomes.count(wanted)} of {len(outcomes)} {wanted}")
    return int(any(outcome != wanted for outcome in outcomes))


@contextmanager
def _working_tree() -> Iterator[Path]:
    """Make a working tree of the last commit, with the build outputs of this one."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder) / ROOT.name
        _git("worktree", "add", "--quiet", "--detach", str(tree))
        try:
            for built in (ROOT / "commlib").glob("_native*.so"):
                shutil.copy2(built, tree / "commlib")
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdin=subprocess.DEVNULL)


def _tested(mutant: Mutant, tree: Path, *, makes_fault: bool) -> tuple[str, str]:
    """Return "caught", "survived" or "error", and the catching test or the reason."""
    path = tree / mutant.file
    source = path.read_text(encoding="utf-8")
    faulty = mutant.applied(source)
    try:
        if makes_fault:
            path.write_text(faulty, encoding="utf-8")
        for arguments in ([CONTRACTS, "-k", mutant.contracts], list(mutant.tests)):
            code, output = _pytest(arguments, tree)
            failed = re.search(r"^FAILED (.+?)(?: - .*)?$", output, re.MULTILINE)
            if code in (_FAILED, _STOPPED) and failed:
                return "caught", f"\n   by {failed[1]}"
            if code not in _PASSED:
                return "error", f"\n   pytest {' '.join(arguments)} ended with {code}:\n{output[-2000:]}"
    finally:
        path.write_text(source, encoding="utf-8")
    return "survived", ""


def _pytest(arguments: Sequence[str], tree: Path) -> tuple[int, str]:
    """Run tests of the tree until one fails; return the code and the output."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", str(_NUM_PROCESSES), "-p", "no:cacheprovider"]
    path = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *arguments],
            cwd=tree,
            env={**os.environ, **path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired as late:
        return -1, f"{late.stdout or ''}\nnot done within {_LIMIT_S} s"
    return done.returncode, done.stdout


if __name__ == "__main__":
    sys.exit(main())
