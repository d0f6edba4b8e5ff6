"""Which tests compare an algorithm, step by step, with the equations of its paper in NumPy or plain torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from commlib.algorithms import Algorithm

F = TypeVar("F", bound=Callable[..., Any])

_COMPARED: dict[type[Algorithm], list[str]] = {}


def against_equations(*classes: type[Algorithm]) -> Callable[[F], F]:
    """Note that a test compares algorithms of these classes with their equations."""

    def note(test: F) -> F:
        for cls in classes:
            _COMPARED.setdefault(cls, []).append(f"{test.__module__}:{test.__name__}")
        return test

    return note


def classes_of(makers: Iterable[Callable[[], Algorithm]]) -> set[type[Algorithm]]:
    """Return the classes of the algorithms that these make."""
    return {type(make()) for make in makers}


def compared() -> dict[type[Algorithm], list[str]]:
    """Return the tests that compare algorithms with their equations, by class."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        if f"@{against_equations.__name__}(" in path.read_text(encoding="utf-8"):
            importlib.import_module(f"{__package__}.{path.stem}")
    return _COMPARED
