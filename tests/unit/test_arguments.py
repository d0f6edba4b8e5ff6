"""The arguments that algorithms and codecs remember, and the words by which ranks compare them."""

from __future__ import annotations

import copy
import functools
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import commlib
from commlib.algorithms import Algorithm, DiLoCo, TopK
from commlib.arguments import changed_options, describe, described
from commlib.codecs import Int4, Int8
from tests.multi.forker import ROOT


class Tuned(Algorithm):
    """An algorithm with options of several kinds, of which one may differ between ranks."""

    may_differ = frozenset({"folder"})

    def __init__(self, rate: float, *, folder: str = "here", weights: Any = None) -> None:
        self._rate = rate
        self._weights = weights


def test_arguments_are_remembered_by_name_with_defaults() -> None:
    assert dict(Tuned(0.5, folder="there").arguments) == {"rate": 0.5, "folder": "there", "weights": None}
    assert TopK(0.25).arguments["ratio"] == 0.25
    assert TopK(0.25).arguments["op"] == "mean"
    assert dict(Int8().arguments) == {}


def test_copies_have_the_same_arguments() -> None:
    made = DiLoCo(period=3, codec="int8")
    for other in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert described(other) == described(made)


@dataclass(frozen=True)
class Frozen(Algorithm):
    rate: float


def test_a_class_that_is_frozen_has_arguments_too() -> None:
    assert dict(Frozen(0.5).arguments) == {"rate": 0.5}


def test_an_algorithm_is_shown_as_the_call_that_creates_it() -> None:
    assert repr(Tuned(0.5)) == "Tuned(rate=0.5, folder='here', weights=None)"
    made = DiLoCo(period=30, codec=Int4())
    assert repr(made).startswith("DiLoCo(period=30, outer_lr=0.7, outer_momentum=0.9, nesterov=True, codec=Int4(), ")
    assert changed_options(made) == "period=30, codec=Int4()"
    assert changed_options(DiLoCo(period=50)) == ""
    assert changed_options(Tuned(0.5)) == "rate=0.5"


def test_wrong_arguments_are_the_constructors_own_error() -> None:
    with pytest.raises(TypeError, match="nosuch"):
        Tuned(0.5, nosuch=1)  # type: ignore[call-arg]


def test_what_may_differ_is_not_compared() -> None:
    assert described(Tuned(0.5, folder="a")) == described(Tuned(0.5, folder="b"))
    assert described(Tuned(0.5)) != described(Tuned(0.25))
    assert described(Tuned(0.5, weights=torch.ones(2))) != described(Tuned(0.5, weights=torch.zeros(2)))


def above(limit: int, *, strict: bool = True) -> Callable[[int], bool]:
    return lambda value: value > limit if strict else value >= limit


class Limit:
    def __init__(self, limit: int) -> None:
        self.limit = limit

    def admits(self, value: int) -> bool:
        return value > self.limit


@dataclass
class Pair:
    one: Any
    other: Any


SAME = [
    (lambda: above(3), "a closure"),
    (lambda: functools.partial(max, 3, key=abs), "a partial"),
    (lambda: Limit(3).admits, "a bound method"),
    (lambda: Pair([1, 2.5], {"a": (None, True)}), "a dataclass"),
    (lambda: torch.arange(6.0).reshape(2, 3), "a tensor"),
    (lambda: Int4(), "a codec"),
    (lambda: {3, 1, 2}, "a set"),
    (lambda: torch.nn.Linear, "a class"),
]


@pytest.mark.parametrize("make", [make for make, _ in SAME], ids=[name for _, name in SAME])
def test_like_values_have_the_same_words(make: Callable[[], Any]) -> None:
    assert describe(make()) == describe(make())
    assert " at 0x" not in describe(make())


DIFFERENT = [
    (above(3), above(4)),
    (above(3), above(3, strict=False)),
    (functools.partial(max, 3), functools.partial(max, 4)),
    (Limit(3).admits, Limit(4).admits),
    (Pair(1, 2), Pair(2, 1)),
    (torch.ones(2), torch.ones(2, dtype=torch.float64)),
    (torch.ones(2), torch.ones(1, 2)),
    (lambda x: x + 1, lambda x: x + 2),
    (lambda x=1: x, lambda x=2: x),
    (1, True),
    (1, 1.0),
    ("1", 1),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_other_values_have_other_words(one: Any, other: Any) -> None:
    assert describe(one) != describe(other)


def test_circles_end() -> None:
    one, other = Pair(None, None), Pair(None, None)
    one.one, other.one = one, other
    assert describe(one) == describe(other)


def test_functions_are_the_same_in_other_files_lines_and_processes() -> None:
    code = "{lines}from commlib.arguments import describe\ndef f(name, parameter, limit=5):\n"
    code += "    return parameter.numel() > limit and 'bias' not in name\nprint(describe(f))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code.format(lines=lines)], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for lines in ("", "\n\n# elsewhere\n")
    }
    assert len(found) == 1


@pytest.mark.parametrize("name", commlib.algorithms.list())
def test_every_algorithm_has_words_without_addresses(name: str) -> None:
    words = described(commlib.algorithms.create(name))
    assert words == described(commlib.algorithms.create(name))
    assert not any(" at 0x" in word for _, word in words)
