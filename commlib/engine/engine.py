"""The engine of one wrapped model: its communication channels, and the steps of its optimizer."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from commlib.algorithms.base import Algorithm
from commlib.engine import optimizer_state
from commlib.engine.channel import OpenChannel, Settings
from commlib.engine.gradients.channel import GradientChannel
from commlib.engine.loads import Loads
from commlib.engine.modes import in_plain_mode
from commlib.engine.opening import open_second_channel
from commlib.engine.optimizers import Steps, all_of, names_of
from commlib.engine.pace import Pace
from commlib.engine.planning.plan import Parameter
from commlib.engine.rounds.drivers import acquire
from commlib.engine.rounds.schedule import StepCounter
from commlib.engine.session import Session
from commlib.engine.unseen import NUM_CHANGES, Enclosing, Observer, UncountedChanges, has_parameters_of, ignore, observe
from commlib.errors import ConfigError
from commlib.transport.base import Communicator, Transport
from commlib.transport.closing import Finalizer

_log = logging.getLogger("commlib")


def _has_tensors(state: Any) -> bool:
    """Return whether nested mappings and sequences contain a non-empty tensor."""
    if isinstance(state, Mapping):
        return any(map(_has_tensors, state.values()))
    if isinstance(state, list | tuple):
        return any(map(_has_tensors, state))
    return isinstance(state, torch.Tensor) and state.numel() > 0


class Engine(Observer):
    """The channels of a model, and the steps of its optimizer.

    There is always a channel of gradients. If the algorithm communicates anything else, a second channel carries it.

    Args:
        parameters: The parameters to communicate, in the model's order. At least one, all on one device.
        transport: The communicator, for the engine's exclusive use.
        algorithm: The algorithm.
        cap_bytes: A fixed bucket size in bytes. None plans the size.
        optimizer: The user's optimizer, if given.
        scaler: The user's GradScaler, if given.

    Attributes:
        gradients: The channel of gradients.
        channels: All channels. The last one carries out the algorithm.
        counter: Counts the steps.
        pace: Mean bytes and seconds of a step.
        has_loaded: Whether state was loaded, and the ranks have not yet compared it.
        when_stepped: Called after each optimizer step, and after the rounds that end or start with it.
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
        self.when_stepped: Callable[[], object] = lambda: None
        self._lacks_state = self._has_state = self._has_told_of_loads = False
        self._settings = Settings(cap_bytes, optimizer, scaler)
        driver, self._release = acquire(self.device)
        self._finalizer = Finalizer(self, self._release, f"the driver of a model on {self.device}")
        self.session = Session(transport, driver)
        self._use(algorithm, parameters)
        self.gradients = GradientChannel(
            self.session, self.device, self._settings, algorithm, self.counter, self.parameters
        )
        self.channels: list[OpenChannel] = [self.gradients]
        self._follow_steps()
        own = weakref.ref(self)
        self.gradients.backward.watch_steps = lambda watches: (engine := own()) and engine._observe(watches)
        self._observe()

    def _observe(self, in_backward: bool = False) -> None:
        """Observe the steps of all optimizers where they matter: if the algorithm follows steps, or inside a backward.

        Not always, since the hook would add a graph break to a compiled step.
        """
        if in_backward or self._follows_steps:
            observe(self)
        else:
            ignore(self)

    def _follow_steps(self) -> None:
        """Count the steps of the current optimizer and scaler."""
        own, tensors = weakref.ref(self), [parameter.param for parameter in self.parameters]
        self._steps = Steps(
            self.optimizer,
            self.scaler,
            lambda has_closure: (engine := own()) and engine._step_begins(has_closure),
            lambda: (engine := own()) and engine._step_ends(),
        )
        refuse = lambda outer: (engine := own()) and engine._refuse_enclosing(outer)  # noqa: E731
        self._enclosing = Enclosing(all_of(self.optimizer), tensors, refuse)

    @property
    def transport(self) -> Transport:
        """The communicator of gradients and of set-up."""
        return self.session.transport

    @property
    def optimizer(self) -> Any:
        """The user's optimizer, if given."""
        return self._settings.optimizer

    @property
    def scaler(self) -> Any:
        """The user's GradScaler, if given."""
        return self._settings.scaler

    @property
    def comm(self) -> Communicator:
        """The group, as seen by algorithms on gradients."""
        return self.session.comm

    def _use(self, algorithm: Algorithm, parameters: Sequence[Parameter]) -> None:
        self.algorithm = algorithm
        self.counter = StepCounter(algorithm.channel, counts_backwards=self.optimizer is None)
        self.pace = Pace(algorithm.channel.cycle)
        own = weakref.ref(self)
        self.counter.when_counted = lambda: (engine := own()) and engine._step_counted()
        self._take(parameters)

    def _take(self, parameters: Sequence[Parameter]) -> None:
        group = self.algorithm.group
        self.parameters = [dataclasses.replace(p, group=group(p.name, p.param)) for p in parameters]
        tensors = [p.param for p in parameters]
        self._own_ids = frozenset(map(id, tensors))
        self._changes, self._loads = UncountedChanges(tensors), Loads(tensors)

    def open(self, connect: Callable[[], Transport]) -> None:
        """Open the second channel, if the algorithm has one. Collective.

        Args:
            connect: Creates a communicator for it. Collective.

        Raises:
            ConfigError: The algorithm cannot run on this model, optimizer or group.
        """
        second = open_second_channel(
            self.algorithm, self.parameters, self.counter, self.session, self._settings, connect
        )
        if second is not None:
            self.channels.append(second)

    def replace(self, algorithm: Algorithm, connect: Callable[[], Transport]) -> None:
        """Change the algorithm. `connect` is as in `open`. Collective, not within a backward."""
        with self.session.wholly():
            self._close_second_channel()
            self._use(algorithm, self.parameters)
            self.gradients.use(algorithm, self.counter, self.parameters)
            self.open(connect)

    def set_optimizer(self, optimizer: Any) -> None:
        """Follow the steps of another optimizer from now on. Collective, not within a backward."""
        self._steps.close()
        self._enclosing.close()
        self._settings = dataclasses.replace(self._settings, optimizer=optimizer)
        with self.session.wholly():
            self.counter.counts_backwards = False
            for channel in self.channels:
                channel.set_up(self._settings)
            self._changes.expect_change()
            self._follow_steps()
            self._observe()

    def adopt(self, parameters: Sequence[Parameter]) -> None:
        """Communicate these parameters from now on, and restart planning. Collective, not within a backward."""
        for channel in self.channels:
            channel.allow_change()
        with self.session.wholly():
            self._take(parameters)
            for channel in self.channels:
                channel.adopt(self.parameters)

    @property
    def is_settled(self) -> bool:
        """Whether the algorithm's rounds no longer change: no bucket plans are being tried."""
        return self.channels[-1].is_settled

    def has_moved(self) -> bool:
        """Return whether parameters were cast or moved to another device since they were adopted."""
        return any(channel.has_moved() for channel in self.channels)

    def check(self) -> None:
        """Raise the error that ended the communication, if any."""
        for channel in self.channels:
            channel.session.check()

    # --- steps ------------------------------------------------------------------------------------------------------

    @property
    def _follows_steps(self) -> bool:
        """Whether the communication depends on the given optimizer's steps from now on."""
        declared = self.algorithm.channel
        return self.optimizer is not None and (
            declared.needs_optimizer or (declared.follows_steps and self.counter.step < declared.steady_step)
        )

    def look_for_uncounted_changes(self) -> None:
        """Raise before a training forward if the weights change although no given optimizer steps.

        Raises:
            ConfigError: They do. See [Note: evidence] in `unseen.py`.
        """
        if not self._follows_steps:
            return
        if self._steps.in_step:  # this forward is in its closure
            self._changes.expect_change()
        if self._changes.at_forward(self._steps.num_seen):
            raise ConfigError(
                f"rank {self.comm.rank}: the weights have changed after each of the last {NUM_CHANGES} forwards, and "
                f"{self._names} made no step. {self._why_that_matters}"
            )

    def before_any_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step of any optimizer that comes too early or is not counted.

        Raises:
            ConfigError: The step is refused. See [Note: evidence] in `unseen.py`.
        """
        if self.session.error is not None:  # raised by the next forward
            return
        is_early = self.gradients.backward.is_communicating
        is_given = any(optimizer is each for each in all_of(self.optimizer))
        is_unseen = not is_given and self._follows_steps and not self._steps.in_step
        if not (is_early or is_unseen) or not has_parameters_of(optimizer, self._own_ids):
            return
        name = type(optimizer).__name__
        if is_early:
            raise ConfigError(
                f"rank {self.comm.rank}: {name} makes a step inside of backward, before the gradients have been "
                "communicated, so each rank would step with its own gradients. Make the step after backward"
            )
        raise ConfigError(
            f"rank {self.comm.rank}: {name} steps parameters of the wrapped model, but commlib.wrap was given "
            f"{self._names}. {self._why_that_matters}"
        )

    def _refuse_enclosing(self, outer: Any) -> None:
        raise ConfigError(
            f"rank {self.comm.rank}: {type(outer).__name__}.step calls the step of {self._names}, which commlib.wrap "
            f"was given, and changes the weights after it: {self.algorithm.name!r} would act in the middle of a step. "
            "Use an optimizer that makes its whole step in a torch.optim.Optimizer, or an algorithm on gradients"
        )

    @property
    def _names(self) -> str:
        return names_of(self.optimizer)

    @property
    def _why_that_matters(self) -> str:
        return (
            f"The algorithm {self.algorithm.name!r} follows the steps of the optimizer given to it, so its rounds, "
            "warm-ups and periods would not advance. Call commlib.set_optimizer(model, optimizer) with the "
            "torch.optim.Optimizer that makes the steps, or a list of them, on all ranks"
        )

    def _step_begins(self, has_closure: bool) -> None:
        if self._watches_enclosing:
            self._enclosing.before_step()
        self.settle_weights()
        for channel in self.channels:
            channel.session.check_streams()
            channel.begin_step(has_closure)

    def _step_ends(self) -> None:
        self.counter.end_step()
        for channel in self.channels:
            channel.end_step()
        if self._watches_enclosing:
            self._enclosing.after_step()
        self.when_stepped()

    def _step_counted(self) -> None:
        self._has_state = False
        self.pace.note(sum(each.bytes_sent for each in self.channels), sum(each.waited_s for each in self.channels))

    @property
    def _watches_enclosing(self) -> bool:
        declared = self.algorithm.channel
        return declared.has_rounds and not declared.keeps_replicas_alike  # else weights may change at any time

    @in_plain_mode
    def drain(self) -> None:
        """Take the results of background rounds, unless that may block on a peer."""
        self.settle_weights()
        for channel in self.channels:
            with channel.session.wholly():
                channel.drain()

    @in_plain_mode
    def synchronize(self) -> None:
        """Give all ranks the same weights. Collective."""
        self.settle_weights()
        self._changes.expect_change()
        for channel in self.channels:
            with channel.session.wholly():
                channel.synchronize()

    @in_plain_mode
    def synchronize_optimizer(self) -> None:
        """Give all ranks the same optimizer state. Collective.

        Raises:
            ConfigError: No optimizer was given, or the ranks' states have no mean.
        """
        if self.optimizer is None:
            raise ConfigError("synchronize(optimizer=True): commlib.wrap was given no optimizer")
        optimizer_state.synchronize(self.session, self.optimizer, self.parameters)

    @contextlib.contextmanager
    def loading_weights(self) -> Iterator[None]:
        """Track weights that the user loads in the block."""
        self._loads.begin()
        yield
        self._loads.end()
        self._changes.expect_change()
        if not self.algorithm.channel.has_rounds:  # peers may request this rank's weights at any time
            self.settle_weights()

    def forget_loads(self) -> None:
        """Forget earlier loads of weights, since state that belongs to the weights is being loaded now."""
        self._loads.settle()
        self._lacks_state, self._has_state = False, True

    def tell_of_loads(self) -> None:
        """Warn once, before a synchronised backward, if weights were loaded without communication state."""
        lacks, self._lacks_state = self._lacks_state, False
        if not lacks or self._has_told_of_loads or self.comm.rank != 0 or self.comm.world_size == 1:
            return
        if not self.algorithm.channel.keeps_replicas_alike:
            what = (
                "each rank has its own weights between rounds, so the weights that one rank has saved are not the mean "
                "of all. Call commlib.synchronize(model) on all ranks before one of them saves the model"
            )
        elif _has_tensors(self.channels[-1].keeper.state_dict()):
            what = (
                "the state that it keeps of earlier gradients (residuals, momentum) starts from zero. Save "
                "commlib.state_dict(model) on each rank, or commlib.Checkpoint, to resume it"
            )
        else:
            return
        self._has_told_of_loads = True
        _log.warning(
            "weights were loaded into a model wrapped with %r without its state: %s", self.algorithm.name, what
        )

    def settle_weights(self) -> None:
        """Reset state that algorithms keep of earlier weights, if other weights were loaded and are kept."""
        if self._loads.settle():
            self._restart()

    @in_plain_mode
    def _restart(self) -> None:
        self._lacks_state = not self._has_state  # true if the state was loaded before the weights
        for channel in self.channels:
            channel.weights_were_loaded()
        declared = self.algorithm.channel
        self.has_loaded |= declared.keeps_step and not declared.keeps_replicas_alike

    # --- the end ----------------------------------------------------------------------------------------------------

    def _close_second_channel(self) -> None:
        while len(self.channels) > 1:
            self.channels.pop().close()

    def close(self) -> None:
        """Remove every hook and release the driver and the communicators. Idempotent."""
        ignore(self)
        self._steps.close()
        self._enclosing.close()
        self._close_second_channel()
        self.gradients.close()
        if self._finalizer.detach():
            self._release()
        self.session.close()
