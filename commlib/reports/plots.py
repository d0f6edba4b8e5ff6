"""The plots of `commlib compare`: speed-ups by bandwidth and latency, the best algorithm, timelines of a step.

They need matplotlib (the extra `plot`) but no display. families.py defines the style of each algorithm.
"""

from __future__ import annotations

import math
import textwrap
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
_LANE_COLOURS = {"compute": "#7d8894", "local work": "#e0a800", "network": "#3b6fb6"}
_WAIT_COLOUR = "#dfe3e8"
#: Heights in a timeline, in lines of text: of a lane, and of a row without its name.
_LANE, _ROW = 0.8, 3.2
#: Width of a figure, inches, and the font sizes, points: readable if the figure is 400 pixels wide.
_WIDTH, _FONT, _TITLE = 5.0, 9, 10
#: Number of characters in a line as wide as a figure.
_LINE = 62


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

    Args:
        by_algorithm: Speed-ups, one for each value; NaN if it could not be simulated.
        values: Bandwidths or latencies.
        axis: Label of the axis, with the unit.
        title: Title of the plot.
        path: The PNG file to write.
        marks: Marks of the labels, as in the table (`Prediction.mark`).
    """
    drawn = {name: line for name, line in by_algorithm.items() if not all(map(math.isnan, line))}
    named = {name: drawn[name] for name in _named(drawn)}
    figure, [ax] = _figure(_WIDTH, 5.2 + 0.17 * len(named))
    for name, line in drawn.items():
        if name not in named:
            ax.plot(values, line, color=_GREY, linewidth=0.8, zorder=1)
    lines = {name: _draw_line(ax, values, line, name) for name, line in named.items()}
    ax.axhline(1.0, color="black", linewidth=1, linestyle=":", zorder=2)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xticks(values, [f"{value:g}" for value in values])
    ax.minorticks_off()
    lowest, highest = _limits(named.values())
    ax.set_ylim(lowest, highest)
    steps = (1, 2, 5) if highest > 20 * lowest else (1, 1.5, 2, 3, 4, 5, 7)
    ticks = [tick for power in range(-2, 5) for step in steps if lowest <= (tick := step * 10.0**power) <= highest]
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.set(xlabel=axis, ylabel="times the speed of DDP-style all-reduce")
    ax.grid(color="#ececec", zorder=0)
    _mark_clipped(ax, named, values, lowest)
    labels = {name: name + (marks or {}).get(name, "") for name in named}
    order = _number_ends(ax, named, values)
    figure.legend(
        [lines[name] for name in order], [f"{idx} {labels[name]}" for idx, name in enumerate(order, 1)],
        loc="outside lower left", fontsize=_FONT, frameon=False, handlelength=3.5, labelspacing=0.25,
    )  # fmt: skip
    notes = [*_notes(drawn, list(named), lowest), *_meanings("".join(labels.values()))]
    _set_title(figure, [title, "dotted: DDP-style all-reduce", *notes])
    _save(figure, path)


def _draw_line(ax: Any, values: Sequence[float], line: Sequence[float], name: str) -> Any:
    [drawn] = ax.plot(values, line, linewidth=1.6, markersize=5, zorder=3, **_line_style(look(name)))
    return drawn


def _set_title(figure: Any, lines: Sequence[str]) -> None:
    """Write a title, wrapped at the width of the figure."""
    texts = "\n".join(lines).split("\n")
    wrapped = [part for text in texts for part in textwrap.wrap(text, _LINE, break_on_hyphens=False)]
    figure.suptitle("\n".join(wrapped), size=_TITLE, x=0.02, ha="left")


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


def _number_ends(ax: Any, lines: Mapping[str, Sequence[float]], values: Sequence[float]) -> list[str]:
    """Number the lines, from 1 on from top to bottom, at the end at which they are further apart. Return their names.

    The numbers are within the axes, so that the scale is always on the left.
    """
    at_left = _spread(line[0] for line in lines.values()) > _spread(line[-1] for line in lines.values())
    margin = (values[-1] / values[0]) ** 0.13
    ax.set_xlim(values[0] / (margin if at_left else 1.1), values[-1] * (1.1 if at_left else margin))
    low, high = map(math.log, ax.get_ylim())
    known = {name: [idx for idx, value in enumerate(line) if not math.isnan(value)] for name, line in lines.items()}
    ends = {name: places[0 if at_left else -1] for name, places in known.items()}
    at = {name: (math.log(line[ends[name]]) - low) / (high - low) for name, line in lines.items()}
    at = {name: min(max(place, 0.0), 1.0) for name, place in at.items()}
    apart = 1.3 * _FONT / (3.4 * 72)
    order = sorted(at, key=lambda name: (at[name], lines[name][ends[name]]))
    places = _spaced([at[name] for name in order], apart)
    for idx, (name, place) in enumerate(zip(order, places, strict=True)):
        colour = look(name).colour
        ax.annotate(
            str(len(order) - idx), (values[ends[name]], at[name]), (0.035 if at_left else 0.965, place),
            xycoords=("data", "axes fraction"), textcoords="axes fraction", ha="center", va="center", fontsize=_FONT,
            color=colour, arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4},
        )  # fmt: skip
    return order[::-1]


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
) -> bool:
    """Draw the fastest algorithm at each bandwidth and latency, with its speed-up. Return whether there is a panel.

    A class in which all-reduce is the fastest everywhere has no panel.

    Args:
        grids: By class of exactness, [latency][bandwidth] the best algorithm of that class or a narrower one, and its
            speed-up.
        bandwidths: Gbit/s.
        latencies: us.
        title: Title of the plot.
        path: The PNG file to write.
    """
    shown = {exactness: grid for exactness, grid in grids.items() if not _is_full_precision(grid)}
    if not shown:
        return False
    figure, axes = _figure(_WIDTH, len(shown) * (0.55 * len(bandwidths) + 0.75) + 1.1, rows=len(shown))
    for ax, (exactness, grid) in zip(axes, shown.items(), strict=True):
        for x, row in enumerate(grid):
            for y, (name, speedup) in enumerate(row):
                colour = _GREY if math.isnan(speedup) else look(name).colour
                ax.add_patch(_rectangle(x - 0.5, y - 0.5, colour))
                text = "not simulated" if math.isnan(speedup) else f"{_broken(name)}\n{speedup:.3g}x"
                ax.text(x, y, text, ha="center", va="center", fontsize=8, color=_ink(colour), linespacing=1.0)
        ax.set_xlim(-0.5, len(latencies) - 0.5)
        ax.set_ylim(-0.5, len(bandwidths) - 0.5)
        ax.set_xticks(range(len(latencies)), [f"{value:g}" for value in latencies])
        ax.set_yticks(range(len(bandwidths)), [f"{value:g}" for value in bandwidths])
        ax.set_title(f"allowed: {exactness}", fontsize=_TITLE)
        ax.set(xlabel="latency, us", ylabel="bandwidth of a node, Gbit/s")
    unchanged = [exactness for exactness in grids if exactness not in shown]
    notes = [f"allowed: {', '.join(unchanged)}: all-reduce in full precision everywhere"] if unchanged else []
    _set_title(figure, [title, "a colour is a family; x: times the speed of DDP-style all-reduce", *notes])
    _save(figure, path)
    return True


def _is_full_precision(grid: Sequence[Sequence[tuple[str, float]]]) -> bool:
    return all(look(name).family == "full precision" for row in grid for name, _ in row)


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
    words = [
        textwrap.wrap(f"{name}: {_step_in_words(place, length_s, result.step_s, cycle)}", _LINE)
        for (name, result, cycle), (place, _), length_s in zip(shown, steps, ends_s, strict=True)
    ]
    height = sum(map(len, words)) + _ROW * len(shown)
    figure, [ax] = _figure(_WIDTH, 0.16 * height + 1.6)
    y = 0.0  # in lines of text, downwards
    for lines, (_, spans), length_s in zip(words, steps, ends_s, strict=True):
        ax.text(0.005 * end_s * 1e3, y, "\n".join(lines), va="top", fontsize=_FONT, linespacing=1.1)
        y += len(lines) + 0.2
        for span in spans:
            colour = _WAIT_COLOUR if span.name == "wait" else _LANE_COLOURS[span.lane]
            length = span.end_s - span.start_s
            ax.barh(
                y + LANES.index(span.lane) * _LANE, length * 1e3, left=span.start_s * 1e3, height=0.9 * _LANE,
                align="edge", color=colour, edgecolor="white", linewidth=0.3 if length > 0.01 * end_s else 0.0,
            )  # fmt: skip
        if length_s > end_s:
            arrow, middle = {"arrowstyle": "-|>", "color": "black"}, y + 1.5 * _LANE
            ax.annotate("", (end_s * 1e3, middle), (end_s * 0.94e3, middle), arrowprops=arrow)
        y += _ROW - 0.2
    for lane, colour in _LANE_COLOURS.items():
        ax.barh(0, 0, color=colour, label=f"{lane} ({('above', 'middle', 'below')[LANES.index(lane)]})")
    ax.barh(0, 0, color=_WAIT_COLOUR, label="waiting (above)")
    ax.set_yticks([])
    ax.set_ylim(height, -0.3)
    ax.set_xlim(0, end_s * 1e3)
    left_out = len(comparison.rows) - len(rows)
    notes = ["arrow: the step continues"] * (max(ends_s) > end_s)
    notes += [f"not drawn: {left_out} slower forms"] * bool(left_out)
    title = f"One training step of {comparison.workload.name} on {comparison.network.name}, rank 0"
    marks = "".join(name for name, _, _ in shown)
    ax.set(xlabel="ms")
    ax.legend(fontsize=_FONT, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
    _set_title(figure, [title, *(["; ".join(notes)] if notes else []), *_meanings(marks)])
    _save(figure, path)


def _step_in_words(place: int, length_s: float, mean_s: float, cycle: int) -> str:
    """Return the mean step time as text and, if steps differ, which step is drawn."""
    mean = f"{mean_s * 1e3:,.1f} ms"
    if cycle == 1 and abs(length_s / mean_s - 1) < _ALIKE:
        return mean
    which = f"step {place % cycle + 1} of {cycle}" if cycle > 1 else "the longest step"
    return f"{mean} on average; drawn: {which}, {length_s * 1e3:,.1f} ms"


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
    figure.savefig(path, dpi=200)
