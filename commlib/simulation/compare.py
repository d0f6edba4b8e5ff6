"""Comparison of algorithms on a workload and a network by simulation: `commlib compare`."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from commlib import algorithms
from commlib.algorithms.allreduce import AllReduce
from commlib.algorithms.base import EXACTNESS, Algorithm
from commlib.algorithms.known import doubt, measured
from commlib.errors import CodecError, ConfigError
from commlib.network.model import Device, Network, Workload
from commlib.simulation.collectives import Islands
from commlib.simulation.cost import Cost, Price, cost, unit
from commlib.simulation.options import check_options, options_of
from commlib.simulation.sharded import Sharding
from commlib.simulation.simulator import Options, Result, simulate
from commlib.simulation.workers import Map

#: The bucket size of `DistributedDataParallel`, whose step is the baseline.
DDP_BUCKET_CAP_MB = 25.0

#: Called after each simulation with its name.
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Prediction:
    """The prediction for one algorithm on one network.

    Attributes:
        algorithm: Registered name of the algorithm, and its options if any.
        exactness: Its effect on the optimisation (`commlib.algorithms.base.EXACTNESS`).
        result: Result of the simulation.
        speedup: Step time of the baseline divided by the algorithm's.
        cycle: Number of steps after which the algorithm repeats (`Channel.cycle`).
        made_for: The optimizer that the algorithm is designed for, "sgd" or "adam"; else "any" (`Algorithm.made_for`).
        doubt: Why the loss should be checked before using it with the workload's optimizer; "" without a reason.
        loss: Measured loss with that optimizer relative to all-reduce's, minus 1; None if it was not measured.
        fits: Whether the device's memory holds `Result.total_bytes`.
        optimizer: The kind of optimizer: the workload's, or a preset's.
    """

    algorithm: str
    exactness: str
    result: Result
    speedup: float
    cycle: int = 1
    made_for: str = "any"
    doubt: str = ""
    loss: float | None = None
    fits: bool = True
    optimizer: str = ""

    @property
    def mark(self) -> str:
        """The mark in tables and plots: "*" is known to lose, "?" was not measured, "!" exceeds the memory."""
        return ("" if not self.doubt else "?" if self.loss is None else "*") + "!" * (not self.fits)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures, for JSON."""
        result = self.result
        return {
            "algorithm": self.algorithm,
            "exactness": self.exactness,
            "made_for": self.made_for,
            "optimizer": self.optimizer,
            "doubt": self.doubt,
            "loss": self.loss,
            "step_s": result.step_s,
            "samples_per_s": result.samples_per_s,
            "speedup": self.speedup,
            "exposed_s": result.exposed_s,
            "wire_bytes": result.wire_bytes,
            "adapter_bytes": result.adapter_bytes,
            "memory_bytes": result.memory_bytes,
            "total_bytes": result.total_bytes,
            "fits": self.fits,
            "num_buckets": result.num_buckets,
            "phases": dict(result.phases),
        }


@dataclass(frozen=True)
class Comparison:
    """The predictions for all algorithms on one network.

    Attributes:
        workload: The trained workload.
        network: The network of the ranks.
        device: The device of each rank.
        ddp: The baseline: DDP-style all-reduce in full precision, with buckets of 25 MiB; between islands if the model
            is sharded.
        rows: The algorithms, the fastest first.
        refused: Reasons of failed simulations, by name of the algorithm.
        sharding: How FSDP2 shards the model; None: every rank has all of it.
        price: Price of the network's nodes; None without a price.
    """

    workload: Workload
    network: Network
    device: Device
    ddp: Result
    rows: tuple[Prediction, ...]
    refused: dict[str, str]
    sharding: Sharding | None = None
    price: Price | None = None

    @property
    def baseline(self) -> str:
        """The name of the baseline."""
        if self.sharding is None:
            return "DDP-style all-reduce"
        return "FSDP2" if self.sharding.ranks == self.network.world_size else "FSDP2 and all-reduce"

    def fits(self, result: Result) -> bool:
        """Return whether `Result.total_bytes` fits in the device's memory."""
        return result.total_bytes <= self.device.memory_gbytes * 1e9

    def cost(self, result: Result) -> Cost | None:
        """Return the cost of training as in a result; None without a price."""
        return None if self.price is None else cost(self.workload, self.network, result, self.price)

    def results(self) -> list[Result]:
        """Return all results, starting with DDP. Each is named like its row."""
        named = [dataclasses.replace(row.result, algorithm=row.algorithm) for row in self.rows]
        return [dataclasses.replace(self.ddp, algorithm=self.baseline), *named]

    def as_dict(self) -> dict[str, Any]:
        """Return everything but layers and spans, for JSON."""
        network = {field.name: getattr(self.network, field.name) for field in dataclasses.fields(self.network)}
        if math.isinf(self.network.ceiling_gbps):
            network["ceiling_gbps"] = None  # JSON has no infinity
        return {
            "workload": {
                "name": self.workload.name,
                "parameters": self.workload.numel,
                "batch_per_rank": self.workload.batch_per_rank,
                "step_s": self.workload.step_s,
                "tokens_per_sample": self.workload.tokens_per_sample,
                "source": self.workload.source,
            },
            "network": network,
            "device": {"name": self.device.name, "source": self.device.source},
            "sharding": None if self.sharding is None else dataclasses.asdict(self.sharding),
            "price": None if self.price is None else {**dataclasses.asdict(self.price), "unit": unit(self.workload)},
            "ddp": {
                "step_s": self.ddp.step_s,
                "samples_per_s": self.ddp.samples_per_s,
                "fits": self.fits(self.ddp),
                "cost": self._cost_as_dict(self.ddp),
            },
            "rows": [{**row.as_dict(), "cost": self._cost_as_dict(row.result)} for row in self.rows],
            "refused": self.refused,
        }

    def _cost_as_dict(self, result: Result) -> dict[str, Any] | None:
        return None if (found := self.cost(result)) is None else dataclasses.asdict(found)


