"""Output of `commlib compare`: tables and plots."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from commlib import algorithms
from commlib.algorithms.allreduce import AllReduce
from commlib.algorithms.auto import Auto
from commlib.algorithms.base import EXACTNESS, Algorithm
from commlib.errors import ConfigError
from commlib.network import presets, workloads
from commlib.network.model import Device, Network, Workload
from commlib.reports import plots, tables, targets
from commlib.reports.advice import advice, losses, misfits
from commlib.reports.families import base_name, without_auto
from commlib.reports.progress import progress_bar
from commlib.reports.tables import Column
from commlib.simulation import compare, timeline
from commlib.simulation.collectives import Islands
from commlib.simulation.compare import Comparison, Prediction
from commlib.simulation.sharded import Sharding
from commlib.simulation.simulator import Options
from commlib.simulation.workers import Map, on_all_cores
from commlib.tuner import candidates_of, preferred

#: Bandwidths (Gbit/s) and latencies (us) in the plots.
BANDWIDTHS_GBPS = (0.5, 1.0, 3.0, 10.0, 25.0, 100.0)
LATENCIES_US = (5.0, 25.0, 300.0, 5000.0)
#: Number of simulated steps for each point in a plot, and for each candidate of `auto`.
_SWEEP_STEPS = 2
#: Default number of simulated steps.
_STEPS = 4
#: Number of table columns that are always shown: name, class, step, speed-up.
_REQUIRED = 4
#: Codecs of sharded weights and gradients.
_CODECS = "int8"


@dataclass(frozen=True)
class Selection:
    """The inputs of a comparison, as given on the command line.

    Attributes:
        workload: A known name or a file.
        networks: Known names.
        algorithms: See `compare.candidates`.
        exactness: See `compare.candidates`.
        device: A known name; None uses the workload's device.
        overrides: Fields of the networks to override; None leaves a field unchanged.
        steps: Number of simulated steps, or of steps in a timed block; most algorithms repeat the same step. None uses
            the default.
        bucket_cap_mb: Size of a bucket, MiB; None uses planned buckets.
        optimizer: "sgd" or "adam", in place of the workload's.
        shard: Number of ranks that shard the model; None: every rank has all of it.
        weights: Codecs of sharded weights, separated by commas; None: the default.
        gradients: Codecs of sharded gradients, separated by commas; None: the default.
        difference: See `Sharding`.
        reshard_after_forward: See `Sharding`.
        hierarchical: See `Sharding`.
        param_dtype: See `Sharding`.
        reduce_dtype: See `Sharding`.
    """

    workload: str
    networks: Sequence[str]
    algorithms: str = "all"
    exactness: str = "any"
    device: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = None
    bucket_cap_mb: float | None = None
    optimizer: str | None = None
    shard: int | None = None
    weights: str | None = None
    gradients: str | None = None
    difference: bool = False
    reshard_after_forward: bool = True
    hierarchical: bool = False
    param_dtype: str | None = None
    reduce_dtype: str | None = None

    def get_shardings(self) -> list[Sharding]:
        """Return the shardings, in full precision first if there are several; none if the model is not sharded."""
        if self.shard is None:
            return []
        pairs = itertools.product(_names(self.weights, _CODECS), _names(self.gradients, _CODECS))
        more = (self.difference, self.reshard_after_forward, self.param_dtype, self.reduce_dtype, self.hierarchical)
        return [Sharding(self.shard, weights, gradients, *more) for weights, gradients in pairs]

    def get_workload(self) -> Workload:
        """Return the workload with the requested optimizer."""
        workload = workloads.get(self.workload)
        if self.optimizer in (None, workload.optimizer):
            return workload
        return workloads.with_optimizer(
            dataclasses.replace(workload, device=self.device or workload.device), self.optimizer
        )


@dataclass(frozen=True)
class Output:
    """The outputs of a comparison.

    Attributes:
        plot: A folder for plots.
        trace: A file for one step of each algorithm, in the Trace Event Format.
        as_json: Print JSON instead of tables.
        wide: Print all columns, regardless of the terminal's width.
    """

    plot: Path | None = None
    trace: Path | None = None
    as_json: bool = False
    wide: bool = False

    def check(self) -> None:
        """Check that the outputs can be written.

        Raises:
            ConfigError: An output cannot be written.
        """
        if self.plot is not None:
            plots.check()
            targets.check_folder(self.plot, "--plot")
        if self.trace is not None:
            targets.check_file(self.trace, "--trace")


@dataclass(frozen=True)
class _Case:
    """A workload on a network, with simulation options."""

    workload: Workload
    network: Network
    device: Device
    options: Options

    @property
    def has_nodes(self) -> bool:
        """Whether the ranks that the algorithms run on are on several nodes, with several each."""
        return _has_nodes(self.network, self.options.sharding)

    @property
    def is_one_island(self) -> bool:
        """Whether all ranks shard one model."""
        return self.options.sharding is not None and self.options.sharding.ranks == self.network.world_size

    def compare(
        self,
        chosen: Mapping[str, Algorithm],
        what: str,
        run_all: Map,
        shardings: Mapping[str, Sharding] | None = None,
    ) -> Comparison:
        """Simulate algorithms and show the progress."""
        with progress_bar(f"{what} {self.workload.name} on {self.network.name}", len(chosen) + 1) as progress:
            return compare.compare(
                self.workload, self.network, self.device, chosen, self.options, progress, run_all, shardings
            )

    def without_auto(self, named: Mapping[str, Algorithm], exactness: str, run_all: Map) -> dict[str, Algorithm]:
        """Return the algorithms with `auto` replaced by its choice on this network, labelled "auto: <name>"."""
        chosen = {}
        for label, algorithm in named.items():
            if isinstance(algorithm, Auto):
                algorithm = self._choice(algorithm, exactness, run_all)
                is_hierarchical = getattr(algorithm.channel, "hierarchical", False)
                label += f": {algorithm.name}" + "(hierarchical=True)" * is_hierarchical
            chosen[label] = algorithm
        return chosen

    def _choice(self, auto: Auto, exactness: str, run_all: Map) -> Algorithm:
        """Return `auto`'s choice within its own and the given class, from preset figures instead of measurements."""
        auto = Auto(min(auto.allow, exactness, key=EXACTNESS.index), auto.candidates)
        kind = torch.optim.AdamW if self.workload.optimizer == "adam" else torch.optim.SGD
        found = candidates_of(auto, kind([torch.zeros(1)]), self.has_nodes)
        quick = dataclasses.replace(self, options=dataclasses.replace(self.options, steps=_SWEEP_STEPS))
        comparison = quick.compare({each.name: each for each in found}, "choosing for", run_all)
        seconds = {row.algorithm: row.result.step_s for row in comparison.rows}
        if not seconds:
            raise ConfigError(f"auto: expected a candidate that can be simulated, got {comparison.refused}")
        name = preferred([each for each in found if each.name in seconds], seconds)
        return next(each for each in found if each.name == name)


