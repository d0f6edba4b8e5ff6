"""`commlib compare --emulate`: shrunk models in real processes on emulated hosts (root and iproute2 needed)."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from commlib.cli import app
from commlib.emulation import check_latency, silence, synthetic
from commlib.emulation import experiment as emulation
from commlib.emulation.links import OFF_LATENCY, OFF_RATE
from commlib.errors import ConfigError, PeerFailure
from commlib.network import presets, workloads
from tests.loopback import MISSING
from tests.waiting import Clock

SETTING = emulation.Setting(hosts=2, max_numel=200_000, compute_s=0.02, reps=2, block=2, timeout_s=120.0)

needs_hosts = pytest.mark.skipif(bool(MISSING), reason="; ".join(MISSING))
# Warnings of a busy machine are not the subject of these tests.
pytestmark = pytest.mark.filterwarnings(f"ignore:{OFF_RATE}:UserWarning", f"ignore:{OFF_LATENCY}:UserWarning")


@pytest.mark.slow
@needs_hosts
@pytest.mark.timeout(300)
def test_systems_are_trained_and_simulated_at_a_rate_and_at_a_networks_scale() -> None:
    workload = workloads.get("vgg16")
    targets = [100e6, presets.network("100gbps")]
    by_rate, by_network = emulation.emulate(workload, targets, ["ddp", "bytegrad", "topk(ratio=0.02)"], SETTING)
    assert by_rate.rate_bps == 100e6
    assert by_rate.scale is None
    assert by_network.network == "100gbps"
    for found in (by_rate, by_network):
        rows = {row.system: row for row in found.rows}
        assert list(rows) == ["none", "ddp", "bytegrad", "topk(ratio=0.02)"]
        assert all(len(row.blocks_s) == 2 and row.step_s > 0 for row in found.rows)
        assert rows["none"].predicted_s is rows["ddp"].predicted_s is None
        assert rows["bytegrad"].predicted_s is not None
        assert found.compute_s == rows["none"].step_s
    rows = {row.system: row for row in by_rate.rows}
    wire_s = 0.8e6 / 12.5e6  # the ring's bytes of 0.2 M elements on 2 hosts at 100 Mbit/s
    assert rows["ddp"].step_s > wire_s
    assert rows["topk(ratio=0.02)"].algorithm == "topk"


@pytest.mark.slow
@needs_hosts
@pytest.mark.timeout(300)
def test_what_cannot_be_run_or_simulated_is_named_and_the_others_are_measured() -> None:
    setting = dataclasses.replace(SETTING, max_numel=20_000, reps=1, block=1)
    none_left = "auto(candidates=['topk'])"  # whose class is wider than auto's
    # DGC has SGD's momentum itself, DiLoCo keeps the first weights, and async_sgd has no rounds.
    systems = [none_left, "dgc", "diloco", "async_sgd", "hogwild", "zero_one_adam"]
    (found,) = emulation.emulate(workloads.get("vgg16"), [200e6], systems, setting)
    assert {row.system: row.predicted_s is not None for row in found.rows} == {
        **{"none": False, "dgc": True, "diloco": True, "async_sgd": True, "hogwild": False, "zero_one_adam": False}
    }
    shown = " ".join(" ".join(emulation.table("vgg16", found, 80)).split())
    assert "hogwild: not simulated: hogwild sends nothing" in shown
    assert "zero_one_adam: not simulated: timed before step 16369, where its steady state" in shown
    assert f"{none_left}: not run: rank 0: auto: expected a candidate of the class '8bit'" in shown


def test_a_run_that_failed_is_an_error_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def emulate(*arguments: Any) -> list[emulation.Emulation]:
        raise PeerFailure("host 3 failed")

    monkeypatch.setattr(emulation, "emulate", emulate)
    result = CliRunner().invoke(app, ASKED)
    assert (result.exit_code, result.output.splitlines()[-1]) == (1, "Error: host 3 failed")


def test_a_block_ends_when_a_round_in_the_background_has_been_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its traffic slows down the next system: by a sixth, after `decentralized` at 200 Mbit/s."""
    clock = Clock()
    for module in (emulation, silence, synthetic):
        monkeypatch.setattr(module, "time", clock)
    counts = iter([1_000_000, 2_000_000, 3_000_000, 3_000_100])
    monkeypatch.setattr(silence, "_sent_bytes", lambda: next(counts))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        racer = emulation._Racer("none", emulation.shrunk(workloads.get("vgg16"), SETTING), SETTING)
        racer.time_block()
    finally:
        dist.destroy_process_group()
    assert next(counts, None) is None
    assert racer.blocks_s == [pytest.approx(SETTING.compute_s)]
    whole_s = (1 + SETTING.block) * SETTING.compute_s
    assert clock.now_s - 1000.0 == pytest.approx(whole_s + 0.3)  # the three tenths that it waited are not the system's


def test_the_rate_keeps_the_weight_of_communication() -> None:
    workload, network = workloads.get("vgg16"), presets.network("10gbps")
    small = emulation.shrink(workload, SETTING.max_numel)
    rate_bps = emulation.scaled_rate(workload, network, small, 0.5, SETTING)
    own_s = 8 * small.numel * 4 / rate_bps  # 2 (h-1)/h = 1 for two hosts
    ring = 2 * (network.world_size - 1) / network.world_size
    assert own_s / 0.5 == pytest.approx(ring * workload.nbytes / network.bytes_per_s / workload.step_s)


