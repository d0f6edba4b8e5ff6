"""The plots of `commlib compare`: speed-ups by bandwidth and latency, the best algorithm, timelines of a step.

They need matplotlib (the extra `plot`) but no display. families.py defines the style of each algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from commlib.errors import ConfigError
from commlib.installation import install
from commlib.reports.families import Look, base_name, look
from commlib.simulation.compare import Comparison
from commlib.simulation.timeline import LANES, longest_step

#: Number of labelled algorithms in a line plot; the best of each family comes first.
_MAX_NAMED = 14
_GREY = "#d0d0d0"
#: Speed-ups below this are not drawn; an arrow marks them.
_LEAST_SPEEDUP = 0.1
#: A timeline ends after this many times the median step in it, or at the end of the longest step.
_LONGEST_STEP = 1.5
#: Steps that differ from the mean by a smaller fraction count as equal.
_ALIKE = 0.02
_LANE_COLOURS = {"compute": "#9aa5b1", "local work": "#e0a800", "network": "#3b6fb6"}
_WAIT_COLOUR = "#f2f2f2"
_FONT = 8


def check() -> None:
    """Check that plots can be drawn.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"plots need matplotlib: {install('plot')}") from error


def speedups(
    by_algorithm: Mapping[str, Sequence[float]],
    values: Sequence[float],
    axis: str,
    title: str,
    path: Path | str,
    marks: Mapping[str, str] | None = None,
) -> None:
    """Draw the speed-up over DDP-style all-reduce by algorithm against `values`, on logarithmic axes.

    Labels are placed at the end, left or right, at which the lines are further apart.

    Args:
        by_algorithm: Speed-ups, one for each value; NaN if it could not be simulated.
        values: Bandwidths or latencies.
        axis: Label of the axis, with the unit.
        title: Title of the plot.
        path: The PNG file to write.
        marks: Marks of the labels, as in the table (`Prediction.mark`).
    """
    figure, [ax] = _figure(9.0, 6.0)
    drawn = {name: line for name, line in by_algorithm.items() if not all(map(math.isnan, line))}
    named = _named(drawn)
    for name, line in drawn.items():
        if name not in named:
            ax.plot(values, line, color=_GREY, linewidth=0.8, zorder=1)
    for name in named:
        ax.plot(values, drawn[name], linewidth=1.6, markersize=5, zorder=3, **_line_style(look(name)))
    ax.axhline(1.0, color="black", linewidth=1, linestyle=":", zorder=2)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xticks(values, [f"{value:g}" for value in values])
    ax.minorticks_off()
    lowest, highest = _limits([drawn[name] for name in named])
    ax.set_ylim(lowest, highest)
    steps = (1, 2, 5) if highest > 20 * lowest else (1, 1.5, 2, 3, 4, 5, 7)
    ticks = [tick for power in range(-2, 5) for step in steps if lowest <= (tick := step * 10.0**power) <= highest]
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.set(xlabel=axis, ylabel="speed-up of a step over DDP-style all-reduce (dotted)")
    ax.grid(color="#ececec", zorder=0)
    _mark_clipped(ax, {name: drawn[name] for name in named}, values, lowest)
    of_named = {name: (marks or {}).get(name, "") for name in named}
    _name_ends(ax, {name: drawn[name] for name in named}, values, of_named)
    notes = [*_notes(drawn, named, lowest), *_meanings("".join(of_named.values()))]
    ax.set_title("\n".join([title, *notes]), fontsize=10)
    _save(figure, path)


def _named(drawn: Mapping[str, Sequence[float]]) -> list[str]:
    """Return which lines are labelled: the best form of the best algorithm of each family, then the best algorithms."""
    ranked = sorted(drawn, key=lambda name: -_mean_log(drawn[name]))
    forms = list({base_name(name): name for name in reversed(ranked)}.values())
    forms.sort(key=ranked.index)
    first = {look(name).family: name for name in reversed(forms)}.values()
    rest = [name for name in [*forms, *ranked] if name not in first]
    return list(dict.fromkeys([*first, *rest]))[:_MAX_NAMED]


