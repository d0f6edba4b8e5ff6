"""Which tests compare a real time with an upper limit: a fault of the tests, as a machine under load is slow.

A real time is a value of a clock of the module `time`, a value computed from it, also when returned by a function of
the same file, or a number with the name of a time (`elapsed`, `seconds`, `..._s`, `..._ms`, `..._us`), as in reports.
Upper limits of 30 s and more are guards against hangs, which are allowed; lower limits do not depend on load.

Names are less reliable than clocks, since the simulator computes times, and tests pass some as inputs. A number that is
a time by its name only may therefore be compared with another such number, or by `approx`; and in the files of
`COMPUTED` names are ignored. Values of a clock are real times there, too. Tests marked `timing` may compare any times.

The check reads one file at a time, and considers neither types nor control flow.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
#: Upper limits from here on are guards against hangs.
GUARD_S = 30.0
#: How many tests may be marked `timing`.
MOST_TIMING = 15

#: Files whose times by name are not measured, but simulated, predicted, or given by the test.
COMPUTED = {
    "multi/test_figures.py",
    "unit/test_bagua_figures.py",
    "unit/test_compare.py",
    "unit/test_planner.py",
    "unit/test_simulator.py",
    "unit/test_simulator_roles.py",
    "unit/test_time_to_loss.py",
    "unit/test_trials.py",
    "unit/test_workloads.py",
}

_CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "time"}
_CLOCKS |= {f"{name}_ns" for name in _CLOCKS}
_NAME = re.compile(r"(?:^|.*_)(?:elapsed|took|seconds|took_s)$|.*[a-z0-9]_(?:s|ms|us)$")
_NO_TIME = re.compile(r".*(?:per_s|bytes_s|timeout_s|limit_s|within_s|most_s|latency_us|launch_us)$")
#: Methods that return whether something came within their limit.
_WAITS = {"wait", "acquire", "poll"}


class File:
    """One file of tests.

    Args:
        source: Its text.
        names_count: Whether a number is a real time by its name.
    """

    def __init__(self, source: str, names_count: bool = True) -> None:
        self.tree = ast.parse(source)
        self._names_count = names_count
        self._functions = [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)]
        self._nodes = {each: list(_own_nodes(each)) for each in self._functions}
        self._constants = dict(_constants(self.tree))
        self._returning: set[str] = set()
        for _ in range(2):  # a function that calls another one
            self._returning |= {each.name for each in self._functions if self._returns_time(each)}
        asserted = [node.test for node in ast.walk(self.tree) if isinstance(node, ast.Assert)]
        self._asserted = {name for test in asserted for name in _called(test)}

    def timing(self) -> list[str]:
        """Return the names of the tests that are marked `timing`."""
        exempt = self._exempt()
        return [each.name for each in self._functions if each in exempt]

    def faults(self) -> list[int]:
        """Return the lines in which a test that is not marked `timing` has an upper limit on a real time."""
        exempt, found = self._exempt(), set[int]()
        for function in self._functions:
            if function in exempt:
                continue
            real = self._real_names(function)
            for node in self._nodes[function]:
                if isinstance(node, ast.Assert):
                    found |= {each.lineno for each in self._limits(node.test, function, real)}
                    found |= {each.lineno for each in self._short_waits(node.test)}
                elif function.name in self._asserted:
                    if isinstance(node, ast.Return) and node.value is not None:
                        found |= {each.lineno for each in self._limits(node.value, function, real)}
                    if self._is_short_deadline(node, function):
                        found.add(node.lineno)  # type: ignore[attr-defined]
        return sorted(found)

    def _exempt(self) -> list[ast.FunctionDef]:
        marked = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and _is_marked(node)
        ]
        inside = [each for node in marked for each in ast.walk(node) if isinstance(each, ast.FunctionDef)]
        return [each for each in inside if each.name.startswith("test_")]

    # -- real times ----------------------------------------------------------------------------------------------------

    def _returns_time(self, function: ast.FunctionDef) -> bool:
        real = self._real_names(function)
        returned = [node.value for node in self._nodes[function] if isinstance(node, ast.Return) and node.value]
        return any(
            self._is_time(value, real, by_name=False) for value in returned if not isinstance(value, ast.Compare)
        )

    def _real_names(self, function: ast.FunctionDef) -> set[str]:
        """Return the names that a function gives to values computed from a clock."""
        real: set[str] = set()
        nodes = self._nodes[function]
        if not any(isinstance(node, ast.Call) and self._gives_time(node) for node in nodes):
            return real
        for _ in range(3):  # names of values computed from such names
            for node in nodes:
                if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value is not None:
                    for target, value in _assignments(node):
                        if self._is_time(value, real, by_name=False):
                            real |= {each.id for each in ast.walk(target) if _is_stored(each)}  # type: ignore[attr-defined]
                elif (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr == "append"
                    and isinstance(node.func.value, ast.Name)
                    and any(self._is_time(each, real, by_name=False) for each in node.args)
                ):
                    real.add(node.func.value.id)
        return real

    def _gives_time(self, call: ast.Call) -> bool:
        return _is_clock(call.func) or (isinstance(call.func, ast.Name) and call.func.id in self._returning)

    def _is_time(self, node: ast.AST, real: set[str], by_name: bool = True) -> bool:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len":
            return False
        if isinstance(node, ast.Lambda | ast.Constant):
            return False
        name = _name_of(node)
        if isinstance(node, ast.Name) and name in real:
            return True
        if isinstance(node, ast.Call) and self._gives_time(node):
            return True
        if by_name and self._names_count and not name.isupper() and _NAME.match(name) and not _NO_TIME.match(name):
            return True
        return any(self._is_time(child, real, by_name) for child in ast.iter_child_nodes(node))

    # -- limits --------------------------------------------------------------------------------------------------------

    def _limits(self, test: ast.expr, function: ast.FunctionDef, real: set[str]) -> Iterator[ast.Compare]:
        for node in ast.walk(test):
            if not isinstance(node, ast.Compare):
                continue
            sides = [node.left, *node.comparators]
            for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
                if isinstance(operator, ast.Eq) and any("approx" in _called(side) for side in (left, right)):
                    if any(self._is_time(side, real, by_name=False) for side in (left, right)):
                        yield node
                elif isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
                    small, large = (left, right) if isinstance(operator, ast.Lt | ast.LtE) else (right, left)
                    is_measured = self._is_time(small, real, by_name=False)
                    is_named = self._is_time(small, real) and not self._is_time(large, set())
                    if (is_measured or is_named) and not self._is_guard(large, function, real):
                        yield node

    def _is_guard(self, limit: ast.expr, function: ast.FunctionDef, real: set[str]) -> bool:
        """Return whether a limit, or a duration added to a moment, is long enough. Two moments may be compared."""
        if isinstance(limit, ast.Name):
            for node in self._nodes[function]:
                if isinstance(node, ast.Assign) and any(_name_of(each) == limit.id for each in node.targets):
                    return self._is_guard(node.value, function, real)
        if isinstance(limit, ast.BinOp) and isinstance(limit.op, ast.Add):
            values = [self._value(side, function) for side in (limit.left, limit.right)]
            return any(value is not None and value >= GUARD_S for value in values)
        value = self._value(limit, function)
        return self._is_time(limit, real) if value is None else value >= GUARD_S

    def _value(self, node: ast.expr, function: ast.FunctionDef | None) -> float | None:
        """Return the number of a literal expression or of a named constant."""
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return float(node.value)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
            left, right = self._value(node.left, function), self._value(node.right, function)
            if left is None or right is None:
                return None
            return left * right if isinstance(node.op, ast.Mult) else left / right
        if isinstance(node, ast.Name):
            if function is not None and node.id in (defaults := _defaults(function)):
                return self._value(defaults[node.id], None)
            return self._constants.get(node.id)
        return None

    def _short_waits(self, test: ast.expr) -> Iterator[ast.Call]:
        """Yield the calls in an assertion that something has come within a short limit."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return
        if isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute) and test.func.attr in _WAITS:
            limits = [*test.args[:1], *(each.value for each in test.keywords if each.arg == "timeout")]
            if any((self._value(each, None) or GUARD_S) < GUARD_S for each in limits):
                yield test
        if isinstance(test, ast.BoolOp | ast.Compare):
            for child in ast.iter_child_nodes(test):
                if isinstance(child, ast.expr):
                    yield from self._short_waits(child)

    def _is_short_deadline(self, node: ast.AST, function: ast.FunctionDef) -> bool:
        """Return whether a helper sets itself a short deadline: its result is then asserted."""
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
            return False
        if not (isinstance(node.left, ast.Call) and _is_clock(node.left.func)):
            return False
        value = self._value(node.right, function)
        return value is not None and value < GUARD_S


