"""The known losses with an optimizer: the table against the result files, and its use."""

import ast
import json
import re
from pathlib import Path
from statistics import fmean

import pytest
import torch
from torch import nn

from commlib import algorithms
from commlib.algorithms.auto import Auto
from commlib.algorithms.known import (
    LOSES,
    OPTIMIZERS,
    doubt,
    keeping_up,
    known_losses,
    loses_with,
    measured,
    worst_measured,
)
from commlib.engine import optimizers
from commlib.errors import LossWarning
from commlib.optim import DeMo, FrozenVarianceAdam
from commlib.simulation.compare import candidates
from commlib.tuner import candidates_of, doubts
from commlib.wrap import _warn_of_losses

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FOLDER = Path(algorithms.__file__).parent


def made(text):
    (algorithm,) = candidates(text).values()
    return algorithm


def rows_of(file):
    return json.loads((RESULTS / file).read_text())["rows"]


def losses(known, system):
    """The losses of a system in the run that an entry names, by seed."""
    run = (known.model, known.trained_with, known.steps, known.ranks, f"commlib:{system}@1")
    names = ("model", "optimizer", "steps", "ranks", "system")
    return {r["seed"]: r["loss"] for r in rows_of(known.file) if tuple(r[name] for name in names) == run}


@pytest.mark.parametrize(
    "known", known_losses(), ids=lambda known: f"{known.optimizer}-{known.model}-{known.steps}-{known.system}"
)
def test_every_figure_is_that_of_the_result_file(known):
    own, exact = losses(known, known.system), losses(known, known.baseline)
    assert tuple(sorted(own.keys() & exact.keys())) == known.seeds
    assert abs(fmean(own[seed] / exact[seed] - 1 for seed in known.seeds) - known.loss) <= 0.0005 + 1e-9


def test_whatever_was_measured_with_its_defaults_is_known():
    """Except `passive_gossip`, whose algorithm has changed since, and `allreduce`, the baseline of all others."""
    measured = set()
    for path in RESULTS.glob("final-loss*.json"):
        for row in rows_of(path.name):
            library, _, system = row["system"].partition(":")
            if library == "commlib" and row["model"] in ("digits", "bytes-1m"):
                measured.add((system.partition("(")[0].partition("@")[0], row["optimizer"], row["model"]))
    known = {(each.algorithm, OPTIMIZERS[each.optimizer].lower(), each.model) for each in known_losses()}
    of_one_seed = {each for each in measured if each[1:] == ("sgd", "bytes-1m")}
    assert measured - known - of_one_seed == {
        ("passive_gossip", "sgd", "digits"),
        *(("allreduce", *where) for where in (("sgd", "digits"), ("adamw", "digits"), ("adamw", "bytes-1m"))),
    }


def test_every_entry_speaks_of_what_was_measured():
    for known in known_losses():
        assert known.speaks_of(of_system(known.system)), known


def of_system(text):
    """The algorithm of a system in the benchmark."""
    tree = ast.parse(text, mode="eval").body
    keywords = tree.keywords if isinstance(tree, ast.Call) else []
    given = [f"{k.arg}={_literal(k.value)}" for k in keywords if k.arg not in ("lr", "optimizer")]
    return made(f"{text.partition('(')[0]}({', '.join(given)})")


def _literal(value: ast.expr) -> str:
    """The benchmark's command line has words without quotes."""
    return repr(value.id) if isinstance(value, ast.Name) else ast.unparse(value)


