"""The list of seeded faults fits the package: each is made in one line, and its tests exist."""

from __future__ import annotations

import pytest

from tests.mutants import ROOT, Mutant, mutants


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.file)
def test_a_mutant_changes_one_line_and_its_tests_exist(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    faulty = mutant.applied(source)
    pairs = zip(source.splitlines(), faulty.splitlines(), strict=True)
    assert [(old.strip(), new.strip()) for old, new in pairs if old != new] == [(mutant.old, mutant.new)]
    compile(faulty, mutant.file, "exec")
    assert mutant.contracts
    assert all((ROOT / test).is_file() for test in mutant.tests)


@pytest.mark.parametrize("source", ["", "x = 1\nx = 1\n", "x = 11\n"])
def test_a_line_that_is_not_there_once_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match=r"a.py: expected this line once, found it [02] times: x = 1"):
        Mutant("a.py", "", "x = 1", "x = 2", (), "").applied(source)


def test_indentation_stays() -> None:
    assert Mutant("a.py", "", "x = 1", "x = 2", (), "").applied("if y:\n    x = 1\n") == "if y:\n    x = 2\n"
