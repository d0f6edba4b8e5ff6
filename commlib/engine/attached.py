"""Algorithms that run themselves: what the engine does for them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from commlib.algorithms.base import Attachment
from commlib.errors import CommlibError, ConfigError
from commlib.transport.mailbox import Mailbox

if TYPE_CHECKING:
    from commlib.engine.engine import Engine


class Attached:
    """The runner of an algorithm with `Traits(tensors="none")`, driven by the optimizer's steps.

    Args:
        engine: The model's engine, whose communicator carries what is collective.
        optimizer: Its steps are what the runner works around.

    Raises:
        ConfigError: The algorithm cannot run on this model, optimizer or group.
    """

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        self._engine = weakref.proxy(engine)
        self._schedule = engine.schedule
        self.runner = engine.algorithm.attach(
            Attachment(
                comm=engine.comm,
                parameters=[(parameter.name, parameter.param) for parameter in engine.parameters],
                optimizer=optimizer,
                gather=engine.transport.gather_objects,
                run=functools.partial(_run, weakref.ref(engine)),
                connect=functools.partial(Mailbox, engine.transport),
                timeout_s=engine.transport.timeout_s,
            )
        )

    def begin_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The optimizer is about to make a step, with these arguments."""
        if self._schedule.warming_up:
            return
        has_closure = kwargs.get("closure") is not None or any(callable(argument) for argument in args[1:])
        if has_closure and self.runner.needs_gradients:
            raise ConfigError(
                f"optimizer.step(closure) computes gradients inside the step, and the algorithm "
                f"{self._engine.algorithm.name!r} takes them before it. Call backward(), then optimizer.step()"
            )
        self._guarded(self.runner.before_step)

    def end_step(self) -> None:
        """The optimizer has made its step."""
        was_warm_up = self._schedule.warming_up
        self._schedule.end_step()
        if not was_warm_up:
            self._guarded(self.runner.after_step)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Act; an error of the communication ends it for good."""
        self._engine.check()
        try:
            with torch.no_grad():
                act()
        except CommlibError as error:
            self._engine.error = error
            raise

    def refuse_change(self) -> None:
        """Parameters were frozen, unfrozen, moved or cast: a runner keeps those that it was given.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"rank {self._engine.comm.rank}: parameters were unfrozen, moved or cast, and the algorithm "
            f"{self._engine.algorithm.name!r} keeps those it was given. Unwrap the model and wrap it again on all ranks"
        )

    def close(self) -> None:
        """End what is under way. Harmless when called twice."""
        self.runner.close()


def _run(reference: weakref.ref[Engine], what: str, communication: Any) -> None:
    engine = reference()
    assert engine is not None
    engine.run(what, communication)
