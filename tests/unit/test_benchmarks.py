"""The benchmarks: names of systems, statistics, orders, launching, and a real short run."""

from __future__ import annotations

import io
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from rich.console import Console

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
BENCHMARKS = REPOSITORY / "benchmarks"
sys.path.append(str(BENCHMARKS))

import agreement  # noqa: E402
import bounds  # noqa: E402
import convergence  # noqa: E402
import final_loss  # noqa: E402
import intervals  # noqa: E402
import launch  # noqa: E402
import models  # noqa: E402
import profile_step  # noqa: E402
import report  # noqa: E402
import shrunk  # noqa: E402
import step  # noqa: E402
import systems  # noqa: E402
import trials  # noqa: E402
import worker  # noqa: E402
from harness import Place  # noqa: E402

import commlib  # noqa: E402
from tests.loopback import OWN_LOOPBACK, needs_own_loopback  # noqa: E402
from tests.waiting import LIMIT_S, Alarm, eventually  # noqa: E402

# -- systems ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", ("none", "", (), None)),
        ("ddp@25", ("ddp", "", (), 25.0)),
        ("ddp:powersgd", ("ddp", "powersgd", (), None)),
        (
            "ddp:own_group(gradient_as_bucket_view=True)@100",
            ("ddp", "own_group", (("gradient_as_bucket_view", True),), 100.0),
        ),
        ("ddp(gradient_as_bucket_view=True)@default", ("ddp", "", (("gradient_as_bucket_view", True),), None)),
        ("commlib:allreduce@0.5", ("commlib", "allreduce", (), 0.5)),
        (
            "commlib:allreduce(wire_dtype=bf16, predivide=2.0)@4",
            ("commlib", "allreduce", (("wire_dtype", "bf16"), ("predivide", 2.0)), 4.0),
        ),
    ],
)
def test_parse(name, expected):
    system = systems.parse(name)
    assert (system.kind, system.variant, system.options, system.cap_mb) == expected
    assert system.name == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "nccl",
        "commlib",
        "none:x",
        "torchft:x",
        "ddp:nope",
        "ddp@x",
        "commlib:x(lr=fast)",
        "commlib:allreduce(",
        "ddp:",
    ],
)
def test_parse_refuses(name):
    with pytest.raises(ValueError, match="system"):
        systems.parse(name)


def test_the_learning_rate_is_the_optimizers():
    system = systems.parse("commlib:signsgd(feedback=False,lr=1e-4)@1")
    assert (system.lr, system.options) == (1e-4, (("feedback", False),))
    model = models.WORKLOADS["bytes-tiny"]().build()
    workload = models.WORKLOADS["bytes-tiny"]()
    for kind, expected in (("adamw", workload.rates["adamw"]), ("frozen-variance-adam", workload.rates["adamw"])):
        assert workload.make_optimizer(model, kind).param_groups[0]["lr"] == expected
    plain = workload.make_optimizer(model, "plain-sgd", 0.5).param_groups[0]
    assert (plain["lr"], plain["momentum"]) == (0.5, 0)


def test_every_algorithm_gets_the_optimizer_that_it_demands():
    assert set(systems.OPTIMIZER_OF) <= set(commlib.algorithms.list())
    assert set(systems.OPTIMIZER_OF.values()) <= set(models.OPTIMIZERS)


def test_parse_list_splits_outside_parentheses():
    names = [system.name for system in systems.parse_list("ddp, commlib:x(a=1,b=2)@4,none")]
    assert names == ["ddp", "commlib:x(a=1,b=2)@4", "none"]
    with pytest.raises(ValueError, match="twice"):
        systems.parse_list("ddp,none,ddp")


