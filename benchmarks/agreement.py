"""Print the simulator's predictions, and their agreement with measurements, as Markdown tables.

python benchmarks/agreement.py compare results/compare-*.json        # of commlib compare --json
python benchmarks/agreement.py bagua                                 # next to the figures of BAGUA's authors; simulates
python benchmarks/agreement.py emulated results/emulated-vgg16.json  # of commlib compare --emulate --json
python benchmarks/agreement.py latency results/latency-h4-1gbit.json # of latency.py
python benchmarks/agreement.py sharded results/sharded-*.json        # of step.py; simulates
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import models
import systems

from commlib.emulation.links import parse_rate
from commlib.network.model import Device, Layer, Network, Workload
from commlib.simulation import bagua
from commlib.simulation.collectives import GLOO
from commlib.simulation.sharded import Sharding
from commlib.simulation.simulator import Options, Result, simulate

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
    """Return the choice of `auto`."""
    return row["algorithm"] if row["system"].startswith("auto") else ""


def latency_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the times of collectives in ms by latency, the simulator's in brackets; the last lines are a summary.

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


def sharded_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return measured steps of `commlib.shard` with waiting layers, and the simulated ones; the last line sums up.

    Args:
        rows: Of `step.py --model slept-gpt --hosts N`.
    """
    lines = _heading(["system", "rate", "ms", "simulated, ms", "difference", "MB", "simulated, MB"], 2)
    errors = []
    for row in rows:
        system = systems.parse(row["system"])
        options = dict(system.options)
        if system.kind != "shard" or "feedback" in options:
            continue
        said = _simulated(row, options)
        errors.append(said.step_s / row["step_s"] - 1)
        figures = [f"{1e3 * row['step_s']:.0f}", f"{1e3 * said.step_s:.0f}", f"{errors[-1]:+.1%}"]
        sent = [f"{each / 1e6:.1f}" for each in (row["wire_bytes"], said.wire_bytes)]
        lines.append(_line([f"`{row['system']}`", row["rate"], *figures, *sent]))
    mean, furthest = fmean(map(abs, errors)), max(map(abs, errors))
    return [*lines, "", f"{len(errors)} predictions: mean distance {mean:.1%}, furthest {furthest:.1%}"]


def _simulated(row: dict[str, Any], options: dict[str, Any]) -> Result:
    """Return the simulated step on hosts whose layers wait like an accelerator. Nothing is fitted to the steps."""
    model = models.WORKLOADS[row["model"]]().build()
    shapes: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, parameter in model.named_parameters():
        block, _, own = name.rpartition(".")
        shapes.setdefault(block, []).append((own, tuple(parameter.shape)))
    sizes = {block: float(sum(math.prod(shape) for _, shape in each)) for block, each in shapes.items()}
    layers = tuple(Layer(block, tuple(each), sizes[block]) for block, each in shapes.items())
    workload = Workload(row["model"], layers, batch_per_rank=1, forward_s=1 / 3, backward_s=2 / 3, optimizer="adam")
    rate_gbps = parse_rate(row["rate"]) / 1e9
    network = Network("emulated", row["hosts"], bandwidth_gbps=rate_gbps, latency_us=100.0, efficiency=1448 / 1538)
    host = Device("host", memory_gbytes_s=6.0, tflops={"fp32": 0.1}, launch_us=10.0)
    how = Options(steps=2, transport=GLOO, sharding=Sharding(row["ranks"], **options))
    return simulate(workload, network, host, "allreduce", how)


def _heading(columns: Sequence[str], num_left: int) -> list[str]:
    """Return the two header lines of a table whose first `num_left` columns hold words."""
    return [_line(columns), "|" + "---|" * num_left + "--:|" * (len(columns) - num_left)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print one table over all files; of emulated hosts one for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("compare", "bagua", "emulated", "latency", "sharded"))
    parser.add_argument("files", nargs="*", help="results; bagua has none")
    args = parser.parse_args()
    results = [json.loads(Path(name).read_text()) for name in args.files]
    tables: dict[str, Callable[[], list[list[str]]]] = {
        "compare": lambda: [compare_lines([each for result in results for each in result])],
        "bagua": lambda: [bagua_lines()],
        "emulated": lambda: [emulated_lines(runs) for runs in results],
        "sharded": lambda: [sharded_lines([row for result in results for row in result["rows"]])],
        "latency": lambda: [latency_lines([row for result in results for row in result["rows"]])],
    }
    print("\n\n".join("\n".join(lines) for lines in tables[args.table]()))


if __name__ == "__main__":
    main()
