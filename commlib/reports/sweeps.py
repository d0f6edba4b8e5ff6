"""Plots of a comparison over bandwidths and latencies, which need more simulations, and its timelines."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path

from commlib.algorithms.base import EXACTNESS, Algorithm
from commlib.reports import plots
from commlib.reports.families import without_auto
from commlib.reports.progress import progress_bar
from commlib.simulation import compare
from commlib.simulation.compare import Comparison
from commlib.simulation.sharded import Sharding
from commlib.simulation.simulator import Options
from commlib.simulation.workers import Map

#: Bandwidths (Gbit/s) and latencies (us) in the plots.
BANDWIDTHS_GBPS = (0.5, 1.0, 3.0, 10.0, 25.0, 100.0)
LATENCIES_US = (5.0, 25.0, 300.0, 5000.0)
#: Number of simulated steps for each point in a plot, and for each candidate of `auto`.
SWEEP_STEPS = 2


class Swept:
    """The speed-ups that were simulated for plots, and the drawn plots of them. Keys are the inputs."""

    def __init__(self) -> None:
        self._rows: dict[Hashable, list[dict[str, list[float]]]] = {}
        self._drawn: set[Hashable] = set()

    def speedups(
        self, key: Hashable, simulate: Callable[[], list[dict[str, list[float]]]]
    ) -> list[dict[str, list[float]]]:
        """Return one entry for each latency: the speed-ups of each algorithm by bandwidth."""
        if key not in self._rows:
            self._rows[key] = simulate()
        return self._rows[key]

    def is_new(self, *plot: Hashable) -> bool:
        """Return whether a plot was not drawn yet, and count it as drawn."""
        added = plot not in self._drawn
        self._drawn.add(plot)
        return added


def draw(
    comparison: Comparison,
    chosen: Mapping[str, Algorithm],
    options: Options,
    folder: Path,
    run_all: Map = map,
    shardings: Mapping[str, Sharding] | None = None,
    swept: Swept | None = None,
) -> list[Path]:
    """Draw speed-ups by bandwidth and by latency, the best algorithm over both, and timelines. Return the files.

    Plots that an earlier call with `swept` has drawn, of a network that differs in bandwidth or latency, are left out.
    """
    swept = Swept() if swept is None else swept
    workload, network, device = comparison.workload, comparison.network, comparison.device
    options = dataclasses.replace(options, steps=min(options.steps, SWEEP_STEPS))
    bandwidths = _around(network.bandwidth_gbps, BANDWIDTHS_GBPS)
    latencies = _around(network.latency_us, LATENCIES_US)
    chosen = {without_auto(label): algorithm for label, algorithm in chosen.items() if label not in comparison.refused}
    if not chosen:
        return []
    name = f"{workload.name}-{network.name}".replace("/", "-")
    common = dataclasses.replace(network, name="", source="", bandwidth_gbps=1.0, latency_us=1.0)
    key = (common, tuple(bandwidths), tuple(latencies), tuple(chosen))

    def simulate() -> list[dict[str, list[float]]]:
        with progress_bar(f"drawing {name}", len(chosen) + 1, len(bandwidths) * len(latencies)) as progress:
            return [
                compare.sweep(
                    workload,
                    [dataclasses.replace(network, bandwidth_gbps=gbps, latency_us=us) for gbps in bandwidths],
                    *(device, chosen, options, progress, run_all, shardings),
                )
                for us in latencies
            ]

    rows = swept.speedups(key, simulate)

    def title(what: str) -> str:
        ceiling = "" if math.isinf(network.ceiling_gbps) else f"; TCP carries at most {network.ceiling_gbps:g} Gbit/s"
        return f"{what}\n{workload.name} on {network.nodes} x {network.gpus_per_node} {device.name}{ceiling}"

    marks = {without_auto(row.algorithm): row.mark for row in comparison.rows}
    own, at = rows[latencies.index(network.latency_us)], bandwidths.index(network.bandwidth_gbps)
    paths = {what: folder / f"{name}-{what}.png" for what in ("bandwidth", "latency", "best", "timeline")}
    drawn = []
    if swept.is_new(key, network.latency_us, tuple(marks.items())):
        by_bandwidth = title(f"Speed-up of a training step by bandwidth, at {network.latency_us:g} us")
        plots.speedups(own, bandwidths, "bandwidth of a node, Gbit/s", by_bandwidth, paths["bandwidth"], marks)
        drawn.append(paths["bandwidth"])
    by_latency = title(f"Speed-up of a training step by latency, at {network.bandwidth_gbps:g} Gbit/s")
    at_own = {label: [row[label][at] for row in rows] for label in chosen}
    plots.speedups(at_own, latencies, "latency, us", by_latency, paths["latency"], marks)
    drawn.append(paths["latency"])
    advised = {label: algorithm for label, algorithm in chosen.items() if not marks[label]}
    if swept.is_new(key, "best", tuple(advised)):
        grids = _best_by_class(advised, rows, comparison.baseline)
        if plots.best(grids, bandwidths, latencies, title("The fastest advised algorithm"), paths["best"]):
            drawn.append(paths["best"])
    plots.timelines(comparison, paths["timeline"])
    return [*drawn, paths["timeline"]]


def _around(own: float, usual: Sequence[float]) -> list[float]:
    """Return the usual values with the nearest one replaced by the network's own value."""
    nearest = min(usual, key=lambda value: abs(math.log(value / max(own, 1e-9))))
    return sorted({own, *usual} - ({nearest} - {own}))


def _best_by_class(
    chosen: Mapping[str, Algorithm], rows: Sequence[Mapping[str, Sequence[float]]], baseline: str
) -> dict[str, list[list[tuple[str, float]]]]:
    """Return the fastest of the baseline and the allowed algorithms at [latency][bandwidth], by class of exactness."""
    grids: dict[str, list[list[tuple[str, float]]]] = {}
    for idx, exactness in enumerate(EXACTNESS):
        if exactness == "exact":
            continue  # all-reduce everywhere
        allowed = [label for label, algorithm in chosen.items() if algorithm.exactness in EXACTNESS[: idx + 1]]
        if any(chosen[label].exactness == exactness for label in allowed):
            grids[exactness] = [_best_of_row({label: row[label] for label in allowed}, baseline) for row in rows]
    return grids


def _best_of_row(row: Mapping[str, Sequence[float]], baseline: str) -> list[tuple[str, float]]:
    points = zip(*([(label, value) for value in line] for label, line in row.items()), strict=True)
    best = [max(point, key=_speedup) for point in points]
    return [(baseline, 1.0) if value < 1 else (label, value) for label, value in best]


def _speedup(entry: tuple[str, float]) -> float:
    return -math.inf if math.isnan(entry[1]) else entry[1]
