"""The engine of one wrapped model: a session over the channels that it communicates by."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from commlib.algorithms.base import Algorithm
from commlib.engine.channels.base import OpenChannel, Settings
from commlib.engine.channels.gradients import GradientChannel
from commlib.engine.channels.opening import open_beside
from commlib.engine.line import Line
from commlib.engine.loads import Loads
from commlib.engine.modes import in_plain_mode
from commlib.engine.optimizers import OtherSteps, Steps, all_of
from commlib.engine.planning.plan import Parameter
from commlib.engine.rounds.drivers import acquire
from commlib.engine.rounds.schedule import Progress
from commlib.transport.base import Communicator, Transport
from commlib.transport.closing import Finalizer

_log = logging.getLogger("commlib")


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
        has_loaded: Whether state was loaded of which it is not known yet that all ranks have the same.
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
        self.has_loaded = False
        self._settings = Settings(cap_bytes, optimizer, scaler)
        driver, self._release = acquire(self.device)
        self._finalizer = Finalizer(self, self._release, f"the driver of a model on {self.device}")
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
        self._take(parameters)
        self.gradients.use(algorithm, self.progress, self.parameters)

    def _take(self, parameters: Sequence[Parameter]) -> None:
        group = self.algorithm.group
        self.parameters = [dataclasses.replace(p, group=group(p.name, p.param)) for p in parameters]
        tensors = [p.param for p in parameters]
        self._other_steps, self._loads = OtherSteps(tensors), Loads(tensors)

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
            self._take(parameters)
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

    def look_for_other_steps(self) -> None:
        """Before a forward of training: say so where weights change and the optimizer that is known makes no step."""
        if self.optimizer is None or not self.algorithm.channel.follows_steps:
            return
        if self._steps.in_step:  # whose closure this forward is in
            self._other_steps.expect_change()
        count = self._other_steps.at_forward(self.progress.step)
        if str(count).rstrip("0") == "2":  # 2, 20, 200, ...: one change may be anything
            known = ", ".join(type(each).__name__ for each in all_of(self.optimizer))
            _log.warning(
                "rank %d: the weights have changed %d times from forward to forward, and commlib.wrap was given an "
                "optimizer (%s) that made no step, or several not all of which did. The algorithm %r follows these "
                "steps: rounds over weights, warm-ups and periods do not come. Give commlib.wrap the optimizer that "
                "makes the steps, after commlib.unwrap(model)",
                self.comm.rank,
                count,
                known,
                self.algorithm.name,
            )

    def _step_begins(self, has_closure: bool) -> None:
        self.settle_weights()
        for channel in self.channels:
            channel.line.check_streams()
            channel.begin_step(has_closure)

    def _step_ends(self) -> None:
        self.progress.end_step()
        for channel in self.channels:
            channel.end_step()

    @in_plain_mode
    def drain(self) -> None:
        """Take what is in the background, if that waits for nobody."""
        self.settle_weights()
        for channel in self.channels:
            with channel.line.wholly():
                channel.drain()

    @in_plain_mode
    def synchronize(self) -> None:
        """Give all ranks the same weights. Collective."""
        self.settle_weights()
        self._other_steps.expect_change()
        for channel in self.channels:
            with channel.line.wholly():
                channel.synchronize()

    @contextlib.contextmanager
    def loading_weights(self) -> Iterator[None]:
        """The user loads weights in the block."""
        self._loads.begin()
        yield
        self._loads.end()
        self._other_steps.expect_change()
        if not self.algorithm.channel.has_rounds:  # its peers ask this rank at any time
            self.settle_weights()

    def forget_loads(self) -> None:
        """Whatever is kept of the weights is loaded now: that they were is no matter any more."""
        self._loads.settle()

    def settle_weights(self) -> None:
        """Let algorithms that keep something of earlier weights start anew, if others were loaded that stay."""
        if self._loads.settle():
            self._begin_anew()

    @in_plain_mode
    def _begin_anew(self) -> None:
        for channel in self.channels:
            channel.weights_were_loaded()
        declared = self.algorithm.channel
        self.has_loaded |= declared.keeps_step and not declared.keeps_replicas_alike

    # --- the end ----------------------------------------------------------------------------------------------------

    def _close_beside(self) -> None:
        while len(self.channels) > 1:
            self.channels.pop().close()

    def close(self) -> None:
        """Remove every hook and give up the driver and the communicators. Harmless when called twice."""
        self._steps.close()
        self._close_beside()
        self.gradients.close()
        if self._finalizer.detach():
            self._release()
        self.line.close()
