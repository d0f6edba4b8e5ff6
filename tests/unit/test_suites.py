"""How the tests are distributed: what is slow, and what runs together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract.subjects import SIBLINGS, slow_for_siblings
from tests.contract.test_algorithms import ALGORITHMS, CONTRACTS, FAMILIES, pairs
from tests.multi.pool import on_ranks
from tests.scheduler import TOGETHER, Scheduler

ROOT = Path(__file__).parents[2]


def is_slow(parameters: Any) -> bool:
    return any(mark.name == "slow" for mark in parameters.marks)


def test_numbers_of_ranks_may_be_slow() -> None:
    @on_ranks(1, 3, slow=(2,))
    def test() -> None: ...

    (mark,) = test.pytestmark  # type: ignore[attr-defined]
    assert [(each.values, each.id, is_slow(each)) for each in mark.args[1]] == [
        ((1,), "1ranks", False),
        ((3,), "3ranks", False),
        ((2,), "2ranks", True),
    ]


def test_siblings_are_slow_and_a_new_algorithm_is_not() -> None:
    assert [is_slow(each) for each in slow_for_siblings(["allreduce", "qsgd", "of_tomorrow"])] == [False, True, False]
    assert set(SIBLINGS) <= set(ALGORITHMS)


def test_every_algorithm_is_held_to_every_contract_and_families_in_the_fast_part() -> None:
    found = {each.values: is_slow(each) for each in pairs()}
    assert found.keys() == {(algorithm, contract) for algorithm in ALGORITHMS for contract in CONTRACTS}
    fast = {pair for pair, slow in found.items() if not slow}
    assert fast >= {(algorithm, contract) for algorithm in FAMILIES for contract in CONTRACTS}
    for algorithm in ALGORITHMS:
        assert sum(name == algorithm for name, _ in fast) >= 10, algorithm


@pytest.mark.parametrize("path", TOGETHER)
def test_files_that_run_together_exist(path: str) -> None:
    assert (ROOT / path).is_file()


def test_tests_of_a_group_run_together_and_others_alone() -> None:
    scheduler = Scheduler.__new__(Scheduler)
    hosts = ["tests/unit/test_emulated.py::a[1]", "tests/unit/test_emulate.py::b", "tests/multi/test_wire_bytes.py::c"]
    others = ["tests/unit/test_order.py::a[1]", "tests/unit/test_order.py::a[2]"]
    assert {scheduler._split_scope(name) for name in hosts} == {"hosts"}
    assert [scheduler._split_scope(name) for name in others] == others