@pytest.mark.parametrize(
    ("name", "least", "expected"),
    [
        ("none", 3, 3),
        ("ddp:powersgd", 8, 8),
        ("torchft", 3, 3),
        ("torchft:local_sgd(sync_every=8)", 8, 8),
        ("torchft:local_sgd(sync_every=8)", 9, 16),
        ("torchft:diloco(sync_every=50)", 8, 50),
        ("commlib:allreduce@4", 3, 3),
        ("commlib:local_sgd(period=6)", 8, 12),
        ("bound:diloco(period=20)", 8, 20),
        ("commlib:streaming_diloco(period=50, fragments=5)", 8, 50),
    ],
)
def test_a_block_holds_whole_periods(name, least, expected):
    assert systems.block_of(systems.parse(name), least) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("commlib:allreduc", "'allreduc' is not registered. Did you mean 'allreduce'?"),
        ("commlib:topk(ratioo=3)", "ratioo"),
        ("torchft:diloco(sync_every=often)", "sync_every is 'often'"),
        ("torchft:diloco(sync_every=0)", "sync_every is 0"),
    ],
)
def test_step_refuses_options_before_anything_starts(name, expected, capsys):
    with pytest.raises(SystemExit):
        step.parse_args(["--systems", f"none,{name}"])
    assert expected in capsys.readouterr().err


def test_only_plain_ddp_is_left_open():
    assert systems.parse("ddp").is_open
    assert not any(systems.parse(name).is_open for name in ("ddp@25", "ddp@default", "ddp:fp16", "none", "commlib:x"))
    configurations = systems.ddp_configurations()
    assert len({system.name for system in configurations}) == 10
    assert not any(system.is_open for system in configurations)


# -- intervals and orders ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_systems", [1, 2, 3, 5, 8])
def test_rotation_is_fair(num_systems):
    orders = [intervals.rotation(num_systems, repetition) for repetition in range(2 * num_systems)]
    assert all(sorted(order) == list(range(num_systems)) for order in orders)
    places = np.array(orders)
    for system in range(num_systems):
        assert ((places == system).sum(axis=0) == 2).all()


def test_interval_covers_the_median():
    random = np.random.default_rng(0)
    ratios = [intervals.median_interval(random.lognormal(0, 0.3, 30).tolist(), 400) for _ in range(200)]
    covered = np.mean([ratio.lo <= 1 <= ratio.hi for ratio in ratios])
    assert 0.90 <= covered <= 0.995


def test_paired_ratio_cancels_drift():
    random = np.random.default_rng(0)
    drift = np.linspace(1, 5, 40)
    base, slower = drift * random.normal(1, 0.01, 40), 1.1 * drift * random.normal(1, 0.01, 40)
    ratio = intervals.paired_ratio(slower.tolist(), base.tolist())
    assert ratio.lo < 1.1 < ratio.hi
    assert ratio.hi - ratio.lo < 0.03


def test_ratio_to_best_does_not_profit_from_luck():
    random = np.random.default_rng(0)
    medians, naive = [], []
    for _ in range(100):
        times = {str(idx): random.lognormal(0, 0.1, 20).tolist() for idx in range(9)}
        target = times.pop("8")
        best, ratio = intervals.ratio_to_best(target, times)
        medians.append(ratio.median)
        naive.append(intervals.paired_ratio(target, times[best]).median)
    assert abs(np.mean(medians) - 1) < 0.012
    assert np.mean(naive) > 1.02


# -- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_parameters", "numel"),
    [("bytes-gpt", 76, 10.8e6), ("cnn", 20, 4.5e6), ("many-small", 2000, 1.06e6)],
)
def test_models_are_as_documented(name, num_parameters, numel):
    parameters = list(models.WORKLOADS[name]().build().parameters())
    assert len(parameters) == num_parameters
    assert sum(parameter.numel() for parameter in parameters) == pytest.approx(numel, rel=0.01)


@pytest.mark.parametrize("name", models.WORKLOADS)
def test_batches_depend_on_seed_step_and_rank(name):
    workload = models.WORKLOADS[name]()
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    once, again = ([workload.draw(key)[0] for key in keys] for _ in range(2))
    assert all(one.equal(other) for one, other in zip(once, again, strict=True))
    assert all(not once[0].equal(other) for other in once[1:])


# -- rows -------------------------------------------------------------------------------------------------------------


def measured(name: str, *blocks_s: float) -> dict:
    sent = {"wire_bytes": [8.0, 8.0], "wire_packets": [2.0, 2.0]}
    return {"configuration": name, "blocks_s": list(blocks_s), **sent, "exposed_s": [], "loss": 1.0}


