"""`commlib compare` and `commlib profile`: tables, JSON, pictures, traces, options, errors."""

import dataclasses
import itertools
import json
import math

import pytest
from typer.testing import CliRunner

from commlib import algorithms
from commlib.algorithms.base import EXACTNESS
from commlib.cli import app
from commlib.errors import ConfigError
from commlib.network import presets, workloads
from commlib.network.model import Device, Layer, Network, Workload
from commlib.reports import plots, sweeps
from commlib.simulation import compare, timeline
from commlib.simulation.simulator import Options

LAYERS = tuple(Layer(f"l{idx}", (("weight", (512, 512)), ("bias", (512,))), 1.0) for idx in range(6))
SMALL = Workload("small", LAYERS, batch_per_rank=4, forward_s=1e-3, backward_s=2e-3, optimizer_s=1e-4, device="v100")
NETWORK = Network("pair", nodes=2, gpus_per_node=2, bandwidth_gbps=1.0, latency_us=20.0)
OPTIONS = Options(steps=2)


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.json"
    workloads.save(SMALL, path)
    return str(path)


def run(*arguments):
    return CliRunner().invoke(app, ["compare", "--steps", "2", *arguments])


def compared(text, network=NETWORK):
    chosen = compare.candidates(text, several_per_node=True)
    return compare.compare(SMALL, network, presets.device("v100"), chosen, OPTIONS)


@pytest.mark.parametrize("name", algorithms.list())
def test_every_algorithm_has_a_class_of_exactness(name):
    algorithm = algorithms.create(name)
    assert algorithm.exactness in EXACTNESS
    if not algorithm.channel.syncs_gradients(1 << 20):
        assert algorithm.exactness == "any"


@pytest.mark.parametrize(
    ("text", "exactness"),
    [
        ("allreduce", "exact"),
        ("allreduce(wire_dtype='bf16')", "8bit"),
        ("bytegrad", "8bit"),
        ("bytegrad(feedback=True)", "compensated"),
        ("qsgd(bits=2)", "any"),
        ("signsgd", "compensated"),
        ("signsgd(feedback=False)", "any"),
        ("topk", "compensated"),
        ("powersgd", "compensated"),
        ("qadam", "any"),
    ],
)
def test_options_decide_the_class(text, exactness):
    [algorithm] = compare.candidates(text).values()
    assert algorithm.exactness == exactness


def test_candidates_are_named_or_all_up_to_a_class():
    assert list(compare.candidates("topk(ratio=0.1), allreduce")) == ["topk(ratio=0.1)", "allreduce"]
    assert {a.exactness for a in compare.candidates("all", "8bit").values()} == {"exact", "8bit"}
    labels = compare.candidates("all", several_per_node=True)
    assert labels["bytegrad(hierarchical=True)"].channel.hierarchical
    assert "bytegrad(hierarchical=True)" not in compare.candidates("all")


@pytest.mark.parametrize(
    ("text", "exactness", "message"),
    [
        ("bytegrd", "any", "bytegrad"),
        ("topk(ratio=", "any", "expected names"),
        ("allreduce, topk(ratio=)", "any", r"expected names.*; topk takes ratio=0.01, op='mean'"),
        ("allreduce][0", "any", "expected names"),
        ("diloco(codec=int8)", "any", r"codec: expected a number, a word in quotes, .* got int8; diloco takes period"),
        ("topk(ratio=nan)", "any", "ratio: expected a number, .* got nan"),
        ("topk(ratio=0.1, ratio=0.2)", "any", "each option once, .* got ratio=0.2"),
        ("topk(**{'ratio': 0.1})", "any", "each option once, .* got "),
        ("topk(ratio=2)", "any", "ratio"),
        ("topk(speed=2)", "any", r"no option 'speed'; topk takes ratio=0.01, op='mean', hierarchical=False"),
        ("topk(ratio='much')", "any", r"ratio: expected float, got 'much'; topk takes ratio=0.01"),
        ("topk(ratio=1e999)", "any", "finite"),
        ("local_sgd(period=True)", "any", "period: expected int"),
        ("bytegrad(hierarchical=1)", "any", "hierarchical: expected bool"),
        ("bytegrad(compress='all')", "any", "compress: expected"),
        ("hogwild(fast=True)", "any", "no options"),
        ("topk(0.1)", "any", r"name\(option=value\).*topk takes ratio=0.01"),
        ("1 + 1", "any", "name"),
        ("topk(ratio=open('x'))", "any", "topk"),
        ("topk, allreduce", "exact", r"got topk \(compensated\)"),
        ("topk", "good", "exactness"),
        ("", "any", "expected names"),
    ],
)
def test_bad_candidates_are_refused(text, exactness, message):
    with pytest.raises(ConfigError, match=message):
        compare.candidates(text, exactness)


