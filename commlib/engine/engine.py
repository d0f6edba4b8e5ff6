"""The engine of one wrapped model: a session over the channels that it communicates by."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from commlib.algorithms.base import Algorithm
from commlib.engine.channels.base import OpenChannel, Settings
from commlib.engine.channels.gradients import GradientChannel
from commlib.engine.channels.opening import open_beside
from commlib.engine.line import Line
from commlib.engine.optimizers import Steps
from commlib.engine.planning.plan import Parameter
from commlib.engine.rounds.drivers import acquire
from commlib.engine.rounds.schedule import Progress
from commlib.transport.base import Communicator, Transport


class Engine:
    """A model's channels, and the steps of its optimizer.

    The channel of gradients is always there; beside it may be one of what else the algorithm communicates.

    Args:
        parameters: The parameters to communicate, in the model's order; all on one device, at least one.
        transport: The communicator, used by nothing else.
        algorithm: What is communicated, and how.
        cap_bytes: A fixed bucket size instead of a planned one.
        optimizer: The user's optimizer, if given.
        scaler: The user's GradScaler, if given.

    Attributes:
        gradients: The channel of gradients.
        channels: All channels; the last one carries out the algorithm.
        progress: Which step it is.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        transport: Transport,
        algorithm: Algorithm,
        cap_bytes: int | None = None,
        optimizer: Any = None,
        scaler: Any = None,
    ) -> None:
        self.device = parameters[0].param.device
        self._settings = Settings(cap_bytes, optimizer, scaler)
        driver, release = acquire(self.device)
        self._finalizer = weakref.finalize(self, release)
        self.line = Line(transport, driver)
        self.gradients = GradientChannel(self.line, self.device, self._settings)
        self.channels: list[OpenChannel] = [self.gradients]
        self._use(algorithm, parameters)
        own = weakref.ref(self)
        self._steps = Steps(
            optimizer,
            scaler,
            lambda has_closure: (engine := own()) and engine._step_begins(has_closure),
            lambda: (engine := own()) and engine._step_ends(),
        )

    @property
    def transport(self) -> Transport:
        """The communicator of gradients, and of what is done once."""
        return self.line.transport

    @property
    def optimizer(self) -> Any:
        """The user's optimizer, if given."""
        return self._settings.optimizer

    @property
    def comm(self) -> Communicator:
        """The group, as algorithms on gradients see it."""
        return self.line.comm

    def _use(self, algorithm: Algorithm, parameters: Sequence[Parameter]) -> None:
        self.algorithm = algorithm
        self.progress = Progress(algorithm.channel, counts_backwards=self.optimizer is None)
        self.parameters = self._grouped(parameters)
        self.gradients.use(algorithm, self.progress, self.parameters)

    def _grouped(self, parameters: Sequence[Parameter]) -> list[Parameter]:
        group = self.algorithm.group
        return [dataclasses.replace(p, group=group(p.name, p.param)) for p in parameters]

    def open(self, connect: Callable[[], Transport]) -> None:
        """Open the channel beside that of gradients, if the algorithm has one. Collective.

        Args:
            connect: Makes a communicator for it. Collective.

        Raises:
            ConfigError: The algorithm cannot run on this model, optimizer or group.
        """
        beside = open_beside(self.algorithm, self.parameters, self.progress, self.line, self._settings, connect)
        if beside is not None:
            self.channels.append(beside)

    def replace(self, algorithm: Algorithm, connect: Callable[[], Transport]) -> None:
        """Change the algorithm; `connect` as in `open`. Collective, and not within a backward."""
        with self.line.wholly():
            self._close_beside()
            self._use(algorithm, self.parameters)
            self.open(connect)

    def adopt(self, parameters: Sequence[Parameter]) -> None:
        """Communicate these parameters from now on, with a plan that starts anew. Collective, not within a backward."""
        for channel in self.channels:
            channel.allow_change()
        with self.line.wholly():
            self.parameters = self._grouped(parameters)
            for channel in self.channels:
                channel.adopt(self.parameters)

    @property
    def is_settled(self) -> bool:
        """Whether the algorithm's rounds are what they will be: no plan is tried any more."""
        return self.channels[-1].is_settled

    def has_moved(self) -> bool:
        """Return whether parameters were cast or moved to another device since they were adopted."""
        return any(channel.has_moved() for channel in self.channels)

    def check(self) -> None:
        """Raise what ended the communication, if anything did."""
        for channel in self.channels:
            channel.line.check()

    # --- steps ------------------------------------------------------------------------------------------------------

    def _step_begins(self, has_closure: bool) -> None:
        for channel in self.channels:
            channel.line.check_streams()
            channel.begin_step(has_closure)

    def _step_ends(self) -> None:
        self.progress.end_step()
        for channel in self.channels:
            channel.end_step()

    def drain(self) -> None:
        """Take what is in the background, if that waits for nobody."""
        for channel in self.channels:
            channel.drain()

    def synchronize(self) -> None:
        """Give all ranks the same weights. Collective."""
        for channel in self.channels:
            channel.synchronize()

    def weights_were_loaded(self) -> None:
        """Let algorithms that keep something of earlier weights start anew from those that the model has now."""
        for channel in self.channels:
            channel.weights_were_loaded()

    # --- the end ----------------------------------------------------------------------------------------------------

    def _close_beside(self) -> None:
        while len(self.channels) > 1:
            self.channels.pop().close()

    def close(self) -> None:
        """Remove every hook and give up the driver and the communicators. Harmless when called twice."""
        self._steps.close()
        self._close_beside()
        self.gradients.close()
        self._finalizer()
        self.line.close()
