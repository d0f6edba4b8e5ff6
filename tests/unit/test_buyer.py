"""`commlib compare` for a buyer: prices and budgets, advice on networks, the report in HTML, CSV."""

import csv
import dataclasses
import io
import json
import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from commlib.algorithms.base import EXACTNESS
from commlib.cli import app
from commlib.errors import ConfigError
from commlib.network import presets, workloads
from commlib.network.model import Layer, Network, Workload
from commlib.reports import comparison as report
from commlib.reports import targets
from commlib.reports.advice import network_advice
from commlib.reports.assumptions import ACCURACY, UNTRIED, machines, summary
from commlib.reports.csv_rows import HEADER
from commlib.reports.page import page
from commlib.reports.rows import amount
from commlib.simulation import compare, cost
from commlib.simulation.simulator import Options

LAYERS = tuple(Layer(f"l{idx}", (("weight", (512, 512)), ("bias", (512,))), 1.0) for idx in range(3))
SMALL = Workload("small", LAYERS, batch_per_rank=4, forward_s=1e-3, backward_s=2e-3, optimizer_s=1e-4, device="v100")
TOKENS = dataclasses.replace(SMALL, tokens_per_sample=100)
NETWORK = Network("pair", nodes=2, gpus_per_node=2, bandwidth_gbps=1.0, latency_us=20.0)
TWO = ["--network", "1gbps,10gbps", "--nodes", "2", "--gpus-per-node", "2", "--algorithms", "bytegrad,topk,allreduce"]


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.json"
    workloads.save(SMALL, path)
    return str(path)


def run(*arguments, columns="80"):
    return CliRunner().invoke(app, ["compare", "--steps", "1", *arguments], env={"COLUMNS": columns})


def compared(text, network=NETWORK, workload=SMALL, price=None):
    chosen = compare.candidates(text, several_per_node=True)
    found = compare.compare(workload, network, presets.device("v100"), chosen, Options(steps=1, bucket_cap_mb=1.0))
    return dataclasses.replace(found, price=price)


# --- prices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workload", "per_sample"), [(SMALL, 1), (TOKENS, 100)])
def test_a_cost_is_the_price_of_all_nodes_for_the_time(workload, per_sample):
    comparison = compared("allreduce", workload=workload, price=cost.Price(1800.0, budget=10.0))
    found, step_s = comparison.cost(comparison.ddp), comparison.ddp.step_s
    assert found.per_step == pytest.approx(2 * 0.5 * step_s), "two nodes at 0.5 a second"
    units = 4 * 4 * per_sample
    assert found.per_million == pytest.approx(found.per_step / units * 1e6)
    assert found.steps == int(10 / step_s)
    assert found.units == pytest.approx(found.steps * units)
    assert compared("allreduce").cost(comparison.ddp) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2.5", {"a": 2.5, "b": 2.5}), ("b=4, a=2.5", {"a": 2.5, "b": 4.0}), (None, {})],
)
def test_prices_are_one_or_one_for_each_network(text, expected):
    assert {name: price.per_hour for name, price in cost.prices(text, ["a", "b"]).items()} == expected


@pytest.mark.parametrize(
    ("text", "budget", "message"),
    [
        ("cheap", None, "--price-per-hour: expected an amount above 0, such as 2.5, got 'cheap'"),
        ("1e13", None, "--price-per-hour: expected an amount from 1e-09 to 1e[+]12, got '1e13'"),
        ("", None, "got ''"),
        ("0", None, "got '0'"),
        ("nan", None, "got 'nan'"),
        ("a=1,b=-1", None, "got '-1'"),
        ("a=1,b=", None, "got ''"),
        ("a=1,2", None, "--price-per-hour: expected NETWORK=PRICE for each network, got '2'"),
        ("a=1", None, "--price-per-hour: b has no price in 'a=1'; add NETWORK=PRICE"),
        ("a=1,b=2,c=3", None, "--price-per-hour: 'c' is not compared; expected a, b"),
        ("a=1,b=2,a=3", None, "--price-per-hour: a has two prices; expected one"),
        (None, 5.0, "--budget: expected --price-per-hour with it"),
        ("1", 1e300, "--budget: expected an amount from 1e-09 to 1e[+]12, got 1e[+]300"),
    ],
)
def test_bad_prices_are_refused(text, budget, message):
    with pytest.raises(ConfigError, match=message):
        cost.prices(text, ["a", "b"], budget)


