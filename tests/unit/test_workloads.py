"""Workloads and presets: counts as published, times as their sources say, files, overrides."""

import dataclasses
import itertools
import json
import math
import re
import sys

import pytest
import torch
from typer.testing import CliRunner

from commlib.cli import app
from commlib.errors import ConfigError
from commlib.network import presets, profiling, workloads
from commlib.network.model import Layer, Workload
from commlib.network.profiling import profile_model, profile_script


@pytest.mark.parametrize("name", workloads.names())
def test_parameters_are_as_many_as_published(name):
    published, tolerance = workloads.PUBLISHED_NUMEL[name]
    assert workloads.get(name).numel == pytest.approx(published, rel=tolerance or 1e-15)


@pytest.mark.parametrize(
    ("name", "gflops", "tolerance"),
    [
        ("vgg16", 31, 0.01),  # Gan et al. (2021), table of models: forward of a sample
        ("bert-base", 22, 0.02),
        ("bert-large", 232, 0.07),  # without the products of queries and keys
        ("resnet50", 8.2, 0.01),  # 4.09 G multiply-adds (torchvision)
    ],
)
def test_arithmetic_is_as_published(name, gflops, tolerance):
    assert sum(layer.weight for layer in workloads.get(name).layers) / 1e9 == pytest.approx(gflops, rel=tolerance)


@pytest.mark.parametrize("name", workloads.names())
def test_times_add_up_and_have_a_source(name):
    workload = workloads.get(name)
    assert workload.source
    assert workload.device in presets.DEVICES
    assert workload.backward_s == pytest.approx(2 * workload.forward_s)
    assert 0 < workload.optimizer_s < 0.1 * workload.step_s


def test_vgg16_is_published_linear_scaling():
    workload = workloads.get("vgg16")
    assert 128 * workload.batch_per_rank / workload.step_s == pytest.approx(29_300)


def test_first_gradients_of_vgg16_are_those_of_the_classifier():
    workload = workloads.get("vgg16")
    ready = dict(zip((name for name, _ in workload.parameters()), workload.ready_s(), strict=True))
    assert ready["classifier.0.weight"] < 0.02 * workload.backward_s < ready["features.0.weight"]
    assert ready["features.0.weight"] == pytest.approx(workload.backward_s)


def test_a_tied_embedding_is_ready_last():
    workload = workloads.get("gpt2")
    ready = dict(zip((name for name, _ in workload.parameters()), workload.ready_s(), strict=True))
    assert ready["wte.weight"] == max(ready.values())


@pytest.mark.parametrize("name", workloads.names())
def test_a_file_holds_a_workload(name, tmp_path):
    path = tmp_path / "w.json"
    workloads.save(workloads.get(name), path)
    assert workloads.get(str(path)) == workloads.get(name)


def test_an_unknown_name_has_a_hint():
    with pytest.raises(ConfigError, match="Did you mean 'vgg16'"):
        workloads.get("vgg-16")


@pytest.mark.parametrize(
    "content",
    [
        "not json",
        "[]",
        "{}",
        json.dumps({"format": "commlib-workload-1"}),
        json.dumps({"format": "commlib-workload-1", "layers": [{"name": "a"}]}),
        json.dumps({"format": "commlib-workload-1", "layers": [3]}),
        json.dumps({"format": "commlib-workload-1", "layers": [], "name": "a", "batch_per_rank": 1, "bad": 1}),
    ],
)
def test_a_bad_file_is_a_clear_error(content, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"bad\.json"):
        workloads.get(str(path))


def test_a_missing_file_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        workloads.load(tmp_path / "none.json")


@pytest.mark.parametrize("name", presets.NETWORKS)
def test_networks_have_sources_and_fields_can_be_overridden(name):
    network = presets.network(name, nodes=3, bandwidth_gbps=7.0, latency_us=None)
    assert network.source
    assert (network.nodes, network.bandwidth_gbps) == (3, 7.0)
    assert network.latency_us == presets.network(name).latency_us


