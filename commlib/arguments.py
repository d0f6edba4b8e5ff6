"""Recording of an object's constructor arguments, and descriptions by which ranks compare them."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, MethodType
from typing import Any, ClassVar

import torch

#: Maximum nesting depth of the objects that are described.
_DEPTH = 12


class Recorded:
    """Records the constructor's arguments by name, defaults included.

    A direct subclass must define `__init__`: otherwise `inspect.signature` returns the signature of `__new__`.

    Attributes:
        may_differ: Names of arguments that may differ between ranks.
    """

    may_differ: ClassVar[frozenset[str]] = frozenset()

    _arguments: Mapping[str, Any] = MappingProxyType({})

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create the object and record its arguments. `__init__` raises the error if they are invalid."""
        made = super().__new__(cls)
        try:
            bound = _signature(cls).bind(None, *args, **kwargs)
        except TypeError:  # also raised for a copy, whose state is set later
            return made
        bound.apply_defaults()
        _, *names = bound.arguments
        object.__setattr__(made, "_arguments", {name: bound.arguments[name] for name in names})  # may be frozen
        return made

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The constructor's arguments by name, as passed."""
        return self._arguments


def call(made: Recorded) -> str:
    """Return the call that creates an object, with all arguments: `TopK(ratio=0.01, op='mean', ...)`."""
    return f"{type(made).__name__}({_listed(made.arguments)})"


def changed_options(made: Recorded) -> str:
    """Return the arguments that differ from their defaults, as in a call: `ratio=0.1`; "" if none does."""
    defaults = {name: each.default for name, each in _signature(type(made)).parameters.items()}
    given = made.arguments.items()
    return _listed({name: value for name, value in given if describe(value) != describe(defaults.get(name))})


def _listed(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _signature(cls: type) -> inspect.Signature:
    return inspect.signature(cls.__init__)


def described(made: Recorded) -> list[tuple[str, str]]:
    """Return (name, description) of each argument that must be equal on all ranks; equal values, equal descriptions."""
    return [(name, describe(value)) for name, value in made.arguments.items() if name not in made.may_differ]


def describe(value: Any) -> str:
    """Return a description of a value that is the same in every process for equal values, independent of addresses.

    Functions are described by their code (without file names and line numbers), defaults, closure and bound arguments;
    tensors by dtype, shape and bits; other objects by their class and attributes.
    """
    return _Describer().describe(value)


class _Describer:
    """Describes one value. Keeps the stack of enclosing objects to detect reference cycles."""

    def __init__(self) -> None:
        self._within: list[int] = []

    def describe(self, value: Any) -> str:
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
            return repr(value)
        if id(value) in self._within:
            return f"<outer {len(self._within) - self._within.index(id(value))}>"
        if len(self._within) == _DEPTH:
            return f"<{_name(type(value))}>"
        self._within.append(id(value))
        try:
            return self._inside(value)
        finally:
            self._within.pop()

    def _inside(self, value: Any) -> str:
        match value:
            case torch.Tensor():
                return _tensor(value)
            case type():
                return _name(value)
            case FunctionType():
                return self._function(value)
            case MethodType():
                return f"{self.describe(value.__func__)} of {self.describe(value.__self__)}"
            case BuiltinFunctionType():
                return f"{value.__module__}.{value.__qualname__}"
            case functools.partial():
                return f"partial({self._each([value.func, value.args, value.keywords])})"
            case CodeType():
                return self._code(value)
            case Recorded():
                return f"{_name(type(value))}({self._named(value.arguments)})"
            case Mapping():
                return "{" + ", ".join(f"{self.describe(k)}: {self.describe(v)}" for k, v in value.items()) + "}"
            case Set():
                return "{" + ", ".join(sorted(map(self.describe, value))) + "}"
            case Sequence():
                return f"[{self._each(value)}]"
        if is_dataclass(value):
            return f"{_name(type(value))}({self._named({f.name: getattr(value, f.name) for f in fields(value)})})"
        return f"{_name(type(value))}({self._named(getattr(value, '__dict__', {}))})"

    def _each(self, values: Any) -> str:
        return ", ".join(map(self.describe, values))

    def _named(self, values: Mapping[str, Any]) -> str:
        return ", ".join(f"{name}={self.describe(value)}" for name, value in values.items())

    def _function(self, function: FunctionType) -> str:
        cells = [_content(cell) for cell in function.__closure__ or ()]
        rest = [function.__defaults__, function.__kwdefaults__, cells]
        return f"{function.__qualname__}: {_digest(self._code(function.__code__))}({self._each(rest)})"

    def _code(self, code: CodeType) -> str:
        names = [code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars]
        shape = [code.co_argcount, code.co_kwonlyargcount, code.co_flags, code.co_code]
        return self._each([*shape, *names, code.co_consts])


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _tensor(tensor: torch.Tensor) -> str:
    values = tensor.detach().cpu().contiguous()
    values = torch.view_as_real(values) if values.is_complex() else values
    bits = values.reshape(-1).view(torch.uint8).numpy().tobytes() if values.numel() else b""
    return f"tensor({tuple(tensor.shape)}, {tensor.dtype}, {hashlib.sha256(bits).hexdigest()[:16]})"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _name(cls: Callable[..., Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
