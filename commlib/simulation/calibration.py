"""Fitting the simulator to measured steps, where nobody publishes what a processor takes for a message.

[Note: what is fitted] Seven figures: of the device its copy rate and the processor time of a byte and of a message, of
the transport the time of a collective and the part of the link's rate that each verb reaches. They are found by a
pattern search on their logarithms, which needs no derivatives and gives the same result every time: each figure is
moved up and down by a factor, kept where the mean squared relative error falls, and the factor shrinks when moves help
little.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from commlib.algorithms.base import Algorithm
from commlib.errors import ConfigError
from commlib.network.model import Device, Network, Workload
from commlib.simulation.collectives import TransportProfile
from commlib.simulation.simulator import simulate
from commlib.simulation.training import Options

_DEVICE = ("memory_gbytes_s", "cpu_s_per_byte", "cpu_s_per_message")
_VERBS = ("all_reduce", "all_to_all", "all_gather")
_FIRST_FACTOR, _LAST_FACTOR = 1.6, 1.03
#: The search ends below this error; and a round that leaves more than this part of it makes the factor smaller.
_SMALL_ERROR, _LITTLE_GAIN = 0.005, 0.8


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step.

    Attributes:
        workload: What was trained; its times are those without communication.
        network: What connected the ranks.
        algorithm: A registered name or an instance.
        step_s: Seconds of a step.
        bucket_cap_mb: The size of its buckets in MiB, or None where they were planned.
    """

    workload: Workload
    network: Network
    algorithm: str | Algorithm
    step_s: float
    bucket_cap_mb: float | None = None


@dataclass(frozen=True)
class Calibration:
    """What was found.

    Attributes:
        device: With fitted figures.
        transport: With fitted figures.
        errors: Of each cell, predicted / measured - 1.
    """

    device: Device
    transport: TransportProfile
    errors: tuple[float, ...]


def predict(cell: MeasuredStep, device: Device, transport: TransportProfile) -> float:
    """Return the simulated seconds of a cell's step."""
    options = Options(steps=1, bucket_cap_mb=cell.bucket_cap_mb, transport=transport)
    return simulate(cell.workload, cell.network, device, cell.algorithm, options).step_s


def calibrate(
    cells: Sequence[MeasuredStep],
    device: Device,
    transport: TransportProfile,
    progress: Callable[[float], None] = lambda _: None,
) -> Calibration:
    """Fit a device and a transport to measured steps.

    Args:
        cells: At least as many as figures are fitted: seven.
        device: Where the search begins; the figures must be above 0.
        transport: Where the search begins.
        progress: Called with the root of the mean squared error after each round of the search.

    Raises:
        ConfigError: Too few cells, or a figure that is 0.
    """
    figures = _figures_of(device, transport)
    if len(cells) < len(figures):
        raise ConfigError(f"calibrate: expected at least {len(figures)} measured steps, got {len(cells)}")
    if not all(value > 0 for value in figures):
        raise ConfigError(f"calibrate: expected figures above 0 to begin with, got {figures}")

    def errors_of(at: Sequence[float]) -> tuple[float, ...]:
        trial_device, trial_transport = _apply(at, device, transport)
        return tuple(predict(cell, trial_device, trial_transport) / cell.step_s - 1 for cell in cells)

    best = errors_of(figures)
    factor = _FIRST_FACTOR
    while factor > _LAST_FACTOR and _size(best) > _SMALL_ERROR:
        before = _size(best)
        for idx in range(len(figures)):
            for move in (factor, 1 / factor):
                moved = [*figures[:idx], _bounded(idx, figures[idx] * move), *figures[idx + 1 :]]
                errors = errors_of(moved)
                if _size(errors) < _size(best):
                    figures, best = moved, errors
                    break
        progress(_size(best))
        factor = math.sqrt(factor) if _size(best) > _LITTLE_GAIN * before else factor
    return Calibration(*_apply(figures, device, transport), best)


def _figures_of(device: Device, transport: TransportProfile) -> list[float]:
    efficiencies = [transport.efficiency_of.get(verb, 1.0) for verb in _VERBS]
    return [*(getattr(device, name) for name in _DEVICE), transport.op_us, *efficiencies]


def _apply(figures: Sequence[float], device: Device, transport: TransportProfile) -> tuple[Device, TransportProfile]:
    own, op_us, efficiencies = figures[: len(_DEVICE)], figures[len(_DEVICE)], figures[len(_DEVICE) + 1 :]
    efficiency_of = {**transport.efficiency_of, **dict(zip(_VERBS, efficiencies, strict=True))}
    return (
        dataclasses.replace(device, **dict(zip(_DEVICE, own, strict=True))),
        dataclasses.replace(transport, op_us=op_us, efficiency_of=efficiency_of),
    )


def _bounded(idx: int, value: float) -> float:
    """Return a figure within its range: no verb is faster than the link."""
    return min(value, 1.0) if idx > len(_DEVICE) else value


def _size(errors: Sequence[float]) -> float:
    return math.sqrt(sum(error * error for error in errors) / len(errors))