def test_rows_of_step():
    timed = {"none": measured("none", 1.0, 2.0), "commlib:allreduce@4": measured("commlib:allreduce@4", 1.5, 3.0)}
    place = Place(4, emulated=True, rate="200mbit", latency_us=5000.0)
    assert str(place) == "4 hosts at 200mbit, 5000 us added one way"
    bare, row = step.rows(timed, {"none": 100, "commlib:allreduce@4": 120}, place, "cnn", to_best_ddp=False)
    assert (bare["ratio"], bare["exposed_s"], bare["algorithm"]) == (1.0, 0.0, None)
    assert (row["algorithm"], row["hosts"], row["ranks"], row["rate"], row["model"]) == (
        "allreduce",
        4,
        4,
        "200mbit",
        "cnn",
    )
    assert (row["ratio"], row["ratio_lo"], row["ratio_hi"], row["exposed_s"]) == (1.5, 1.5, 1.5, 0.75)
    assert row["latency_us"] == 5000.0
    assert report.place(row) == "4 hosts, 200mbit, 5000 us"
    assert (row["wire_bytes"], row["wire_packets"], row["peak_bytes"], row["step_s"]) == (8.0, 2.0, 120, 2.25)


def test_rows_compare_with_the_best_ddp_configuration():
    timed = {s.name: measured(s.name, *[2.0 + idx] * 4) for idx, s in enumerate(systems.ddp_configurations())}
    timed["none"] = measured("none", *[1.0] * 4)
    row = step.rows(timed, {}, Place(2), "cnn", to_best_ddp=True)[-1]
    assert (row["ratio"], row["reference"], row["peak_bytes"]) == (0.5, systems.ddp_configurations()[0].name, None)


def test_the_lower_bound_is_the_best_of_the_same_algorithm():
    blocks = {
        "commlib:qsgd(bits=4)@4": [1.1] * 4,
        "bound:qsgd(bits=4)@1": [1.2] * 4,
        "bound:qsgd(bits=4)@4": [1.0] * 4,
        "bound:qsgd@4": [0.5] * 4,
        "none": [0.1] * 4,
    }
    timed = {name: {**measured(name, *times), "reported_wire_bytes": 8.0} for name, times in blocks.items()}
    own, *others = step.rows(timed, {}, Place(4), "cnn", to_best_ddp=False)
    assert (own["lower_bound_s"], own["to_lower_bound"]) == (1.0, pytest.approx(1.1))
    assert all(row["lower_bound_s"] is None for row in others)
    lines = report.relaxed_rows({"rows": [own, *others]})
    assert [line.split("|")[3].strip() for line in lines] == ["commlib:qsgd(bits=4)@4", "none"]
    assert "1.10" in lines[0]


def test_the_spread_of_all_runs_is_by_system_whatever_its_buckets():
    def run(cap: int, ratio: float, to_bound: float | None, reference: str = "ddp(gradient_as_bucket_view=True)@5"):
        place = {"model": "cnn", "hosts": 4, "rate": "1gbit", "reference": reference, "to_lower_bound": None}
        shared = {**place, "wire_bytes": 2.2e6, "wire_packets": 1000, "reported_wire_bytes": 2e6}
        own = {**shared, "system": f"commlib:topk@{cap}", "ratio": ratio, "to_lower_bound": to_bound}
        return {"rows": [own, *({**shared, "system": name, "ratio": ratio} for name in ("bound:topk@4", reference))]}

    results = [run(4, 0.5, 1.0), run(25, 0.4, 1.2), run(4, 0.8, None), run(4, 1.2, 1.4, "none")]
    assert report.spread_rows(results) == [
        "| cnn | 4 hosts, 1gbit | commlib:topk | 3 | 2.00 (1.25 to 2.50) | 3 | 1.20 (1.00 to 1.40) | 2.2 "
        "| +10.0% | +6.7% |"
    ]


def test_races_are_replayed_on_recorded_steps():
    """Three plans on two ranks; the second is slowest on one rank, the third in its later steps."""
    fast, slow = [0.1, 0.101] * 6, [0.12, 0.121] * 6
    late = [0.09, 0.091] * 2 + [0.13, 0.131] * 4
    result = {
        "steps_per_visit": 2,
        "bucket_numels": [[8, 8], [16], [4, 12]],
        "steps_s": [[fast, fast, late], [fast, slow, late]],
    }
    recording = trials.Recording(result)
    assert recording.num_visits == 6
    assert recording.true_s == pytest.approx([0.1005, 0.1205, 0.13])
    found = [recording.replay(start) for start in range(6)]
    assert [race.excess for race in found[2:5]] == [0.0] * 3
    assert [race.steps for race in found[2:5]] == [18] * 3  # one pass: two visits of three plans, three steps each
    assert found[0].excess == pytest.approx(0.13 / 0.1005 - 1)  # where the third plan is the fastest
    summary = trials.summarize(result)
    assert summary["races"] == 6
    assert summary["slow"] == sum(race.excess > 0.01 for race in found) > 0


