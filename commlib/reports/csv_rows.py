"""The rows of comparisons as CSV, with a header that is always the same."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

from commlib.simulation.compare import Comparison, Prediction
from commlib.simulation.cost import unit
from commlib.simulation.simulator import Result

_NETWORK = ("nodes", "gpus_per_node", "bandwidth_gbps", "latency_us")
_RESULT = (
    *("step_s", "compute_s", "exposed_s", "samples_per_s"),
    *("wire_bytes", "adapter_bytes", "memory_bytes", "total_bytes"),
)
#: The header. Names end with units; docs/how-to/choose-a-network.md describes the columns.
HEADER = (
    *("workload", "network", *_NETWORK, "device", "shard"),
    *("algorithm", "exactness", "mark", "loss", "speedup", *_RESULT, "unit"),
    *("price_per_hour", "cost_per_step", "cost_per_million", "budget", "budget_steps", "budget_units"),
)


def to_csv(comparisons: Sequence[Comparison]) -> str:
    """Return one line per network and algorithm, each network's baseline first. A missing value is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, HEADER, restval="", lineterminator="\n")
    writer.writeheader()
    for comparison in comparisons:
        writer.writerows(_rows(comparison))
    return out.getvalue()


def _rows(comparison: Comparison) -> Iterator[dict[str, Any]]:
    ddp, fits = comparison.ddp, comparison.fits(comparison.ddp)
    baseline = Prediction(comparison.baseline, "exact", ddp, speedup=1.0, fits=fits)
    for row in (baseline, *comparison.rows):
        named = {"algorithm": row.algorithm, "exactness": row.exactness, "mark": row.mark, "speedup": row.speedup}
        loss = {} if row.loss is None else {"loss": row.loss}
        yield {**_setting(comparison), **named, **loss, **_measures(row.result), **_costs(comparison, row.result)}


def _setting(comparison: Comparison) -> dict[str, Any]:
    network = comparison.network
    of_network = {name: getattr(network, name) for name in _NETWORK}
    sharding = {} if comparison.sharding is None else {"shard": comparison.sharding.ranks}
    names = {"workload": comparison.workload.name, "network": network.name, "device": comparison.device.name}
    return {**names, **of_network, **sharding, "unit": unit(comparison.workload)}


def _measures(result: Result) -> dict[str, Any]:
    return {name: getattr(result, name) for name in _RESULT}


def _costs(comparison: Comparison, result: Result) -> dict[str, Any]:
    price, cost = comparison.price, comparison.cost(result)
    if price is None or cost is None:
        return {}
    paid = {"price_per_hour": price.per_hour, "cost_per_step": cost.per_step, "cost_per_million": cost.per_million}
    if price.budget is None:
        return paid
    return {**paid, "budget": price.budget, "budget_steps": cost.steps, "budget_units": cost.units}
