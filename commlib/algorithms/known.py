"""Measured losses of algorithms with an optimizer.

`known.json` holds them, one per line, each with the file in `benchmarks/results/` that it is from; a test compares
them. Results with a single seed are omitted, except for `diloco` with SGD, where only this run is long enough for tens
of rounds.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from commlib.algorithms.base import Algorithm
from commlib.codecs import BlockCodec, SparseCodec
from commlib.primitives.topology import Topology

#: Relative increase of the validation loss over all-reduce's above which an algorithm counts as losing. It lies in a
#: gap of the measurements: the highest mean below it is 4.8 %, the lowest above it is 5.2 %.
LOSES = 0.05
#: Display names of the optimizer kinds (`Algorithm.made_for`).
OPTIMIZERS = {"sgd": "SGD", "adam": "AdamW", "muon": "Muon"}
#: Descriptions of the models, by their name in the benchmark.
_MODELS = {"digits": "a CNN on digits", "bytes-1m": "a byte GPT of 1 M parameters"}
#: Options for which a smaller value sends less, and options for which a larger value sends less.
_SENDS_LESS_BELOW, _SENDS_LESS_ABOVE = ("ratio", "rank", "bits"), ("period",)


@dataclass(frozen=True)
class Known:
    """The loss of an algorithm relative to all-reduce after the same number of steps, untuned; the mean over seeds.

    Attributes:
        system: Name in the result file: the registered name and the given options.
        optimizer: The optimizer's kind, "sgd", "adam" or "muon". All-reduce is measured with the same optimizer.
        model: Name of the model in the benchmark.
        steps: Number of steps.
        loss: Validation loss relative to all-reduce's with the same seeds, minus 1: 0.32 is 32 % more.
        file: File in `benchmarks/results`.
        options: Attributes that an instance or its channel must have for this result to apply, including relevant
            defaults. The period of `streaming_diloco` is that of a fragment.
        seeds: The seeds.
        ranks: Number of ranks.
    """

    system: str
    optimizer: str
    model: str
    steps: int
    loss: float
    file: str = "final-loss.json"
    options: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2)
    ranks: int = 4

    @property
    def algorithm(self) -> str:
        """The registered name."""
        return self.system.partition("(")[0]

    @property
    def baseline(self) -> str:
        """The name of all-reduce with the same optimizer in the result file."""
        return "allreduce(optimizer=muon)" if self.optimizer == "muon" else "allreduce"

    @property
    def trained_with(self) -> str:
        """The optimizer of the result file: a system can name another one."""
        return "sgd" if self.optimizer == "sgd" else "adamw"

    @property
    def command(self) -> str:
        """The command that measures it together with all-reduce."""
        return (
            f"python benchmarks/convergence.py final --model {self.model} --optimizer {self.trained_with} "
            f"--steps {self.steps} --ranks {self.ranks} --seeds {','.join(map(str, self.seeds))} "
            f"--systems 'commlib:{self.baseline}@1,commlib:{self.system}@1'"
        )

    def speaks_of(self, algorithm: Algorithm) -> bool:
        """Return whether the result applies to an instance.

        A result above `LOSES` also applies to options that send less, and any other result to options that send more.
        EF21 changes the gradient, so its results do not apply without it, nor vice versa.
        """
        return (
            algorithm.name == self.algorithm
            and _option(algorithm, "ef21") == self.options.get("ef21")
            and all(self._covers(name, value, _option(algorithm, name)) for name, value in self.options.items())
        )

    def _covers(self, name: str, measured: Any, value: Any) -> bool:
        if name == "codec" and value is None:
            return self.loss <= LOSES
        if name not in (*_SENDS_LESS_BELOW, *_SENDS_LESS_ABOVE):
            return value == measured
        sends_less = value < measured if name in _SENDS_LESS_BELOW else value > measured
        return value == measured or sends_less == (self.loss > LOSES)

    def __str__(self) -> str:
        """Return a short description."""
        difference = f"{abs(self.loss):.0%} {'more' if self.loss > 0 else 'less'} loss than all-reduce"
        model = _MODELS[self.model]
        return f"{difference} with {OPTIMIZERS[self.optimizer]} ({model}, {self.steps} steps, {self.ranks} ranks)"


@functools.cache
def known_losses() -> tuple[Known, ...]:
    """Return the measured results, read from `known.json` at the first call."""
    rows = json.loads(Path(__file__).with_name("known.json").read_text(encoding="utf-8"))
    return tuple(Known(**{**row, "seeds": tuple(row["seeds"])}) for row in rows)


def measured(algorithm: Algorithm, kind: str) -> Known | None:
    """Return the least favorable result of an algorithm with a kind of optimizer, or None without a measurement.

    Of several runs of one model the best one is used, since more steps can compensate for a slow start; of several
    models the worst one. Without a result for Muon, one with AdamW stands in, as neither steps in proportion to
    gradients. A preset's own kind takes precedence.
    """
    kind = algorithm.optimizer_kind or kind
    for each_kind in _standing_for(kind):
        found = [each for each in known_losses() if each.optimizer == each_kind and each.speaks_of(algorithm)]
        if found:
            found.sort(key=_model)
            return max((min(runs, key=_loss) for _, runs in groupby(found, key=_model)), key=_loss)
    return None


def worst_measured(algorithm: Algorithm) -> Known | None:
    """Return the least favorable result of an algorithm with any kind of optimizer, or None without a measurement."""
    found = [each for kind in OPTIMIZERS if (each := measured(algorithm, kind)) is not None]
    return max(found, key=_loss, default=None)


def loses_with(algorithm: Algorithm, optimizer_kind: str) -> Known | None:
    """Return the result that exceeds `LOSES` for an algorithm with an optimizer, or None if no such result is known.

    Args:
        algorithm: An instance with its name set (`create`).
        optimizer_kind: "sgd", "adam" or "muon".
    """
    found = measured(algorithm, optimizer_kind)
    return found if found is not None and found.loss > LOSES else None


def doubt(algorithm: Algorithm, optimizer_kind: str) -> str:
    """Return the reason to monitor the loss of an algorithm with an optimizer, or "" if there is no reason.

    Either a result exceeds `LOSES`, or the algorithm is not exact and was not measured with the optimizer.
    """
    optimizer_kind = algorithm.optimizer_kind or optimizer_kind
    found = measured(algorithm, optimizer_kind)
    if found is not None:
        return str(found) if found.loss > LOSES else ""
    if algorithm.exactness == "exact":
        return ""
    unknown = f"not measured with {OPTIMIZERS[optimizer_kind]}"
    if algorithm.made_for in ("any", optimizer_kind) or (optimizer_kind, algorithm.made_for) == ("muon", "adam"):
        return unknown
    return f"made for {OPTIMIZERS.get(algorithm.made_for, algorithm.made_for)}, {unknown}"


def keeping_up(optimizer_kind: str) -> list[str]:
    """Return the systems measured with an optimizer whose loss is at most `LOSES` in every run, the best first."""
    by_options: dict[str, list[Known]] = {}
    for each in known_losses():
        if each.optimizer in _standing_for(optimizer_kind):
            by_options.setdefault(f"{each.algorithm} {each.options}", []).append(each)
    worst = sorted((max(runs, key=_loss) for runs in by_options.values()), key=_loss)
    return [each.system for each in worst if each.loss <= LOSES]


def _standing_for(kind: str) -> tuple[str, ...]:
    """Return the kinds of optimizer whose results apply to a kind, in order of precedence."""
    return ("muon", "adam") if kind == "muon" else (kind,)


def _option(algorithm: Algorithm, name: str) -> Any:
    """Return an option of an instance in the format of `Known.options`."""
    value = getattr(algorithm, name, None)
    if value is None:
        value = getattr(algorithm.channel, name, None)
    if isinstance(value, BlockCodec | SparseCodec):
        return value.name
    return type(value).__name__ if isinstance(value, Topology) else value


def _model(known: Known) -> str:
    return known.model


def _loss(known: Known) -> float:
    return known.loss
