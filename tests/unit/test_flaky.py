"""Which failures continuous integration may try again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flaky import MOST, Failures, known_flaky, main

ROOT = Path(__file__).parents[2]


def test_a_failed_assertion_may_be_tried_again() -> None:
    assert Failures({"tests/a.py::test[1]": "assert 3 == 4"}).stay_red(set()) == []


def test_so_may_not_too_many() -> None:
    (reason,) = Failures({f"tests/a.py::test[{idx}]": "assert 3 == 4" for idx in range(MOST + 1)}).stay_red(set())
    assert "at most 3" in reason


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("the process of rank 1 died with exit code -6", "crash"),
        ("worker 'gw1' crashed while running 'tests/a.py::test'", "crash"),
        ("Failed: Timeout (>180.0s) from pytest-timeout.", "hang"),
        ("tests.multi.forker.RankHang: \n--- rank 1 hung in train:", "hang"),
        ("assert torch.equal(now, before), 'the frozen layer moved'", "same bits"),
        ("AssertionError: replicas differ", "same bits"),
    ],
)
def test_so_may_not_a_crash_a_hang_or_other_bits(text: str, why: str) -> None:
    (reason,) = Failures({"tests/a.py::test": text}).stay_red(set())
    assert why in reason


def test_so_may_not_what_is_known_to_be_flaky() -> None:
    (reason,) = Failures({"tests/a.py::test[1]": "assert 3 == 4"}).stay_red({"tests/a.py::test"})
    assert "known_flaky.txt" in reason


def test_so_may_not_what_was_no_test() -> None:
    assert Failures({}).stay_red(set())
    assert Failures({"tests/a.py": "ImportError"}).stay_red(set())


def test_known_tests_exist() -> None:
    for name in known_flaky():
        path, _, function = name.partition("::")
        assert f"def {function}(" in (ROOT / path).read_text(), f"{name}: take it out of known_flaky.txt"


FLAKY = """
from pathlib import Path

def test_fails_once():
    mark = Path(__file__).with_suffix(".mark")
    was_there = mark.exists()
    mark.touch()
    assert was_there, "the first time"

def test_passes():
    pass
"""


def session(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest as continuous integration does, on a test that is made for this."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "--noconftest"]
    own = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        [*command, "-c", os.devnull, f"--rootdir={path}", *options],
        cwd=path,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=False,
    )


def test_what_fails_once_is_run_again_alone_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_made.py").write_text(FLAKY)
    failures = tmp_path / "failures.json"
    first = session(tmp_path, "--failures", str(failures))
    assert first.returncode == 1, first.stdout + first.stderr
    assert main(str(failures)) == 0
    again = capsys.readouterr().out.split()
    assert again == ["test_made.py::test_fails_once"]
    second = session(tmp_path, "--again", str(failures), *again)
    assert second.returncode == 0, second.stdout
    assert "FLAKY test_made.py::test_fails_once failed, then passed alone" in second.stdout
    assert "the first time" in second.stdout
    assert second.stdout.rstrip().splitlines()[-1].startswith("1 passed")
