"""The distribution of the tests: which ones are slow, and which ones run together."""

from __future__ import annotations

import ast
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import SHARD, SLOW_TESTS
from tests.contract.contracts_values import CONCERNS
from tests.contract.subjects import REPRESENTATIVES, Subject, of_each_kind
from tests.contract.test_algorithms import ALGORITHMS, CONTRACTS, FAST, pairs
from tests.multi.pool import on_ranks
from tests.scheduler import TOGETHER, _is_marked
from tests.thin import thinned
from tests.xdist_scheduler import Scheduler

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


def test_one_algorithm_of_each_kind_is_fast() -> None:
    assert [is_slow(each) for each in of_each_kind(["allreduce", "topk", "of_tomorrow"])] == [True, False, True]


def test_every_algorithm_is_held_to_every_contract_and_some_in_the_fast_part() -> None:
    found = {each.values: is_slow(each) for each in pairs()}
    concerned = {(name, contract) for name in ALGORITHMS for contract in CONTRACTS if concerns(name, contract)}
    assert found.keys() == concerned
    assert {pair for pair, slow in found.items() if not slow} == {pair for pair in concerned if pair[0] in FAST}
    assert set(REPRESENTATIVES.values()) <= set(FAST)


def concerns(name: str, contract: str) -> bool:
    return contract not in CONCERNS or CONCERNS[contract](Subject(name))


class Combination:
    """A test with these values, as pytest has it."""

    def __init__(self, *indices: int, thin: bool = True) -> None:
        self.nodeid = f"tests/a.py::test[{indices}]"
        self.callspec = SimpleNamespace(params={f"argument {place}": index for place, index in enumerate(indices)})
        self.thin = thin

    def get_closest_marker(self, _: str) -> object | None:
        return self if self.thin else None


@pytest.mark.parametrize("sizes", [(1,), (4,), (3, 3), (2, 5), (4, 2, 3)])
def test_thin_tests_run_with_each_value(sizes: tuple[int, ...]) -> None:
    every = [Combination(*indices) for indices in itertools.product(*map(range, sizes))]
    kept = thinned(every)
    for place, size in enumerate(sizes):
        assert {each.callspec.params[f"argument {place}"] for each in kept} == set(range(size))
    assert max(sizes) <= len(kept) < max(sizes) + max(1, len(sizes) - 1)


def test_thin_tests_of_this_suite_have_fewer_combinations() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "tests/multi/test_zero_one_adam.py"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in (SLOW_TESTS, SHARD)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.count("::test_weights_are_those_of_the_reference[") == 4, "of 2 times 4 combinations"


def test_other_tests_run_with_all_combinations() -> None:
    every = [Combination(*indices, thin=False) for indices in itertools.product(range(3), range(4))]
    assert thinned(every) == every


@pytest.mark.parametrize("path", TOGETHER)
def test_files_that_run_together_exist(path: str) -> None:
    assert (ROOT / path).is_file()


def test_tests_of_a_group_run_together_and_others_alone() -> None:
    scheduler = Scheduler.__new__(Scheduler)
    hosts = ["tests/unit/test_emulated.py::a[1]", "tests/unit/test_emulate.py::b", "tests/multi/test_wire_bytes.py::c"]
    others = ["tests/unit/test_order.py::a[1]", "tests/unit/test_order.py::a[2]"]
    assert {scheduler._split_scope(name) for name in hosts} == {"hosts"}
    assert [scheduler._split_scope(name) for name in others] == others


class Node:
    """A process of xdist that records the tests it is given, and may run a test once it knows the next."""

    def __init__(self) -> None:
        self.queue: list[int] = []
        self.shutting_down = False
        self.gateway = SimpleNamespace(id="gw")

    def send_runtest_some(self, indices: list[int]) -> None:
        self.queue += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    @property
    def may_run(self) -> bool:
        return len(self.queue) >= (1 if self.shutting_down else 2)


def run_session(tests: list[str], num_nodes: int) -> list[tuple[int, str, int]]:
    """Run tests on pretended processes; return (process, test, processes that have not ended) in their order."""
    scheduler: Any = Scheduler.__new__(Scheduler)
    config = SimpleNamespace(option=SimpleNamespace(loadscopereorder=True, tx=["popen"] * num_nodes), rootpath=ROOT)
    config.getvalue = lambda name: getattr(config.option, name)
    scheduler.__init__(config)
    nodes = [Node() for _ in range(num_nodes)]
    for node in nodes:
        scheduler.add_node(node)
        scheduler.add_node_collection(node, tests)
    scheduler.schedule()
    ran: list[tuple[int, str, int]] = []
    alive = list(nodes)
    while alive:
        idle = [node for node in alive if node.shutting_down and not node.queue]
        able = [node for node in alive if node.may_run]
        assert idle or able, f"nothing goes on after {ran}"
        for node in idle:
            alive.remove(node)
            if node in scheduler.nodes:
                scheduler.remove_node(node)
        for node in able:
            index = node.queue.pop(0)
            ran.append((nodes.index(node), tests[index], len(alive)))
            scheduler.mark_test_complete(node, index)
    return ran


@pytest.mark.parametrize("num_nodes", [1, 2, 3])
@pytest.mark.parametrize("num_others", [0, 1, 2, 7])
@pytest.mark.parametrize("num_timing", [0, 1, 2, 5])
def test_timing_tests_run_alone_and_last(
    num_nodes: int, num_others: int, num_timing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    timing = {f"tests/unit/test_a.py::timing_{idx}" for idx in range(num_timing)}
    monkeypatch.setattr("tests.scheduler.timing_tests", lambda: timing)
    tests = sorted(timing) + [f"tests/unit/test_b.py::test[{idx}]" for idx in range(num_others)]
    ran = run_session(tests, num_nodes) if tests else []
    assert sorted(name for _, name, _ in ran) == sorted(tests)
    alone = ran[num_others:]
    assert {name for _, name, _ in alone} == timing
    assert len({node for node, _, _ in alone}) <= 1
    assert all(num_alive == 1 for _, _, num_alive in alone)


def test_marks_are_read_from_the_sources() -> None:
    source = ast.parse("@pytest.mark.timing\ndef one(): ...\n@pytest.mark.slow\ndef other(): ...\ndef plain(): ...")
    assert [_is_marked(function) for function in source.body] == [True, False, False]  # type: ignore[arg-type]