@pytest.mark.parametrize(
    ("text", "kind", "loses"),
    [
        ("topk", "adam", True),
        ("topk(ratio=0.001)", "adam", True),  # sends less than the measured one
        ("topk(ratio=0.1)", "adam", False),  # more: not known
        ("topk(hierarchical=True)", "adam", True),
        ("topk", "sgd", False),
        ("powersgd(rank=1)", "adam", True),
        ("powersgd(rank=4)", "adam", False),
        ("local_sgd", "adam", True),
        ("local_sgd(period=16)", "adam", True),
        ("local_sgd(period=2)", "adam", False),
        ("signsgd", "adam", True),
        ("diloco", "adam", True),
        ("diloco", "sgd", False),  # 300 steps are too few for it, 3,000 are enough
        ("streaming_diloco", "sgd", True),
        ("topk", "muon", True),  # not measured with it: as with AdamW
        ("diloco_muon", "adam", False),  # its own kind counts
        ("diloco(period=20, outer_lr=1.0, outer_momentum=0.5)", "muon", False),  # sends more than the measured one
        ("diloco", "muon", True),  # other options
        ("noloco", "adam", True),
        ("dgc", "adam", True),
        ("bytegrad", "muon", False),
        ("topk(ef21=0.1)", "adam", False),  # another gradient: not known
        ("signsgd(feedback=False)", "adam", True),  # on one model of two
        ("bytegrad", "adam", False),
        ("onebit_adam", "adam", False),
        ("allreduce", "adam", False),
    ],
)
def test_what_is_known_to_lose(text, kind, loses):
    found = loses_with(made(text), kind)
    assert (found is not None) == loses
    if found is not None:
        assert found.loss > LOSES
        assert found.algorithm == text.split("(")[0]
        assert found.optimizer == kind or (kind, found.optimizer) == ("muon", "adam")


def test_of_several_models_the_worst_counts():
    found = loses_with(made("signsgd(feedback=False)"), "adam")
    assert found is not None
    assert (found.model, round(found.loss, 2)) == ("digits", 0.91)


def test_what_is_made_for_another_optimizer_is_doubted_unless_it_was_measured():
    assert doubt(made("gossip"), "adam") == "made for SGD, not measured with AdamW"
    assert doubt(made("sparse_loco"), "sgd") == "made for AdamW, not measured with SGD"
    assert doubt(made("diloco"), "sgd") == ""  # made for AdamW, but keeps up
    assert doubt(made("noloco(period=10)"), "adam") == "not measured with AdamW"
    assert doubt(made("topk(ef21=0.1)"), "adam").endswith("not measured with AdamW")  # another gradient
    assert doubt(made("allreduce"), "adam") == ""  # exact
    assert doubt(made("bytegrad"), "adam") == ""
    assert doubt(made("topk"), "adam").startswith("32% more loss than all-reduce with AdamW")


#: A row of `commlib compare` in a page: name, mark, class, step, speed-up, loss.
SHOWN = re.compile(
    r"^ *(?P<name>[a-z_0-9]+(?:\([^)]*\))?)(?P<mark>[*?]?) +(?:exact|8bit|compensated|any) +[\d,.]+ +[\d.]+ +"
    r"(?P<loss>[+-]\d+%|\?)",
    re.MULTILINE,
)


@pytest.mark.parametrize("page", ["docs/index.md", "docs/tutorial.md"])
def test_the_output_in_the_pages_has_the_known_losses(page):
    """Both show a workload with AdamW."""
    rows = list(SHOWN.finditer((RESULTS.parents[1] / page).read_text()))
    assert rows
    for row in rows:
        algorithm = made(row["name"])
        found = measured(algorithm, "adam")
        loss = "?" if found is None else f"{found.loss:+.0%}"
        mark = "" if not doubt(algorithm, "adam") else "?" if found is None else "*"
        assert (row["mark"], row["loss"]) == (mark, loss), row["name"]


