"""Which parameters of a test the fast part has: chosen ones, or, marked `thin`, each value at least once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def fast(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """Return the parameters of a test that is slow except for the chosen values."""
    return [pytest.param(value, marks=() if value in chosen else pytest.mark.slow) for value in values]


def thinned(items: Sequence[Any]) -> list[Any]:
    """Return the tests without those combinations of tests marked `thin` that have no value of their own."""
    combinations: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("thin") is not None:
            combinations[item.nodeid.partition("[")[0]].append(item)
    left_out = {each for same in combinations.values() for each in _superfluous(same)}
    return [item for item in items if item not in left_out]


def _superfluous(same: list[Any]) -> set[Any]:
    """Return those of one test's combinations that are not needed for each value of each parameter to come once."""
    kept: set[Any] = set()
    seen: set[tuple[str, int]] = set()
    for wants_all_new in (True, False):
        for item in same:
            values = {(name, id(value)) for name, value in item.callspec.params.items()}
            new = values - seen
            if new == values or (new and not wants_all_new):
                kept.add(item)
                seen |= values
    return set(same) - kept