def _mean_log(line: Sequence[float]) -> float:
    known = [math.log(value) for value in line if value > 0]
    return sum(known) / len(known) if known else -math.inf


def _line_style(shown: Look) -> dict[str, Any]:
    return {
        "color": shown.colour,
        "marker": shown.marker,
        "linestyle": shown.dashes,
        "markerfacecolor": "white" if shown.is_hollow else shown.colour,
    }


def _limits(lines: Iterable[Sequence[float]]) -> tuple[float, float]:
    known = [value for line in lines for value in line if value >= _LEAST_SPEEDUP]
    return max(min([*known, 0.9]) / 1.2, _LEAST_SPEEDUP), max([*known, 1.1]) * 1.2


def _mark_clipped(ax: Any, lines: Mapping[str, Sequence[float]], values: Sequence[float], lowest: float) -> None:
    """Draw an arrow at the lower edge for each value of a line below it."""
    for name, line in lines.items():
        for value, speedup in zip(values, line, strict=True):
            if speedup < lowest:
                ax.annotate(
                    "", (value, 0), (value, 0.035), xycoords=("data", "axes fraction"), zorder=4,
                    arrowprops={"arrowstyle": "-|>", "color": look(name).colour},
                )  # fmt: skip


def _notes(drawn: Mapping[str, Sequence[float]], named: Sequence[str], lowest: float) -> list[str]:
    """Return remarks about lines that are unlabelled, clipped or incomplete."""
    notes = []
    if len(named) < len(drawn):
        notes.append(f"grey: {len(drawn) - len(named)} others")
    if any(look(name).is_hollow for name in named):
        notes = ["; ".join([*notes, "hollow markers: hierarchical forms"])]
    low = {name: min(value for value in line if not math.isnan(value)) for name, line in drawn.items()}
    low = {name: value for name, value in low.items() if value < lowest}
    if low:
        slowest = min(low, key=low.__getitem__)
        notes.append(f"not drawn below {lowest:.2g}: {len(low)} of the lines, such as {slowest} ({low[slowest]:.2g})")
    gaps = [name for name, line in drawn.items() if any(map(math.isnan, line))]
    if gaps:
        notes.append(f"cannot be simulated everywhere: {len(gaps)} of the lines, such as {gaps[0]}")
    return notes


def _meanings(marks: str) -> list[str]:
    """Return the meanings of the marks in a plot, in one line."""
    meanings = {"*": "* known to lose more than 5 %", "?": "? loss not measured", "!": "! does not fit in memory"}
    shown = [meaning for mark, meaning in meanings.items() if mark in marks]
    return ["; ".join(shown)] if shown else []


def _name_ends(
    ax: Any, lines: Mapping[str, Sequence[float]], values: Sequence[float], marks: Mapping[str, str]
) -> None:
    """Write labels next to the plot, as near as possible to the ends of their lines, with connecting lines."""
    at_left = _spread(line[0] for line in lines.values()) > _spread(line[-1] for line in lines.values())
    side = -0.03 if at_left else 1.03
    if at_left:
        ax.yaxis.tick_right()
        ax.yaxis.set_label_position("right")
    low, high = map(math.log, ax.get_ylim())
    known = {name: [idx for idx, value in enumerate(line) if not math.isnan(value)] for name, line in lines.items()}
    ends = {name: places[0 if at_left else -1] for name, places in known.items()}
    at = {name: (math.log(line[ends[name]]) - low) / (high - low) for name, line in lines.items()}
    at = {name: min(max(place, 0.0), 1.0) for name, place in at.items()}
    apart = 1.45 * _FONT / (ax.figure.get_figheight() * 72 * 0.8)
    order = sorted(at, key=lambda name: (at[name], lines[name][ends[name]]))
    for name, place in zip(order, _spaced([at[name] for name in order], apart), strict=True):
        colour = look(name).colour
        ax.annotate(
            name + marks[name], (values[ends[name]], at[name]), (side, place), xycoords=("data", "axes fraction"),
            textcoords="axes fraction", ha="right" if at_left else "left", va="center", fontsize=_FONT, color=colour,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "relpos": (float(at_left), 0.5),
                "shrinkA": 0, "shrinkB": 4},
            annotation_clip=False,
        )  # fmt: skip