def candidates(
    text: str = "all", exactness: str = "any", *, several_per_node: bool = False, optimizer: str | None = None
) -> dict[str, Algorithm]:
    """Return algorithms by their label in tables.

    Args:
        text: "all", or names separated by commas, optionally with options: `allreduce, topk(ratio=0.001)`.
        exactness: The widest allowed class (`commlib.algorithms.base.EXACTNESS`).
        several_per_node: Whether "all" includes hierarchical forms.
        optimizer: The workload's optimizer; with "adam", "all" includes the presets, whose Muon can replace it.

    Raises:
        ConfigError: A name, option or class is unknown, a named algorithm is wider than the class, or no algorithm
            remains.
    """
    if exactness not in EXACTNESS:
        raise ConfigError(f"exactness: expected one of {', '.join(EXACTNESS)}, got {exactness!r}")
    is_all = text.strip() == "all"
    found = _all(several_per_node, optimizer) if is_all else dict(map(_parsed, _listed(text)))
    allowed = EXACTNESS[: EXACTNESS.index(exactness) + 1]
    wider = {label: algorithm.exactness for label, algorithm in found.items() if algorithm.exactness not in allowed}
    if wider and not is_all:
        shown = ", ".join(f"{label} ({of})" for label, of in wider.items())
        raise ConfigError(f"algorithms: expected the class {exactness!r} or a narrower one, got {shown}")
    chosen = {label: algorithm for label, algorithm in found.items() if label not in wider}
    if not chosen:
        raise ConfigError(f"algorithms: none of {text!r} is of the class {exactness!r} or a narrower one")
    return chosen


def _all(several_per_node: bool, optimizer: str | None) -> dict[str, Algorithm]:
    found: dict[str, Algorithm] = {}
    for name in algorithms.list():
        if name == "auto":  # selects one of the others
            continue
        found[name] = algorithms.create(name)
        if several_per_node and (form := hierarchical_form(name)) is not None:
            found[f"{name}(hierarchical=True)"] = form
    if optimizer == "adam":
        found |= {name: algorithms.create(name) for name in algorithms.PRESETS}
    return found


def has_nodes(network: Network, sharding: Sharding | None) -> bool:
    """Return whether the ranks that the algorithms run on are on several nodes, with several each."""
    if sharding is not None:
        network = Islands.of(network, sharding.ranks).replicas
    return min(network.gpus_per_node, network.nodes) > 1


def hierarchical_form(name: str) -> Algorithm | None:
    """Return the hierarchical form of a registered algorithm, or None if it has no such form."""
    cls = algorithms.get(name)
    if "hierarchical" not in inspect.signature(cls).parameters:
        return None
    return algorithms.create(cls(hierarchical=True))  # pyright: ignore[reportCallIssue]


def _listed(text: str) -> list[ast.expr]:
    expected = f"algorithms: expected names such as 'allreduce, topk(ratio=0.001)', got {text!r}"
    try:
        tree = ast.parse(f"[{text}]", mode="eval").body
    except (SyntaxError, ValueError) as error:
        called = (name for name in re.findall(r"(\w+)\s*\(", text) if name in algorithms.list())
        takes = "".join(f"; {name} takes {options_of(algorithms.get(name))}" for name in dict.fromkeys(called))
        raise ConfigError(expected + takes) from error
    if not isinstance(tree, ast.List) or not tree.elts:
        raise ConfigError(expected)
    return tree.elts


