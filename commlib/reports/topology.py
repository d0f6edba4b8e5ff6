"""Report on a topology: its matrix, its spectral gap, its speed of convergence to the mean, and a plot."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from commlib.errors import ConfigError
from commlib.installation import install
from commlib.primitives.topology import Matrix, Topology
from commlib.reports import targets

#: Largest number of ranks whose matrix is printed.
_PRINTED_RANKS = 8

#: Number of printed and drawn steps of a topology that changes.
_SHOWN_STEPS = 4

#: Upper bound of the search for a number of steps.
_MAX_STEPS = 1 << 40


def decay(topology: Topology, world_size: int) -> Iterator[float]:
    """Yield the distance to the mean after 0, 1, 2, ... steps, as a fraction of the initial distance.

    The distance is the root mean square over initial values that are independent and of equal variance.
    """
    left = np.eye(world_size) - 1.0 / world_size
    for step in itertools.count():
        yield _rms(left)
        left = (topology.matrix(world_size, step) - 1.0 / world_size) @ left


def steps_to(topology: Topology, world_size: int, fraction: float) -> int | None:
    """Return the number of steps until `decay` is at most `fraction`, or None if it exceeds 2^40."""
    period = topology.period(world_size)
    if period is None:
        return next(step for step, distance in enumerate(decay(topology, world_size)) if distance <= fraction)
    left, begin = np.eye(world_size) - 1.0 / world_size, 0
    if _rms(left) <= fraction:
        return 0
    turns = [topology.matrix(world_size, step) - 1.0 / world_size for step in range(period)]
    powers = [_product(turns)]  # of the period's product: 1, 2, 4, ... periods
    while _rms(powers[-1]) > fraction:
        if period << len(powers) > _MAX_STEPS:
            return None
        powers.append(powers[-1] @ powers[-1])
    for exponent in range(len(powers) - 1, -1, -1):  # skip periods while the distance stays too large
        further = powers[exponent] @ left
        if _rms(further) > fraction:
            left, begin = further, begin + (period << exponent)
    for step, turn in enumerate(turns, start=1):
        left = turn @ left
        if _rms(left) <= fraction:
            return begin + step
    raise AssertionError("the distance to the mean must not grow")


def describe(topology: Topology, world_size: int) -> str:
    """Return a few lines about the topology of `world_size` ranks, with the matrix if it is small.

    Raises:
        ConfigError: The topology does not support `world_size` ranks.
    """
    if world_size < 1:
        raise ConfigError(f"ranks: expected 1 or more, got {world_size}")
    gap, period, steps = topology.spectral_gap(world_size), topology.period(world_size), _shown(topology, world_size)
    changes = "new pairs in every step" if period is None else f"{period} matrices in turn"
    speed = f"the distance to the mean shrinks by {1 - gap:.4g} per step in the long run"
    degrees = sorted(
        len(topology.neighbours(rank, world_size, step).sources) for step in steps for rank in range(world_size)
    )
    needed = steps_to(topology, world_size, 0.01)
    lines = [
        f"{topology} of {world_size} ranks: {'one matrix' if period == 1 else changes}",
        f"  a rank receives from {' to '.join(map(str, sorted({degrees[0], degrees[-1]})))} others per step",
        f"  spectral gap {gap:.4g}: {'the mean is reached within a period' if gap == 1 else speed}",
        f"  to 1 % of the distance at the start: {'more than 2^40' if needed is None else needed} steps",
    ]
    if world_size <= _PRINTED_RANKS:
        for step in steps:
            lines.append(f"  step {step}:" if len(steps) > 1 else "  weights, row i of rank i:")
            lines += ["    " + "  ".join(f"{w:5.3f}" for w in row) for row in topology.matrix(world_size, step)]
    return "\n".join(lines)


def check_plot(path: str | Path) -> None:
    """Check that `plot` can write the file.

    Raises:
        ConfigError: matplotlib is missing or does not support the file type, or the file cannot be written.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ConfigError(f"--plot needs matplotlib: {install('plot')}") from None
    known = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".").lower() not in known:
        raise ConfigError(
            f"--plot: expected a file that ends in one of .{', .'.join(sorted(known))}, got {str(path)!r}"
        )
    targets.check_file(path, "--plot")