def _spread(ends: Iterable[float]) -> float:
    logs = [math.log(max(value, _LEAST_SPEEDUP)) for value in ends if not math.isnan(value)]
    return max(logs) - min(logs) if logs else 0.0


def _spaced(places: Sequence[float], apart: float) -> list[float]:
    """Return ascending places, moved as little as possible to be `apart` and, if there is room, within 0..1."""
    groups: list[list[float]] = []  # of touching places: their sum, their number, and the position of the first one
    for place in places:
        groups.append([place, 1, place])
        while len(groups) > 1 and groups[-2][2] + groups[-2][1] * apart > groups[-1][2]:
            total, count, _ = groups.pop()
            groups[-1][0] += total
            groups[-1][1] += count
            mean = groups[-1][0] / groups[-1][1]
            groups[-1][2] = mean - (groups[-1][1] - 1) * apart / 2
    spaced = [start + idx * apart for _, count, start in groups for idx in range(int(count))]
    for idx, place in enumerate(spaced):
        spaced[idx] = max(place, idx * apart)
    for idx in reversed(range(len(spaced))):
        spaced[idx] = min(spaced[idx], max(1.0, (len(spaced) - 1) * apart) - (len(spaced) - 1 - idx) * apart)
    return spaced


def best(
    grids: Mapping[str, Sequence[Sequence[tuple[str, float]]]],
    bandwidths: Sequence[float],
    latencies: Sequence[float],
    title: str,
    path: Path | str,
) -> None:
    """Draw the fastest algorithm at each bandwidth and latency, with its speed-up.

    Args:
        grids: By class of exactness, [latency][bandwidth] the best algorithm of that class or a narrower one, and its
            speed-up.
        bandwidths: Gbit/s.
        latencies: us.
        title: Title of the plot.
        path: The PNG file to write.
    """
    columns = 2 if len(grids) % 2 == 0 else 1
    rows = len(grids) // columns
    size = (columns * (1.25 * len(bandwidths) + 0.6), rows * (0.62 * len(latencies) + 0.6) + 0.8)
    figure, axes = _figure(*size, rows=rows, columns=columns)
    for ax, (exactness, grid) in zip(axes, grids.items(), strict=True):
        for y, row in enumerate(grid):
            for x, (name, speedup) in enumerate(row):
                colour = look(name).colour
                ax.add_patch(_rectangle(x - 0.5, y - 0.5, colour))
                text = f"{_broken(name)}\n{speedup:.3g}x"
                ax.text(x, y, text, ha="center", va="center", fontsize=7, color=_ink(colour), linespacing=1.1)
        ax.set_xlim(-0.5, len(bandwidths) - 0.5)
        ax.set_ylim(-0.5, len(latencies) - 0.5)
        ax.set_xticks(range(len(bandwidths)), [f"{value:g}" for value in bandwidths])
        ax.set_yticks(range(len(latencies)), [f"{value:g}" for value in latencies])
        ax.set_title(f"allowed: {exactness}", fontsize=10)
    figure.suptitle(
        f"{title}\n(a colour is a family of algorithms; x: times the speed of DDP-style all-reduce)", size=10
    )
    figure.supxlabel("bandwidth of a node, Gbit/s", size=10)
    figure.supylabel("latency, us", size=10)
    _save(figure, path)