def test_prices_add_columns_and_a_budget_more(small):
    plain = run("--workload", small, *TWO).stdout
    assert "cost" not in plain
    priced = run("--workload", small, *TWO, "--price-per-hour", "1gbps=2,10gbps=2.5")
    assert priced.exit_code == 0, priced.output
    assert priced.stdout.count("cost/M: of a million samples, on 2 nodes at 2") == 2
    assert "2.5 per hour each" in priced.stdout
    assert "buys M" not in priced.stdout
    both = run("--workload", small, *TWO, "--price-per-hour", "2", "--budget", "500").stdout
    assert "buys M: millions of samples for 500." in " ".join(map(str.strip, both.splitlines()))


def test_json_has_the_costs(small):
    arguments = ["--workload", small, *TWO, "--json"]
    for comparison in json.loads(run(*arguments).stdout):
        assert comparison["price"] is comparison["ddp"]["cost"] is comparison["rows"][0]["cost"] is None
    for comparison in json.loads(run(*arguments, "--price-per-hour", "2", "--budget", "500").stdout):
        assert comparison["price"] == {"per_hour": 2.0, "budget": 500.0, "unit": "samples"}
        for row in (comparison["ddp"], *comparison["rows"]):
            assert row["cost"]["per_step"] == pytest.approx(2 * 2 / 3600 * row["step_s"])
            assert row["cost"]["steps"] * row["cost"]["per_step"] == pytest.approx(500, rel=1e-3)


def test_amounts_have_three_digits():
    assert [amount(value) for value in (0.012345, 1.0, 99.96, 123.4, 999.6, 12345.6)] == [
        *("0.0123", "1.00", "100", "123", "1,000", "12,346")
    ]  # fmt: skip


def test_a_table_with_costs_is_readable_in_80_columns():
    out = io.StringIO()
    report.show(compared("all", price=cost.Price(2.0, 500.0)), Console(width=80, file=out))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    (header,) = [line for line in lines if line.startswith("algorithm ")]
    assert header.split("  ")[-1].strip() == "buys M"
    assert all(title in header for title in ("class", "step ms", "speed-up", "loss", "cost/M"))
    assert any(line.startswith("low_precision_") for line in lines)


