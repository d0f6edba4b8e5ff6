"""benchmarks/gpu_train.py without a GPU: its systems, its rows, the values read from a trace, and a real short run."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import gpu_trace  # noqa: E402
import gpu_train  # noqa: E402


def test_systems_by_the_number_of_ranks():
    assert gpu_train.parse_args(["--ranks", "1"]).names[0] == "none"
    names = gpu_train.parse_args(["--ranks", "2"]).names
    assert names[0].startswith("ddp")
    assert {"commlib:bytegrad@25", "commlib:powersgd@25", "commlib:diloco(period=4)@25"} < set(names)
    assert names[-2:] == ["fsdp", "shard(weights=int8,gradients=int8)"]
    with pytest.raises(SystemExit):
        gpu_train.parse_args(["--systems", "nothing"])


def racer(*blocks_s: float) -> SimpleNamespace:
    return SimpleNamespace(blocks_s=list(blocks_s), peak_bytes=2_000_000, block=4)


def test_ratios_are_those_of_blocks_side_by_side():
    racers = {"none": racer(1.0, 2.0, 4.0), "commlib:allreduce@25": racer(1.1, 2.2), "commlib:topk@25": racer()}
    bench = SimpleNamespace(racers=racers, world_size=1, args=SimpleNamespace(backend="gloo"))
    bare, allreduce = gpu_train.rows_of(bench)
    assert (bare["ms"], bare["peak_mb"]) == (2000.0, 2.0)
    assert "to_none" not in bare
    assert allreduce["to_none"] == pytest.approx([1.1, 1.1, 1.1])
    assert "to_ddp" not in allreduce


def event(name: str, ts: float, dur: float, cat: str = "kernel") -> dict:
    return {"name": name, "ts": ts, "dur": dur, "cat": cat, "ph": "X"}


def test_a_trace_shows_where_the_parts_lie():
    events = [
        event("sm90_gemm", 1000, 4000),
        event("commlib_encode_Int8_Float32_false_false_false", 2000, 1000),
        event("ncclDevKernel_SendRecv", 3000, 3000),
        event("commlib_decode_Int8_Float32_false", 6000, 500),
        event("commlib_sum_sparse", 6500, 500),
        event("Memcpy DtoD", 7000, 100, "gpu_memcpy"),
        event("aten::add", 0, 99_000, "cpu_op"),
    ]
    found = gpu_trace.summary(events)
    assert found["device_events"] == 6
    assert (found["encode_ms"], found["wire_ms"], found["decode_ms"], found["compute_ms"]) == (1.0, 3.0, 1.0, 4.0)
    assert found["wire_from_to_ms"] == [2.0, 5.0]
    assert found["hidden_ms"] == 3.0  # the encoding, and the wire until the product ends
    assert gpu_trace.summary([]) == {"device_events": 0}


def test_file_names():
    assert gpu_trace.file_name("commlib:diloco(period=4)@25") == "commlib-diloco-period-4-25"


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_a_short_run_notes_every_system(tmp_path):
    systems = "ddp(gradient_as_bucket_view=True)@25,commlib:allreduce@25,commlib:bytegrad@25"
    systems += ",fsdp,shard(weights=int8,gradients=int8)"
    command = [sys.executable, str(BENCHMARKS / "gpu_train.py"), "--ranks", "2", "--device", "cpu", "--size", "tiny"]
    command += ["--batch", "2", "--seconds", "60", "--out", str(tmp_path), "--systems", systems, "--repetitions", "2"]
    env = {**os.environ, "COMMLIB_GPU_RESULTS": str(tmp_path / "results.jsonl")}
    env["PYTHONPATH"] = os.pathsep.join([str(BENCHMARKS.parent), env.get("PYTHONPATH", "")])
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=160, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    notes = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert all(note["outcome"] == "passed" for note in notes), notes
    named = {note["name"].partition(", 2 ranks")[0] for note in notes}
    assert set(gpu_train.parse_args(["--systems", systems]).names) <= named
    result = json.loads((tmp_path / "train-cpu-r2.json").read_text())
    assert [len(row["blocks_s"]) for row in result["rows"]] == [2] * 5
    assert all("to_ddp" in row for row in result["rows"][1:])
    assert len(list(tmp_path.glob("trace-r2-*.json.gz"))) == 2
