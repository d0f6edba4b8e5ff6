"""Nested state with its tensors apart, and copies of it that members of an elastic group have received."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from commlib.engine.bits import as_integers


def without_tensors(value: Any, tensors: dict[str, torch.Tensor], path: str = "") -> Any:
    """Return nested data without its tensors, which are put into `tensors` by their paths."""
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach().contiguous()
        return ("tensor", path)
    if isinstance(value, Mapping):
        items = [(key, without_tensors(each, tensors, path_of(path, key))) for key, each in value.items()]
        return ("dict", items)
    if isinstance(value, list | tuple):
        items = [without_tensors(each, tensors, path_of(path, idx)) for idx, each in enumerate(value)]
        return ("list" if isinstance(value, list) else "tuple", items)
    return ("plain", value)


def with_tensors(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the data that `without_tensors` turned into `skeleton` and `tensors`."""
    kind, value = skeleton
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: with_tensors(each, tensors) for key, each in value}
    if kind == "plain":
        return value
    return (list if kind == "list" else tuple)(with_tensors(each, tensors) for each in value)


def path_of(start: str, *keys: Any) -> str:
    """Return the path of a value in nested data: `start`, and the keys that lead to it."""
    return "".join([start, *(f"/{key!r}" for key in keys)])


@dataclass(frozen=True)
class Copy:
    """Tensors of the state at one time.

    Attributes:
        tensors: By path.
        num_rounds: The number of rounds before it.
        is_local: Whether it is of a period of local steps. The optimizer's state then belongs to one member, and so do
            the weights until the next round: those of another step, or of another member, serve a new member as well.
    """

    tensors: Mapping[str, torch.Tensor]
    num_rounds: int
    is_local: bool

    def missing(self, now: Copy) -> list[str]:
        """Return the paths of the tensors of `now` that a member with this copy lacks, or whose bits have changed."""
        of_member = ["/'optimizers'/", "/'model'/"] if self.num_rounds == now.num_rounds else ["/'optimizers'/"]
        serves = lambda path: self.is_local and now.is_local and path.startswith(tuple(of_member))  # noqa: E731
        return [path for path, tensor in now.tensors.items() if not self._has(path, tensor, serves)]

    def missing_of(self, now: Copy) -> Copy:
        """Return copies of those tensors."""
        return replace(now, tensors={path: now.tensors[path].clone() for path in self.missing(now)})

    def _has(self, path: str, tensor: torch.Tensor, serves: Callable[[str], bool]) -> bool:
        own = self.tensors.get(path)
        if own is None or own.shape != tensor.shape or own.dtype != tensor.dtype:
            return False
        return serves(path) or torch.equal(as_integers(own), as_integers(tensor))
