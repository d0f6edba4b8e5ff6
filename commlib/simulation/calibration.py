"""Calibration of the simulator with measured steps, for figures that are not published, such as CPU time per message.

[Note: fitted figures] There are seven figures: the copy rate and the processor time per byte and per message of the
device, the time of a collective, and the fraction of the link's rate that each of three verbs reaches. A pattern search
on their logarithms finds them, which needs no derivatives and is deterministic. It moves each figure up and down by a
factor, keeps the moves that reduce the mean squared relative error, and reduces the factor when moves help little.
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
#: The search ends below this error. It reduces the factor if a pass leaves more than this fraction of the error.
_SMALL_ERROR, _LITTLE_GAIN = 0.005, 0.8


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step.

    Attributes:
        workload: The trained workload, with its times without communication.
        network: The network of the ranks.
        algorithm: A registered name or an instance.
        step_s: Measured seconds per step.
        bucket_cap_mb: Size of a bucket, MiB; None for planned buckets.
    """

    workload: Workload
    network: Network
    algorithm: str | Algorithm
    step_s: float
    bucket_cap_mb: float | None = None


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration.

    Attributes:
        device: The device with fitted figures.
        transport: The transport with fitted figures.
        errors: Relative error of each cell, predicted / measured - 1.
    """

    device: Device
    transport: TransportProfile
    errors: tuple[float, ...]


def predict(cell: MeasuredStep, device: Device, transport: TransportProfile) -> float:
    """Return the simulated seconds per step of a cell."""
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
        cells: Measured steps, at least as many as there are fitted figures: seven.
        device: Start of the search; its figures must be above 0.
        transport: Start of the search.
        progress: Called with the root mean squared error after each pass of the search.

    Raises:
        ConfigError: There are too few cells, or a figure is 0.
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
    """Return a figure limited to its range: no verb is faster than the link."""
    return min(value, 1.0) if idx > len(_DEVICE) else value


def _size(errors: Sequence[float]) -> float:
    return math.sqrt(sum(error * error for error in errors) / len(errors))
