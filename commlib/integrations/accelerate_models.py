"""Which models of an accelerator are wrapped, and with which optimizers."""

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


#: What accelerate sets on what it has prepared.
_MARK = "_is_accelerate_prepared"


class Models:
    """The models that one accelerator has wrapped, or is to wrap once their optimizers are there.

    Args:
        algorithm: For all of them.
        options: Of `commlib.wrap`.

    Attributes:
        goes_on: Whether a model that is prepared again with the same optimizers goes on as it is, though the
            accelerator was made to forget it (`free_memory`): for a trainer that does so before it trains further.
    """

    def __init__(self, algorithm: Algorithm, options: dict[str, Any]) -> None:
        self.algorithm = algorithm
        self.goes_on = False
        self._options = options
        self._expected: Optimizers = ()
        self._wrapped: WeakTable[nn.Module, Optimizers] = WeakTable(locks.lock("accelerate.wrapped"))
        self._waiting: WeakTable[nn.Module, Any] = WeakTable(locks.lock("accelerate.waiting"))  # their guards

    @contextlib.contextmanager
    def expecting(self, objects: Iterable[Any]) -> Iterator[None]:
        """Know of the optimizers among `objects` before they are prepared."""
        self._expected = _plain(each for each in objects if isinstance(each, torch.optim.Optimizer))
        try:
            yield
        finally:
            self._expected = ()

    @property
    def in_use(self) -> bool:
        """Whether there is a wrapped model."""
        return any(self.has(model) for model in self._wrapped)

    def has(self, model: nn.Module) -> bool:
        """Return whether a model is wrapped by this accelerator."""
        return model in self._wrapped and isinstance(find(model), Replica)

    def rank_state(self, model: nn.Module) -> dict[str, Any] | None:
        """Return what this rank saves of a model beside the common checkpoint; None for one that is not wrapped."""
        return checkpoint.rank_state(model, self._wrapped[model]) if self.has(model) else None

    def load_rank_states(self, models: Sequence[nn.Module], states: Sequence[Any] | None) -> None:
        """Take over what `rank_state` returned for each model; None where there is nothing but the weights.

        Raises:
            ConfigError: It is of another model, or world size, or there is none of a wrapped model.
        """
        if states is None:
            _log.warning("load_state: the checkpoint has no state of commlib; the communication starts anew")
            return
        for model, state in zip(models, states, strict=True):
            if self.has(model) and state is None:
                raise ConfigError(
                    f"load_state: the {type(model).__name__} was not trained where this was saved, so it has no state "
                    "of commlib. Prepare the same models in the same way"
                )
            if self.has(model):
                checkpoint.load_rank_state(model, state, self._wrapped[model])

    def check(self, model: nn.Module) -> None:
        """Refuse a model that somebody else has wrapped.

        Raises:
            ConfigError: It is one.
        """
        if isinstance(find(model), Replica) and model not in self._wrapped:
            raise ConfigError(
                f"prepare: the {type(model).__name__} is wrapped by commlib already. Give prepare the bare model "
                "(commlib.unwrap), as use lets prepare wrap it"
            )

    def mark(self, model: nn.Module) -> None:
        """Let accelerate know that it has prepared a model before, if that is wrapped here."""
        if self.has(model):
            setattr(model, _MARK, True)

    def unmark(self) -> None:
        """Take accelerate's mark from the wrapped models.

        With DDP it is on the object around the model. On the model itself it would let another accelerator, which knows
        nothing of this one, take the model for prepared, and train it without any communication.
        """
        for model in self._wrapped:
            if self.has(model):
                model.__dict__.pop(_MARK, None)

    def wrap(self, model: nn.Module, prepared: Sequence[Any], scaler: Any, *, anew: bool) -> bool:
        """Wrap a model with the optimizers that hold its parameters.

        Args:
            model: Not compiled.
            prepared: All optimizers that the accelerator has.
            scaler: The accelerator's.
            anew: Whether a model that is wrapped with the same optimizers begins anew, too.

        Returns:
            Whether it is wrapped; False where the algorithm needs optimizers that are not there yet.
        """
        own = _those_of(model, (*_plain(prepared), *self._expected))
        if self.algorithm.channel.needs_optimizer and self._lacks_optimizers(model, own):
            self._wait(model)
            return False
        if isinstance(find(model), Replica):
            if (self.goes_on or not anew) and self._wrapped.get(model) == own:
                return True
            unwrap(model)
        self._stop_waiting(model)
        wrap(model, self.algorithm, optimizer=own or None, scaler=scaler, **self._options)
        self._wrapped.put(model, own)
        return True

    def optimizer_came(self, prepared: Sequence[Any], scaler: Any) -> None:
        """Wrap the models that waited for an optimizer, and those that did not know of it."""
        for model in [*self._waiting, *self._wrapped]:
            if model in self._waiting or isinstance(find(model), Replica):
                self.wrap(model, prepared, scaler, anew=False)

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
        """Refuse a forward in training of a model that was to be wrapped, and trains alone until then."""
        if torch.is_grad_enabled():
            raise ConfigError(
                f"{self.algorithm.name!r} acts on weights or optimizer state, and the {type(model).__name__} was "
                "prepared without optimizers that hold all its parameters. Call accelerator.prepare(model, optimizer), "
                "or prepare the optimizer before the first step"
            )


def inner_of(model: nn.Module) -> nn.Module:
    """Return the model inside of what `torch.compile` made of it."""
    is_outer = is_compiled_module(model) and find(model) is None
    return extract_model_from_parallel(model, keep_torch_compile=False) if is_outer else model


def bare_of(model: nn.Module) -> nn.Module:
    """Return the bare object of a wrapped model; any other model itself."""
    wrapped = find(model)
    return model if wrapped is None else wrapped.bare


def _plain(prepared: Iterable[Any]) -> Optimizers:
    return tuple(proxies.resolve(each) for each in prepared)


def _those_of(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> Optimizers:
    """Return, once each, the optimizers that hold a parameter of the model."""
    own = {id(parameter) for parameter in model.parameters()}
    found = {id(each): each for each in optimizers if own & _held_by(each)}
    return tuple(found.values())


def _held_by(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
