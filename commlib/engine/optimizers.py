"""The user's optimizers: finding the one inside a proxy, joining several, and detecting steps."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from commlib import locks
from commlib.errors import ConfigError
from commlib.weak import WeakMembers

_log = logging.getLogger("commlib")

#: Class names, in capitals, of optimizers whose steps are proportional to the gradient.
_SGD = ("SGD", "ASGD", "LARS")


class Joint:
    """Several optimizers, such as Muon and AdamW, as one, for algorithms that read groups or state."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = tuple(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, in order."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        """The state of all optimizers, by parameter."""
        return {parameter: state for optimizer in self.optimizers for parameter, state in optimizer.state.items()}


def resolve(optimizer: Any) -> Any:
    """Return the optimizer for `optimizer`: None, an optimizer, a proxy of one, or a sequence of those.

    Raises:
        ConfigError: `optimizer` is something else.
    """
    if optimizer is None:
        return None
    if isinstance(optimizer, list | tuple):
        found = [_plain(each) for each in optimizer]
        if not found or len(set(map(id, found))) < len(found):
            raise ConfigError(f"optimizer: expected different optimizers, got a sequence of {len(found)}")
        return found[0] if len(found) == 1 else Joint(found)
    return _plain(optimizer)


def all_of(optimizer: Any) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers in the result of `resolve`."""
    if optimizer is None:
        return ()
    return optimizer.optimizers if isinstance(optimizer, Joint) else (optimizer,)


def scale_of(scaler: Any) -> dict[str, float]:
    """Return a GradScaler's scale and the numbers that govern its changes. Equal on ranks that keep in step."""
    if not scaler.is_enabled():
        return {}
    getters = ("get_scale", "get_growth_factor", "get_backoff_factor", "get_growth_interval", "_get_growth_tracker")
    return {name.strip("_"): float(getattr(scaler, name)()) for name in getters if hasattr(scaler, name)}


def names_of(optimizer: Any) -> str:
    """Return the class names of the optimizers in the result of `resolve`, for messages."""
    return ", ".join(type(each).__name__ for each in all_of(optimizer)) or "no optimizer"


def has_points(optimizer: Any) -> bool:
    """Return whether an optimizer in the result of `resolve` trains and evaluates at different weights.

    Schedule-free optimizers switch between them with their methods `train` and `eval`, which torch's do not have.
    """
    return any(callable(getattr(each, "eval", None)) for each in all_of(optimizer))


def kind_of(optimizer: Any) -> str:
    """Return "sgd", "muon" or "adam" for the result of `resolve`. "adam" is the conservative choice.

    The kind depends on how a step scales with a gradient's size. It is proportional for SGD (and its subclasses, ASGD,
    LARS). It is independent of the size for optimizers that divide by the root of mean squares or take a sign, such as
    Adam, RMSprop and Lion. An optimizer that is unknown or not given may be one of these. The result is "muon" if one
    of several optimizers is Muon, which trains the matrices, and so almost all parameters.
    """
    found = all_of(optimizer)
    if any(_has_base(each, {"MUON"}) for each in found):
        return "muon"
    return "sgd" if found and all(_has_base(each, _SGD) for each in found) else "adam"


def _has_base(optimizer: Any, names: Collection[str]) -> bool:
    return any(base.__name__.upper() in names for base in type(optimizer).__mro__)