def plot(topology: Topology, world_size: int, path: str | Path) -> None:
    """Draw the weighted graphs of the first steps and the decay of the distance to the mean into a file.

    Raises:
        ConfigError: matplotlib is missing or cannot write the file.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    steps = _shown(topology, world_size)
    figure = Figure(figsize=(4.2 * (len(steps) + 1), 4.4), layout="constrained")
    axes = figure.subplots(1, len(steps) + 1, squeeze=False)[0]
    for axis, step in zip(axes, steps, strict=False):
        _draw_graph(axis, topology.matrix(world_size, step))
        axis.set_title(f"step {step}" if len(steps) > 1 else f"{world_size} ranks, every step")
    _draw_decay(axes[-1], topology, world_size)
    figure.suptitle(str(topology))
    figure.savefig(path, dpi=120)


def _shown(topology: Topology, world_size: int) -> range:
    return range(min(topology.period(world_size) or _SHOWN_STEPS, _SHOWN_STEPS))


def _rms(deviation: Matrix) -> float:
    return float(np.linalg.norm(deviation)) / math.sqrt(max(1, len(deviation) - 1))


def _product(turns: list[Matrix]) -> Matrix:
    product = turns[0]
    for turn in turns[1:]:
        product = turn @ product
    return product


def _draw_graph(axis: Any, matrix: Matrix) -> None:
    """Draw ranks on a circle and their weights as arrows, or as lines where both directions have the same weight."""
    num = len(matrix)
    angles = np.pi / 2 - 2 * np.pi * np.arange(num) / num
    places = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    off_diagonal = matrix * (1 - np.eye(num))
    largest = off_diagonal.max()
    labelled: set[str] = set()
    for i, j in np.argwhere(off_diagonal > 0):
        is_mutual = matrix[i, j] == matrix[j, i]
        if is_mutual and j < i:
            continue
        weight = f"{matrix[i, j]:.3g}"
        arrow = {"arrowstyle": "-" if is_mutual else "-|>", "color": _color(matrix[i, j] / largest), "linewidth": 1.4}
        arrow |= {"shrinkA": 9, "shrinkB": 9, "mutation_scale": 9}
        axis.annotate("", xy=places[i], xytext=places[j], arrowprops=arrow, zorder=1)
        if weight not in labelled:
            axis.plot([], [], color=arrow["color"], label=f"weight {weight}")
            labelled.add(weight)
    axis.scatter(*places.T, s=230 if num <= 32 else 30, color="white", edgecolors="black", zorder=2)
    for rank, (x, y) in enumerate(places if num <= 32 else []):
        axis.text(x, y, str(rank), ha="center", va="center", fontsize=8, zorder=3)
    own = sorted({f"{weight:.3g}" for weight in np.diagonal(matrix)})
    axis.plot([], [], " ", label=f"own {own[0]}" + (f" to {own[-1]}" if len(own) > 1 else ""))
    axis.set(xlim=(-1.25, 1.25), ylim=(-1.6, 1.25), aspect="equal")
    axis.axis("off")
    if len(labelled) <= 6:
        axis.legend(loc="lower center", ncols=3, fontsize=8, frameon=False)


def _color(share: float) -> tuple[float, float, float]:
    """Return a shade from light to dark blue."""
    return (0.75 - 0.65 * share, 0.85 - 0.55 * share, 0.95 - 0.25 * share)


def _draw_decay(axis: Any, topology: Topology, world_size: int) -> None:
    needed = steps_to(topology, world_size, 0.01)
    num_steps = min(max(10, math.ceil(1.3 * needed)) if needed is not None else 1000, 1000)
    distances = list(itertools.islice(decay(topology, world_size), num_steps + 1))
    rate = 1 - topology.spectral_gap(world_size)
    axis.semilogy(range(len(distances)), np.maximum(distances, 1e-17), label="distance to the mean (start: 1)")
    if rate > 0:
        predicted = rate ** np.arange(num_steps + 1)
        axis.semilogy(predicted, "--", color="gray", label=f"{rate:.4g} per step (spectral gap)")
    axis.axhline(0.01, color="tab:red", linewidth=0.8, label=f"1 %: {needed} steps" if needed is not None else "1 %")
    axis.set(xlabel="steps", ylim=(max(1e-4, min(distances[-1] / 2, 5e-3)), 1.5))
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)
