"""What `commlib compare` prints and draws."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import TimeRemainingColumn
from rich.table import Table

from commlib.algorithms.base import EXACTNESS, Algorithm
from commlib.network import presets, workloads
from commlib.reports import plots
from commlib.simulation import compare, timeline
from commlib.simulation.compare import Comparison
from commlib.simulation.simulator import Options
from commlib.simulation.workers import Map, on_all_cores

#: Bandwidths (Gbit/s) and latencies (us) of the pictures.
BANDWIDTHS_GBPS = (0.5, 1.0, 3.0, 10.0, 25.0, 100.0)
LATENCIES_US = (5.0, 25.0, 300.0, 5000.0)
#: Columns where the output is no terminal.
_WIDTH = 140
#: Simulated steps of each point in a picture.
_SWEEP_STEPS = 2


@dataclass(frozen=True)
class Selection:
    """What is to be compared, as the command line says it.

    Attributes:
        workload: A known name or a file.
        networks: Known names.
        algorithms: See `compare.candidates`.
        exactness: See `compare.candidates`.
        device: A known name; None is the workload's.
        overrides: Fields of the networks; None leaves a field as it is.
        steps: Simulated steps; those of most algorithms are all alike.
        bucket_cap_mb: Size of a bucket, MiB; None plans.
    """

    workload: str
    networks: Sequence[str]
    algorithms: str = "all"
    exactness: str = "any"
    device: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 4
    bucket_cap_mb: float | None = None


def run(
    selection: Selection, *, plot: Path | None = None, trace: Path | None = None, as_json: bool = False
) -> list[Comparison]:
    """Simulate a selection and print it.

    Args:
        selection: What is compared.
        plot: A folder for pictures.
        trace: A file for one step of each algorithm, in the Trace Event Format.
        as_json: Print JSON.

    Raises:
        ConfigError: A name that is not known or a value that is not possible.
    """
    workload = workloads.get(selection.workload)
    device = presets.device(selection.device or workload.device)
    networks = [presets.network(name.strip(), **selection.overrides) for name in selection.networks]
    options = Options(steps=selection.steps, bucket_cap_mb=selection.bucket_cap_mb)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    chosen_on = [
        compare.candidates(
            selection.algorithms, selection.exactness, several_per_node=min(net.gpus_per_node, net.nodes) > 1
        )
        for net in networks
    ]
    points = 1 if plot is None else 1 + len(BANDWIDTHS_GBPS) * len(LATENCIES_US)
    comparisons = []
    with on_all_cores(points * sum(len(chosen) + 1 for chosen in chosen_on)) as run_all:
        for network, chosen in zip(networks, chosen_on, strict=True):
            with progress_bar(f"simulating {network.name}", len(chosen) + 1) as progress:
                comparison = compare.compare(workload, network, device, chosen, options, progress, run_all)
            comparisons.append(comparison)
            if not as_json:
                show(comparison, console)
            if plot is not None:
                for path in draw(comparison, chosen, options, plot, run_all):
                    print(f"drawn: {path}", file=sys.stderr)
    if trace is not None:
        timeline.save_trace([result for one in comparisons for result in one.results()], trace)
    if as_json:
        print(json.dumps([comparison.as_dict() for comparison in comparisons], indent=1))
    return comparisons


def show_known() -> None:
    """Print workloads, networks and devices with their sources."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    for name in workloads.names():
        known = workloads.get(name)
        console.print(f"[bold]{name}[/]: {known.numel:,} parameters, {known.step_s * 1e3:.1f} ms. {known.source}")
    for known in (*presets.NETWORKS.values(), *presets.DEVICES.values()):
        console.print(f"[bold]{known.name}[/]: {known.source}")


