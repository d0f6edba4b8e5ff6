"""Opens the channel that an algorithm declares."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from commlib.algorithms.base import Algorithm
from commlib.algorithms.channels import SelfRunning, Weights
from commlib.engine.channel import OpenChannel, Settings
from commlib.engine.planning.plan import Parameter
from commlib.engine.rounds.schedule import StepCounter
from commlib.engine.session import Session
from commlib.engine.weights.channel import WeightChannel
from commlib.engine.weights.self_running import SelfRunningChannel
from commlib.transport.base import Transport


def open_second_channel(
    algorithm: Algorithm,
    parameters: Sequence[Parameter],
    counter: StepCounter,
    session: Session,
    settings: Settings,
    connect: Callable[[], Transport],
) -> OpenChannel | None:
    """Open the channel that an algorithm needs in addition to the gradient channel. Collective.

    Args:
        algorithm: The algorithm.
        parameters: The parameters, in the model's order.
        counter: Counts the steps.
        session: The session of the gradient channel. If it ends, this channel ends too.
        settings: Arguments of `wrap`. Without an optimizer, no channel is opened.
        connect: Creates a communicator for the channel's rounds. Collective.

    Raises:
        ConfigError: The algorithm cannot run on this model, optimizer or group.
    """
    declared = algorithm.channel
    if settings.optimizer is None:
        return None
    if isinstance(declared, Weights):
        own = session  # an elastic group has one sequence of rounds
        if not session.is_elastic:
            own = Session(connect(), session.driver, wants_nodes=declared.wants_nodes, ends_with=session)
        return WeightChannel(parameters, algorithm, counter, own, session, settings)
    if isinstance(declared, SelfRunning):
        return SelfRunningChannel(parameters, algorithm, counter, session, settings.optimizer)
    return None