def test_rows_of_convergence():
    first = {"losses": [[1.0, 1.0], [3.0, 3.0]], "identical": True, "digest": "a"}
    other = {"losses": [[1.0, 1.0], [3.0, 3.2]], "identical": False, "digest": "b"}
    same, row = convergence.rows({"ddp@25": first, "commlib:x": other}, 2, "cnn")
    assert (same["bit_equal"], same["difference"], same["replicas_identical"]) == (True, 0.0, True)
    assert (row["bit_equal"], row["same_weights"], row["replicas_identical"]) == (False, False, False)
    assert row["difference"] == pytest.approx(0.05)


def final_row(system: str, seed: int, loss: float, optimizer: str = "sgd") -> dict:
    place = {"model": "digits", "optimizer": optimizer, "ranks": 4, "steps": 9}
    return {**place, "system": system, "seed": seed, "loss": loss, "accuracy": 0.5, "identical": True}


def test_losses_are_compared_seed_by_seed():
    rows = [final_row("commlib:allreduce@1", seed, loss) for seed, loss in enumerate((1.0, 2.0, 3.0))]
    rows += [final_row("commlib:x", seed, 1.1 * loss) for seed, loss in enumerate((1.0, 2.0))]
    rows += [final_row("commlib:allreduce@1", 0, 7.0, "adamw"), final_row("commlib:x", 0, 7.7, "adamw")]
    reference, other, *_, last = final_loss.summary(rows)
    assert (reference["change"], reference["change_sd"], reference["seeds"]) == (0.0, 0.0, 3)
    assert reference["spread"] == pytest.approx(0.5)
    assert other["change"] == pytest.approx(0.1)
    assert other["change_sd"] == pytest.approx(0, abs=1e-12)
    assert other["seeds"] == 2
    assert last["change"] == pytest.approx(0.1)
    assert last["optimizer"] == "adamw"


def test_budgets_grow_until_the_loss_of_all_reduce_is_reached(tmp_path, monkeypatch):
    trained = []

    def run_workers(place: object, spec: dict, steps: int) -> dict:
        (system,) = spec["systems"]
        trained.append((spec["seed"], system, steps))
        loss = 2.0 + spec["seed"] if "allreduce" in system else 2.3 - 0.002 * steps
        return {"systems": {system: {"loss": loss, "accuracy": 0.5, "identical": True}}}

    monkeypatch.setattr(final_loss.harness, "run_workers", run_workers)
    out = str(tmp_path / "out.json")
    final_loss.main(
        ["--systems", "commlib:qsgd@1", "--steps", "100", "--budgets", "2,1,1.25", "--seeds", "0,1", "--json", out]
    )
    wanted = [(0, "commlib:allreduce@1", 100), *((0, "commlib:qsgd@1", steps) for steps in (100, 125, 200))]
    assert trained == [*wanted, (1, "commlib:allreduce@1", 100), (1, "commlib:qsgd@1", 100)]
    final_loss.main(
        ["--systems", "commlib:qsgd@1", "--steps", "100", "--budgets", "1,1.5,2", "--seeds", "0", "--json", out]
    )
    assert trained[6:] == [(0, "commlib:qsgd@1", 150)]
    systems = "commlib:qsgd@1,commlib:allreduce@1"  # whatever the budgets and the order, all-reduce's is --steps
    final_loss.main(["--systems", systems, "--steps", "80", "--budgets", "1.5", "--seeds", "2", "--json", out])
    assert trained[7:] == [(2, "commlib:allreduce@1", 80), (2, "commlib:qsgd@1", 120)]


