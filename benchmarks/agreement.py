"""Print what the simulator says, and how well it agrees with measurements, as Markdown tables.

python benchmarks/agreement.py compare results/compare-*.json        # of commlib compare --json
python benchmarks/agreement.py bagua                                 # beside the figures of BAGUA's authors; simulates
python benchmarks/agreement.py emulated results/emulated-vgg16.json  # of commlib compare --emulate --json
python benchmarks/agreement.py latency results/latency-h4-1gbit.json # of latency.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from commlib.simulation import bagua

_SHOWN_BYTES = (2**16, 2**20, 2**24)


def compare_lines(comparisons: Sequence[dict[str, Any]]) -> list[str]:
    """Return simulated speed-ups over DDP-style all-reduce: algorithms down, workloads and networks across.

    Args:
        comparisons: As `commlib compare --json` prints them, of the same algorithms.
    """
    found = [{row["algorithm"]: row for row in comparison["rows"]} for comparison in comparisons]
    where = [f"{each['workload']['name']}, {each['network']['name']}" for each in comparisons]
    lines = _heading(["algorithm", "class", *where], 2)
    for name in sorted(found[0], key=lambda name: -found[0][name]["speedup"]):
        cells = [f"{rows[name]['speedup']:.2f}" if name in rows else "" for rows in found]
        lines.append(_line([f"`{name}`", found[0][name]["exactness"], *cells]))
    return lines


def bagua_lines() -> list[str]:
    """Return BAGUA's published steps / the simulated ones: systems down, workloads and networks across."""
    found: dict[str, dict[str, str]] = {}
    for figure in (*bagua.PUBLISHED, *bagua.PUBLISHED_WITH_LATENCY):
        said = bagua.predict_figure(figure).step_s
        difference = "impossible" if figure in bagua.impossible() else f"{said / figure.step_s - 1:+.1%}"
        latency = f" + {figure.added_latency_us / 1e3:g} ms" if figure.added_latency_us else ""
        where = f"{figure.workload}, {figure.bandwidth_gbps:g} Gbit/s{latency}"
        found.setdefault(where, {})[figure.system] = f"{figure.step_s:.3f} / {said:.3f} ({difference})"
    lines = _heading(["seconds a step, published / simulated", *found], 1)
    for system in bagua.SYSTEMS:
        lines.append(_line([system, *(cells.get(system, "") for cells in found.values())]))
    return lines


def emulated_lines(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return measured steps, and how far the simulated ones are from them; the last line sums up.

    Args:
        runs: As `commlib compare --emulate --json` prints them: one for each rate, of the same systems.
    """
    titles = [f"{run['rate_bps'] / 1e6:g} Mbit/s: ms | simulated, ms | difference" for run in runs]
    lines = ["| system | " + " | ".join(titles) + " |", "|---|" + "--:|" * 3 * len(runs)]
    for each in zip(*(run["rows"] for run in runs), strict=True):
        cells = []
        for row in each:
            said = row["predicted_s"]
            told = [f"{1e3 * said:.0f}", f"{said / row['step_s'] - 1:+.1%}"] if said else [_choice(row), ""]
            cells += [f"{1e3 * row['step_s']:.0f}", *told]
        lines.append(_line([f"`{each[0]['system']}`", *cells]))
    errors = [abs(row["predicted_s"] / row["step_s"] - 1) for run in runs for row in run["rows"] if row["predicted_s"]]
    return [*lines, "", f"{len(errors)} predictions: mean distance {fmean(errors):.1%}, furthest {max(errors):.1%}"]


def _choice(row: dict[str, Any]) -> str:
    """Return what `auto` chose."""
    return row["algorithm"] if row["system"].startswith("auto") else ""


def latency_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return what collectives take by latency in ms, the simulator's figures in brackets; the last lines sum up.

    Args:
        rows: Of `latency.py`.
    """
    latencies = list(dict.fromkeys(row["latency_us"] for row in rows))
    lines = _heading(["collective", "bytes", *(f"{each / 1e3:g} ms" for each in latencies)], 1)
    found = {(row["verb"], row["bytes"], row["latency_us"]): row for row in rows}
    for verb in dict.fromkeys(row["verb"] for row in rows):
        for nbytes in _SHOWN_BYTES:
            own = [found[verb, nbytes, each] for each in latencies if (verb, nbytes, each) in found]
            if own:
                lines.append(_line([verb, f"{nbytes // 1024} KiB", *map(_milliseconds, own)]))
    for each in latencies:
        said = [row for row in rows if row["latency_us"] == each and row["predicted_s"] and row["bytes"] >= 2**16]
        errors = [abs(row["predicted_s"] / row["seconds"] - 1) for row in said]
        if errors:
            lines += ["", f"{each / 1e3:g} ms: median distance {median(errors):.0%}, furthest {max(errors):.0%}"]
    return lines


def _milliseconds(row: dict[str, Any]) -> str:
    said = row["predicted_s"]
    return f"{1e3 * row['seconds']:.1f}" + (f" ({1e3 * said:.1f})" if said else "")


def _heading(columns: Sequence[str], num_left: int) -> list[str]:
    """Return the two lines above a table, of which so many columns hold words."""
    return [_line(columns), "|" + "---|" * num_left + "--:|" * (len(columns) - num_left)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print one table over all files; of emulated hosts one for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("compare", "bagua", "emulated", "latency"))
    parser.add_argument("files", nargs="*", help="results; bagua has none")
    args = parser.parse_args()
    results = [json.loads(Path(name).read_text()) for name in args.files]
    tables: dict[str, Callable[[], list[list[str]]]] = {
        "compare": lambda: [compare_lines([each for result in results for each in result])],
        "bagua": lambda: [bagua_lines()],
        "emulated": lambda: [emulated_lines(runs) for runs in results],
        "latency": lambda: [latency_lines([row for result in results for row in result["rows"]])],
    }
    print("\n\n".join("\n".join(lines) for lines in tables[args.table]()))


if __name__ == "__main__":
    main()