def left_out(optimizer: Any, named: Sequence[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names of the parameters that are in no group of the optimizer."""
    inside = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [name for name, parameter in named if id(parameter) not in inside]


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer itself, or the one that a proxy (accelerate's, Lightning's) forwards its steps to."""
    given = optimizer
    for _ in range(8):
        attributes = getattr(optimizer, "__dict__", {})
        is_whole = isinstance(optimizer, torch.optim.Optimizer) and "_optimizer_step_pre_hooks" in attributes
        inner = attributes.get("optimizer", attributes.get("_optimizer"))
        calls_hooks = hasattr(type(optimizer).step, "hooked") if is_whole else False  # a proxy may not call hooks
        if is_whole and (calls_hooks or not isinstance(inner, torch.optim.Optimizer)):
            return optimizer
        if inner is None:
            break
        optimizer = inner
    raise ConfigError(
        f"optimizer: expected a torch.optim.Optimizer, a sequence of them, or a proxy with one as its attribute "
        f"`optimizer`, got {type(given).__name__}"
    )


class Steps:
    """Reports the user's steps. A step begins with the first optimizer, and ends when each optimizer has made one.

    A step that a `GradScaler` skips counts if the scaler is known. The scaler then calls no hook of the optimizer, so
    its method `step` is replaced. Nothing else of the optimizers and the scaler is changed.

    Args:
        optimizer: The result of `resolve`.
        scaler: The user's GradScaler, or None.
        begins: Called before the step, with whether it is given a closure.
        ends: Called when the step has ended.

    Attributes:
        in_step: Whether one of the optimizers is within its `step`, which may call the model again.
        num_seen: Number of steps of all optimizers, including those that the scaler skipped.
        scaler: The user's GradScaler, if its steps are observed.
    """

    def __init__(
        self,
        optimizer: Any,
        scaler: Any,
        begins: Callable[[bool], object],
        ends: Callable[[], object],
    ) -> None:
        self._optimizers = all_of(optimizer)
        self._begins, self._ends = begins, ends
        self.in_step = self._has_begun = False
        self.num_seen = self._num_partial = 0
        self._done: set[int] = set()
        self._hooks: list[Any] = []
        own = weakref.ref(self)
        for idx, each in enumerate(self._optimizers):
            self._hooks += [
                each.register_step_pre_hook(functools.partial(_before, own)),
                each.register_step_post_hook(functools.partial(_after, own, idx)),
            ]
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        if self.scaler is not None:
            _watch(self.scaler, self)

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.in_step = True
        if not self._has_begun:
            self._has_begun = True
            self._begins(kwargs.get("closure") is not None or any(map(callable, args[1:])))

    def _after(self, idx: int) -> None:
        self.in_step = False
        self.num_seen += 1
        self._done.add(idx)
        self._num_partial += 1
        if len(self._done) == len(self._optimizers):
            self._done.clear()
            self._num_partial = 0
            self._has_begun = False
            self._ends()
        elif str(self._num_partial).rstrip("0") == "8":  # 8, 80, 800, ...: optimizers of a GAN may alternate
            idle = [type(each).__name__ for idx, each in enumerate(self._optimizers) if idx not in self._done]
            _log.warning(
                "of the optimizers given to commlib.wrap, %s made no step while the others made %d: a step ends when "
                "each has made one, so rounds, warm-ups and periods do not advance. Call commlib.set_optimizer(model, "
                "optimizers) with those that step",
                ", ".join(idle),
                self._num_partial,
            )

    def skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step that the scaler skipped, if the optimizer is one of these."""
        for idx, each in enumerate(self._optimizers):
            if each is optimizer:
                self._before((), {})
                self._after(idx)

    def close(self) -> None:
        """Remove the hooks. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self.scaler is not None:
            _unwatch(self.scaler, self)
            self.scaler = None


@torch._disable_dynamo  # see [Note: hooks and dynamo] in engine/gradients/backward.py
def _before(steps: Callable[[], Steps | None], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if (alive := steps()) is not None:
        alive._before(args, kwargs)


@torch._disable_dynamo
def _after(steps: Callable[[], Steps | None], idx: int, *_: Any) -> None:
    if (alive := steps()) is not None:
        alive._after(idx)


#: Objects to notify of steps that a scaler skips. Several models may share a scaler.
_watchers: WeakMembers[Steps] = WeakMembers(locks.lock("optimizers", is_of_process=True))


def _watch(scaler: Any, steps: Steps) -> None:
    _watchers.add(steps)
    scaler.step = functools.partial(_step, weakref.ref(scaler))


def _unwatch(scaler: Any, steps: Steps) -> None:
    _watchers.discard(steps)
    if not _told_by(scaler):
        vars(scaler).pop("step", None)


def _told_by(scaler: Any) -> list[Steps]:
    """Return the objects to notify of the steps that a scaler skips."""
    return [steps for steps in _watchers.alive() if steps.scaler is scaler]


def _step(reference: Callable[[], Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Make the scaler's step, and report a skipped step if the optimizer made none."""
    scaler, plain = reference(), _plain(optimizer)
    made: list[None] = []
    hook = plain.register_step_post_hook(lambda *_: made.append(None))
    try:
        result = type(scaler).step(scaler, optimizer, *args, **kwargs)
    finally:
        hook.remove()
    for steps in [] if made else _told_by(scaler):
        steps.skipped(plain)
    return result