def test_without_an_optimizer_the_worst_result_counts_but_not_for_a_copy():
    assert worst_measured(made("topk")).optimizer == "adam"
    assert worst_measured(made("topk")).loss == measured(made("topk"), "adam").loss
    assert worst_measured(made("randomk(ratio=0.05)")).optimizer == "sgd"
    assert worst_measured(made("topk(ratio=0.5)")).loss < LOSES
    assert worst_measured(made("gossip")) is None
    with pytest.warns(LossWarning, match="topk: 32% more loss .* Pass optimizer= to compare yours"):
        _warn_of_losses(made("topk"), None, is_copy=False)
    _warn_of_losses(made("topk"), None, is_copy=True)
    _warn_of_losses(made("bytegrad"), None, is_copy=False)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_keeps_up_is_not_known_to_lose(kind):
    names = keeping_up(kind)
    assert "bytegrad" in names
    assert not [name for name in names if name.startswith(("signsgd", "randomk"))]
    for name in names:
        assert loses_with(of_system(name), kind) is None


def test_every_algorithm_says_what_it_is_made_for():
    for name in algorithms.list():
        cls = algorithms.get(name)
        if Path(FOLDER / f"{name}.py").exists():
            assert vars(cls)["made_for"] in ("any", *OPTIMIZERS), name
    assert (made("signsgd").made_for, made("signsgd(feedback=False)").made_for) == ("sgd", "any")


class Lion(torch.optim.SGD.__base__):
    """Known by no name here."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-4})


class MySGD(torch.optim.SGD):
    """An SGD of the user's."""


class Proxy:
    """As accelerate's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def parameters():
    return [nn.Parameter(torch.zeros(2))]


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.optim.SGD(parameters(), lr=0.1, momentum=0.9), "sgd"),
        (lambda: MySGD(parameters(), lr=0.1), "sgd"),
        (lambda: torch.optim.ASGD(parameters()), "sgd"),
        (lambda: Proxy(Proxy(MySGD(parameters(), lr=0.1))), "sgd"),
        (lambda: [MySGD(parameters(), lr=0.1), torch.optim.SGD(parameters(), lr=0.1)], "sgd"),
        (lambda: [torch.optim.SGD(parameters(), lr=0.1), torch.optim.AdamW(parameters())], "adam"),
        (lambda: torch.optim.AdamW(parameters()), "adam"),
        (lambda: torch.optim.NAdam(parameters()), "adam"),
        (lambda: torch.optim.Adafactor(parameters()), "adam"),
        (lambda: torch.optim.RMSprop(parameters()), "adam"),
        (lambda: FrozenVarianceAdam(parameters()), "adam"),
        (lambda: DeMo(parameters()), "adam"),
        (lambda: Proxy(torch.optim.AdamW(parameters())), "adam"),
        (lambda: Lion(parameters()), "adam"),
        (lambda: None, "adam"),
        (lambda: [torch.optim.Muon([nn.Parameter(torch.ones(2, 2))]), torch.optim.AdamW(parameters())], "muon"),
    ],
)
def test_the_kind_of_an_optimizer(make, kind):
    assert optimizers.kind_of(optimizers.resolve(make())) == kind


@pytest.mark.parametrize(
    ("allow", "kind", "names"),
    [
        ("8bit", torch.optim.AdamW, ["allreduce", "bytegrad"]),
        ("compensated", torch.optim.AdamW, ["allreduce", "bytegrad", "ef_quantized"]),
        ("any", torch.optim.AdamW, ["allreduce", "bytegrad", "ef_quantized"]),
        ("compensated", torch.optim.SGD, ["allreduce", "bytegrad", "ef_quantized", "topk", "powersgd"]),
    ],
)
@pytest.mark.parametrize("has_nodes", [False, True])
def test_auto_does_not_consider_what_is_known_to_lose(allow, kind, names, has_nodes):
    optimizer = kind(parameters())
    assert [each.name for each in candidates_of(Auto(allow=allow), optimizer, has_nodes)] == names


def test_auto_honours_candidates_that_are_named():
    auto = Auto(allow="compensated", candidates=["allreduce", "topk"])
    found = candidates_of(auto, torch.optim.AdamW(parameters()))
    assert [each.name for each in found] == ["allreduce", "topk"]
    assert doubts(found, "adam").startswith("topk: 32% more loss than all-reduce with AdamW")
    assert doubts(found, "sgd") == ""
