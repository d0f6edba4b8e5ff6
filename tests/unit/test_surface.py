"""The public surface stays: what users have written keeps working."""

from __future__ import annotations

import json
import re
import sys
import types
import warnings
from typing import Any

import click
import pytest

from commlib.network import workloads
from tests import surface

RECORDED: dict[str, Any] = json.loads(surface.GOLDEN.read_text(encoding="utf-8"))


def test_every_recorded_name_takes_what_it_took() -> None:
    lost = [words for name, before in RECORDED.items() for words in surface.missing(before, name)]
    assert not lost, "\n".join(lost)


def test_every_public_name_is_recorded_with_what_it_takes() -> None:
    now = {name: surface.describe(surface.resolve(name)) for name in surface.names()}
    new = [name for name, taken in now.items() if RECORDED.get(name) != taken]
    assert not new, f"record them with `python -m tests.surface --write`: {new}"


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--plot", None),
        ("--picture", r"commlib topology does not take \['plot'\]"),
    ],
)
def test_an_option_of_a_command_that_is_gone_is_found(
    option: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = click.Command(
        "topology", params=[click.Argument(["name"]), click.Option(["--ranks"]), click.Option([option])]
    )
    monkeypatch.setattr(surface, "commands", lambda: {"commlib topology": surface.as_function(command)})
    found = surface.missing(RECORDED["commlib topology"], "commlib topology")
    assert bool(found) == (words is not None)
    assert words is None or re.search(words, "\n".join(found)), found
    assert surface.missing(RECORDED["commlib doctor"], "commlib doctor") == ["commlib doctor: there is none"]


def test_a_deprecated_name_says_which_replaces_it() -> None:
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always", DeprecationWarning)
        for name in RECORDED:
            surface.resolve(name)
    assert raised, "delete this test with the last deprecated name"
    for each in raised:
        replacement = re.search(r"import (\w+) from ([\w.]+)", str(each.message))
        assert replacement, each.message
        surface.resolve(f"{replacement[2]}.{replacement[1]}")


#: The files with the formats of saved state, in the order of the page's table.
FORMATS = [
    "checkpoint/stateful.py",
    "engine/state.py",
    "checkpoint/rank_state.py",
    "integrations/accelerate_checkpoint.py",
    "integrations/lightning/checkpoints.py",
]


def test_the_page_on_stability_names_the_packages_and_the_formats() -> None:
    page = (surface.ROOT / "docs" / "reference" / "stability.md").read_text(encoding="utf-8")
    packages = page.split("`__all__` of ")[1].split(";")[0]
    assert tuple(re.findall(r"`([\w.]+)`", packages)) == surface._PACKAGES
    numbers = re.findall(r"^\| `[^|]* \| (\d+) \|$", page, re.MULTILINE)
    sources = [(surface.ROOT / "commlib" / name).read_text(encoding="utf-8") for name in FORMATS]
    assert [re.findall(r"^_FORMAT = (\d+)$", text, re.MULTILINE) for text in sources] == [[each] for each in numbers]
    assert f"`{workloads._FORMAT}`" in page


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