def _broken(name: str) -> str:
    """Break a name into lines that fit into a cell."""
    name = name.replace("(hierarchical=True)", "\n(hierarchical)").replace("(", "\n(").replace("\n\n", "\n")
    return name.replace("low_precision_", "low_precision_\n").replace("hierarchical_local", "hierarchical_\nlocal")


def timelines(comparison: Comparison, path: Path | str) -> None:
    """Draw one step of the fastest form of each algorithm: computation, local work of communication, the network.

    If steps differ, for example for algorithms with a period, the longest one is drawn and the mean is printed.
    """
    fastest = {base_name(row.algorithm): row for row in reversed(comparison.rows)}.values()
    rows = sorted(fastest, key=lambda row: row.result.step_s)
    shown = [
        (comparison.baseline, comparison.ddp, 1),
        *((row.algorithm + row.mark, row.result, row.cycle) for row in rows),
    ]
    steps = [longest_step(result) for _, result, _ in shown]
    ends_s = [max((span.end_s for span in spans), default=0.0) for _, spans in steps]
    end_s = _LONGEST_STEP * max(sorted(ends_s)[len(ends_s) // 2], comparison.workload.step_s)
    if end_s > 0.9 * max(ends_s):
        end_s = max(ends_s)
    figure, [ax] = _figure(11.0, 0.5 * len(shown) + 1.6)
    for place, (_, spans) in enumerate(steps):
        for span in spans:
            is_wait = span.name == "wait"
            ax.barh(
                place + (LANES.index(span.lane) - 1) * 0.27, (span.end_s - span.start_s) * 1e3, left=span.start_s * 1e3,
                height=0.25, color=_WAIT_COLOUR if is_wait else _LANE_COLOURS[span.lane],
                edgecolor="white" if not is_wait else "#d0d0d0", linewidth=0.3,
            )  # fmt: skip
        if ends_s[place] > end_s:
            arrow = {"arrowstyle": "-|>", "color": "black"}
            ax.annotate("", (end_s * 1.02e3, place), (end_s * 0.985e3, place), arrowprops=arrow, annotation_clip=False)
        _, result, cycle = shown[place]
        ax.text(
            1.03, place, _step_in_words(steps[place][0], ends_s[place], result.step_s, cycle), va="center",
            transform=ax.get_yaxis_transform(), fontsize=_FONT,
        )  # fmt: skip
    for lane, colour in _LANE_COLOURS.items():
        ax.barh(0, 0, color=colour, label=f"{lane} ({('above', 'middle', 'below')[LANES.index(lane)]})")
    ax.barh(0, 0, color=_WAIT_COLOUR, edgecolor="#d0d0d0", label="waiting")
    ax.set_yticks(range(len(shown)), [name for name, _, _ in shown])
    ax.set_ylim(len(shown) - 0.45, -0.55)
    ax.set_xlim(0, end_s * 1e3)
    left_out = len(comparison.rows) - len(rows)
    note = f"; {left_out} slower forms are not drawn" if left_out else ""
    title = f"One step of {comparison.workload.name} on {comparison.network.name} (rank 0{note}; arrow: continues)"
    ax.set(xlabel="ms")
    figure.suptitle(title, size=11)
    ax.legend(fontsize=_FONT, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)
    _save(figure, path)


def _step_in_words(place: int, length_s: float, mean_s: float, cycle: int) -> str:
    """Return the mean step time as text and, if steps differ, which step is drawn."""
    mean = f"{mean_s * 1e3:,.1f} ms"
    if cycle == 1 and abs(length_s / mean_s - 1) < _ALIKE:
        return mean
    which = f"step {place % cycle + 1} of {cycle}" if cycle > 1 else "the longest step"
    return f"{mean} on average;\ndrawn: {which}, {length_s * 1e3:,.1f} ms"


def _ink(colour: str) -> str:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 125 else "white"


def _figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, list[Any]]:
    check()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _rectangle(x: float, y: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white")


def _save(figure: Any, path: Path | str) -> None:
    figure.savefig(path, dpi=130, bbox_inches="tight")