def test_rows_are_sorted_and_measured_against_ddp():
    comparison = compared("allreduce, bytegrad(hierarchical=True), decentralized")
    steps = [row.result.step_s for row in comparison.rows]
    assert steps == sorted(steps)
    for row in comparison.rows:
        assert row.speedup == pytest.approx(comparison.ddp.step_s / row.result.step_s)
    fewest = min(comparison.rows, key=lambda row: row.result.adapter_bytes)
    assert fewest.algorithm == "bytegrad(hierarchical=True)"


def test_ddp_moves_all_gradients_over_the_adapter():
    ddp = compared("allreduce").ddp
    assert ddp.wire_bytes == pytest.approx(2 * 3 / 4 * SMALL.nbytes, rel=1e-3)
    assert ddp.step_s > SMALL.step_s


def test_what_cannot_be_simulated_is_named_with_its_reason():
    comparison = compared("allreduce, hogwild")
    assert [row.algorithm for row in comparison.rows] == ["allreduce"]
    assert "sends nothing" in comparison.refused["hogwild"]


def test_speedups_grow_as_the_network_slows_down():
    networks = [dataclasses.replace(NETWORK, bandwidth_gbps=value) for value in (100.0, 10.0, 1.0)]
    chosen = compare.candidates("bytegrad(hierarchical=True), hogwild")
    swept = compare.sweep(SMALL, networks, presets.device("v100"), chosen, OPTIONS)
    assert swept["bytegrad(hierarchical=True)"] == sorted(swept["bytegrad(hierarchical=True)"])
    assert all(math.isnan(value) for value in swept["hogwild"])


def test_the_table_has_every_algorithm(small):
    result = run("--workload", small, "--network", "10gbps,1gbps", "--algorithms", "allreduce,powersgd", "--nodes", "2")
    assert result.exit_code == 0, result.output
    first_words = [line.split(" ")[0] for line in result.stdout.splitlines()]
    assert first_words.count("powersgd") == first_words.count("allreduce") == first_words.count("DDP-style") == 2
    assert "2 x 8 ranks" in result.stdout


