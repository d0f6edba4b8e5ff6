"""What each algorithm makes of a workload on a network, by simulation: `commlib compare`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from commlib import algorithms
from commlib.algorithms.allreduce import AllReduce
from commlib.algorithms.base import EXACTNESS, Algorithm
from commlib.errors import ConfigError
from commlib.network.model import Device, Network, Workload
from commlib.network.simulator import Options, Result, simulate

#: The bucket size of `DistributedDataParallel`, whose step is the measure of all others.
DDP_BUCKET_CAP_MB = 25.0

#: Called after each simulation with what was simulated.
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """One algorithm on one network.

    Attributes:
        algorithm: Its registered name.
        exactness: What it may do to the optimisation (`commlib.algorithms.base.EXACTNESS`).
        result: What the simulation found.
        speedup: Steps of DDP-style all-reduce in the time of one step.
    """

    algorithm: str
    exactness: str
    result: Result
    speedup: float

    def as_dict(self) -> dict[str, Any]:
        """Return the figures, for JSON."""
        result = self.result
        return {
            "algorithm": self.algorithm,
            "exactness": self.exactness,
            "step_s": result.step_s,
            "samples_per_s": result.samples_per_s,
            "speedup": self.speedup,
            "exposed_s": result.exposed_s,
            "wire_bytes": result.wire_bytes,
            "adapter_bytes": result.adapter_bytes,
            "memory_bytes": result.memory_bytes,
            "num_buckets": result.num_buckets,
            "phases": dict(result.phases),
        }


@dataclass(frozen=True)
class Comparison:
    """All algorithms on one network.

    Attributes:
        workload: What is trained.
        network: What connects the ranks.
        device: What each rank computes with.
        ddp: DDP-style all-reduce: full precision, buckets of 25 MiB.
        rows: The algorithms, the fastest first.
        refused: Why algorithms could not be simulated, by name.
    """

    workload: Workload
    network: Network
    device: Device
    ddp: Result
    rows: tuple[Row, ...]
    refused: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Return everything but layers and spans, for JSON."""
        network = {field.name: getattr(self.network, field.name) for field in dataclasses.fields(self.network)}
        if math.isinf(self.network.ceiling_gbps):
            network["ceiling_gbps"] = None  # JSON knows no infinity
        return {
            "workload": {
                "name": self.workload.name,
                "parameters": self.workload.numel,
                "batch_per_rank": self.workload.batch_per_rank,
                "step_s": self.workload.step_s,
                "source": self.workload.source,
            },
            "network": network,
            "device": {"name": self.device.name, "source": self.device.source},
            "ddp": {"step_s": self.ddp.step_s, "samples_per_s": self.ddp.samples_per_s},
            "rows": [row.as_dict() for row in self.rows],
            "refused": self.refused,
        }


def candidates(names: str = "all", exactness: str = "any") -> list[str]:
    """Return algorithms by name: those of a list with commas, or all, up to a class of exactness.

    Raises:
        ConfigError: An unknown name or class, or none that is left.
    """
    if exactness not in EXACTNESS:
        raise ConfigError(f"exactness: expected one of {', '.join(EXACTNESS)}, got {exactness!r}")
    known = [name for name in algorithms.list() if name != "auto"]  # which becomes one of the others
    wanted = known if names == "all" else [name.strip() for name in names.split(",") if name.strip()]
    allowed = EXACTNESS[: EXACTNESS.index(exactness) + 1]
    chosen = [name for name in dict.fromkeys(wanted) if algorithms.create(name).exactness in allowed]
    if not chosen:
        raise ConfigError(f"algorithms: none of {names!r} is of the class {exactness!r} or a narrower one")
    return chosen


def compare(
    workload: Workload,
    network: Network,
    device: Device,
    names: Iterable[str],
    options: Options = Options(),  # noqa: B008 (it is frozen)
    progress: Progress = lambda _: None,
) -> Comparison:
    """Simulate algorithms on one network, and DDP-style all-reduce beside them.

    Args:
        workload: What is trained.
        network: What connects the ranks.
        device: What each rank computes with.
        names: Registered names.
        options: How simulations are made; the size of buckets is not that of DDP, which has its own.
        progress: Called after each simulation.

    Raises:
        ConfigError: An unknown name, or options that make no sense.
    """
    ddp = _ddp(workload, network, device, options)
    progress("ddp")
    rows: list[Row] = []
    refused: dict[str, str] = {}
    for name in names:
        algorithm = algorithms.create(name)
        try:
            result = simulate(workload, network, device, algorithm, options)
        except ConfigError as error:
            refused[name] = str(error)
        else:
            rows.append(Row(name, algorithm.exactness, result, ddp.step_s / result.step_s))
        progress(name)
    rows.sort(key=lambda row: row.result.step_s)
    return Comparison(workload, network, device, ddp, tuple(rows), refused)


def sweep(
    workload: Workload,
    networks: Sequence[Network],
    device: Device,
    names: Sequence[str],
    options: Options = Options(),  # noqa: B008 (it is frozen)
    progress: Progress = lambda _: None,
) -> dict[str, list[float]]:
    """Return, by algorithm, its speed-up over DDP-style all-reduce on each network; NaN where it cannot be simulated."""
    speedups: dict[str, list[float]] = {name: [] for name in names}
    for network in networks:
        found = {row.algorithm: row.speedup for row in compare(workload, network, device, names, options, progress).rows}
        for name in names:
            speedups[name].append(found.get(name, math.nan))
    return speedups


def _ddp(workload: Workload, network: Network, device: Device, options: Options) -> Result:
    algorithm: Algorithm = AllReduce()
    return simulate(
        workload, network, device, algorithm, dataclasses.replace(options, bucket_cap_mb=DDP_BUCKET_CAP_MB)
    )
