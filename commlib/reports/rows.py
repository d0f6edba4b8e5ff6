"""The rows of a comparison as text, for the table and the report: which values are shown, rounded, in which order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from commlib.algorithms.known import LOSES
from commlib.reports.families import base_name
from commlib.reports.tables import Column
from commlib.simulation.compare import Comparison, Prediction, has_nodes
from commlib.simulation.cost import Cost, unit
from commlib.simulation.simulator import Result

#: Columns that are shown at any width, if they have values.
_ALWAYS = ("class", "step ms", "speed-up", "loss", "cost/M", "buys M")
#: The marks at the end of names (`Prediction.mark`).
_MARKS = "*?!"


@dataclass(frozen=True)
class Row:
    """An algorithm, or several with equal values in every column.

    Attributes:
        names: Their labels with their marks.
        cells: Values by column, those that are always shown first.
        result: The result of one of them.
        is_variant: Whether the row follows a faster form of the same algorithm.
    """

    names: tuple[str, ...]
    cells: dict[str, str]
    result: Result
    is_variant: bool = False


def rows_of(comparison: Comparison) -> list[Row]:
    """Return the baseline and the algorithms, the fastest first; variants of an algorithm follow its fastest form.

    Algorithms whose values are equal in every column, as rounded there, and whose marks are equal share a row. Columns
    without a value are left out.
    """
    name = comparison.baseline + "!" * (not comparison.fits(comparison.ddp))
    first = Row((name,), _cells(comparison, comparison.ddp, "exact", 1.0, ""), comparison.ddp)
    rows = [first, *_by_family(_joined(comparison))]
    titles = [title for title in first.cells if any(row.cells[title] for row in rows)]
    return [Row(row.names, {title: row.cells[title] for title in titles}, row.result, row.is_variant) for row in rows]


def columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns of a table, that of the names first."""
    names = ["\n".join("  " * row.is_variant + name for name in _listed(row)) for row in rows]
    columns = [Column(title, [row.cells[title] for row in rows], left=title == "class") for title in rows[0].cells]
    return [Column("algorithm", names, left=True), *columns]


def num_required(rows: Sequence[Row]) -> int:
    """Return the number of columns that are shown at any width, that of the names included."""
    return 1 + sum(title in _ALWAYS for title in rows[0].cells)


def sent(comparison: Comparison) -> str:
    """Return the meaning of the column of bytes on nodes of several ranks; "" without such nodes."""
    with_nodes = has_nodes(comparison.network, comparison.sharding)
    return "sent MB: by a rank, to others in its node as well." if with_nodes else ""


def explained(comparison: Comparison) -> str:
    """Return the meaning of the columns of costs; "" without a price."""
    if (price := comparison.price) is None:
        return ""
    nodes, units = comparison.network.nodes, unit(comparison.workload)
    text = f"cost/M: of a million {units}, on {nodes} node{'s' * (nodes > 1)} at {price.per_hour:g} per hour each."
    return text if price.budget is None else f"{text} buys M: millions of {units} for {price.budget:g}."


def _listed(row: Row) -> list[str]:
    *others, last = row.names
    return [*(f"{name}," for name in others), last]


def _joined(comparison: Comparison) -> list[Row]:
    """Return the algorithms, the fastest first, with equal ones in one row."""
    joined: dict[tuple[str, ...], Row] = {}
    for row in comparison.rows:
        cells = _cells(comparison, row.result, row.exactness, row.speedup, _loss(row))
        values = (row.mark, *cells.values())
        names = joined[values].names if values in joined else ()
        joined[values] = Row((*names, row.algorithm + row.mark), cells, row.result)
    return list(joined.values())


def _by_family(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the rows with those that have an algorithm in common one after the other, all but the first as variants."""
    groups: list[tuple[set[str], list[Row]]] = []
    for row in rows:
        names = {base_name(name).rstrip(_MARKS) for name in row.names}
        known, members = next((group for group in groups if group[0] & names), (set[str](), list[Row]()))
        if not members:
            groups.append((known, members))
        known |= names
        members.append(row)
    for _, (best, *variants) in groups:
        yield best
        yield from (Row(row.names, row.cells, row.result, is_variant=True) for row in variants)


def _cells(comparison: Comparison, result: Result, exactness: str, speedup: float, loss: str) -> dict[str, str]:
    cost = comparison.cost(result)
    return {
        "class": exactness,
        "step ms": _short(result.step_s * 1e3),
        "speed-up": f"{speedup:.2f}",
        "loss": loss,
        **_costs(cost),
        "sent MB": _short(result.wire_bytes / 1e6),
        "exposed ms": _short(result.exposed_s * 1e3),
        "memory MB": f"{result.memory_bytes / 1e6:,.0f}",
        "total GB": _short(result.total_bytes / 1e9),
        "samples/s": _short(result.samples_per_s),
        "leaves a node MB": _short(result.adapter_bytes / 1e6),
    }


def _costs(cost: Cost | None) -> dict[str, str]:
    if cost is None:
        return {}
    units, steps = ("", "") if cost.units is None else (amount(cost.units / 1e6), f"{cost.steps:,}")
    return {"cost/M": amount(cost.per_million), "buys M": units, "cost/step": amount(cost.per_step), "steps": steps}


def amount(value: float) -> str:
    """Return an amount with three digits, or a whole number from 1,000 on."""
    return f"{value:#.3g}".rstrip(".") if value < 999.5 else f"{value:,.0f}"


def _loss(row: Prediction) -> str:
    if row.loss is None:
        return "?" * bool(row.doubt)
    is_near = bool(row.doubt) and round(row.loss, 2) <= LOSES  # more than the limit, but not as rounded
    return f"{row.loss:+.1%}" if is_near else f"{round(row.loss, 2) + 0.0:+.0%}"


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"
