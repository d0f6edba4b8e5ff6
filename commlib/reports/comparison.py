"""The command `commlib compare`: its inputs, its simulations and its outputs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from commlib.algorithms.allreduce import AllReduce
from commlib.algorithms.auto import Auto
from commlib.algorithms.base import EXACTNESS, Algorithm
from commlib.errors import ConfigError
from commlib.network import presets, workloads
from commlib.network.model import Device, Network, Workload
from commlib.reports import plots, sweeps, tables, targets
from commlib.reports.advice import advice, forms_left_out, losses, misfits, network_advice, presets_of
from commlib.reports.assumptions import ceiling, machines, sharded, summary
from commlib.reports.csv_rows import to_csv
from commlib.reports.known import known
from commlib.reports.page import page
from commlib.reports.progress import progress_bar
from commlib.reports.rows import columns, explained, num_required, rows_of, sent
from commlib.simulation import compare, timeline
from commlib.simulation.compare import Comparison
from commlib.simulation.cost import prices
from commlib.simulation.sharded import Sharding
from commlib.simulation.simulator import Options
from commlib.simulation.workers import Map, on_all_cores
from commlib.tuner import candidates_of, preferred

#: Default number of simulated steps.
_STEPS = 4
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
        price_per_hour: Price of a node per hour; see `commlib.simulation.cost.prices`.
        budget: The amount to spend; None without a budget.
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
    price_per_hour: str | None = None
    budget: float | None = None

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
        on_device = dataclasses.replace(workload, device=self.device or workload.device)
        return dataclasses.replace(workloads.with_optimizer(on_device, self.optimizer), device=workload.device)


@dataclass(frozen=True)
class Output:
    """The outputs of a comparison.

    Attributes:
        plot: A folder for plots.
        html: A file for the report, which includes the plots if there are any.
        csv: A file for all rows; "-" prints them instead of tables.
        trace: A file for one step of each algorithm, in the Trace Event Format.
        as_json: Print JSON instead of tables.
        wide: Print all columns, regardless of the terminal's width.
        command: The command line, for the report.
    """

    plot: Path | None = None
    html: Path | None = None
    csv: Path | None = None
    trace: Path | None = None
    as_json: bool = False
    wide: bool = False
    command: str = ""

    @property
    def prints_csv(self) -> bool:
        """Whether CSV is printed."""
        return self.csv == Path("-")

    @property
    def prints_tables(self) -> bool:
        """Whether tables are printed."""
        return not self.as_json and not self.prints_csv

    def check(self) -> None:
        """Check that the outputs can be written.

        Raises:
            ConfigError: An output cannot be written, or two would be printed.
        """
        if self.as_json and self.prints_csv:
            raise ConfigError("--csv -: expected a file with --json, which prints, too")
        if self.plot is not None:
            plots.check()
            targets.check_folder(self.plot, "--plot")
        if self.trace is not None:
            targets.check_file(self.trace, "--trace")
        if self.html is not None:
            targets.check_file(self.html, "--html")
        if self.csv is not None and not self.prints_csv:
            targets.check_file(self.csv, "--csv")

    def save(self, comparisons: Sequence[Comparison], drawn: Sequence[Path]) -> None:
        """Write files, and print JSON or CSV.

        Args:
            comparisons: The results.
            drawn: The plots.

        Raises:
            ConfigError: A file cannot be written.
        """
        if self.trace is not None:
            trace = timeline.chrome_trace([result for one in comparisons for result in one.results()])
            targets.write_text(self.trace, json.dumps(trace), "--trace")
        if self.html is not None:
            targets.write_text(self.html, page(comparisons, self.command, drawn), "--html")
        if self.prints_csv:
            print(to_csv(comparisons), end="")
        elif self.csv is not None:
            targets.write_text(self.csv, to_csv(comparisons), "--csv")
        if self.as_json:
            print(json.dumps([comparison.as_dict() for comparison in comparisons], indent=1))


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
        return compare.has_nodes(self.network, self.options.sharding)

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
        quick = dataclasses.replace(self, options=dataclasses.replace(self.options, steps=sweeps.SWEEP_STEPS))
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
    price_of = prices(selection.price_per_hour, [network.name for network in networks], selection.budget)
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
            named = compare.candidates(
                selection.algorithms,
                selection.exactness,
                several_per_node=case.has_nodes,
                optimizer=workload.optimizer,
            )
            named_on.append(named)
    points = 1 if output.plot is None else 1 + len(sweeps.BANDWIDTHS_GBPS) * len(sweeps.LATENCIES_US)
    comparisons, drawn, swept = list[Comparison](), list[Path](), sweeps.Swept()
    with on_all_cores(points * sum(len(named) + 1 for named in named_on)) as run_all:
        for case, named in zip(cases, named_on, strict=True):
            chosen = case.without_auto(named, selection.exactness, run_all)
            comparison = case.compare(chosen, "simulating", run_all, own)
            comparison = dataclasses.replace(comparison, price=price_of.get(case.network.name))
            comparisons.append(comparison)
            if output.prints_tables:
                show(comparison, console, output.wide)
            if output.plot is not None:
                drawn += sweeps.draw(comparison, chosen, options, output.plot, run_all, own, swept)
    for path in drawn:
        print(f"drawn: {path}", file=sys.stderr)
    if output.prints_tables:
        _say(network_advice(comparisons), console, "bold")
    output.save(comparisons, drawn)
    return comparisons


def show_known() -> None:
    """Print workloads, networks and devices as tables, with their sources."""
    console = tables.console()
    for kind in known():
        _say(kind.title, console, "bold")
        tables.show(tables.fitted(kind.columns, console.width, len(kind.columns), wide=True), console)
        for names, source in kind.sources.items():
            _say(f"{names}: {source}", console)
        console.print()


def show(comparison: Comparison, console: Console, wide: bool = False) -> None:
    """Print a comparison as a table, with the network, the scale, algorithms that cannot be simulated, and advice."""
    _say(summary(comparison), console)
    for text in filter(None, (machines(comparison), ceiling(comparison.network))):
        _say(text, console)
    if comparison.sharding is not None:
        _say(sharded(comparison.sharding, comparison.network), console)
    rows = rows_of(comparison)
    lines = tables.fitted(columns(rows), console.width, num_required(rows), wide)
    tables.show(lines[:1], console, "bold")
    tables.show(lines[1:], console)
    for text in filter(None, [f(comparison) for f in (sent, explained, presets_of, losses, misfits)]):
        _say(text, console)
    for name, reason in comparison.refused.items():
        _say(f"not simulated: {tables.kept(name)}: {reason}", console)
    if text := forms_left_out(comparison):
        _say(text, console)
    _say(advice(comparison), console, "bold")
    console.print()


def _names(text: str | None, usual: str) -> list[str]:
    return [each.strip() for each in (usual if text is None else text).split(",")]


def _say(text: str, console: Console, style: str = "") -> None:
    tables.show(tables.wrapped(text, console.width, "  "), console, style)
