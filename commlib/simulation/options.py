"""Options of algorithms as a user writes them: which there are, and whether a value is of the right type."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from commlib.algorithms.base import Algorithm

_PLAIN = (bool, int, float, str, type(None))


def options_of(cls: type[Algorithm]) -> str:
    """Return the options that a value can be written for, with their defaults: "ratio=0.01, op='mean'"."""
    found = inspect.signature(cls).parameters.values()
    shown = [f"{each.name}={each.default!r}" for each in found if isinstance(each.default, _PLAIN)]
    return ", ".join(shown) or "no options"


def check_options(cls: type[Algorithm], options: Mapping[str, Any]) -> None:
    """Compare options with the signature of an algorithm.

    Raises:
        TypeError: There is no such option, or its value is of another type.
        ValueError: A number that is not finite.
    """
    known = inspect.signature(cls).parameters
    try:
        hints = get_type_hints(cls.__init__)
    except NameError:  # of names that are there for type checkers only
        hints = {}
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"there is no option {name!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name}: expected a finite number, got {value!r}")
        if not _fits(value, hints.get(name, Any)):
            raise TypeError(f"{name}: expected {known[name].annotation}, got {value!r}")


def _fits(value: object, hint: Any) -> bool:
    """Return whether a value is of the type that a hint names; of containers what they hold is not looked at."""
    origin = get_origin(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    kind = origin or hint
    if not isinstance(kind, type):
        return True
    return isinstance(value, kind) and (kind is str or not isinstance(value, str))
