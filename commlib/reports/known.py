"""The known workloads, networks and devices as tables, for `commlib compare --list`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from commlib.network import presets, workloads
from commlib.network.model import Device, Network, Workload
from commlib.reports.tables import Column

_T = TypeVar("_T", Workload, Network, Device)


@dataclass(frozen=True)
class Kind:
    """A table of one kind.

    Attributes:
        title: The heading.
        columns: The columns; the first one holds the names.
        sources: Sources of the figures by the names that have them in common.
    """

    title: str
    columns: list[Column]
    sources: dict[str, str]


def known() -> list[Kind]:
    """Return the tables of workloads, networks and devices."""
    return [
        _kind("Workloads", [workloads.get(name) for name in workloads.names()], _OF_WORKLOADS),
        _kind("Networks", presets.NETWORKS.values(), _OF_NETWORKS),
        _kind("Devices", presets.DEVICES.values(), _OF_DEVICES),
    ]


_OF_WORKLOADS: Mapping[str, Callable[[Workload], str]] = {
    "parameters, M": lambda one: f"{one.numel / 1e6:,.1f}",
    "batch": lambda one: f"{one.batch_per_rank}",
    "tokens": lambda one: f"{one.tokens_per_sample:,}" if one.tokens_per_sample else "",
    "optimizer": lambda one: one.optimizer,
    "step ms": lambda one: f"{one.step_s * 1e3:,.1f}",
    "device": lambda one: one.device,
}
_OF_NETWORKS: Mapping[str, Callable[[Network], str]] = {
    "nodes x ranks": lambda one: f"{one.nodes} x {one.gpus_per_node}",
    "Gbit/s": lambda one: f"{one.bandwidth_gbps:g}",
    "TCP at most": lambda one: "" if math.isinf(one.ceiling_gbps) else f"{one.ceiling_gbps:g}",
    "latency us": lambda one: f"{one.latency_us:,.0f}",
    "inside Gbit/s": lambda one: f"{one.intra_gbps:,.0f}",
    "device": lambda one: one.device,
}
_OF_DEVICES: Mapping[str, Callable[[Device], str]] = {
    "memory GB": lambda one: "" if math.isinf(one.memory_gbytes) else f"{one.memory_gbytes:g}",
    "GB/s": lambda one: f"{one.memory_gbytes_s:,.0f}",
    "TFLOP/s": lambda one: ", ".join(f"{value:g} in {dtype}" for dtype, value in one.tflops.items()),
}


def _kind(title: str, members: Iterable[_T], figures: Mapping[str, Callable[[_T], str]]) -> Kind:
    members = list(members)
    columns = [Column(name, [figure(each) for each in members]) for name, figure in figures.items()]
    by_source: dict[str, list[str]] = {}
    for each in members:
        by_source.setdefault(each.source, []).append(each.name)
    sources = {", ".join(names): source for source, names in by_source.items()}
    return Kind(title, [Column("name", [each.name for each in members], left=True), *columns], sources)
