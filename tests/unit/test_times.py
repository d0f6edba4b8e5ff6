"""No test compares a real time with an upper limit, but for a few that are marked; and what counts as such."""

from __future__ import annotations

import textwrap

import pytest

from tests.times import COMPUTED, MOST_TIMING, TESTS, File, files


def test_no_test_that_is_not_marked_compares_a_real_time_with_an_upper_limit() -> None:
    assert [f"tests/{name}:{line}" for name, file in files() for line in file.faults()] == []


def test_few_tests_are_marked() -> None:
    marked = [f"tests/{name}: {test}" for name, file in files() for test in file.timing()]
    assert 0 < len(marked) <= MOST_TIMING, marked


def test_the_files_whose_times_are_computed_are_there() -> None:
    assert all((TESTS / name).exists() for name in COMPUTED)


FAULTS = {
    "a clock": "assert time.monotonic() - begin < 5",
    "the limit first": "assert 5 > time.perf_counter() - begin",
    "one of several": "assert begin and 0.2 < time.process_time() - begin <= 1.0",
    "a name": "took = time.time() - begin\n    assert took < 2.0, took",
    "a name of a name": "now = time.monotonic()\n    spent = now - begin\n    assert max(spent, 0) < 10",
    "a list": "found = []\n    found.append(time.monotonic() - begin)\n    assert min(found) <= 3",
    "one of two names": "other, now = 1, time.monotonic()\n    assert now - begin < other",
    "about": "took = time.monotonic() - begin\n    assert took == pytest.approx(0.3, rel=0.1)",
    "a report": "assert found[0]['waited_s'] < 5.0",
    "an attribute": "assert result.elapsed < TOO_SHORT",
    "a variable": "assert took_s < 2",
    "a limit that is not known": "assert took_s < within_s",
    "a deadline": "deadline = time.monotonic() + 5\n    assert time.monotonic() < deadline",
    "a helper": "assert helper() < 3",
    "a wait": "assert event.wait(5)",
    "a wait among others": "assert begin is None or event.acquire(timeout=10)",
    "a helper of its own": "assert soon(event.is_set)",
    "a comparison elsewhere": "assert is_prompt(begin)",
    "a lambda": "assert all(map(lambda each: time.monotonic() - each < 1, [begin]))",
}
FINE = {
    "a guard": "assert time.monotonic() - begin < 30",
    "a guard by name": "assert time.monotonic() - begin < LIMIT_S",
    "half of a guard": "assert took_s < LIMIT_S / 2",
    "a guard of its own": "assert took_s < LONG_ENOUGH",
    "a lower limit": "assert time.monotonic() - begin > 0.2",
    "a lower limit of a report": "assert 0.035 < found['waited_s']",
    "order": "first, second = time.monotonic(), time.monotonic()\n    assert first <= second",
    "a deadline far away": "deadline = time.monotonic() + 60\n    assert time.monotonic() < deadline",
    "a rate": "assert found['steps_per_s'] < 20",
    "a count of times": "assert len(times_s) < 4",
    "a setting": "assert model.timeout_s < 5",
    "a constant": "assert PROMPT_S < 5",
    "computed times": "assert result.step_s == pytest.approx(0.031)",
    "two computed times": "assert nodes.step_s < flat.step_s",
    "a long wait": "assert event.wait(LIMIT_S)",
    "nothing comes": "assert not event.wait(0.2)",
    "a wait that is not asserted": "event.wait(0.05)",
    "another function": "assert patient(event.is_set)",
    "an other clock": "assert clock.monotonic() < 5",
}
AROUND = """
import time
from tests.waiting import LIMIT_S
TOO_SHORT = 10.0
LONG_ENOUGH = 45.0

def helper():
    begin = time.monotonic()
    act()
    return time.monotonic() - begin

def soon(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()

def patient(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()

def is_prompt(begin):
    return time.monotonic() - begin < 2.0

{mark}
def test_it():
    begin = time.monotonic()
    {body}
"""


def faults(body: str, mark: str = "", names_count: bool = True) -> list[int]:
    return File(AROUND.format(body=textwrap.dedent(body), mark=mark), names_count).faults()


@pytest.mark.parametrize("what", FAULTS)
def test_upper_limits_on_real_times_are_found(what: str) -> None:
    assert faults(FAULTS[what])
    assert faults(FAULTS[what], "@pytest.mark.slow")


@pytest.mark.parametrize("what", FINE)
def test_what_is_no_such_limit_is_not_found(what: str) -> None:
    assert faults(FINE[what]) == []


def test_marked_tests_may_compare() -> None:
    source = AROUND.format(body=FAULTS["a clock"], mark="@pytest.mark.timing")
    assert File(source).faults() == []
    assert File(source).timing() == ["test_it"]
    in_class = "class TestAll:\n    def test_it(self):\n        assert took_s < 1\n"
    assert File(in_class).faults() == [3]
    assert File(f"@pytest.mark.timing\n{in_class}").faults() == []
    assert File(f"@pytest.mark.timing\n{in_class}").timing() == ["test_it"]


def test_names_say_nothing_where_times_are_computed() -> None:
    assert faults(FAULTS["a report"], names_count=False) == []
    assert faults(FAULTS["a clock"], names_count=False)