def test_losses_without_a_reference_are_shown_alone():
    (line,) = lines = final_loss.summary([final_row("commlib:x", seed, 2.0) for seed in (0, 1)])
    assert (line["loss"], line["seeds"]) == (2.0, 2)
    (table,) = final_loss.tables(lines)
    assert [list(column.cells) for column in table.columns][3] == ["-"]
    assert "all-reduce" not in str(table.title)


@pytest.mark.parametrize("width", [80, 100, 120])
def test_tables_fold_long_names_and_no_numbers(width):
    name = "commlib:diloco(period=30,outer_lr=1.0,outer_momentum=0.5,codec=int4,optimizer=muon)@1"
    rows = [final_row("commlib:allreduce@1", seed, 2.0) for seed in (0, 1)] + [final_row(name, 0, 1.93)]
    out = Console(width=width, file=io.StringIO())
    for table in final_loss.tables(final_loss.summary(rows)):
        out.print(table)
    printed = out.file.getvalue()
    assert max(map(len, printed.splitlines())) <= width
    cells = [line.split("│")[1:-1] for line in printed.splitlines() if line.startswith("│")]
    assert "".join(own[0].strip() for own in cells) == "commlib:allreduce@1" + name
    assert any([cell.strip() for cell in own[1:4]] == ["1", "1.9300", "-3.50%"] for own in cells)


def test_the_learning_rate_rises_and_falls_to_a_tenth():
    factors = [worker.schedule(step, 200) for step in range(200)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == factors[10] == 1.0
    assert factors[-1] == pytest.approx(0.1, abs=0.01)
    assert all(one >= other for one, other in itertools.pairwise(factors[10:]))


def test_arguments():
    assert step.parse_args(["--ranks", "1"]).systems == ["none", "commlib:allreduce"]
    assert step.parse_args([]).systems == ["ddp", "commlib:allreduce"]
    sweep = step.parse_args(["--sweep"]).systems
    assert sweep[0] == "commlib:allreduce"
    assert sweep[1:] == [f"commlib:allreduce@{cap}" for cap in ("0.5", "1", "2", "4", "8", "16", "32", "64")]
    assert len(step.parse_args(["--ddp-all"]).systems) == 11


@pytest.mark.parametrize(
    "arguments", [["--rate", "1gbit"], ["--latency-us", "9"], ["--systems", "ddp:nope"], ["--model", "nope"]]
)
def test_wrong_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        step.parse_args(arguments)
    assert "error" in capsys.readouterr().err


# -- launching --------------------------------------------------------------------------------------------------------


def script(folder: pathlib.Path, text: str) -> pathlib.Path:
    path = folder / "script.py"
    path.write_text("import os, sys, time\nrank = int(os.environ['RANK'])\n" + text)
    return path


def test_failing_rank_shows_its_error_and_ends_the_others(tmp_path):
    path = script(tmp_path, "if rank == 1: raise RuntimeError('the reason')\ntime.sleep(3600)")
    with pytest.raises(launch.WorkerError, match="rank 1 ended with code 1") as caught:
        launch.run_local(2, path, [], {}, timeout=LIMIT_S)
    assert "RuntimeError: the reason" in str(caught.value)


def test_hanging_rank_is_ended(tmp_path, monkeypatch):
    text = "print('before', flush=True)\nopen(f'{sys.argv[1]}/{rank}', 'w').close()\ntime.sleep(3600)"
    path, said = script(tmp_path, text), [tmp_path / str(rank) for rank in range(2)]
    monkeypatch.setattr(launch, "time", Alarm(lambda: all(each.exists() for each in said)))
    with pytest.raises(launch.WorkerError, match="did not end within 5 s") as caught:
        launch.run_local(2, path, [str(tmp_path)], {}, timeout=5)
    assert "before" in str(caught.value)


def test_no_rank_outlives_a_benchmark_that_is_told_to_end(tmp_path):
    path = script(tmp_path, "open(f'{sys.argv[1]}/{rank}', 'w').write(str(os.getpid()))\ntime.sleep(60)")
    code = f"import launch, pathlib; launch.run_local(2, pathlib.Path({str(path)!r}), [{str(tmp_path)!r}], {{}}, 50)"
    benchmark = subprocess.Popen([sys.executable, "-c", code], cwd=pathlib.Path(launch.__file__).parent)
    pids = [tmp_path / str(rank) for rank in range(2)]
    assert eventually(lambda: all(pid.exists() and pid.read_text() for pid in pids)), "the ranks did not start"
    benchmark.terminate()
    assert benchmark.wait(LIMIT_S) == 128 + signal.SIGTERM
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)


