"""The pictures of `commlib compare`: speed-ups by bandwidth and latency, the best algorithm, timelines of a step.

matplotlib is needed (the extra `plot`); it draws without a display.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from commlib.errors import ConfigError
from commlib.simulation.compare import Comparison
from commlib.simulation.timeline import LANES, last_step

#: How many algorithms have a colour of their own in a picture; the others are grey.
_MAX_COLOURS = 8
_COLOURS = ("#4053d3", "#ddb310", "#b51d14", "#00beff", "#fb49b0", "#00b25d", "#7f4909", "#8c6bd6")
_GREY = "#c4c4c4"
#: Speed-ups below it are not shown.
_LEAST_SPEEDUP = 0.1
#: A timeline ends after this many times the step without communication.
_LONGEST_STEP = 4.0
_LANE_COLOURS = {"compute": "#9aa5b1", "local work": "#ddb310", "network": "#4053d3"}
_WAIT_COLOUR = "#f2f2f2"


def speedups(
    by_algorithm: dict[str, list[float]], values: Sequence[float], axis: str, title: str, path: Path | str
) -> None:
    """Draw the speed-up over DDP-style all-reduce by algorithm against `values`, on a logarithmic axis.

    Args:
        by_algorithm: Speed-ups, one for each value; NaN where there is none.
        values: Bandwidths or latencies.
        axis: What they are, with the unit.
        title: Above the picture.
        path: The PNG to write.
    """
    figure, [ax] = _figure(8.0, 4.8)
    colours = _colours(by_algorithm)
    for name, line in sorted(by_algorithm.items(), key=lambda entry: entry[0] in colours):
        is_shown = name in colours
        ax.plot(
            values, line, color=colours.get(name, _GREY), linewidth=2 if is_shown else 1, marker="o", markersize=3,
            label=name if is_shown else None,
        )  # fmt: skip
    ax.axhline(1.0, color="black", linewidth=1, linestyle=":", label="DDP-style all-reduce")
    if len(colours) < len(by_algorithm):
        ax.plot([], [], color=_GREY, label=f"{len(by_algorithm) - len(colours)} others")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xticks(values, [f"{value:g}" for value in values])
    ax.minorticks_off()
    lowest, highest = ax.get_ylim()
    ticks = [step * 10.0**power for power in range(-3, 5) for step in (1, 2, 5)]
    ticks = [tick for tick in ticks if max(lowest, _LEAST_SPEEDUP) <= tick <= highest]
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.set_ylim(bottom=max(lowest, _LEAST_SPEEDUP))
    ax.set(xlabel=axis, ylabel="speed-up of a step", title=title)
    ax.grid(color="#e6e6e6")
    # The legend follows the order of the lines at their highest end.
    handles, labels = ax.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda idx: -_highest(by_algorithm.get(labels[idx], [0.0])))
    ax.legend(
        [handles[i] for i in order], [labels[i] for i in order], fontsize=8, loc="upper left", bbox_to_anchor=(1, 1)
    )
    _save(figure, path)


def best(
    grids: Mapping[str, Sequence[Sequence[tuple[str, float]]]],
    bandwidths: Sequence[float],
    latencies: Sequence[float],
    title: str,
    path: Path | str,
) -> None:
    """Draw which algorithm is the fastest at each bandwidth and latency, and how much faster it is.

    Args:
        grids: By class of exactness, [latency][bandwidth] the best algorithm of that class or a narrower one, and its
            speed-up.
        bandwidths: Gbit/s.
        latencies: us.
        title: Above the picture.
        path: The PNG to write.
    """
    names = sorted({name for grid in grids.values() for row in grid for name, _ in row})
    colours = dict(zip(names, (*_COLOURS, *[_GREY] * len(names)), strict=False))
    columns = min(2, len(grids))
    rows = -(-len(grids) // columns)
    size = (columns * (1.15 * len(bandwidths) + 1), rows * (0.6 * len(latencies) + 0.9) + 0.5)
    figure, axes = _figure(*size, rows=rows, columns=columns)
    for ax in axes[len(grids) :]:
        ax.set_visible(False)
    for ax, (exactness, grid) in zip(axes, grids.items(), strict=False):
        for y, row in enumerate(grid):
            for x, (name, speedup) in enumerate(row):
                ax.add_patch(_rectangle(x - 0.5, y - 0.5, colours[name]))
                text = f"{name.replace('(', chr(10) + '(')}\n{speedup:.3g}x"
                ax.text(x, y, text, ha="center", va="center", fontsize=6, color=_ink(colours[name]))
        ax.set_xlim(-0.5, len(bandwidths) - 0.5)
        ax.set_ylim(-0.5, len(latencies) - 0.5)
        ax.set_xticks(range(len(bandwidths)), [f"{value:g}" for value in bandwidths])
        ax.set_yticks(range(len(latencies)), [f"{value:g}" for value in latencies])
        ax.set_title(f"allowed: {exactness}", fontsize=10)
    figure.suptitle(title)
    figure.supxlabel("bandwidth of a node, Gbit/s")
    figure.supylabel("latency, us")
    _save(figure, path)


def timelines(comparison: Comparison, path: Path | str) -> None:
    """Draw one step of each algorithm: what rank 0 computes, what local work communication has, what is on the wire."""
    shown = [("DDP", comparison.ddp), *((row.algorithm, row.result) for row in comparison.rows)]
    end_s = min(max(result.step_s for _, result in shown), _LONGEST_STEP * comparison.workload.step_s)
    figure, [ax] = _figure(10.0, 0.55 * len(shown) + 1.4)
    for place, (_, result) in enumerate(shown):
        if result.step_s > end_s:
            ax.text(end_s * 1e3, place, f"... {result.step_s * 1e3:,.0f} ms ", ha="right", va="center", fontsize=8)
        for span in last_step(result):
            is_wait = span.name == "wait"
            ax.barh(
                place + (LANES.index(span.lane) - 1) * 0.27, (span.end_s - span.start_s) * 1e3, left=span.start_s * 1e3,
                height=0.25, color=_WAIT_COLOUR if is_wait else _LANE_COLOURS[span.lane],
                edgecolor="white" if not is_wait else "#d0d0d0", linewidth=0.3,
            )  # fmt: skip
    for lane, colour in _LANE_COLOURS.items():
        ax.barh(0, 0, color=colour, label=lane)
    ax.barh(0, 0, color=_WAIT_COLOUR, edgecolor="#d0d0d0", label="waiting")
    ax.set_yticks(range(len(shown)), [name for name, _ in shown])
    ax.invert_yaxis()
    ax.set_xlim(0, end_s * 1e3)
    title = f"One step of {comparison.workload.name} on {comparison.network.name}"
    ax.set(xlabel="ms", title=title)
    ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    _save(figure, path)


def _colours(by_algorithm: dict[str, list[float]]) -> dict[str, str]:
    """Give a colour to the algorithms that are highest somewhere."""
    ranked = sorted(by_algorithm, key=lambda name: -_highest(by_algorithm[name]))
    return dict(zip(ranked[:_MAX_COLOURS], _COLOURS, strict=False))


def _highest(line: Sequence[float]) -> float:
    return max((value for value in line if not math.isnan(value)), default=-math.inf)


def _ink(colour: str) -> str:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 140 else "white"


def _figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, list[Any]]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'commlib[plot]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _rectangle(x: float, y: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white")


def _save(figure: Any, path: Path | str) -> None:
    figure.savefig(path, dpi=130, bbox_inches="tight")