@pytest.mark.parametrize("name", ["10gbps", "25gbps", "100gbps", "1gbps"])
def test_the_clusters_of_bagua_have_16_nodes_of_8(name):
    network = presets.network(name)
    assert (network.nodes, network.gpus_per_node) == (16, 8)
    assert network.bandwidth_gbps == float(name.removesuffix("gbps"))


@pytest.mark.parametrize(
    "overrides", [{"nodes": 0}, {"bandwidth_gbps": -1.0}, {"efficiency": 1.5}, {"latency_us": math.nan}, {"colour": 3}]
)
def test_impossible_overrides_are_refused(overrides):
    with pytest.raises(ConfigError, match=next(iter(overrides))):
        presets.network("10gbps", **overrides)


def test_a_ceiling_limits_the_rate():
    network = presets.network("10gbps", efficiency=0.5, ceiling_gbps=4.0)
    assert network.bytes_per_s == 4e9 / 8
    assert dataclasses.replace(network, ceiling_gbps=math.inf).bytes_per_s == 5e9 / 8
    with pytest.raises(ConfigError, match="ceiling_gbps"):
        dataclasses.replace(network, ceiling_gbps=0.0)


class _Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(64, 384)
        self.heavy = torch.nn.Linear(384, 384)
        self.last = torch.nn.Linear(384, 4)
        self.scale = torch.nn.Parameter(torch.ones(4))
        self.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x):
        x = self.first(x)
        for _ in range(8):
            x = self.heavy(x).relu()
        return self.last(x) * self.scale


def _step(model):
    model(torch.ones(64, 64)).sum().backward()


