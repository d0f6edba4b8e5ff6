"""The output of `commlib compare`: screens of several widths, recommendations, `auto`, families and pictures."""

import dataclasses
import io
import itertools
import math
import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

from commlib import algorithms
from commlib.algorithms.known import LOSES, measured
from commlib.cli import app
from commlib.errors import ConfigError
from commlib.network import presets, workloads
from commlib.network.model import Layer, Network, Workload
from commlib.reports import comparison as report
from commlib.reports import families, plots, progress, sweeps
from commlib.reports.advice import _best_by_class, advice
from commlib.reports.csv_rows import to_csv
from commlib.reports.rows import rows_of
from commlib.simulation import compare, timeline
from commlib.simulation.simulator import Options

LAYERS = tuple(Layer(f"l{idx}", (("weight", (512, 512)), ("bias", (512,))), 1.0) for idx in range(3))
SMALL = Workload("small", LAYERS, batch_per_rank=4, forward_s=1e-3, backward_s=2e-3, optimizer_s=1e-4, device="v100")
NETWORK = Network("pair", nodes=2, gpus_per_node=2, bandwidth_gbps=1.0, latency_us=20.0)
OPTIONS = report.Options(steps=1, bucket_cap_mb=1.0)
LONG = "topk(ratio=0.001, op='mean', hierarchical=True), low_precision_decentralized(period=2, hierarchical=True)"


def compared(text, network=NETWORK, workload=SMALL):
    chosen = compare.candidates(text, several_per_node=True)
    return compare.compare(workload, network, presets.device("v100"), chosen, OPTIONS)


@pytest.fixture(scope="module")
def everything():
    """All algorithms, some with long lists of options."""
    found, more = compared("all"), compared(LONG)
    rows = sorted((*found.rows, *more.rows), key=lambda row: row.result.step_s)
    return dataclasses.replace(found, rows=tuple(rows))


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.json"
    workloads.save(SMALL, path)
    return str(path)


def run(*arguments, columns="80"):
    return CliRunner().invoke(app, [*arguments], env={"COLUMNS": columns})


def shown(comparison, width, wide=False):
    out = io.StringIO()
    report.show(comparison, Console(width=width, file=out), wide)
    return out.getvalue().splitlines()


def table_of(lines):
    """Return the lines of the table below its rule."""
    begin = next(idx for idx, line in enumerate(lines) if line.startswith("─"))
    end = next(idx for idx, line in enumerate(lines) if line.startswith(("loss: ", "not simulated", "Use ")))
    return lines[begin - 1], lines[begin + 1 : end]


@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_screen_has_whole_names_and_no_longer_line(everything, width):
    lines = shown(everything, width)
    assert max(map(len, lines)) <= width
    header, rows = table_of(lines)
    assert header.split("  ")[0] == "algorithm"
    text = "\n".join(rows)
    for row in everything.rows:
        words = [part for part in row.algorithm.replace("(", "(|").replace(", ", ",|").split("|") if part]
        assert all(word in text for word in words), row.algorithm
        if len(row.algorithm) <= 38:
            name = row.algorithm + row.mark
            assert any(re.match(rf" *{re.escape(name)}(,| |$)", line) for line in rows), name


def test_a_loss_above_the_limit_is_not_shown_as_the_limit():
    comparison = compared("bytegrad")
    (row,) = comparison.rows
    shown = {}
    for loss, doubt in ((0.052, "5% more"), (0.318, "32% more"), (0.048, ""), (None, "not measured")):
        one = dataclasses.replace(comparison, rows=(dataclasses.replace(row, loss=loss, doubt=doubt),))
        shown[loss] = rows_of(one)[1].cells["loss"]
    assert shown == {0.052: "+5.2%", 0.318: "+32%", 0.048: "+5%", None: "?"}