def test_json_is_for_machines(small):
    result = run("--workload", small, "--network", "h100-400g", "--algorithms", "bytegrad,hogwild", "--json")
    [comparison] = json.loads(result.stdout)
    [row] = comparison["rows"]
    assert comparison.keys() >= {"workload", "network", "device", "sharding", "ddp", "rows", "refused"}
    assert row.keys() >= {"algorithm", "exactness", "made_for", "doubt", "loss", "step_s", "samples_per_s", "speedup"}
    assert row.keys() >= {"exposed_s", "wire_bytes", "adapter_bytes", "memory_bytes", "total_bytes", "fits"}
    assert row.keys() >= {"num_buckets", "phases"}
    assert row["algorithm"] == "bytegrad"
    assert row["speedup"] == pytest.approx(comparison["ddp"]["step_s"] / row["step_s"])
    assert list(comparison["refused"]) == ["hogwild"]
    assert comparison["network"]["ceiling_gbps"] is None


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("--nodes", 3, "nodes"),
        ("--gpus-per-node", 2, "gpus_per_node"),
        ("--bandwidth-gbps", 7.5, "bandwidth_gbps"),
        ("--latency-us", 0.0, "latency_us"),
        ("--intra-gbps", 80.0, "intra_gbps"),
        ("--efficiency", 0.5, "efficiency"),
        ("--ceiling-gbps", 2.0, "ceiling_gbps"),
    ],
)
def test_fields_of_the_network_are_overridden(small, option, value, field):
    result = run("--workload", small, "--network", "10gbps", "--algorithms", "allreduce", option, str(value), "--json")
    [comparison] = json.loads(result.stdout)
    assert comparison["network"][field] == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "vgg61"], "vgg16"),
        (["--network", "10gbs"], "10gbps"),
        (["--network", ""], "10gbps"),
        (["--algorithms", "bytegrd"], "bytegrad"),
        (["--device", "v101"], "v100"),
        (["--nodes", "0"], "nodes"),
        (["--exactness", "fair"], "compensated"),
        (["--steps", "0"], "steps"),
    ],
)
def test_wrong_input_is_an_error_without_a_traceback(arguments, message):
    result = run("--algorithms", "allreduce", *arguments) if "--algorithms" not in arguments else run(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_the_known_are_listed_with_their_sources():
    result = run("--list")
    lines = result.output.splitlines()
    assert [line for line in lines if line in ("Workloads", "Networks", "Devices")] == [
        "Workloads",
        "Networks",
        "Devices",
    ]
    assert result.output.count("16 servers with 8 V100s") == 1
    assert any(line.split() == ["bert-large", "335.1", "6", "adam", "532.4", "v100"] for line in lines)
    assert any(line.split()[:5] == ["10gbps", "16", "x", "8", "10"] for line in lines)
    assert max(map(len, lines)) <= 80
    for name in (*workloads.names(), *presets.NETWORKS, *presets.DEVICES):
        assert name in result.output


def test_pictures_and_trace(small, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sweeps, "BANDWIDTHS_GBPS", (1.0, 10.0))
    monkeypatch.setattr(sweeps, "LATENCIES_US", (25.0, 1000.0))
    arguments = ["--network", "10gbps,1gbps", "--nodes", "2", "--algorithms", "allreduce,bytegrad,powersgd,hogwild"]
    result = run("--workload", small, *arguments, "--plot", str(tmp_path), "--trace", str(tmp_path / "trace.json"))
    assert result.exit_code == 0, result.output
    names = {path.name for path in tmp_path.glob("*.png")}
    of_both = {f"small-{network}-{what}.png" for network in ("10gbps", "1gbps") for what in ("latency", "timeline")}
    assert names == of_both | {"small-10gbps-bandwidth.png", "small-10gbps-best.png"}, "the same for both"
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        f"{name} ({network})"
        for network in ("10gbps", "1gbps")
        for name in ("DDP-style all-reduce", "allreduce", "bytegrad", "powersgd")
    }


def test_a_trace_covers_one_step():
    comparison = compared("bytegrad")
    for result in comparison.results():
        spans = timeline.last_step(result)
        compute = [span for span in spans if span.lane == "compute"]
        assert min(span.start_s for span in spans) == pytest.approx(0.0, abs=1e-12)
        assert max(span.end_s for span in compute) == pytest.approx(result.steps_s[-1], rel=0.02)
        assert {"forward", "backward"} <= {span.name for span in compute}
        assert any(span.lane == "network" for span in spans)
    events = timeline.chrome_trace(comparison.results())["traceEvents"]
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_no_events_of_a_track_overlap():
    """Perfetto would drop them. Within nodes and between them, collectives run at the same time."""
    events = timeline.chrome_trace(compared("signsgd(hierarchical=True)").results())["traceEvents"]
    tracks = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert "network 2" in tracks.values()
    for pid, tid in tracks:
        own = [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == (pid, tid)]
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in itertools.pairwise(own))


def test_plots_without_matplotlib_say_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'matplotlib"):
        plots.speedups({"a": [1.0, 2.0]}, [1.0, 2.0], "x", "title", tmp_path / "a.png")


def test_a_profile_is_compared(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))\n"
        "def step(model):\n    model(torch.ones(4, 64)).sum().backward()\n"
    )
    path = str(tmp_path / "mine.json")
    result = CliRunner().invoke(app, ["profile", str(script), "--output", path, "--batch-per-rank", "4"])
    assert result.exit_code == 0, result.output
    result = run("--workload", path, "--device", "v100", "--network", "1gbps", "--algorithms", "allreduce")
    assert result.exit_code == 0, result.output
    assert "mine" in result.output


def test_a_device_is_described_by_figures_above_zero():
    with pytest.raises(ConfigError, match="memory_gbytes_s"):
        Device("none", memory_gbytes_s=0.0, tflops={"fp32": 1.0})
