"""Options of algorithms as users write them: their names, and type checks of their values."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from commlib.algorithms.base import Algorithm

_PLAIN = (bool, int, float, str, type(None))


def options_of(cls: type[Algorithm]) -> str:
    """Return the options that can be written as text, with their defaults: "ratio=0.01, op='mean'"."""
    found = inspect.signature(cls).parameters.values()
    shown = [f"{each.name}={each.default!r}" for each in found if isinstance(each.default, _PLAIN)]
    return ", ".join(shown) or "no options"


def check_options(cls: type[Algorithm], options: Mapping[str, Any]) -> None:
    """Check options against the signature of an algorithm.

    Raises:
        TypeError: An option does not exist, or its value has another type.
        ValueError: A number is not finite.
    """
    known = inspect.signature(cls).parameters
    try:
        hints = get_type_hints(cls.__init__)
    except NameError:  # a name imported for type checkers only
        hints = {}
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"there is no option {name!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name}: expected a finite number, got {value!r}")
        if not _fits(value, hints.get(name, Any)):
            raise TypeError(f"{name}: expected {known[name].annotation}, got {value!r}")


def _fits(value: object, hint: Any) -> bool:
    """Return whether a value has the type of a hint. Elements of containers are not checked."""
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
