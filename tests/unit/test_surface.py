"""The public surface stays: what users have written keeps working."""

from __future__ import annotations

import json
import re
import sys
import types
from typing import Any

import pytest

from tests import surface

RECORDED: dict[str, Any] = json.loads(surface.GOLDEN.read_text(encoding="utf-8"))


def test_every_recorded_name_takes_what_it_took() -> None:
    lost = [words for name, before in RECORDED.items() for words in surface.missing(before, name)]
    assert not lost, "\n".join(lost)


def test_every_public_name_is_recorded() -> None:
    new = sorted(set(surface.names()) - RECORDED.keys())
    assert not new, f"record them with `python -m tests.surface --write`: {new}"


def function(a: int, b: int = 0, *, c: int, d: int = 0) -> None:
    """Stands for a public function."""


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ("def f(a, b=0, *, c, d=0, e=0): ...", None),
        ("def f(a, b=0, **options): ...", None),
        ("def f(a, b=0, d=0, *, c): ...", None),
        ("def f(a, b=0, *, c): ...", r"does not take \['d'\]"),
        ("def f(b=0, a=0, *, c, d=0): ...", "by position"),
        ("def f(a, b, *, c, d=0): ...", r"needs \['b'\]"),
        ("def f(a, b=0, *, c, d=0, e): ...", r"needs \['e'\]"),
        ("f = 1", "cannot be called"),
        ("class f:\n    def __init__(self, a, b=0, *, c, d=0): ...", "function became class"),
        ("g = 1", "nothing has this name"),
    ],
)
def test_what_no_longer_works_is_found(now: str, words: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("commlib_stand_in")
    exec(now, vars(module))
    monkeypatch.setitem(sys.modules, "commlib_stand_in", module)
    found = surface.missing(surface.describe(function), "commlib_stand_in.f")
    assert bool(found) == (words is not None)
    assert words is None or re.search(words, "\n".join(found)), found


def test_an_attribute_that_is_gone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("commlib_stand_in")
    exec("class C:\n    kept = 1\n    def gone(self): ...", vars(module))
    before = {
        "kind": "class",
        "arguments": None,
        "attributes": {"kept": None, "gone": surface.arguments(module.C.gone)},
    }
    monkeypatch.setitem(sys.modules, "commlib_stand_in", module)
    assert surface.missing(before, "commlib_stand_in.C") == []
    del module.C.gone
    assert surface.missing(before, "commlib_stand_in.C") == ["commlib_stand_in.C.gone is gone"]