def test_an_unknown_system_is_an_error_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="bytegrd"):
        emulation.emulate(workloads.get("vgg16"), [1e8], ["bytegrd"], SETTING)


MADE_UP: dict[str, Any] = {"links": "2 emulated hosts", "compute_s": 0.25, "rows": (), "found": {}}


def made_up(workload: Any, targets: Any, systems: Any, setting: Any, progress: Any) -> list[emulation.Emulation]:
    """Stand in for `emulate`."""
    rows = [emulation.Measurement("none", 0.25, None, (0.25, 0.25), "none")]
    rows += [emulation.Measurement(system, 0.5, 0.4, (0.5, 0.5), system) for system in systems]
    links = f"{setting.hosts} emulated hosts"
    found = {**MADE_UP, "links": links, "rows": tuple(rows), "latency_us": setting.latency_us}
    return [emulation.Emulation("", rate_bps, None, rtt_s=1e-3, **found) for rate_bps in targets]


ASKED = ["compare", "--emulate", "--hosts", "2", "--rate", "200mbit", "--algorithms", "signsgd"]


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_measures_what_it_is_asked_for_and_prints_it(
    monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    monkeypatch.setattr(emulation, "emulate", made_up)
    result = CliRunner().invoke(app, [*ASKED, *(["--json"] if as_json else [])], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    if as_json:
        (found,) = json.loads(result.stdout)
        assert [row["system"] for row in found["rows"]] == ["none", "ddp", "signsgd"]
        assert (found["rate_bps"], found["links"]) == (200e6, "2 emulated hosts")
    else:
        lines = [line.split() for line in result.stdout.splitlines()]
        assert ["signsgd", "500.0", "400.0", "-20.0%", "1.00"] in lines
        assert ["none", "250.0", "2.00"] in lines


def test_the_command_adds_latency_at_a_rate_and_for_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "emulate", made_up)
    result = CliRunner().invoke(app, [*ASKED, "--latency-us", "5000", "--json"])
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)
    assert (found["latency_us"], found["rtt_s"]) == (5000.0, 1e-3)
    for_a_network = emulation.Emulation("10gbps", 1e8, 50.0, rtt_s=1e-2, **{**MADE_UP, "latency_us": 5000.0})
    shown = " ".join(" ".join(emulation.table("vgg16", for_a_network, 100)).split())
    assert "2 emulated hosts; one-way latency 5000 us, instead of 10gbps's" in shown


@pytest.mark.slow
@needs_hosts
@pytest.mark.skipif(bool(check_latency()), reason="; ".join(check_latency()))
def test_hosts_have_the_latency_that_was_asked_for() -> None:
    setting = dataclasses.replace(SETTING, latency_us=4000.0)
    (found,) = emulation.emulate(workloads.get("vgg16"), [200e6], ["ddp"], setting)
    assert found.latency_us == 4000.0
    assert found.rtt_s > 7e-3
    assert found.found["network"]["latency_us"] > 3000  # probed by the ranks themselves
    rows = {row.system: row for row in found.rows}
    # An all-reduce cannot take less than a round trip, from which calibration takes half a millisecond at most.
    assert rows["ddp"].step_s > setting.compute_s + 7.5e-3


def test_steps_bucket_size_optimizer_and_network_are_those_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def emulate(workload: Any, targets: Any, systems: Any, setting: Any, progress: Any) -> list[emulation.Emulation]:
        asked.update(workload=workload, targets=targets, setting=setting)
        return made_up(workload, [1e8], systems, setting, progress)

    monkeypatch.setattr(emulation, "emulate", emulate)
    options = ["--steps", "7", "--bucket-cap-mb", "2", "--optimizer", "adamw", "--network", "10gbps"]
    network = ["--efficiency", "0.5", "--ceiling-gbps", "2", "--nodes", "3", "--algorithms", "signsgd"]
    result = CliRunner().invoke(app, ["compare", "--emulate", *options, *network], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert (asked["setting"].block, asked["setting"].bucket_cap_mb, asked["workload"].optimizer) == (7, 2.0, "adam")
    (target,) = asked["targets"]
    assert (target.efficiency, target.ceiling_gbps, target.nodes) == (0.5, 2.0, 3)
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "emulated hosts" in result.stderr


@pytest.mark.slow
@needs_hosts
@pytest.mark.timeout(300)
def test_the_command_prints_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "Setting", lambda **changed: SETTING)
    result = CliRunner().invoke(app, [*ASKED, "--json"])
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)
    assert [row["system"] for row in found["rows"]] == ["none", "ddp", "signsgd"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--emulate", "--plot", "pictures"], "--plot"),
        (["--emulate", "--rate", "200mbit", "--nodes", "2"], "network"),
        (["--rate", "200mbit"], "--rate"),
        (["--emulate", "--rate", "fast"], "fast"),
        (["--emulate", "--rate", "200mbit", "--network", "wan"], "--network"),
        (["--emulate", "--intra-gbps", "3"], "--intra-gbps"),
        (["--emulate", "--wide"], "--wide"),
        (["--emulate", "--trace", "x.json"], "--trace"),
        (["--emulate", "--device", "cpu"], "--device"),
        (["--emulate", "--algorithms", "topk", "--exactness", "8bit"], "topk"),
        (["--emulate", "--algorithms", "auto", "--exactness", "exact"], "allow"),
        (["--hosts", "2"], "--hosts"),
    ],
)
def test_options_that_would_be_ignored_are_errors(options: list[str], named: str) -> None:
    result = CliRunner().invoke(app, ["compare", *options])
    assert result.exit_code == 2
    assert named in result.output