def test_an_algorithm_slower_than_the_baseline_is_not_the_best():
    rows = [{"bytegrad": [0.9, 1.5, math.nan], "topk": [0.8, 2.0, math.nan]}]
    found = sweeps._best_by_class(compare.candidates("bytegrad, topk"), rows, "DDP-style all-reduce")
    assert found["8bit"] == [
        [("DDP-style all-reduce", 1.0), ("bytegrad", 1.5), ("bytegrad", pytest.approx(math.nan, nan_ok=True))]
    ]
    assert found["compensated"][0][1] == ("topk", 2.0)
    assert families.look("DDP-style all-reduce") == families.look("allreduce")
    assert compared("allreduce").baseline in families.BASELINES


def test_columns_come_with_the_width(everything):
    titles = {width: table_of(shown(everything, width))[0] for width in (80, 100, 120)}
    assert all(title in titles[80] for title in ("class", "step ms", "speed-up"))
    assert len(titles[80]) < len(titles[100]) < len(titles[120])
    assert "leaves a node MB" in table_of(shown(everything, 80, wide=True))[0]


def test_variants_stand_below_the_fastest_of_them(everything):
    _, *rows = rows_of(everything)
    found = [({families.base_name(name).rstrip("*?!") for name in row.names}, row) for row in rows]
    tops = [(names, row) for names, row in found if not row.is_variant]
    assert [row.result.step_s for _, row in tops] == sorted(row.result.step_s for _, row in tops)
    assert len({name for names, _ in tops for name in names}) == sum(len(names) for names, _ in tops)
    top, step_s = set(), 0.0
    for names, row in found:
        assert row.is_variant == bool(names & top)
        assert row.result.step_s >= step_s or not row.is_variant
        top = top | names if row.is_variant else names
        step_s = row.result.step_s
    assert any(line.startswith("  bytegrad ") for line in shown(everything, 120))


def test_algorithms_share_a_row_if_all_shown_values_and_marks_are_equal():
    comparison = compared("qsgd, bytegrad, allreduce")
    bytegrad = next(row for row in comparison.rows if row.algorithm == "bytegrad")
    nearly = dataclasses.replace(bytegrad.result, step_s=bytegrad.result.step_s + 1e-9)
    twin = dataclasses.replace(bytegrad, algorithm="twin", result=nearly)
    others = {
        "marked": dataclasses.replace(twin, algorithm="marked", doubt="unknown"),
        "heavy": dataclasses.replace(twin, algorithm="heavy", result=dataclasses.replace(nearly, memory_bytes=10**9)),
    }
    rows = (bytegrad, twin, *others.values(), *(row for row in comparison.rows if row.algorithm == "allreduce"))
    comparison = dataclasses.replace(comparison, rows=rows)
    names = [row.names for row in rows_of(comparison)]
    assert ("bytegrad", "twin") in names
    assert ("marked*",) in names, "another mark"
    assert ("heavy",) in names, "another value, in a column that only wide tables show"
    lines = shown(comparison, 80)
    idx = next(idx for idx, line in enumerate(lines) if line.startswith("bytegrad, "))
    assert lines[idx + 1].strip() == "twin"
    assert len(comparison.as_dict()["rows"]) == len(rows)
    assert len(to_csv([comparison]).splitlines()) == 1 + 1 + len(rows), "header, baseline, rows"


def test_the_plain_name_is_what_the_plain_name_gives(everything):
    rows = {row.algorithm: row.result for row in everything.rows}
    plain = compared("decentralized").rows[0].result
    assert rows["decentralized"].step_s == plain.step_s
    assert not algorithms.create("decentralized").channel.hierarchical
    assert rows["decentralized(hierarchical=True)"].adapter_bytes < plain.adapter_bytes


def test_forms_that_a_selection_left_out_are_named():
    assert any("decentralized(hierarchical=True)" in line for line in shown(compared("decentralized"), 80))
    assert not any("not compared" in line for line in shown(compared("decentralized, local_sgd"), 200)[-2:])
    alone = dataclasses.replace(NETWORK, gpus_per_node=1)
    assert not any("not compared" in line for line in shown(compared("decentralized", alone), 80))


