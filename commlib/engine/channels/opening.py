"""From what an algorithm declares to the channel that carries it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from commlib.algorithms.base import Algorithm
from commlib.algorithms.channels import SelfRunning, Weights
from commlib.engine.channels.base import OpenChannel, Settings
from commlib.engine.channels.self_running import SelfRunningChannel
from commlib.engine.channels.weights import WeightChannel
from commlib.engine.line import Line
from commlib.engine.planning.plan import Parameter
from commlib.engine.rounds.schedule import Progress
from commlib.transport.base import Transport


def open_beside(
    algorithm: Algorithm,
    parameters: Sequence[Parameter],
    progress: Progress,
    line: Line,
    settings: Settings,
    connect: Callable[[], Transport],
) -> OpenChannel | None:
    """Open the channel that an algorithm needs beside that of gradients. Collective.

    Args:
        algorithm: The algorithm.
        parameters: The parameters, in the model's order.
        progress: Counts the steps.
        line: That of gradients; if it ends, so does this channel.
        settings: What the user gave; without an optimizer there is no channel.
        connect: Makes a communicator for the channel's rounds. Collective.

    Raises:
        ConfigError: The algorithm cannot run on this model, optimizer or group.
    """
    declared = algorithm.channel
    if settings.optimizer is None:
        return None
    if isinstance(declared, Weights):
        own = Line(connect(), line.driver, wants_nodes=declared.wants_nodes, ends_with=line)
        return WeightChannel(parameters, algorithm, progress, own, line, settings)
    if isinstance(declared, SelfRunning):
        return SelfRunningChannel(parameters, algorithm, progress, line, settings.optimizer)
    return None