def _parsed(tree: ast.expr) -> tuple[str, Algorithm]:
    """Return the label and the instance of `name` or `name(option=value)`."""
    label = ast.unparse(tree)
    match tree:
        case ast.Name(id=name):
            return label, algorithms.create(name)
        case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords):
            cls = algorithms.get(name)
            try:
                options = _options(keywords)
                check_options(cls, options)
                return label, algorithms.create(cls(**options))
            except (TypeError, ValueError, CodecError) as error:
                raise ConfigError(f"algorithms: {label!r}: {error}; {name} takes {options_of(cls)}") from error
        case ast.Call(func=ast.Name(id=name)):
            raise ConfigError(
                f"algorithms: expected name(option=value), got {label!r}; {name} takes "
                f"{options_of(algorithms.get(name))}"
            )
    raise ConfigError(f"algorithms: expected a name or name(option=value), got {label!r}")


def _options(keywords: Sequence[ast.keyword]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for keyword in keywords:
        if keyword.arg is None or keyword.arg in options:
            raise TypeError(f"expected each option once, as in name(option=value), got {ast.unparse(keyword)}")
        try:
            options[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError as error:
            got = ast.unparse(keyword.value)
            raise ValueError(
                f"{keyword.arg}: expected a number, a word in quotes, True, False or None, got {got}"
            ) from error
    return options


def compare(
    workload: Workload,
    network: Network,
    device: Device,
    chosen: Mapping[str, Algorithm],
    options: Options = Options(),  # noqa: B008 (it is frozen)
    progress: Progress = lambda _: None,
    run: Map = map,
    shardings: Mapping[str, Sharding] | None = None,
) -> Comparison:
    """Simulate algorithms and DDP-style all-reduce on one network.

    Args:
        workload: The trained workload.
        network: The network of the ranks.
        device: The device of each rank.
        chosen: Algorithms by label (`candidates`).
        options: Options of the simulations. Their bucket size does not apply to DDP, which has its own.
        progress: Called after each simulation, with the label of the algorithm (DDP's is "ddp").
        run: The `map` that runs the simulations (`workers.on_all_cores`).
        shardings: Shardings by label, in place of that of the options.

    Raises:
        ConfigError: An option is invalid.
    """
    sharding = options.sharding
    baseline = dataclasses.replace(options, bucket_cap_mb=DDP_BUCKET_CAP_MB)
    if sharding is not None:
        baseline = dataclasses.replace(baseline, sharding=sharding.without_codecs())
    own = {label: (shardings or {}).get(label, sharding) for label in chosen}
    settings = [baseline, *(dataclasses.replace(options, sharding=own[label]) for label in chosen)]
    simulated = run(functools.partial(_simulate, workload, network, device), [AllReduce(), *chosen.values()], settings)
    outcomes: dict[str, Result | str] = {}
    for name, outcome in zip(["ddp", *chosen], simulated, strict=True):
        outcomes[name] = outcome
        progress(name)
    ddp = outcomes.pop("ddp")
    if isinstance(ddp, str):
        raise ConfigError(ddp)
    found = Comparison(workload, network, device, ddp, (), {}, sharding)
    rows = [
        Prediction(
            name,
            _widest(chosen[name], own[name]),
            result,
            ddp.step_s / result.step_s,
            fits=found.fits(result),
            cycle=chosen[name].channel.cycle,
            made_for=chosen[name].made_for,
            doubt=doubt(chosen[name], workload.optimizer),
            loss=None if (known := measured(chosen[name], workload.optimizer)) is None else known.loss,
            optimizer=chosen[name].optimizer_kind or workload.optimizer,
        )
        for name, result in outcomes.items()
        if isinstance(result, Result)
    ]
    rows.sort(key=lambda row: row.result.step_s)
    refused = {name: reason for name, reason in outcomes.items() if isinstance(reason, str)}
    return dataclasses.replace(found, rows=tuple(rows), refused=refused)


def _widest(algorithm: Algorithm, sharding: Sharding | None) -> str:
    """Return the wider class of an algorithm and a sharding."""
    classes = [algorithm.exactness, "exact" if sharding is None else sharding.exactness]
    return max(classes, key=EXACTNESS.index)


def sweep(
    workload: Workload,
    networks: Sequence[Network],
    device: Device,
    chosen: Mapping[str, Algorithm],
    options: Options = Options(),  # noqa: B008 (it is frozen)
    progress: Progress = lambda _: None,
    run: Map = map,
    shardings: Mapping[str, Sharding] | None = None,
) -> dict[str, list[float]]:
    """Return each algorithm's speed-up over DDP-style all-reduce on each network; NaN if it cannot be simulated.

    See `compare` for the arguments.
    """
    speedups: dict[str, list[float]] = {name: [] for name in chosen}
    for network in networks:
        comparison = compare(workload, network, device, chosen, options, progress, run, shardings)
        found = {row.algorithm: row.speedup for row in comparison.rows}
        for name in chosen:
            speedups[name].append(found.get(name, math.nan))
    return speedups


def _simulate(
    workload: Workload, network: Network, device: Device, algorithm: Algorithm, options: Options
) -> Result | str:
    """Return the result or the reason of the failure. An error in one algorithm does not stop the others."""
    try:
        return simulate(workload, network, device, algorithm, options)
    except ConfigError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
