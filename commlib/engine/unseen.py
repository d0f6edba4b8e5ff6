"""Detects steps that the optimizers given to `wrap` do not make, and steps that come too early.

[Note: evidence] Warm-ups, periods and rounds over weights follow the steps of the given optimizers. If other optimizers
make the steps, rounds stop. If the given optimizer is part of another one, rounds run in the middle of a step. Both
cases raise an error, but only on evidence:

    another optimizer steps parameters of the model (torch's global hooks report every `torch.optim.Optimizer`)
    the weights have changed after each of `NUM_CHANGES` forwards in a row, and no given optimizer has stepped
    an object's `step` calls the given optimizer's, and then changes the weights itself

A step inside a backward whose gradients are not yet communicated raises as well, since it uses a rank's own gradient.
Accumulated backwards, steps that a scaler skips, and weights that are swapped, clipped or loaded do not raise.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from commlib import locks
from commlib.engine.bits import as_integers
from commlib.sharding.local import local_of
from commlib.weak import WeakMembers

#: Number of consecutive forwards after which the weights must have changed to raise an error.
NUM_CHANGES = 8

#: Maximum number of parameters that are sampled, and maximum number of elements along the last dimension of each.
_NUM_WATCHED, _NUM_ELEMENTS = 8, 64
#: Number of steps of an enclosing optimizer in which it is checked for changes of the weights after the given step.
_NUM_PROBED = 20
#: Number of frames above a step that are searched for an enclosing optimizer.
_NUM_FRAMES = 12


class Sample:
    """A sample of the elements of a model's parameters, to detect changes of its weights.

    Args:
        parameters: The model's parameters.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._watched = parameters[:: -(-len(parameters) // _NUM_WATCHED)]

    def take(self) -> list[torch.Tensor]:
        """Return copies of the sampled elements, without waiting for the device."""
        return [_some(local_of(parameter.data)) for parameter in self._watched]


def are_alike(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return [] bool, on the device: whether two samples are bit-identical."""
    if [each.shape for each in one] != [each.shape for each in other]:
        return torch.tensor(False, device=one[0].device)
    return torch.stack([(a == b).all() for a, b in zip(one, other, strict=True)]).all()


def _some(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of elements that are spread over the tensor."""
    values = torch.view_as_real(values) if values.is_complex() else values
    for dim in range(values.dim()):
        stride = -(-values.shape[dim] // _NUM_ELEMENTS) if dim == values.dim() - 1 else -(-values.shape[dim] // 2)
        values = values[(slice(None),) * dim + (slice(None, None, max(stride, 1)),)]
    return as_integers(values.clone(memory_format=torch.contiguous_format))


class UncountedChanges:
    """Detects weights that change from forward to forward while no given optimizer steps. See [Note: evidence].

    Args:
        parameters: The model's parameters.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._sample = Sample(parameters)
        self.expect_change()

    def expect_change(self) -> None:
        """Restart the detection after a known change of the weights."""
        self._num_steps: int | None = None
        self._seen: list[list[torch.Tensor]] = []

    def at_forward(self, num_steps: int) -> bool:
        """Check the weights at a training forward.

        Args:
            num_steps: Number of steps that the given optimizers have made.

        Returns:
            Whether the weights have changed after each of the last `NUM_CHANGES` forwards.
        """
        if num_steps != self._num_steps:
            self._num_steps, self._seen = num_steps, []
            return False
        self._seen.append(self._sample.take())
        if len(self._seen) <= NUM_CHANGES:
            return False
        are_equal = torch.stack([are_alike(*pair) for pair in itertools.pairwise(self._seen)])
        del self._seen[:-1]
        return not bool(are_equal.any())


class Observer:
    """Is called before every step of any `torch.optim.Optimizer` of this process."""

    def before_any_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check a step that `optimizer` is about to make. Raises an error to refuse it."""


_observers: WeakMembers[Observer] = WeakMembers(locks.lock("observers", is_of_process=True))
#: Torch's hook, registered while there are observers, since it breaks the graph of a compiled step.
_hooks: list[RemovableHandle] = []


@torch._disable_dynamo  # see [Note: hooks and dynamo] in engine/gradients/backward.py
def _before_any_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for observer in _observers.alive():
        observer.before_any_step(optimizer)


def observe(observer: Observer) -> None:
    """Notify the observer of steps from now on, for as long as it is alive."""
    _observers.add(observer)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_any_step))


def ignore(observer: Observer) -> None:
    """Undo `observe`. Idempotent."""
    _observers.discard(observer)
    if not _observers.alive():
        while _hooks:
            _hooks.pop().remove()


def has_parameters_of(optimizer: torch.optim.Optimizer, ids: frozenset[int]) -> bool:
    """Return whether an optimizer has one of these parameters (by identity) with a gradient."""
    return any(id(p) in ids and p.grad is not None for group in optimizer.param_groups for p in group["params"])


class Enclosing:
    """Detects an object whose `step` calls the given optimizer's and then changes the weights.

    Examples are optimizer wrappers that do not derive from torch's `Optimizer`, such as schedule-free's. Proxies that
    only forward steps, such as accelerate's, change nothing.

    Args:
        optimizers: The given optimizers.
        parameters: The model's parameters.
        found: Called with an object that changes them.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Sequence[torch.Tensor],
        found: Callable[[Any], None],
    ) -> None:
        self._optimizers = optimizers
        self._sample = Sample(parameters)
        self._found = found
        self._num_left = _NUM_PROBED
        self._outer: Any = None
        self._after: list[torch.Tensor] | None = None

    def before_step(self) -> None:
        """Find the enclosing object before the first step of a given optimizer."""
        if self._outer is None and self._num_left == _NUM_PROBED:
            self._num_left -= 1
            self._outer = _caller_with_step(self._optimizers)
            if self._outer is not None:
                own = weakref.ref(self)
                with_step = functools.partial(_step_of, self._outer, own)
                try:
                    self._outer.step = with_step
                except AttributeError:
                    self._outer = None

    def is_called(self) -> None:
        """Reset at the beginning of the object's `step`."""
        self._after = None

    def after_step(self) -> None:
        """Sample the weights after a step of the given optimizers and commlib's work."""
        if self._outer is not None:
            self._after = self._sample.take()

    def has_returned(self) -> None:
        """Compare the weights at the end of the object's `step`."""
        after, self._after = self._after, None
        self._num_left -= 1
        has_changed = after is not None and not bool(are_alike(after, self._sample.take()))
        outer = self._outer
        if has_changed or self._num_left <= 0:
            self.close()
        if has_changed:
            self._found(outer)

    def close(self) -> None:
        """Restore the object's `step`. Idempotent."""
        if self._outer is not None:
            vars(self._outer).pop("step", None)
            self._outer = None


def _step_of(outer: Any, enclosing: Callable[[], Enclosing | None], *args: Any, **kwargs: Any) -> Any:
    if (alive := enclosing()) is not None:
        alive.is_called()
    result = type(outer).step(outer, *args, **kwargs)
    if (alive := enclosing()) is not None:
        alive.has_returned()
    return result


def _caller_with_step(optimizers: Sequence[torch.optim.Optimizer]) -> Any:
    """Return the calling object that has a method `step` on the stack, and parameter groups like an optimizer."""
    frame: Any = sys._getframe(1)
    for _ in range(_NUM_FRAMES):
        frame = frame.f_back
        if frame is None:
            return None
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if owner is None or any(owner is each for each in optimizers) or not hasattr(owner, "__dict__"):
            continue
        if hasattr(owner, "param_groups") and "step" not in vars(owner) and hasattr(type(owner), "step"):
            return owner
    return None