def test_the_last_line_names_the_fastest_of_each_class():
    comparison = compared("allreduce, bytegrad(hierarchical=True), powersgd, decentralized")
    text = advice(comparison).replace("\N{NO-BREAK SPACE}", " ")
    best = {row.exactness: row for row in reversed(comparison.rows)}
    assert f"8bit: {best['8bit'].algorithm}, {best['8bit'].speedup:.3g} times" in text
    assert f"compensated: powersgd, {best['compensated'].speedup:.3g} times" in text
    assert "exact:" not in text  # allreduce is what DDP does
    assert f"{comparison.ddp.exposed_s / comparison.ddp.step_s:.0%}" in text


def test_where_nothing_pays_the_last_line_says_why():
    fast = dataclasses.replace(NETWORK, bandwidth_gbps=1e6, latency_us=0.0, intra_gbps=1e6, intra_latency_us=0.0)
    busy = dataclasses.replace(SMALL, forward_s=1.0, backward_s=2.0)
    assert "Use allreduce, as DDP does: computation hides" in advice(compared("allreduce, bytegrad", fast, busy))
    assert "none of these" in advice(compared("allreduce"))


def test_what_is_known_to_lose_with_the_optimizer_has_a_mark_and_a_reason_and_is_not_recommended():
    adam = dataclasses.replace(SMALL, optimizer="adam")
    for workload, is_marked in ((SMALL, False), (adam, True)):
        comparison = compared("allreduce, powersgd", workload=workload)
        lines = shown(comparison, 80)
        text = " ".join(line.strip() for line in lines)
        (row,) = [line for line in lines if line.startswith("powersgd")]
        assert row.startswith("powersgd*") == is_marked
        assert ("+14%" if is_marked else "+3%") in row
        assert ("* more than 5%: not advised." in text) == is_marked
        assert ("powersgd" in advice(comparison)) != is_marked


def test_what_is_made_for_another_optimizer_and_was_not_measured_is_marked_too():
    adam = dataclasses.replace(SMALL, optimizer="adam")
    (row,) = compared("post_local_sgd", workload=adam).rows
    assert (row.made_for, row.doubt) == ("sgd", "made for SGD, not measured with AdamW")
    assert (row.mark, row.as_dict()["doubt"], row.as_dict()["loss"]) == ("?", row.doubt, None)
    assert "post_local_sgd" not in advice(compared("allreduce, post_local_sgd", workload=adam))


def test_losses_have_a_column_only_if_a_row_has_one():
    assert "loss" not in table_of(shown(compared("allreduce"), 80))[0]
    assert "loss" in table_of(shown(compared("allreduce, bytegrad"), 80))[0]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_nothing_is_advised_that_was_not_measured_with_the_optimizer(optimizer):
    comparison = compared("all", workload=dataclasses.replace(SMALL, optimizer=optimizer))
    advised = [row for row in _best_by_class(comparison) if row.exactness != "exact"]
    assert advised
    for row in advised:
        (algorithm,) = compare.candidates(row.algorithm).values()
        known = measured(algorithm, optimizer)
        assert known is not None, row.algorithm
        assert row.loss == known.loss <= LOSES
    unknown = {row.algorithm for row in comparison.rows if row.mark == "?"}
    assert "zero_one_adam" in unknown, "an algorithm that was not measured with either optimizer"
    text = " ".join(line.strip() for line in shown(comparison, 80))
    name = "SGD" if optimizer == "sgd" else "AdamW"
    assert f"? not measured with {name} and these options: not advised." in text


def test_auto_is_not_what_loses_with_the_workloads_optimizer(small):
    slow = {"nodes": 2, "gpus_per_node": 1, "bandwidth_gbps": 0.01}

    def label(optimizer):
        selection = report.Selection(
            small, ["1gbps"], "auto(candidates=None, allow='compensated')", overrides=slow, optimizer=optimizer, steps=1
        )
        (comparison,) = report.run(selection)
        return comparison.rows[0].algorithm.split(": ")[1]

    assert label("sgd") in ("topk", "powersgd")
    assert label("adam") == "ef_quantized"


