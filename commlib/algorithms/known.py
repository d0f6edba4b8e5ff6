"""What is known of the loss that algorithms reach with an optimizer: measured runs, as data.

The figures are of `benchmarks/results/`, where a test finds them again. Rows of a single seed are left out, but for
`diloco` with SGD, of which only that run is long enough for tens of its rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from commlib.algorithms.base import Algorithm
from commlib.primitives.topology import Topology

#: An algorithm loses with an optimizer where its loss on unseen data is higher than all-reduce's by more than this.
#: The measured ones lie apart there: below it the highest mean is 4.8 %, above it the lowest is 7.2 %.
LOSES = 0.05
#: What each kind of optimizer is called, by the kind (`Algorithm.made_for`).
OPTIMIZERS = {"sgd": "SGD", "adam": "AdamW", "muon": "Muon"}
#: The models, by what the benchmark calls them.
_MODELS = {"digits": "a CNN on digits", "bytes-1m": "a byte GPT of 1 M parameters"}
#: Options of which less means that less is sent, and those of which more does.
_SENDS_LESS_BELOW, _SENDS_LESS_ABOVE = ("ratio", "rank", "bits"), ("period",)


@dataclass(frozen=True)
class Known:
    """How an algorithm fared beside all-reduce in as many steps, with nothing tuned; the mean over seeds.

    Attributes:
        system: What the result file calls it: the registered name, and the options that were given.
        optimizer: The optimizer's kind, "sgd" or "adam".
        model: What the benchmark calls the model.
        steps: After how many steps.
        loss: Of unseen data, relative to all-reduce's with the same seeds: 0.32 is 32 % more.
        file: In `benchmarks/results`.
        options: What an instance must have for this to speak of it, the defaults that matter included.
        seeds: Which ones.
        ranks: On how many ranks.
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
    def command(self) -> str:
        """The command that measures it, beside all-reduce."""
        optimizer = OPTIMIZERS[self.optimizer].lower()
        return (
            f"python benchmarks/convergence.py final --model {self.model} --optimizer {optimizer} --steps {self.steps} "
            f"--ranks {self.ranks} --seeds {','.join(map(str, self.seeds))} "
            f"--systems 'commlib:allreduce@1,commlib:{self.system}@1'"
        )

    def speaks_of(self, algorithm: Algorithm) -> bool:
        """Return whether it holds for an instance, too.

        A loss does for options with which as much or less is sent, keeping up for those with as much or more. EF21
        takes another gradient, of which another run must speak.
        """
        return (
            algorithm.name == self.algorithm
            and _option(algorithm, "ef21") == self.options.get("ef21")
            and all(self._covers(name, value, _option(algorithm, name)) for name, value in self.options.items())
        )

    def _covers(self, name: str, measured: Any, value: Any) -> bool:
        if name not in (*_SENDS_LESS_BELOW, *_SENDS_LESS_ABOVE):
            return value == measured
        sends_less = value < measured if name in _SENDS_LESS_BELOW else value > measured
        return value == measured or sends_less == (self.loss > LOSES)

    def __str__(self) -> str:
        """Say it in a few words."""
        beside = f"{abs(self.loss):.0%} {'more' if self.loss > 0 else 'less'} loss than all-reduce"
        model = _MODELS[self.model]
        return f"{beside} with {OPTIMIZERS[self.optimizer]} ({model}, {self.steps} steps, {self.ranks} ranks)"


def _runs(
    optimizer: str,
    model: str,
    steps: int,
    *found: tuple[str, float] | tuple[str, float, Mapping[str, Any]],
    **more: Any,
) -> tuple[Known, ...]:
    """Return what one command measured: systems, with losses and options."""
    return tuple(
        Known(system, optimizer, model, steps, loss, options=dict(*options), **more) for system, loss, *options in found
    )


_LOCAL, _UPDATES = {"file": "final-loss-local.json"}, {"file": "final-loss-updates.json"}
_FEEDBACK, _VOTE = {"feedback": True}, {"feedback": False}
_TUNED = {"period": 50, "outer_lr": 1.0, "outer_momentum": 0.5}
_PAPER = {"period": 50, "outer_lr": 0.7, "outer_momentum": 0.9}
_STREAMING = {**_PAPER, "period": 10}