@pytest.fixture
def one_thread():
    """Threads that wait for one another on a busy machine would drown the times of small layers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_a_profile_has_the_shapes_and_the_order_of_backward(tmp_path):
    model = _Net()
    optimizer = torch.optim.Adam(model.parameters())
    workload = profile_model(model, _step, optimizer=optimizer, batch_per_rank=64, steps=7)
    expected = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    assert {name.removeprefix("scale."): shape for name, shape in workload.parameters()} == expected
    assert workload.layers[0].name == "first"
    heavy = next(layer for layer in workload.layers if layer.name == "heavy")
    assert heavy.weight > 0.3 * sum(layer.weight for layer in workload.layers)
    assert workload.optimizer == "adam"
    assert workload.optimizer_s > 0
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    workloads.save(workload, tmp_path / "mine.json")
    assert workloads.load(tmp_path / "mine.json") == workload


def test_a_step_without_backward_is_a_clear_error():
    with pytest.raises(ConfigError, match=r"must call backward"):
        profile_model(_Net(), lambda model: model(torch.ones(1, 64)))


class _Mixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.large = torch.nn.Linear(64, 64)
        self.small = torch.nn.Linear(64, 2).double()
        self.idle = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.small(self.large(x).double())


def test_mixed_dtypes_count_as_that_of_most_elements_and_unused_parameters_as_ready_last():
    workload = profile_model(_Mixed(), _step, steps=3)
    assert workload.dtype == "fp32"
    assert "130 elements of float64 count as fp32" in workload.source
    assert "2 of 6 parameters got no gradient and count as ready last: idle.weight, idle.bias" in workload.source
    assert workload.numel == 64 * 65 + 2 * 65 + 12
    ready_s = dict(zip([name for name, _ in workload.parameters()], workload.ready_s(), strict=True))
    assert ready_s["idle.weight"] == max(ready_s.values()) == pytest.approx(workload.backward_s)


def test_dtypes_that_workloads_do_not_have_are_a_clear_error():
    model = torch.nn.Linear(64, 2, dtype=torch.complex64)
    with pytest.raises(ConfigError, match="complex64"):
        profile_model(model, _step)


@pytest.mark.parametrize(("growth_s", "is_steady"), [(0.0, True), (0.1, False)])
def test_a_profile_shows_how_much_its_steps_differ(monkeypatch, growth_s, is_steady):
    times = itertools.accumulate(0.5 + growth_s * reading for reading in itertools.count())
    monkeypatch.setattr(profiling.time, "perf_counter", lambda: next(times))
    source = profile_model(_Net(), _step, steps=3).source
    shortest, longest = re.search(r"median of 3 steps of ([\d.e+]+) to ([\d.e+]+) ms", source).groups()
    assert (float(longest) == float(shortest)) is is_steady
    assert ("the steps differ" not in source) is is_steady


def test_a_script_is_profiled(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(8, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "def step(model):\n    model(torch.ones(4, 8)).sum().backward()\n"
    )
    workload = profile_script(script, batch_per_rank=4, steps=2)
    assert (workload.name, workload.numel, workload.optimizer) == ("mine", 18, "sgd")


def test_a_script_finds_its_arguments_and_its_folder_and_is_not_main(tmp_path):
    (tmp_path / "beside_the_script.py").write_text("width = 8\n")
    script = tmp_path / "mine.py"
    script.write_text(
        "import sys, torch\nfrom beside_the_script import width\n"
        "model = torch.nn.Linear(width, int(sys.argv[2]))\nassert sys.argv[:2] == [__file__, '--out']\n"
        "def step(model):\n    assert sys.argv[2:] == ['3']\n    model(torch.ones(4, 8)).sum().backward()\n"
        "if __name__ == '__main__':\n    raise SystemExit('it trained')\n"
    )
    before = sys.argv, list(sys.path)
    assert profile_script(script, ["--out", "3"], steps=1).numel == 27
    assert (sys.argv, sys.path) == before
    output = tmp_path / "work.json"
    result = CliRunner().invoke(app, ["profile", str(script), "--output", str(output), "--", "--out", "3"])
    assert result.exit_code == 0, result.output
    assert workloads.load(output).numel == 27


def test_a_file_that_cannot_be_written_is_found_before_the_script_runs(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text("raise SystemExit('it ran')")
    result = CliRunner().invoke(app, ["profile", str(script), "--output", str(tmp_path / "no" / "work.json")])
    assert result.exit_code == 2
    assert "--output" in result.output
    assert "it ran" not in result.output


@pytest.mark.parametrize(
    ("text", "where", "error"),
    [
        ("def fails():\n    raise KeyError('mine')\nfails()\n", "line 3, in <module>", "KeyError"),
        ("def x(:\n", "line 1", "SyntaxError"),
        ("import commlib\nraise commlib.ConfigError('mine')\n", "line 2, in <module>", "commlib.errors.ConfigError"),
        (
            "import torch\nmodel = torch.nn.Linear(8, 4)\ndef step(model):\n    model(torch.ones(3, 7))\n",
            "line 4, in step",
            "RuntimeError",
        ),
    ],
)
def test_an_error_of_the_script_is_shown_from_its_first_line_on(text, where, error, tmp_path):
    script, output = tmp_path / "mine.py", tmp_path / "work.json"
    script.write_text(text)
    result = CliRunner().invoke(app, ["profile", str(script), "--output", str(output)])
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert next(line for line in lines if line.startswith("  File")).startswith(f'  File "{script}", {where}')
    assert lines[-2].startswith(f"{error}: ")
    assert lines[-1] == f"commlib profile: {script} raised {error.split('.')[-1]}; nothing was written"
    assert not output.exists()


@pytest.mark.parametrize("text", ["x = 1", "import torch\nmodel = torch.nn.Linear(1, 1)\nstep = 3"])
def test_a_script_without_model_and_step_is_a_clear_error(text, tmp_path):
    script = tmp_path / "bad.py"
    script.write_text(text)
    with pytest.raises(ConfigError, match="to define `model`"):
        profile_script(script)


def test_a_workload_needs_parameters():
    with pytest.raises(ConfigError, match="parameters"):
        Workload("empty", (Layer("a", (), 1.0),), 1, forward_s=1.0, backward_s=1.0)
