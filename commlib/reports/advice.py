"""The recommendations at the end of a comparison: an algorithm, and a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from commlib import algorithms
from commlib.algorithms import PRESETS
from commlib.algorithms.base import EXACTNESS
from commlib.algorithms.known import LOSES, OPTIMIZERS
from commlib.reports.families import without_auto
from commlib.reports.rows import amount
from commlib.reports.tables import kept
from commlib.simulation import compare
from commlib.simulation.compare import Comparison, Prediction
from commlib.simulation.cost import Cost, unit
from commlib.simulation.simulator import Result

#: A step that is longer than one without communication by at most this factor counts as near it.
NEAR = 1.1
#: Speed-ups that differ by a smaller factor count as equal, given the accuracy of the predictions.
_SAME = 1.05


def advice(comparison: Comparison) -> str:
    """Return the recommended algorithms by exactness class, or allreduce if none is faster, with the reason."""
    if not any(row.fits for row in comparison.rows) and not comparison.fits(comparison.ddp):
        how = "Shard the model (--shard RANKS)" if comparison.sharding is None else "Use more ranks per shard (--shard)"
        return f"None of these fits in the {comparison.device.memory_gbytes:g} GB of {comparison.device.name}. {how}."
    best = list(_best_by_class(comparison))
    ddp, named = comparison.ddp, "DDP" if comparison.sharding is None else "FSDP2"
    exposed = ddp.exposed_s / ddp.step_s
    share = f"{exposed:.0%} of {named}'s step is not computation"
    marked = any(row.mark and row.speedup > _SAME for row in comparison.rows)
    none = f"none of these{' without a mark' * marked} is more than {_SAME - 1:.0%} faster"
    if not best and comparison.sharding is not None:
        return f"Use {comparison.baseline}: {none} ({share})."
    if not best:
        if exposed < 1 - 1 / _SAME:
            return f"Use allreduce, as DDP does: computation hides communication here ({share}), so none pays off."
        return f"Use allreduce, as DDP does: {none}, although {share}."
    names = [kept(without_auto(row.algorithm)) for row in best]
    fastest = "; ".join(
        f"{row.exactness}: {name}, {kept(f'{row.speedup:.3g} times')} {named}'s speed"
        for row, name in zip(best, names, strict=True)
    )
    return f"Use what your training tolerates: {fastest}. The reason: {share}. A faster step may learn less."


def _best_by_class(comparison: Comparison) -> Iterator[Prediction]:
    """Yield the fastest of each class, narrowest class first, if it is faster than DDP and than narrower classes."""
    to_beat = 1.0
    for exactness in EXACTNESS:
        rows = [row for row in comparison.rows if row.exactness == exactness and row.fits and not row.doubt]
        if rows and rows[0].speedup > to_beat * _SAME:
            to_beat = rows[0].speedup
            yield rows[0]


def forms_left_out(comparison: Comparison) -> str:
    """Return which hierarchical forms were not compared although their algorithms were; "" if none."""
    if not compare.has_nodes(comparison.network, comparison.sharding):
        return ""
    labels = [row.algorithm for row in comparison.rows]
    named = [label for label in labels if label in algorithms.list() and compare.hierarchical_form(label) is not None]
    forms = [form for name in named if (form := f"{name}(hierarchical=True)") not in labels]
    return f"Forms for nodes of several ranks, not compared: {', '.join(forms)}." if forms else ""


def misfits(comparison: Comparison) -> str:
    """Return which rows need more memory than the device has; "" if none."""
    rows = [kept(without_auto(row.algorithm)) for row in comparison.rows if not row.fits]
    names = [comparison.baseline] * (not comparison.fits(comparison.ddp)) + rows
    if not names:
        return ""
    size = f"{comparison.device.memory_gbytes:g} GB of {comparison.device.name}"
    return f"! more than the {size}, even without activations, so is not advised: {', '.join(names)}."


def presets_of(comparison: Comparison) -> str:
    """Return the algorithms and options of the presets among the rows; "" without any."""
    named = [(row.algorithm, PRESETS[row.algorithm]) for row in comparison.rows if row.algorithm in PRESETS]
    if not named:
        return ""
    calls = "; ".join(f"{kept(name)}: {preset}" for name, preset in sorted(named, key=lambda each: each[0]))
    return f"{calls}. With Muon for the hidden matrices, whose own computation is not simulated."


def losses(comparison: Comparison) -> str:
    """Return the meaning of the column of losses and its marks; "" if all rows have the losses of all-reduce."""
    if not any(row.doubt or row.loss is not None for row in comparison.rows):
        return ""
    optimizer = OPTIMIZERS[comparison.workload.optimizer]
    text = f"loss: relative to all-reduce after the same number of steps, in small models with {optimizer}."
    if any(row.algorithm in PRESETS for row in comparison.rows):
        text = f"{text[:-1]} (presets: both with Muon)."
    marks = {row.mark[:1] for row in comparison.rows if row.doubt}
    meanings = {"*": f"* more than {LOSES:.0%}", "?": f"? not measured with {optimizer} and these options"}
    shown = ", ".join(meaning for mark, meaning in meanings.items() if mark in marks)
    return f"{text} {shown}: not advised." if shown else text


@dataclass(frozen=True)
class _Choice:
    """An algorithm that may be advised on a network; the baseline is one."""

    comparison: Comparison
    name: str
    exactness: str
    result: Result
    loss: float | None = None

    @property
    def slowdown(self) -> float:
        """The time of a step relative to one without communication."""
        return self.result.step_s / self.comparison.ddp.compute_s

    @property
    def cost(self) -> Cost | None:
        """The cost of training; None without a price."""
        return self.comparison.cost(self.result)

    @property
    def rank(self) -> tuple[float, ...]:
        """The sort key of networks: the cost of a million, or without prices the bandwidth and the latency."""
        if (cost := self.cost) is not None:
            return (cost.per_million,)
        network = self.comparison.network
        return network.bytes_per_s, network.bandwidth_gbps, -network.latency_us

    def described(self) -> str:
        """Return the algorithm, its class and measured loss, the slowdown and the cost."""
        cost = self.cost
        price = "" if cost is None else f", {amount(cost.per_million)} per million {unit(self.comparison.workload)}"
        muon = ", with Muon, whose own time is not included" if self.name in PRESETS else ""
        loss = f", loss {self.loss:+.0%}" if self.loss is not None and round(self.loss, 2) else ""
        slower = f"{self.slowdown - 1:+.0%}" if self.slowdown < 2 else f"{self.slowdown:.3g} times as long"
        return f"{kept(self.name)} ({self.exactness}{muon}{loss}), {slower}{price}"


def network_advice(comparisons: Sequence[Comparison]) -> str:
    """Return the cheapest network, or the slowest without prices, on which a step is near one without communication.

    On each network the most exact algorithm that is near enough counts, and among equally exact ones the fastest. The
    cheapest network is the one with the lowest cost of a million samples or tokens with that algorithm. If another
    choice costs less, it is named too. Rows with a mark are never advised.
    """
    choices = [_choices(each) for each in comparisons]
    return f"{_near_advice(comparisons, choices)}{_lowest_cost(choices)}"


def _near_advice(comparisons: Sequence[Comparison], choices: Sequence[Sequence[_Choice]]) -> str:
    near = [found[0] for each in choices if (found := [one for one in each if one.slowdown <= NEAR])]
    limit = f"within {NEAR - 1:.0%} of a step without communication"
    is_one = len(comparisons) == 1
    if near:
        best = _best_near(near)
        name = kept(best.comparison.network.name)
        if is_one:
            return f"{name} is {limit}: {best.described()}."
        kind = "slowest" if comparisons[0].price is None else "cheapest"
        return f"The {kind} network {limit} is {name}: {best.described()}."
    nearest = min((one for each in choices for one in each), key=lambda one: one.slowdown, default=None)
    if nearest is None:
        return "No network is advised: every row has a mark."
    name = nearest.comparison.network.name
    none, at = (f"{name} is not", "") if is_one else ("No network is", f" on {name}")
    return f"{none} {limit} with an advised algorithm. Nearest: {nearest.described()}{at}."


def _best_near(near: Sequence[_Choice]) -> _Choice:
    return min(near, key=lambda one: one.rank)


def _lowest_cost(choices: Sequence[Sequence[_Choice]]) -> str:
    """Return the choice with the lowest cost at any step time, if it is not the advised one; "" without prices."""
    near = [found[0] for each in choices if (found := [one for one in each if one.slowdown <= NEAR])]
    every = [(cost.per_million, one) for each in choices for one in each if (cost := one.cost) is not None]
    if not every:
        return ""
    _, lowest = min(every, key=lambda entry: entry[0])
    if near and lowest is _best_near(near):
        return ""
    return f" The lowest cost is that of {lowest.described()}, on {kept(lowest.comparison.network.name)}."


def _choices(comparison: Comparison) -> list[_Choice]:
    """Return the baseline and the rows without a mark, the most exact first, then the fastest."""
    found = [
        _Choice(comparison, without_auto(row.algorithm), row.exactness, row.result, row.loss)
        for row in comparison.rows
        if not row.mark
    ]
    if comparison.fits(comparison.ddp):
        found.insert(0, _Choice(comparison, comparison.baseline, "exact", comparison.ddp))
    return sorted(found, key=lambda one: (EXACTNESS.index(one.exactness), one.result.step_s))