def run(selection: Selection, output: Output = Output()) -> list[Comparison]:
    """Simulate a selection and print it.

    Raises:
        ConfigError: A name is unknown, a value is invalid, or a file cannot be written.
    """
    output.check()
    workload = selection.get_workload()
    device = presets.device(selection.device or workload.device)
    networks = [presets.network(name.strip(), **selection.overrides) for name in selection.networks]
    shardings = selection.get_shardings()
    options = Options(
        steps=selection.steps or _STEPS,
        bucket_cap_mb=selection.bucket_cap_mb,
        sharding=shardings[0] if shardings else None,
    )
    console = tables.console()
    cases = [_Case(workload, network, device, options) for network in networks]
    named_on, own = [], dict[str, Sharding]()
    for case in cases:
        if case.is_one_island:  # ranks that all shard one model exchange nothing else
            own = {f"{each.weights} weights, {each.gradients} gradients": each for each in shardings}
            named_on.append({label: AllReduce() for label in own})
        elif len(shardings) > 1:
            raise ConfigError("--weights and --gradients: expected one codec each with several islands of ranks")
        else:
            named = compare.candidates(selection.algorithms, selection.exactness, several_per_node=case.has_nodes)
            named_on.append(named)
    points = 1 if output.plot is None else 1 + len(BANDWIDTHS_GBPS) * len(LATENCIES_US)
    comparisons = []
    with on_all_cores(points * sum(len(named) + 1 for named in named_on)) as run_all:
        for case, named in zip(cases, named_on, strict=True):
            chosen = case.without_auto(named, selection.exactness, run_all)
            comparison = case.compare(chosen, "simulating", run_all, own)
            comparisons.append(comparison)
            if not output.as_json:
                show(comparison, console, output.wide)
            if output.plot is not None:
                for path in draw(comparison, chosen, options, output.plot, run_all, own):
                    print(f"drawn: {path}", file=sys.stderr)
    if output.trace is not None:
        timeline.save_trace([result for one in comparisons for result in one.results()], output.trace)
    if output.as_json:
        print(json.dumps([comparison.as_dict() for comparison in comparisons], indent=1))
    return comparisons


def show_known() -> None:
    """Print workloads, networks and devices with their sources."""
    console = tables.console()
    known = [workloads.get(name) for name in workloads.names()]
    for one in known:
        figures = f"{one.numel / 1e6:.1f} M parameters, {one.step_s * 1e3:.1f} ms, {one.optimizer}"
        _say(f"{one.name}: {figures}. {one.source}", console)
    for one in (*presets.NETWORKS.values(), *presets.DEVICES.values()):
        _say(f"{one.name}: {one.source}", console)