def show(comparison: Comparison, console: Console) -> None:
    """Print one comparison as a table, with the network, the scale and the sources."""
    workload, network = comparison.workload, comparison.network
    console.print(
        f"[bold]{workload.name}[/] ({workload.numel / 1e6:.1f} M parameters, batch {workload.batch_per_rank}, "
        f"{workload.step_s * 1e3:.1f} ms a step alone on {comparison.device.name}) on [bold]{network.name}[/]: "
        f"{network.nodes} x {network.gpus_per_node} ranks, {network.bandwidth_gbps:g} Gbit/s, {network.latency_us:g} us"
    )
    if network.bytes_per_s * 8e-9 < network.bandwidth_gbps * network.efficiency:
        console.print(f"The transport carries {network.ceiling_gbps:g} Gbit/s at most (docs/simulator.md).")
    table = Table()
    table.add_column("algorithm", no_wrap=True)
    table.add_column("class", no_wrap=True)
    for title in ("step, ms", "samples/s", "speed-up", "exposed, ms", "sent, MB", "leaves a node, MB", "memory, MB"):
        table.add_column(title, justify="right")
    ddp = comparison.ddp
    rows = [("DDP-style all-reduce", "exact", ddp, 1.0)]
    rows += [(row.algorithm, row.exactness, row.result, row.speedup) for row in comparison.rows]
    for name, exactness, result, speedup in rows:
        table.add_row(
            name,
            exactness,
            f"{result.step_s * 1e3:.1f}",
            f"{result.samples_per_s:,.0f}" if result.samples_per_s >= 100 else f"{result.samples_per_s:.3g}",
            f"{speedup:.2f}",
            f"{result.exposed_s * 1e3:.1f}",
            f"{result.wire_bytes / 1e6:.1f}",
            f"{result.adapter_bytes / 1e6:.1f}",
            f"{result.memory_bytes / 1e6:.0f}",
        )
    console.print(table)
    for name, reason in comparison.refused.items():
        console.print(f"not simulated: {name}: {reason}")


def draw(
    comparison: Comparison, chosen: Mapping[str, Algorithm], options: Options, folder: Path, run_all: Map = map
) -> list[Path]:
    """Draw speed-ups by bandwidth and by latency, the best algorithm over both, and timelines; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    workload, network, device = comparison.workload, comparison.network, comparison.device
    options = dataclasses.replace(options, steps=min(options.steps, _SWEEP_STEPS))
    bandwidths = _around(network.bandwidth_gbps, BANDWIDTHS_GBPS)
    latencies = _around(network.latency_us, LATENCIES_US)
    chosen = {label: algorithm for label, algorithm in chosen.items() if label not in comparison.refused}
    name = f"{workload.name}-{network.name}"
    rows: list[dict[str, list[float]]] = []  # by latency, the speed-ups of each algorithm by bandwidth
    with progress_bar(f"drawing {name}", (len(chosen) + 1) * len(bandwidths) * len(latencies)) as progress:
        for latency_us in latencies:
            networks = [
                dataclasses.replace(network, bandwidth_gbps=value, latency_us=latency_us) for value in bandwidths
            ]
            rows.append(compare.sweep(workload, networks, device, chosen, options, progress, run_all))

    def title(what: str) -> str:
        return f"{workload.name}, {network.nodes} x {network.gpus_per_node} {device.name}, {what}"

    own, at = rows[latencies.index(network.latency_us)], bandwidths.index(network.bandwidth_gbps)
    paths = [folder / f"{name}-{what}.png" for what in ("bandwidth", "latency", "best", "timeline")]
    plots.speedups(own, bandwidths, "bandwidth of a node, Gbit/s", title(f"{network.latency_us:g} us"), paths[0])
    by_latency = {label: [row[label][at] for row in rows] for label in chosen}
    plots.speedups(by_latency, latencies, "latency, us", title(f"{network.bandwidth_gbps:g} Gbit/s"), paths[1])
    plots.best(_best_by_class(chosen, rows), bandwidths, latencies, title("the fastest algorithm"), paths[2])
    plots.timelines(comparison, paths[3])
    return paths


def _around(own: float, usual: Sequence[float]) -> list[float]:
    """Return the usual values with the nearest one replaced by a network's own."""
    nearest = min(usual, key=lambda value: abs(math.log(value / max(own, 1e-9))))
    return sorted({own, *usual} - ({nearest} - {own}))


def _best_by_class(
    chosen: Mapping[str, Algorithm], rows: Sequence[Mapping[str, Sequence[float]]]
) -> dict[str, list[list[tuple[str, float]]]]:
    """Return, by class of exactness, [latency][bandwidth] the fastest algorithm that it allows."""
    grids: dict[str, list[list[tuple[str, float]]]] = {}
    for idx, exactness in enumerate(EXACTNESS):
        allowed = [label for label, algorithm in chosen.items() if algorithm.exactness in EXACTNESS[: idx + 1]]
        if any(chosen[label].exactness == exactness for label in allowed):
            grids[exactness] = [_best_of_row({label: row[label] for label in allowed}) for row in rows]
    return grids


def _best_of_row(row: Mapping[str, Sequence[float]]) -> list[tuple[str, float]]:
    points = zip(*([(label, value) for value in line] for label, line in row.items()), strict=True)
    return [max(point, key=_speedup) for point in points]


def _speedup(entry: tuple[str, float]) -> float:
    return -math.inf if math.isnan(entry[1]) else entry[1]


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar on standard error, where that is a terminal; yields what is called after each of `total` parts."""
    console = Console(stderr=True)
    with Bar(*Bar.get_default_columns()[:-1], TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda _: bar.advance(task)