def test_ranks_get_arguments_and_environment(tmp_path):
    text = "open(f'{sys.argv[1]}/{rank}', 'w').write(os.environ['WORLD_SIZE'] + os.environ['MINE'])"
    launch.run_local(3, script(tmp_path, text), [str(tmp_path)], {"MINE": "!"}, timeout=50)
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["3!"] * 3


# -- a real run -------------------------------------------------------------------------------------------------------


def run(name: str, *args: str, where: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [*where, sys.executable, str(BENCHMARKS / name), *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.slow
@pytest.mark.timeout(960)
def test_step_measures_real_training(tmp_path):
    out = tmp_path / "folder" / "out.json"
    names = ["ddp@25", "commlib:allreduce@4", "none"]
    short = ("--reps", "3", "--block", "1", "--warmup", "3", "--memory-steps", "2", "--memory-runs", "1")
    done = run("step.py", "--systems", ",".join(names), *short, "--model", "bytes-tiny", "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(name in done.stdout for name in names)
    result = json.loads(out.read_text())
    assert result["header"]["torch"]
    assert "step.py" in result["header"]["command"]
    ddp, commlib, bare = result["rows"]
    assert [row["system"] for row in result["rows"]] == names
    gradient_bytes = 4 * sum(p.numel() for p in models.WORKLOADS["bytes-tiny"]().build().parameters())
    for row in (ddp, commlib):
        assert row["wire_bytes"] > 0.95 * gradient_bytes
        assert row["peak_bytes"] > 3 * gradient_bytes
    assert bare["peak_bytes"] < ddp["peak_bytes"]
    assert commlib["loss"] == ddp["loss"] != bare["loss"]
    assert all(len(row["blocks_s"]) == 3 and row["step_s"] > 0 for row in result["rows"])


@needs_own_loopback
@pytest.mark.slow
@pytest.mark.timeout(960)
def test_the_bound_of_messages_sends_as_many_bytes(tmp_path):
    out, options = tmp_path / "out.json", "(period=1,rest=0.0)"
    names = f"none,commlib:async_sgd{options},bound:async_sgd{options}"
    short = ("--reps", "5", "--block", "20", "--warmup", "5", "--memory-steps", "0")
    done = run("step.py", "--systems", names, *short, "--model", "bytes-tiny", "--json", str(out), where=OWN_LOOPBACK)
    assert done.returncode == 0, done.stdout + done.stderr
    bare, own, bound = json.loads(out.read_text())["rows"]
    assert own["to_lower_bound"] > 0
    assert bare["wire_bytes"] < 0.01 * bound["wire_bytes"]
    assert 0.5 < bound["wire_bytes"] / own["wire_bytes"] < 2


@pytest.mark.slow
@pytest.mark.timeout(960)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--kills", "2", "--mb", "0.1", "--compute-ms", "20"), {"kills": 2, "members": 4}),
        (("--losses", "digits", "--steps", "40", "--every", "15", "--seeds", "3"), {"kills": 2, "seed": 3}),
    ],
)
def test_elastic_kills_members(tmp_path, options, expected):
    out = tmp_path / "out.json"
    done = run("elastic.py", *options, "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert {name: row[name] for name in expected} == expected
    if "gap_percent" in row:
        assert row["disturbed_loss"] != row["undisturbed_loss"]
        assert abs(row["gap_percent"]) < 50
    else:
        assert 0 < row["median_extra_s"] <= row["longest_extra_s"]


def test_an_algorithm_that_sends_outside_of_rounds_has_no_bound():
    with pytest.raises(ValueError, match="PassiveGossip sends outside of rounds"):
        bounds.bound_of(commlib.algorithms.get("passive_gossip")())


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_trials_are_recorded_and_replayed(tmp_path):
    out = tmp_path / "folder" / "out.json"
    done = run("trials.py", "--passes", "1", "--json", str(out), model="cnn")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 races" in done.stdout
    result = json.loads(out.read_text())
    numel = sum(p.numel() for p in models.WORKLOADS["cnn"]().build().parameters())
    assert len(result["bucket_numels"]) > 1
    assert all(sum(numels) == numel for numels in result["bucket_numels"])
    for of_plans in result["steps_s"]:
        assert [len(steps_s) for steps_s in of_plans] == [2 * result["steps_per_visit"]] * len(of_plans)
    again = run("trials.py", "--replay", str(out))
    assert "2 races" in again.stdout, again.stdout + again.stderr


@pytest.mark.timeout(180)
def test_convergence_compares_curves(tmp_path):
    out = tmp_path / "out.json"
    done = run("convergence.py", "--systems", "ddp@25,commlib:allreduce,none", "--steps", "12", "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["system"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["commlib:allreduce"]["bit_equal"]
    assert rows["commlib:allreduce"]["same_weights"]
    assert rows["commlib:allreduce"]["replicas_identical"]
    assert not rows["none"]["replicas_identical"]
    assert not rows["none"]["bit_equal"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_final_losses_are_kept_and_completed(tmp_path):
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    names = ["commlib:allreduce@1", "commlib:qadam(warmup_steps=2)@1"]
    common = ("--ranks", "2", "--steps", "8", "--seeds", "3", "--json", str(out), "--optimizer", "sgd")
    done = run("convergence.py", "final", "--systems", names[0], *common)
    assert done.returncode == 0, done.stdout + done.stderr
    first = json.loads(out.read_text())
    done = run("convergence.py", "final", "--systems", ",".join(names), *common, "--plot", str(plot))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert result["rows"][:1] == first["rows"]
    assert [len(header["date"]) for header in result["headers"]] == [25, 25]  # of both runs
    assert [row["system"] for row in result["rows"]] == names
    assert len({row["loss"] for row in result["rows"]}) == 2
    assert all(row["identical"] and 1 < row["loss"] < 6 and 0 <= row["accuracy"] < 1 for row in result["rows"])
    assert plot.stat().st_size > 1000


@pytest.mark.timeout(180)
def test_a_worker_that_fails_shows_its_error():
    done = run("step.py", "--systems", "ddp(nosuch=1)@25", "--ranks", "1", "--memory-steps", "0")
    assert done.returncode != 0
    assert "TypeError" in done.stderr
    assert "nosuch" in done.stderr


def test_shrunk_workloads_train_and_their_rate_follows_the_network() -> None:
    workload = models.WORKLOADS["shrunk-bert-large"]()
    model = workload.new_model(0, models.torch.device("cpu"))
    assert 3.5e6 < sum(p.numel() for p in model.parameters()) <= 4.1e6
    inputs, target = workload.draw((0, 0, 0))
    workload.loss(model(inputs), target).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert shrunk.usual_optimizer("bert-large") == next(iter(workload.rates)) == "adamw"
    slow, fast = (shrunk.equivalent_rate("bert-large", name, 4) for name in ("1gbps", "10gbps"))
    assert fast == pytest.approx(10 * slow)


def test_step_refuses_a_network_for_a_model_that_computes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        step.parse_args(["--hosts", "4", "--network", "10gbps", "--model", "cnn"])
    assert "shrunk" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        step.parse_args(["--hosts", "4", "--network", "10gpbs", "--model", "shrunk-vgg16"])
    args = step.parse_args(["--hosts", "4", "--network", "10gbps", "--model", "shrunk-vgg16"])
    assert args.rate.endswith("mbit")


# --- simulated next to measured values -------------------------------------------------------------------------------


def test_simulated_speed_ups_stand_in_a_column_for_each_network_the_fastest_first():
    def comparison(network: str, **speedups: float):
        rows = [{"algorithm": name, "exactness": "8bit", "speedup": value} for name, value in speedups.items()]
        return {"workload": {"name": "small"}, "network": {"name": network}, "rows": rows}

    lines = agreement.compare_lines([comparison("far", slow=1.0, fast=2.5), comparison("near", slow=1.25)])
    assert lines == [
        "| algorithm | class | small, far | small, near |",
        "|---|---|--:|--:|",
        "| `fast` | 8bit | 2.50 |  |",
        "| `slow` | 8bit | 1.00 | 1.25 |",
    ]


def test_simulated_steps_stand_beside_measured_ones_and_distances_are_summed_up():
    def run(rate_bps: float, step_s: float):
        rows = [
            {"system": "none", "step_s": 0.1, "predicted_s": None, "algorithm": "none"},
            {"system": "topk", "step_s": step_s, "predicted_s": 0.22, "algorithm": "topk"},
            {"system": "auto()", "step_s": 0.3, "predicted_s": None, "algorithm": "topk"},
        ]
        return {"rate_bps": rate_bps, "rows": rows}

    _, _, *lines = agreement.emulated_lines([run(2e8, 0.2), run(1e9, 0.275)])
    assert lines == [
        "| `none` | 100 |  |  | 100 |  |  |",
        "| `topk` | 200 | 220 | +10.0% | 275 | 220 | -20.0% |",
        "| `auto()` | 300 | topk |  | 300 | topk |  |",
        "",
        "2 predictions: mean distance 15.0%, furthest 20.0%",
    ]


def test_collectives_stand_by_latency_with_what_was_simulated():
    def row(latency_us: float, nbytes: int, seconds: float, predicted_s: float | None):
        place = {"verb": "all_reduce", "latency_us": latency_us, "bytes": nbytes}
        return {**place, "seconds": seconds, "predicted_s": predicted_s}

    rows = [row(0.0, 2**16, 0.01, None), row(5e3, 4, 0.05, 0.1), row(5e3, 2**16, 0.05, 0.06), row(5e3, 2**18, 0.1, 0.1)]
    assert agreement.latency_lines(rows)[2:] == [
        "| all_reduce | 64 KiB | 10.0 | 50.0 (60.0) |",
        "",
        "5 ms: median distance 10%, furthest 20%",
    ]


def test_simulated_steps_of_shards_are_compared_with_measured_ones():
    """The bytes of the waiting GPT are those that the interfaces counted, and a slow link takes their time."""
    place = {"hosts": 4, "ranks": 4, "rate": "50mbit", "model": "slept-gpt", "wire_bytes": 24.8e6}
    systems = ["fsdp", "shard(weights=int8,gradients=int8)", "shard(weights=int8,gradients=int8,feedback=True)"]
    step_s = 24.7e6 * 8 / 50e6 / (1448 / 1538)
    lines = agreement.sharded_lines([{**place, "system": each, "step_s": step_s} for each in systems])
    [row] = lines[2:-2]
    system, rate, measured, said, difference, sent, sent_said = (cell.strip() for cell in row.strip("|").split("|"))
    assert (system, rate, sent, sent_said) == ("`shard(weights=int8,gradients=int8)`", "50mbit", "24.8", "24.7")
    assert abs(float(difference.rstrip("%"))) < 3
    assert float(said) / float(measured) - 1 == pytest.approx(float(difference.rstrip("%")) / 100, abs=2e-3)
    assert lines[-1].startswith("1 predictions: mean distance")


def test_a_sweep_is_shown_by_its_best_fixed_size():
    row = {"model": "cnn", "rate": None, "ranks": 2}
    found = {"best_fixed": "commlib:allreduce@16", "planned_to_best": 0.9859, "lo": 0.9667, "hi": 1.0434}
    line = report.sweep_row({"rows": [row], "sweep": found})
    assert line == "| cnn | 2 ranks, loopback | 16 MiB | 0.986 | 0.967 to 1.043 |"


# --- traces -----------------------------------------------------------------------------------------------------------


def traced(name: str, start: float, duration: float) -> dict[str, object]:
    return {"ph": "X", "name": name, "ts": start, "dur": duration, "pid": 1, "tid": 7}


def test_collectives_of_a_trace_that_overlap_are_moved_to_tracks_of_their_own():
    names = ["all_to_all: bucket 0", "all_to_all: bucket 1", "all_gather: bucket 0", "encode: bucket 2"]
    times = [(0.0, 5.0), (3.0, 4.0), (5.0, 1.0), (4.0, 1.0)]
    trace = {"traceEvents": [traced(f"commlib: {name}", *time) for name, time in zip(names, times, strict=True)]}
    profile_step.separate_collectives(trace)
    assert [event["tid"] for event in trace["traceEvents"]] == ["wire 0", "wire 1", "wire 0", 7]


def test_a_trace_without_commlib_is_refused():
    with pytest.raises(SystemExit, match="without a wrapped model"):
        profile_step.spans_of({"traceEvents": [traced("forward", 0.0, 1.0)]})