def show(comparison: Comparison, console: Console, wide: bool = False) -> None:
    """Print a comparison as a table, with the network, the scale, algorithms that cannot be simulated, and advice."""
    workload, network = comparison.workload, comparison.network
    _say(
        f"{workload.name} ({workload.numel / 1e6:.1f} M parameters, batch {workload.batch_per_rank}, "
        f"{workload.optimizer}, {workload.step_s * 1e3:.1f} ms a step alone on {comparison.device.name}) on "
        f"{network.name}: {tables.kept(f'{network.nodes} x {network.gpus_per_node} ranks')}, "
        f"{network.bandwidth_gbps:g} Gbit/s, {network.latency_us:g} us",
        console,
    )
    if network.bytes_per_s * 8e-9 < network.bandwidth_gbps * network.efficiency:
        _say(f"The transport carries {network.ceiling_gbps:g} Gbit/s at most (docs/explanation/simulator.md).", console)
    if (sharding := comparison.sharding) is not None:
        _say(_described(sharding, network), console)
    rows = list(_grouped(comparison.rows))
    lines = tables.fitted(_columns(comparison, rows), console.width, _REQUIRED, wide)
    tables.show(lines[:1], console, "bold")
    tables.show(lines[1:], console)
    if text := losses(comparison):
        _say(text, console)
    if text := misfits(comparison):
        _say(text, console)
    for name, reason in comparison.refused.items():
        _say(f"not simulated: {tables.kept(name)}: {reason}", console)
    if forms := _forms_left_out(comparison):
        _say(f"Forms for nodes of several ranks, not compared: {', '.join(forms)}.", console)
    _say(advice(comparison), console, "bold")
    console.print()


def _has_nodes(network: Network, sharding: Sharding | None) -> bool:
    """Return whether the ranks that the algorithms run on are on several nodes, with several each."""
    if sharding is not None:
        network = Islands.of(network, sharding.ranks).replicas
    return min(network.gpus_per_node, network.nodes) > 1


def _described(sharding: Sharding, network: Network) -> str:
    """Return how the model is sharded."""
    num_islands = network.world_size // sharding.ranks
    islands = "all ranks" if num_islands == 1 else f"{num_islands} islands of {sharding.ranks} ranks"
    codecs = f", weights in {sharding.weights}, gradients in {sharding.gradients}" if num_islands > 1 else ""
    once = "differences of weights, once per step" if sharding.difference else ""
    kept_whole = "" if sharding.reshard_after_forward else "reshard_after_forward=False"
    by_node = "gradients summed within nodes first" if sharding.hierarchical else ""
    more = "".join(f", {each}" for each in (once, kept_whole, by_node) if each)
    return f"Sharded by {islands} (FSDP2, commlib.shard){codecs}{more}."


def _names(text: str | None, usual: str) -> list[str]:
    return [each.strip() for each in (usual if text is None else text).split(",")]


def _forms_left_out(comparison: Comparison) -> list[str]:
    """Return hierarchical forms that were not compared although their algorithms were, for nodes of several ranks."""
    if not _has_nodes(comparison.network, comparison.sharding):
        return []
    labels = [row.algorithm for row in comparison.rows]
    named = [label for label in labels if label in algorithms.list() and compare.hierarchical_form(label) is not None]
    return [form for name in named if (form := f"{name}(hierarchical=True)") not in labels]


def _say(text: str, console: Console, style: str = "") -> None:
    tables.show(tables.wrapped(text, console.width, "  "), console, style)


def _grouped(rows: Sequence[Prediction]) -> Iterator[tuple[Prediction, bool]]:
    """Yield (row, is_variant), the fastest first; variants of an algorithm follow its fastest form."""
    groups: dict[str, list[Prediction]] = {}
    for row in rows:
        groups.setdefault(base_name(row.algorithm), []).append(row)
    for best, *variants in groups.values():
        yield best, False
        yield from ((row, True) for row in variants)


def _columns(comparison: Comparison, rows: Sequence[tuple[Prediction, bool]]) -> list[Column]:
    """Return the columns in order of importance, with the baseline in the first row."""
    results = [comparison.ddp, *(row.result for row, _ in rows)]
    losses_of_rows = [_loss(row) for row, _ in rows]
    names = [f"{'  ' * variant}{row.algorithm}{row.mark}" for row, variant in rows]
    first = comparison.baseline + "!" * (not comparison.fits(comparison.ddp))
    return [
        Column("algorithm", [first, *names], left=True),
        Column("class", ["exact", *(row.exactness for row, _ in rows)], left=True),
        Column("step ms", [_short(result.step_s * 1e3) for result in results]),
        Column("speed-up", ["1.00", *(f"{row.speedup:.2f}" for row, _ in rows)]),
        *([Column("loss", ["", *losses_of_rows])] if any(losses_of_rows) else []),
        Column("sent MB", [_short(result.wire_bytes / 1e6) for result in results]),
        Column("exposed ms", [_short(result.exposed_s * 1e3) for result in results]),
        Column("memory MB", [f"{result.memory_bytes / 1e6:,.0f}" for result in results]),
        Column("total GB", [_short(result.total_bytes / 1e9) for result in results]),
        Column("samples/s", [_short(result.samples_per_s) for result in results]),
        Column("leaves a node MB", [_short(result.adapter_bytes / 1e6) for result in results]),
    ]