@functools.cache
def files() -> list[tuple[str, File]]:
    """Return every file of tests with its name."""
    found = [(path.relative_to(TESTS).as_posix(), path) for path in sorted(TESTS.rglob("*.py"))]
    return [(name, File(path.read_text(encoding="utf-8"), name not in COMPUTED)) for name, path in found]


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without those of the functions inside it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef):
            waiting.extend(ast.iter_child_nodes(node))


def _name_of(node: ast.AST) -> str:
    """Return the name of a variable, of an attribute, or of a field that is asked for by a string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return node.slice.value
    return ""


def _assignments(node: ast.Assign | ast.AugAssign | ast.AnnAssign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield pairs of target and value; multiple assignments one by one."""
    assert node.value is not None
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _is_clock(function: ast.AST) -> bool:
    if isinstance(function, ast.Attribute):
        return isinstance(function.value, ast.Name) and function.value.id == "time" and function.attr in _CLOCKS
    return isinstance(function, ast.Name) and function.id in _CLOCKS - {"time"}


def _is_marked(node: ast.FunctionDef | ast.ClassDef) -> bool:
    return any(ast.unparse(each).startswith("pytest.mark.timing") for each in node.decorator_list)


def _called(node: ast.AST) -> set[str]:
    return {_name_of(each.func) for each in ast.walk(node) if isinstance(each, ast.Call)}


def _defaults(function: ast.FunctionDef) -> dict[str, ast.expr]:
    places = function.args.args[len(function.args.args) - len(function.args.defaults) :]
    return {place.arg: value for place, value in zip(places, function.args.defaults, strict=True)}


def _constants(tree: ast.Module) -> Iterator[tuple[str, float]]:
    """Yield the numbers that a file gives names to, or takes from `tests/waiting.py`."""
    from tests import waiting

    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                if isinstance(target, ast.Name) and isinstance(node.value.value, int | float):
                    yield target.id, float(node.value.value)
        elif isinstance(node, ast.ImportFrom) and node.module == "tests.waiting":
            for alias in node.names:
                if isinstance(value := getattr(waiting, alias.name), float):
                    yield alias.asname or alias.name, value


if __name__ == "__main__":
    for name, file in files():
        for line in file.faults():
            print(f"tests/{name}:{line}")
