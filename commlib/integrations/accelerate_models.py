"""The wrapped models of an accelerator, with their optimizers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel, is_compiled_module
from torch import nn

from commlib import checkpoint, locks, verify
from commlib.algorithms import Algorithm
from commlib.engine import optimizers as proxies
from commlib.errors import ConfigError
from commlib.replica import Replica, find
from commlib.weak import WeakTable
from commlib.wrap import unwrap, wrap

_log = logging.getLogger("commlib")

Optimizers = tuple[torch.optim.Optimizer, ...]


#: The attribute that accelerate sets on prepared objects.
_MARK = "_is_accelerate_prepared"


class Models:
    """The models that one accelerator has wrapped, or will wrap once their optimizers are prepared.

    Args:
        algorithm: The algorithm for all models.
        options: Options of `commlib.wrap`.

    Attributes:
        goes_on: Whether a model that is prepared again with the same optimizers stays wrapped after the accelerator was
            made to forget it (`free_memory`). For trainers that do so before they continue training.
    """

    def __init__(self, algorithm: Algorithm, options: dict[str, Any]) -> None:
        self.algorithm = algorithm
        self.goes_on = False
        self._options = options
        self._expected: Optimizers = ()
        self._wrapped: WeakTable[nn.Module, Optimizers] = WeakTable(locks.lock("accelerate.wrapped"))
        self._waiting: WeakTable[nn.Module, Any] = WeakTable(locks.lock("accelerate.waiting"))  # their guards

    def __reduce__(self) -> Any:
        """Pickle without the models. A copy of a wrapped model is wrapped in its first training forward."""
        return Models, (self.algorithm, self._options), {"goes_on": self.goes_on}

    @contextlib.contextmanager
    def expecting(self, objects: Iterable[Any]) -> Iterator[None]:
        """Register the optimizers among `objects` before they are prepared."""
        self._expected = _plain(each for each in objects if isinstance(each, torch.optim.Optimizer))
        try:
            yield
        finally:
            self._expected = ()

    @property
    def in_use(self) -> bool:
        """Whether any model is wrapped."""
        return any(self.has(model) for model in self._wrapped)

    def has(self, model: nn.Module) -> bool:
        """Return whether a model is wrapped by this accelerator."""
        return model in self._wrapped and isinstance(find(model), Replica)

    def rank_state(self, model: nn.Module) -> dict[str, Any] | None:
        """Return this rank's own state of a model; None if the model is not wrapped."""
        return checkpoint.rank_state(model, self._wrapped[model]) if self.has(model) else None

    def load_rank_states(self, models: Sequence[nn.Module], states: Sequence[Any] | None) -> None:
        """Load the output of `rank_state` for each model; None if the checkpoint has only the weights.

        Raises:
            ConfigError: A state is of another model or world size, or a wrapped model has no state.
        """
        if states is None:
            _log.warning("load_state: the checkpoint has no state of commlib; the communication starts from scratch")
            return
        for model, state in zip(models, states, strict=True):
            if self.has(model) and state is None:
                raise ConfigError(
                    f"load_state: the {type(model).__name__} was not trained when this was saved, so it has no state "
                    "of commlib. Prepare the same models in the same way"
                )
            if self.has(model):
                checkpoint.load_rank_state(model, state, self._wrapped[model])

    def check(self, model: nn.Module) -> None:
        """Reject a model that was wrapped outside of this accelerator.

        Raises:
            ConfigError: The model was wrapped outside of this accelerator.
        """
        if isinstance(find(model), Replica) and model not in self._wrapped:
            raise ConfigError(
                f"prepare: the {type(model).__name__} is wrapped by commlib already. Pass the bare model "
                "(commlib.unwrap) to prepare, which wraps it itself after use"
            )

    def mark(self, model: nn.Module) -> None:
        """Set accelerate's mark on a model that is wrapped here, so that accelerate treats it as prepared."""
        if self.has(model):
            setattr(model, _MARK, True)

    def unmark(self) -> None:
        """Remove accelerate's mark from the wrapped models.

        With DDP the mark is on the DDP object. On the model itself it would make another accelerator treat the model as
        prepared, and train it without any communication.
        """
        for model in self._wrapped:
            if self.has(model):
                model.__dict__.pop(_MARK, None)

    def wrap(self, model: nn.Module, prepared: Sequence[Any], scaler: Any, *, rewraps: bool) -> bool:
        """Wrap a model with the optimizers that hold its parameters.

        Args:
            model: The model, not compiled.
            prepared: All optimizers of the accelerator.
            scaler: The accelerator's gradient scaler.
            rewraps: Whether to wrap again a model that is already wrapped with the same optimizers.

        Returns:
            Whether the model is wrapped; False if the algorithm needs optimizers that are not prepared yet.
        """
        own = _those_of(model, (*_plain(prepared), *self._expected))
        if self.algorithm.channel.needs_optimizer and self._lacks_optimizers(model, own):
            self._wait(model)
            return False
        if isinstance(find(model), Replica):
            if (self.goes_on or not rewraps) and self._wrapped.get(model) == own:
                return True
            unwrap(model)
        self._stop_waiting(model)
        wrap(model, self.algorithm, optimizer=own or None, scaler=scaler, **self._options)
        self._wrapped.put(model, own)
        return True

    def optimizer_came(self, prepared: Sequence[Any], scaler: Any) -> None:
        """Wrap the models that waited for an optimizer, and wrap again those whose optimizers changed."""
        for model in [*self._waiting, *self._wrapped]:
            if model in self._waiting or isinstance(find(model), Replica):
                self.wrap(model, prepared, scaler, rewraps=False)

    def _lacks_optimizers(self, model: nn.Module, own: Optimizers) -> bool:
        ignored = verify.ignored_names(model, tuple(self._options.get("ignored_parameters", ())))
        held = set().union(*map(_held_by, own))
        return any(p.requires_grad and id(p) not in held for name, p in model.named_parameters() if name not in ignored)

    def _wait(self, model: nn.Module) -> None:
        if model not in self._waiting:
            self._waiting.put(model, model.register_forward_pre_hook(self._refuse))

    def _stop_waiting(self, model: nn.Module) -> None:
        guard = self._waiting.pop(model)
        if guard is not None:
            guard.remove()

    def _refuse(self, model: nn.Module, _: Any) -> None:
        """Reject a training forward of a model that still waits for its optimizers, because it would train alone."""
        if torch.is_grad_enabled():
            raise ConfigError(
                f"{self.algorithm.name!r} acts on weights or optimizer state, and the {type(model).__name__} was "
                "prepared without optimizers that hold all its parameters. Call accelerator.prepare(model, optimizer), "
                "or prepare the optimizer before the first step"
            )


def inner_of(model: nn.Module) -> nn.Module:
    """Return the model inside the wrapper of `torch.compile`."""
    is_outer = is_compiled_module(model) and find(model) is None
    return extract_model_from_parallel(model, keep_torch_compile=False) if is_outer else model


def bare_of(model: nn.Module) -> nn.Module:
    """Return the bare object of a wrapped model. Return any other model unchanged."""
    wrapped = find(model)
    return model if wrapped is None else wrapped.bare


def _plain(prepared: Iterable[Any]) -> Optimizers:
    return tuple(proxies.resolve(each) for each in prepared)


def _those_of(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> Optimizers:
    """Return the optimizers that hold a parameter of the model, without duplicates."""
    own = {id(parameter) for parameter in model.parameters()}
    found = {id(each): each for each in optimizers if own & _held_by(each)}
    return tuple(found.values())


def _held_by(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