def test_a_profile_can_count_tokens(tmp_path):
    script, output = tmp_path / "mine.py", tmp_path / "mine.json"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(64, 8)\n"
        "def step(model):\n    model(torch.ones(4, 64)).sum().backward()\n"
    )
    arguments = ["profile", str(script), "--output", str(output), "--steps", "1", "--tokens-per-sample", "7"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert (workloads.load(output).tokens_per_sample, cost.unit(workloads.load(output))) == (7, "tokens")
    assert [cost.unit(workloads.get(name)) for name in ("vgg16", "gpt2", "llama3-8b")] == [
        "samples",
        "tokens",
        "tokens",
    ]


# --- advice on networks -----------------------------------------------------------------------------------------------

SLOW, MEDIUM, FAST = (
    dataclasses.replace(NETWORK, name=name, bandwidth_gbps=gbps)
    for name, gbps in (("slow", 0.001), ("medium", 12.0), ("fast", 1000.0))
)


def test_the_slowest_network_near_a_step_without_communication_is_advised():
    comparisons = [compared("bytegrad(hierarchical=True), topk", each) for each in (FAST, SLOW, MEDIUM)]
    text = network_advice(comparisons)
    assert "The slowest network within 10% of a step without communication is medium: topk" in text
    (row,) = [row for row in comparisons[2].rows if row.algorithm == "topk"]
    assert f"+{row.result.step_s / SMALL.step_s - 1:.0%}" in text
    assert "(exact)" in network_advice(comparisons[:1]), "the most exact of several"


def test_the_cheapest_network_is_advised():
    prices = {"medium": 3.0, "fast": 2.0}
    comparisons = [compared("topk", each, price=cost.Price(prices[each.name])) for each in (MEDIUM, FAST)]
    text = network_advice(comparisons)
    assert text.startswith("The cheapest network within 10% of a step without communication is fast: ")
    assert "per million samples" in text
    assert "The lowest cost" not in text, "it is that of the advised choice"


def test_a_lower_cost_on_a_slower_network_is_named_too():
    slow = dataclasses.replace(NETWORK, name="slow", bandwidth_gbps=1.0)
    prices = {"slow": 0.01, "fast": 2.0}
    text = network_advice([compared("topk", each, price=cost.Price(prices[each.name])) for each in (slow, FAST)])
    first, second = text.split(" The lowest cost is that of ")
    assert "is fast: " in first
    assert re.fullmatch(r"topk \(compensated, loss \+3%\), .* per million samples, on slow\.", second)


def test_a_network_on_which_no_algorithm_is_near_is_not_advised():
    text = network_advice([compared("topk, allreduce", SLOW), compared("allreduce", SLOW)])
    assert text.startswith("No network is within 10% of a step without communication with an advised algorithm.")
    assert re.search(r"Nearest: topk \(compensated, loss \+3%\), \d+ times as long on slow\.$", text)
    assert network_advice([compared("allreduce", SLOW)]).startswith("slow is not within 10%")


@pytest.mark.parametrize(
    ("field", "value"), [("doubt", "loses more"), ("doubt", "not measured"), ("fits", False)], ids=["*", "?", "!"]
)
def test_rows_with_a_mark_are_never_advised(field, value):
    comparison = compared("topk, allreduce", MEDIUM)
    assert "topk" in network_advice([comparison])
    loss = 0.3 if value == "loses more" else None
    rows = [dataclasses.replace(row, **{field: value}, loss=loss) for row in comparison.rows if row.algorithm == "topk"]
    rows += [row for row in comparison.rows if row.algorithm != "topk"]
    assert "topk" not in network_advice([dataclasses.replace(comparison, rows=tuple(rows))])
    too_small = dataclasses.replace(comparison.device, memory_gbytes=1e-9)
    nothing = network_advice([dataclasses.replace(comparison, rows=(), device=too_small)])
    assert nothing == "No network is advised: every row has a mark."


# --- devices ---------------------------------------------------------------------------------------------------------


def test_the_output_names_the_device_of_the_times_and_other_machines():
    comparison = compared("allreduce")
    assert machines(comparison) == ""
    assert "ms a step alone on v100) on pair" in summary(comparison)
    other = dataclasses.replace(comparison, device=presets.device("h100"))
    assert "ms a step alone on v100) on pair" in summary(other)
    assert machines(other).startswith("The time of a step alone is that on v100: h100 changes only")
    elsewhere = dataclasses.replace(comparison, network=presets.network("h100-400g"))
    assert machines(elsewhere) == "h100-400g describes machines with h100, and is simulated with v100."
    assert {each.device for each in presets.NETWORKS.values()} <= presets.DEVICES.keys()


def test_another_optimizer_keeps_the_device_of_the_times():
    workload = report.Selection("gpt2", [], optimizer="sgd", device="v100").get_workload()
    assert (workload.optimizer, workload.device) == ("sgd", "h100")


# --- CSV --------------------------------------------------------------------------------------------------------------


def test_csv_has_a_stable_header_and_all_rows(small, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("old")
    path.chmod(0o640)
    result = run("--workload", small, *TWO, "--csv", str(path))
    assert result.exit_code == 0, result.output
    assert "DDP-style all-reduce" in result.stdout, "the table is printed, too"
    assert path.stat().st_mode & 0o777 == 0o640
    printed = run("--workload", small, *TWO, "--csv", "-", "--price-per-hour", "2", "--budget", "500").stdout
    for text, is_priced in ((path.read_text(), False), (printed, True)):
        rows = list(csv.DictReader(io.StringIO(text)))
        assert tuple(rows[0]) == HEADER
        assert [row["network"] for row in rows] == ["1gbps"] * 4 + ["10gbps"] * 4
        assert {row["algorithm"] for row in rows} == {"DDP-style all-reduce", "bytegrad", "topk", "allreduce"}
        assert all(bool(row["cost_per_million"]) == bool(row["budget_steps"]) == is_priced for row in rows)
    page_of_docs = (Path(__file__).parents[2] / "docs/how-to/choose-a-network.md").read_text()
    assert all(f"`{name}`" in page_of_docs for name in HEADER)


def test_csv_and_json_are_not_both_printed(small):
    result = run("--workload", small, *TWO, "--csv", "-", "--json")
    assert (result.exit_code, "--csv -: expected a file" in result.output) == (2, True)


def test_sharded_models_have_a_report_too(tmp_path):
    blocks = tuple(dataclasses.replace(layer, name=f"blocks.{idx}") for idx, layer in enumerate(LAYERS))
    workloads.save(dataclasses.replace(SMALL, layers=blocks), tmp_path / "blocks.json")
    shard = ["--network", "1gbps", "--nodes", "2", "--gpus-per-node", "2", "--shard", "4", "--weights", "fp32,int8"]
    arguments = [*shard, "--csv", "-", "--html", str(tmp_path / "r.html"), "--price-per-hour", "3"]
    result = run("--workload", str(tmp_path / "blocks.json"), *arguments)
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [row["shard"] for row in rows] == ["4"] * 3
    text = (tmp_path / "r.html").read_text()
    assert "fp32 weights, int8 gradients" in text.replace("<wbr>", "")
    assert "Sharded by all ranks" in text


# --- the report -------------------------------------------------------------------------------------------------------


class _Page(HTMLParser):
    """Collects tags, attributes that load something, and texts by tag."""

    LOADS = ("src", "href", "srcset", "data", "action", "poster", "background", "xlink:href", "formaction")

    def __init__(self, text):
        super().__init__()
        self.tags, self.loaded, self.texts = [], [], {}
        self._open = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._open.append(tag)
        self.loaded += [value for name, value in attrs if name in self.LOADS]

    def handle_data(self, data):
        self.texts.setdefault(self._open[-1] if self._open else "", []).append(data)

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass


def test_a_report_loads_nothing_and_has_all_parts(small, tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    command = ["commlib", "compare", "--workload", "<small>", "--html", "a b.html"]
    monkeypatch.setattr(sys, "argv", command)
    result = run("--workload", small, *TWO, "--price-per-hour", "2", "--budget", "500", "--html", str(path))
    assert result.exit_code == 0, result.output
    text = path.read_text()
    found = _Page(text)
    assert all(value.startswith("data:") for value in found.loaded), found.loaded
    assert not {"iframe", "object", "embed", "base", "form", "a"} & set(found.tags)
    assert found.tags.count("link") == 1
    assert not re.search(r"url\(|@import|https?:|fetch\(|XMLHttp|import\(|WebSocket", text)
    assert "default-src 'none'" in text, "the browser refuses requests, too"
    assert (found.tags.count("table"), found.tags.count("svg")) == (2, 2)
    assert len(found.texts["button"]) == 2 * len(set(found.texts["button"])) > 20
    assert {"workload", "network", "transport", "device", "baseline", "price", "versions"} <= set(found.texts["dt"])
    assert "commlib compare --workload '<small>' --html 'a b.html'" in "".join(found.texts["pre"])
    assert "<small>" not in text, "escaped"
    assert "The cheapest network" in text or "No network" in text
    assert "at most 23 Gbit/s" in text
    assert {"Classes", "Accuracy and limits"} <= set(found.texts["h2"])
    assert set(EXACTNESS) <= set(found.texts["dt"])
    guide = " ".join((Path(__file__).parents[2] / "docs/how-to/choose-a-network.md").read_text().split())
    assert ACCURACY.partition(" (")[0] in guide
    assert {ACCURACY, UNTRIED} <= set(found.texts["p"])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["report.html", "small.json"]


def test_a_report_embeds_the_plots(tmp_path):
    picture = tmp_path / "small.png"
    picture.write_bytes(b"\x89PNG")
    assert '<img src="data:image/png;base64,iVBORw=="' in page([compared("allreduce")], "commlib compare", [picture])


@pytest.mark.parametrize("option", ["--html", "--csv"])
def test_a_file_that_cannot_be_written_is_an_error_before_the_work(monkeypatch, option):
    monkeypatch.setattr(compare, "compare", lambda *_: pytest.fail("it simulated"))
    result = run(*TWO, option, "/nowhere/file", columns="120")
    assert result.exit_code == 2
    assert f"{option}: cannot write '/nowhere/file': No such file or directory" in result.output


def test_a_file_is_written_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file.txt"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "replace", fail)
    for target in (path, tmp_path / "new.txt"):
        with pytest.raises(ConfigError, match="--csv: cannot write '.*': No space left on device"):
            targets.write_text(target, "new", "--csv")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ConfigError, match="--csv: cannot write '/dev/full'"):
        targets.write_text("/dev/full", "new", "--csv")
    assert report.Output(csv=Path("-")).prints_csv