def test_the_optimizer_is_replaced(small):
    adam = report.Selection(small, ["10gbps"], optimizer="adam").get_workload()
    assert (adam.optimizer, SMALL.optimizer) == ("adam", "sgd")
    assert adam.optimizer_s == workloads.with_optimizer(SMALL, "adam").optimizer_s
    assert report.Selection(small, ["10gbps"], optimizer="sgd").get_workload() == SMALL  # measured values stay
    other = run(
        "compare", "--workload", small, "--network", "10gbps", "--algorithms", "allreduce", "--optimizer", "lion"
    )
    assert (other.exit_code, "adamw" in other.output) == (2, True)


def choice(selection):
    (comparison,) = report.run(report.Selection(*selection, steps=1, overrides={"nodes": 2, "gpus_per_node": 2}))
    return [row.algorithm for row in comparison.rows]


def test_auto_is_what_it_would_choose(small, capsys):
    assert choice((small, ["1gbps"], "auto")) == ["auto: bytegrad(hierarchical=True)"]
    assert choice((small, ["1gbps"], "auto", "exact")) == ["auto: allreduce(hierarchical=True)"]
    (label,) = choice((small, ["1gbps"], "auto(candidates=['qsgd'])"))
    assert label == "auto(candidates=['qsgd']): qsgd"
    assert families.without_auto(label) == "qsgd"
    assert "choosing for" in capsys.readouterr().err


class _Looks(algorithms.AllReduce):
    """Asks for a value while it is set up, which a simulation does not have."""

    def setup(self, context):
        float(context.buckets[0].flat[0])


def test_auto_without_a_candidate_that_can_be_simulated_is_an_error():
    case = report._Case(SMALL, NETWORK, presets.device("v100"), OPTIONS)
    with pytest.raises(ConfigError, match="can be simulated.*_Looks"):
        case.without_auto({"auto": algorithms.Auto(candidates=[_Looks()])}, "any", map)


def test_every_algorithm_has_one_family_and_every_family_a_look_of_its_own():
    members = [name for family in families.FAMILIES.values() for name in family]
    assert sorted(members) == [name for name in algorithms.list() if name != "auto"]
    looks = [families.look(names[0]) for names in families.FAMILIES.values()]
    assert len({look.colour for look in looks}) == len({look.marker for look in looks}) == len(families.FAMILIES)
    for family in families.FAMILIES.values():
        assert len({str(families.look(name).dashes) for name in family}) == len(family)


def test_an_algorithm_of_a_user_is_drawn_alike_in_every_picture():
    assert families.look("mine").family == families.OTHER
    assert families.look("mine") == families.look("mine(speed=3)") == families.look("auto: mine")
    assert families.look("topk(hierarchical=True)").is_hollow
    assert families.look("topk(hierarchical=True)").colour == families.look("dgc").colour


def test_names_beside_a_picture_do_not_overlap():
    for places in ([0.0, 0.01, 0.02, 0.5, 0.51, 0.99, 1.0], [1.0] * 4, [0.0] * 4, [0.3]):
        spaced = plots._spaced(places, 0.05)
        assert all(b - a >= 0.05 - 1e-9 for a, b in itertools.pairwise(spaced))
        assert min(spaced) >= -1e-9
        assert max(spaced) <= 1 + 1e-9
        assert max(abs(a - b) for a, b in zip(places, spaced, strict=True)) <= 0.05 * len(places)


def test_the_best_of_each_family_has_a_name_and_what_is_below_the_axis_is_said():
    lines = {f"topk(ratio={idx})": [float(idx + 5)] * 2 for idx in range(20)} | {"allreduce": [1.0, 1.0]}
    lines |= {"decentralized": [0.05, 0.9], "mine": [0.5, 0.4]}
    named = plots._named(lines)
    assert {"allreduce", "decentralized", "mine", "topk(ratio=19)"} <= set(named)
    assert len(named) == plots._MAX_NAMED
    others, below = plots._notes(lines, named, 0.1)
    assert others.startswith(f"grey: {len(lines) - len(named)} others")
    assert "decentralized (0.05)" in below