#: What was measured.
KNOWN: tuple[Known, ...] = (
    *_runs(
        *("adam", "bytes-1m", 200),
        ("bytegrad", 0.000),
        ("qsgd(bits=4)", 0.020, {"bits": 4}),
        ("ef_quantized", 0.012),
        ("signsgd", 0.228, _FEEDBACK),
        ("topk", 0.318, {"ratio": 0.01}),
        ("randomk(ratio=0.05)", 0.258, {"ratio": 0.05}),
        ("powersgd", 0.139, {"rank": 2}),
        ("signsgd(feedback=False)", -0.006, _VOTE),
        ("onebit_adam(warmup_steps=40)", 0.026),
        ("qadam(warmup_steps=40)", 0.002),
        ("local_sgd(period=8)", 0.072, {"period": 8}),
        ("decentralized", 0.074, {"topology": "Exponential"}),
        ("low_precision_decentralized", 0.072, {"topology": "Ring"}),
    ),
    *_runs(
        *("adam", "digits", 300),
        ("bytegrad", -0.001),
        ("qsgd(bits=4)", -0.002, {"bits": 4}),
        ("ef_quantized", 0.001),
        ("signsgd", 0.035, _FEEDBACK),
        ("topk", 0.032, {"ratio": 0.01}),
        ("randomk(ratio=0.05)", 0.205, {"ratio": 0.05}),
        ("powersgd", 0.021, {"rank": 2}),
        ("signsgd(feedback=False)", 0.906, _VOTE),
        ("onebit_adam(warmup_steps=60)", 0.004),
        ("qadam(warmup_steps=60)", -0.001),
    ),
    *_runs(
        *("sgd", "digits", 300),
        ("bytegrad", -0.000),
        ("qsgd(bits=4)", 0.009, {"bits": 4}),
        ("ef_quantized", -0.003),
        ("signsgd", 0.083, _FEEDBACK),
        ("topk", 0.032, {"ratio": 0.01}),
        ("randomk(ratio=0.05)", 0.468, {"ratio": 0.05}),
        ("powersgd", 0.029, {"rank": 2}),
        ("local_sgd(period=8)", 0.048, {"period": 8}),
        ("decentralized", 0.008, {"topology": "Exponential"}),
        ("low_precision_decentralized", 0.007, {"topology": "Ring"}),
        ("diloco", 0.448, _PAPER),
        ("signsgd(feedback=False,lr=1e-4)", 0.844, _VOTE),
        ("dgc(ratio=0.01,ratio_warmup_steps=60)", -0.013, {"ratio": 0.01}),
    ),
    *_runs(
        "sgd",
        "digits",
        300,
        ("async_averaging", 0.077, {"period": 8}),
        ("streaming_diloco", 0.343, _STREAMING),
        **_LOCAL,
    ),
    *_runs("sgd", "digits", 3000, ("diloco", 0.028, _PAPER), seeds=(0,), **_LOCAL),
    *_runs("sgd", "digits", 3000, ("diloco(outer_lr=1.0,outer_momentum=0.5)", -0.001, _TUNED), **_LOCAL),
    *_runs("sgd", "digits", 300, ("async_sgd", 0.037, {"push": "updates", "period": 4}), **_UPDATES),
    *_runs("adam", "bytes-1m", 200, ("async_sgd", 0.102, {"push": "updates", "period": 4}), seeds=(0, 1), **_UPDATES),
    *_runs(
        *("adam", "bytes-1m", 800),
        ("diloco(outer_lr=1.0,outer_momentum=0.5)", 0.128, _TUNED),
        seeds=(0, 2),
        **_LOCAL,
    ),
    *_runs(
        *("adam", "bytes-1m", 400),
        ("diloco(period=50)", 0.164, _PAPER),
        seeds=(0, 1),
        file="final-loss-sharded.json",
    ),
)


def measured(algorithm: Algorithm, kind: str) -> Known | None:
    """Return what speaks most against an algorithm, of what was measured with a kind of optimizer; None: nothing was.

    Of the runs of one model the best counts, as more steps may make up for a slow start; of the models the worst. What
    was not measured with Muon counts as with AdamW, which does not step in proportion to gradients either.
    """
    found = [each for each in _known_with(kind) if each.speaks_of(algorithm)]
    found.sort(key=_model)
    best = [min(runs, key=_loss) for _, runs in groupby(found, key=_model)]
    return max(best, key=_loss, default=None)


def loses_with(algorithm: Algorithm, optimizer_kind: str) -> Known | None:
    """Return the run in which an algorithm lost more than `LOSES` with an optimizer, or None where none is known.

    Args:
        algorithm: An instance that has its name (`create`).
        optimizer_kind: "sgd", "adam" or "muon".
    """
    found = measured(algorithm, optimizer_kind)
    return found if found is not None and found.loss > LOSES else None


def doubt(algorithm: Algorithm, optimizer_kind: str) -> str:
    """Return why an algorithm should not be chosen with an optimizer without a look at the loss; "" where nothing is.

    It is known to lose, or it is made for another optimizer and was not measured with this one.
    """
    found = measured(algorithm, optimizer_kind)
    if found is not None:
        return str(found) if found.loss > LOSES else ""
    if algorithm.made_for in ("any", optimizer_kind) or (optimizer_kind, algorithm.made_for) == ("muon", "adam"):
        return ""
    own = OPTIMIZERS.get(algorithm.made_for, algorithm.made_for)
    return f"made for {own}, not measured with {OPTIMIZERS[optimizer_kind]}"


def keeping_up(optimizer_kind: str) -> list[str]:
    """Return the systems that were measured with an optimizer and lost at most `LOSES` in every run, the best first."""
    alike: dict[str, list[Known]] = {}
    for each in _known_with(optimizer_kind):
        alike.setdefault(f"{each.algorithm} {each.options}", []).append(each)
    worst = sorted((max(runs, key=_loss) for runs in alike.values()), key=_loss)
    return [each.system for each in worst if each.loss <= LOSES]


def _known_with(kind: str) -> list[Known]:
    """Return what was measured with a kind of optimizer; for "muon", with which nothing was, that with "adam"."""
    return [each for each in KNOWN if each.optimizer == ("adam" if kind == "muon" else kind)]


def _option(algorithm: Algorithm, name: str) -> Any:
    """Return an option of an instance as `Known.options` has it."""
    value = getattr(algorithm, name, None)
    if value is None:
        value = getattr(algorithm.channel, name, None)
    return type(value).__name__ if isinstance(value, Topology) else value


def _model(known: Known) -> str:
    return known.model


def _loss(known: Known) -> float:
    return known.loss