def _loss(row: Prediction) -> str:
    return f"{row.loss:+.0%}" if row.loss is not None else "?" * bool(row.doubt)


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def draw(
    comparison: Comparison,
    chosen: Mapping[str, Algorithm],
    options: Options,
    folder: Path,
    run_all: Map = map,
    shardings: Mapping[str, Sharding] | None = None,
) -> list[Path]:
    """Draw speed-ups by bandwidth and by latency, the best algorithm over both, and timelines. Return the files."""
    workload, network, device = comparison.workload, comparison.network, comparison.device
    options = dataclasses.replace(options, steps=min(options.steps, _SWEEP_STEPS))
    bandwidths = _around(network.bandwidth_gbps, BANDWIDTHS_GBPS)
    latencies = _around(network.latency_us, LATENCIES_US)
    chosen = {without_auto(label): algorithm for label, algorithm in chosen.items() if label not in comparison.refused}
    if not chosen:
        return []
    name = f"{workload.name}-{network.name}".replace("/", "-")
    rows: list[dict[str, list[float]]] = []  # one per latency: the speed-ups of each algorithm by bandwidth
    with progress_bar(f"drawing {name}", len(chosen) + 1, len(bandwidths) * len(latencies)) as progress:
        for latency_us in latencies:
            networks = [
                dataclasses.replace(network, bandwidth_gbps=value, latency_us=latency_us) for value in bandwidths
            ]
            rows.append(compare.sweep(workload, networks, device, chosen, options, progress, run_all, shardings))

    def title(what: str) -> str:
        ceiling = "" if math.isinf(network.ceiling_gbps) else f", TCP carries at most {network.ceiling_gbps:g} Gbit/s"
        return f"{workload.name}, {network.nodes} x {network.gpus_per_node} {device.name}, {what}{ceiling}"

    marks = {without_auto(row.algorithm): row.mark for row in comparison.rows}
    own, at = rows[latencies.index(network.latency_us)], bandwidths.index(network.bandwidth_gbps)
    paths = [folder / f"{name}-{what}.png" for what in ("bandwidth", "latency", "best", "timeline")]
    plots.speedups(own, bandwidths, "bandwidth of a node, Gbit/s", title(f"{network.latency_us:g} us"), paths[0], marks)
    by_latency = {label: [row[label][at] for row in rows] for label in chosen}
    plots.speedups(by_latency, latencies, "latency, us", title(f"{network.bandwidth_gbps:g} Gbit/s"), paths[1], marks)
    advised = {label: algorithm for label, algorithm in chosen.items() if not marks[label]}
    grids = _best_by_class(advised, rows)
    if grids:
        plots.best(grids, bandwidths, latencies, title("the fastest advised algorithm"), paths[2])
    else:
        del paths[2]
    plots.timelines(comparison, paths[-1])
    return paths


def _around(own: float, usual: Sequence[float]) -> list[float]:
    """Return the usual values with the nearest one replaced by the network's own value."""
    nearest = min(usual, key=lambda value: abs(math.log(value / max(own, 1e-9))))
    return sorted({own, *usual} - ({nearest} - {own}))


def _best_by_class(
    chosen: Mapping[str, Algorithm], rows: Sequence[Mapping[str, Sequence[float]]]
) -> dict[str, list[list[tuple[str, float]]]]:
    """Return the fastest allowed algorithm at [latency][bandwidth], by class of exactness."""
    grids: dict[str, list[list[tuple[str, float]]]] = {}
    for idx, exactness in enumerate(EXACTNESS):
        if exactness == "exact":
            continue  # all-reduce everywhere
        allowed = [label for label, algorithm in chosen.items() if algorithm.exactness in EXACTNESS[: idx + 1]]
        if any(chosen[label].exactness == exactness for label in allowed):
            grids[exactness] = [_best_of_row({label: row[label] for label in allowed}) for row in rows]
    return grids


def _best_of_row(row: Mapping[str, Sequence[float]]) -> list[tuple[str, float]]:
    points = zip(*([(label, value) for value in line] for label, line in row.items()), strict=True)
    return [max(point, key=_speedup) for point in points]


def _speedup(entry: tuple[str, float]) -> float:
    return -math.inf if math.isnan(entry[1]) else entry[1]