def test_a_line_that_ends_where_nothing_can_be_simulated_has_a_name_and_that_is_said(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: figures.append(figure))
    lines = {"allreduce": [1.0, 1.0, 1.0], "async_sgd": [math.nan, 40.0, 2.0], "topk": [30.0, 20.0, math.nan]}
    marks = {"topk": "*", "async_sgd": "?"}
    plots.speedups(lines, (0.5, 1.0, 25.0), "bandwidth", "title", tmp_path / "x.png", marks)
    (ax,) = figures[0].axes
    assert {text.get_text(): text.xy[0] for text in ax.texts} == {"1": 1.0, "2": 0.5, "3": 0.5}
    (legend,) = figures[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["1 async_sgd?", "2 topk*", "3 allreduce"]
    title = figures[0].get_suptitle().replace("\n", " ")
    assert "* known to lose more than 5 %; ? loss not measured" in title
    assert "cannot be simulated everywhere: 2 of the lines, such as async_sgd" in title


@pytest.mark.parametrize("lines", [{"a": [9.0, 1.0], "b": [1.0, 1.0]}, {"a": [1.0, 9.0], "b": [1.0, 1.0]}])
def test_the_scale_of_a_plot_is_on_the_left_and_numbers_are_within_the_axes(monkeypatch, tmp_path, lines):
    figures = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: figures.append(figure))
    plots.speedups(lines, (1.0, 10.0), "bandwidth", "title", tmp_path / "x.png")
    (ax,) = figures[0].axes
    assert ax.yaxis.get_label_position() == ax.yaxis.get_ticks_position() == "left"
    assert all(0 < text.get_position()[0] < 1 for text in ax.texts)


def test_a_class_in_which_all_reduce_is_the_fastest_everywhere_has_no_panel(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: figures.append(figure))
    black = [[("allreduce", 1.0), ("allreduce(hierarchical=True)", 1.1)]]
    assert not plots.best({"8bit": black}, (1.0, 10.0), (25.0,), "title", tmp_path / "x.png")
    assert figures == []
    grids = {"8bit": black, "compensated": [[("topk", 2.0), ("topk", math.nan)]]}
    assert plots.best(grids, (1.0, 10.0), (25.0,), "title", tmp_path / "x.png")
    (ax,) = figures[0].axes
    assert (ax.get_title(), [text.get_text() for text in ax.texts]) == (
        "allowed: compensated",
        ["topk\n2x", "not simulated"],
    )
    assert "allowed: 8bit: all-reduce" in figures[0].get_suptitle()


def test_every_colour_of_a_timeline_is_in_its_legend(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: figures.append(figure))
    plots.timelines(compared("powersgd, allreduce, local_sgd(period=3)"), tmp_path / "x.png")
    (ax,) = figures[0].axes
    named = {handle.get_facecolor() for handle in ax.get_legend().legend_handles}
    assert {bar.get_facecolor() for bar in ax.patches} == named
    assert len(named) == 4
    texts = [text.get_text() for text in ax.texts if text.get_text()]
    assert texts[0].split(":")[0] == "DDP-style all-reduce"
    assert any("drawn: step 3 of 3" in text.replace("\n", " ") for text in texts)


def test_a_timeline_says_which_step_of_a_period_it_shows():
    (row,) = compared("local_sgd(period=3)").rows
    place, spans = timeline.longest_step(row.result)
    assert place % row.cycle == row.cycle - 1 == 2
    assert any(span.lane == "network" for span in spans)
    length_s = max(span.end_s for span in spans)
    assert length_s == pytest.approx(max(row.result.steps_s), rel=0.02)
    text = plots._step_in_words(place, length_s, row.result.step_s, row.cycle)
    assert text == f"{row.result.step_s * 1e3:.1f} ms on average; drawn: step 3 of 3, {length_s * 1e3:.1f} ms"
    assert plots._step_in_words(3, 0.1, 0.1, 1) == "100.0 ms"


