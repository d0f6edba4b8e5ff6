"""The channel of algorithms that run themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from typing_extensions import override

from commlib.algorithms.base import Algorithm, Attachment, Runner
from commlib.engine.channel import OpenChannel, Settings
from commlib.engine.planning.plan import Parameter
from commlib.engine.rounds.schedule import StepCounter
from commlib.engine.session import Session
from commlib.errors import CommlibError, ConfigError
from commlib.transport.mailbox import Mailbox


class SelfRunningChannel(OpenChannel):
    """Calls the runner of an algorithm that declares `SelfRunning` around the optimizer's steps.

    Args:
        parameters: The parameters, in the model's order.
        algorithm: The algorithm to run.
        counter: Counts the steps.
        session: The model's session, which carries the runner's collectives.
        optimizer: The optimizer whose steps call the runner.

    Raises:
        ConfigError: The algorithm cannot run on this model, optimizer or group.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        algorithm: Algorithm,
        counter: StepCounter,
        session: Session,
        optimizer: Any,
    ) -> None:
        self.session = session
        self._algorithm = algorithm
        self._parameters = parameters
        self._counter = counter
        self._attach(optimizer)

    def _attach(self, optimizer: Any) -> None:
        session, transport = self.session, self.session.transport
        self._runner = self.keeper = self._algorithm.attach(
            Attachment(
                comm=session.comm,
                parameters=[(parameter.name, parameter.param) for parameter in self._parameters],
                optimizer=optimizer,
                gather=transport.gather_objects,
                run=session.run,
                connect=lambda answer, *limit: Mailbox(transport, answer, *limit),
                timeout_s=transport.timeout_s,
            )
        )

    @override
    def set_up(self, settings: Settings) -> None:
        with torch.no_grad():
            self._runner.synchronize()  # a runner starts with identical parameters on all ranks
        state = self._runner.state_dict()
        self._runner.close()
        self._attach(settings.optimizer)
        self._runner.load_state_dict(state)

    @property
    def runner(self) -> Runner:
        """The runner of the algorithm."""
        return self._runner

    @property
    def num_rounds(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Number of exchanges whose result this rank has taken."""
        return self._runner.num_rounds

    @property
    @override
    def bytes_sent(self) -> float:
        return self._runner.bytes_sent

    @override
    def allow_change(self) -> None:
        raise ConfigError(
            f"rank {self.session.comm.rank}: parameters were unfrozen, moved or cast, but the algorithm "
            f"{self._algorithm.name!r} cannot change its parameters. Unwrap the model and wrap it again on all ranks"
        )

    @override
    def adopt(self, parameters: Sequence[Parameter]) -> None:
        self.allow_change()

    @override
    def begin_step(self, has_closure: bool = False) -> None:
        if self._counter.is_warming_up:
            return
        if has_closure and self._runner.needs_gradients:
            raise ConfigError(
                "optimizer.step(closure) computes gradients inside the step, but the algorithm "
                f"{self._algorithm.name!r} reads them before the step. Call backward(), then optimizer.step()"
            )
        self._guarded(self._runner.before_step)

    @override
    def end_step(self) -> None:
        if not self._counter.ended_warm_up_step:
            self._guarded(self._runner.after_step)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Call `act`. A communication error permanently ends the communication."""
        self.session.check()
        try:
            with torch.no_grad():
                act()
        except CommlibError as error:
            self.session.keep(error)
            raise

    @override
    def synchronize(self) -> None:
        self._runner.synchronize()

    @override
    def weights_were_loaded(self) -> None:
        self._runner.weights_were_loaded()

    @override
    def close(self) -> None:
        self._runner.close()
