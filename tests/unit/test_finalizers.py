"""Finalizers, locks, and weak references that several threads iterate over: each in one module only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.structure import PACKAGE, names_of_locks, sources

#: What only one module of commlib may use, by that module.
PLACES = {
    "transport/closing.py": "a finalizer; see [Note: closing]",
    "locks.py": "a lock; see [Note: locks]",
    "weak.py": "a set or table of weak references that several threads may use",
}


def found_in(source: str) -> Iterator[str]:
    """Yield, for each restricted use in a source, the module in which it belongs."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "__del__":
            yield "transport/closing.py"
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            has_callback = len(node.args) > 1 or any(each.arg == "callback" for each in node.keywords)
            if name == "finalize" or (name in ("ref", "ReferenceType", "WeakMethod", "proxy") and has_callback):
                yield "transport/closing.py"
        if isinstance(node, ast.Attribute | ast.Name | ast.alias):
            name = {ast.Attribute: "attr", ast.Name: "id", ast.alias: "name"}[type(node)]
            name = getattr(node, name)
            if name in ("Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "allocate_lock"):
                yield "locks.py"
            elif name in ("WeakSet", "WeakKeyDictionary", "WeakValueDictionary"):
                yield "weak.py"


@pytest.mark.parametrize("place", PLACES)
def test_is_in_one_module_only(place: str) -> None:
    found = {path.relative_to(PACKAGE).as_posix() for path in sources() if place in found_in(text_of(path))}
    assert found == {place}, PLACES[place]


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("class A:\n    def __del__(self): ...", "transport/closing.py"),
        ("weakref.finalize(owner, print)", "transport/closing.py"),
        ("from weakref import finalize as end, ref\nref(model, print)", "transport/closing.py"),
        ("weakref.ref(model, callback=print)", "transport/closing.py"),
        ("weakref.WeakMethod(model.forward, print)", "transport/closing.py"),
        ("weakref.proxy(model, print)", "transport/closing.py"),
        ("lock = threading.Lock()", "locks.py"),
        ("from threading import RLock", "locks.py"),
        ("make = threading.Condition", "locks.py"),
        ("from weakref import WeakSet", "weak.py"),
        ("weakref.WeakKeyDictionary()", "weak.py"),
    ],
)
def test_each_way_to_write_it_is_found(source: str, place: str) -> None:
    assert place in found_in(source)


def test_what_is_harmless_is_not_found() -> None:
    assert list(found_in("weakref.ref(model)\nweakref.WeakMethod(model.forward)\nthreading.Event()")) == []


def test_every_lock_has_a_name_of_its_own() -> None:
    names = names_of_locks()
    assert len(names) > 20
    assert len(names) == len(set(names))