@pytest.mark.parametrize(
    "option",
    [
        ["--trace", "/nowhere/trace.json"],
        ["--plot", "/proc/nowhere"],
        ["--workload", "/nowhere/work.json"],
        ["--workload", __file__],
    ],
)
def test_files_are_tried_before_the_work(monkeypatch, option):
    monkeypatch.setattr(compare, "compare", lambda *_: pytest.fail("it simulated"))
    result = run("compare", "--network", "10gbps", "--algorithms", "allreduce", *option)
    assert result.exit_code == 2
    assert option[1].split("/")[1] in result.output
    assert "Traceback" not in result.output


def test_a_file_that_is_tried_stays_as_it_is(small, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_Case", lambda *_: pytest.fail("enough"))
    kept, new = tmp_path / "kept.json", tmp_path / "new.json"
    kept.write_text("something")
    for path in (kept, new):
        report.Output(trace=path).check()
    assert kept.read_text() == "something"
    assert not new.exists()


NUMBERS = {
    "compare": "bucket-cap-mb steps nodes gpus-per-node bandwidth-gbps intra-gbps efficiency ceiling-gbps hosts",
    "profile script.py": "batch-per-rank steps",
    "topology ring": "ranks",
}
VALUES = ("inf", "nan", "0", "-1")
WRONG = [(name, each, value) for name in NUMBERS for each in NUMBERS[name].split() for value in VALUES]


@pytest.mark.parametrize(
    ("command", "option", "value"), [*WRONG, *(("compare", "latency-us", value) for value in ("inf", "nan", "-1"))]
)
def test_numbers_that_make_no_sense_are_refused(command, option, value):
    result = run(*command.split(), f"--{option}", value)
    assert result.exit_code == 2
    assert f"Invalid value for '--{option}'" in result.output


class Clock:
    """A clock that tests set."""

    def __init__(self, monkeypatch):
        self.now_s = 0.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now_s)


def test_a_log_shows_life(monkeypatch, capsys):
    clock = Clock(monkeypatch)
    with progress.progress_bar("simulating here", 2, 2) as advance:
        for name, clock.now_s in (("slow", 70.0), ("fast", 75.0), ("slow", 150.0), ("fast", 152.0)):
            advance(name)
    assert capsys.readouterr().err.splitlines() == [
        "simulating here: 4 simulations",
        "simulating here: 1 of 4",
        "simulating here: 3 of 4, about 0:05 min left",
    ]


def test_the_remaining_time_is_that_of_the_kinds_that_remain(monkeypatch):
    """As many tasks are done as remain, but the slow ones come first."""
    clock = Clock(monkeypatch)
    remaining = progress.Remaining(3, 4)
    for name, clock.now_s in (("ddp", 1.0), ("slow", 101.0)):
        remaining.add(name)
        assert remaining.seconds() is None
    clock.now_s = 103.0
    remaining.add("fast")
    assert remaining.seconds() == 3 * (1 + 100 + 2)
    for name, clock.now_s in (("ddp", 104.0), ("slow", 224.0)):
        remaining.add(name)
    assert remaining.seconds() == 2 * 1 + 2 * 110 + 3 * 2
    assert str(remaining) == ", about 3:48 min left"


def test_without_repeats_no_time_is_promised(monkeypatch):
    clock = Clock(monkeypatch)
    remaining = progress.Remaining(2, 1)
    for name, clock.now_s in (("ddp", 1.0), ("slow", 101.0)):
        remaining.add(name)
        assert str(remaining) == ""


def test_all_commands_keep_to_the_width(small):
    commands = [["doctor"], ["topology", "ring"], ["topology", "one_peer_exponential"], ["compare", "--list"]]
    for columns in ("80", "100", "120"):
        for command in commands:
            result = run(*command, columns=columns)
            assert result.exit_code == 0
            assert max(map(len, result.stdout.splitlines())) <= int(columns), command


def test_nothing_is_drawn_of_what_cannot_be_simulated(tmp_path):
    comparison = compared("hogwild")
    assert comparison.rows == ()
    chosen = compare.candidates("hogwild")
    assert sweeps.draw(comparison, chosen, Options(), tmp_path) == []
    assert math.isnan(compare.sweep(SMALL, [NETWORK], presets.device("v100"), chosen, OPTIONS)["hogwild"][0])
