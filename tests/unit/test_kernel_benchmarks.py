"""benchmarks/kernels.py: sizes, byte models, ratios, crossovers, and a real short run."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
import torch

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import gpu_timing  # noqa: E402
import kernel_cases  # noqa: E402
import kernels  # noqa: E402

from commlib import codecs  # noqa: E402


@pytest.mark.parametrize(
    ("text", "expected"), [("4KiB", 4096), ("1 MiB", 1 << 20), ("0.5GiB", 1 << 29), ("2MB", 2 << 20), ("7B", 7)]
)
def test_sizes_are_read(text, expected):
    assert kernels.parse_bytes(text) == expected


def test_wrong_arguments_are_named(capsys):
    for wrong in (["--sizes", "many"], ["--codecs", "int9"]):
        with pytest.raises(SystemExit):
            kernels.parse_args(wrong)
        assert wrong[1] in capsys.readouterr().err


def kernel(name: str, codec: str, moved: int, payload: int = 0, peer_of: tuple[str, str] | None = None):
    return kernel_cases.Kernel(name, codec, moved, lambda: None, payload, peer_of)


def test_ratios_are_to_the_memcpy_of_the_same_run():
    made = [
        kernel("memcpy", "-", 8000),
        kernel("encode", "int8", 5000, 1000),
        kernel("decode", "int8", 5000, 1000),
        kernel("theirs", "other", 5000, peer_of=("encode", "int8")),
    ]
    copy, encode, decode = kernels.rows_of(made, [4.0, 5.0, 2.5, 20.0], 1000, "cpu", 1)
    assert copy["to_memcpy"] == copy["fraction_of_limit"] == 1
    assert encode["to_memcpy"] == 1.25
    assert encode["limit_s"] == 2.5
    assert encode["fraction_of_limit"] == 0.5
    assert decode["fraction_of_limit"] == 1
    assert encode["gb_per_s"] == pytest.approx(1e-6)
    assert encode["peers_s"] == {"theirs": 20.0}
    assert decode["peers_s"] == {}
    # 3000 bytes saved for 7.5 s of work
    assert kernels.crossovers([copy, encode, decode]) == {"int8": pytest.approx(3000 * 8 / 7.5 / 1e9)}


def test_bytes_moved_are_those_of_the_tensors():
    tensors = kernel_cases.new_tensors(1 << 16, "cpu")
    full = tensors.x.nbytes
    by_name = {made.name: made for made in kernel_cases.kernels_of("int8", tensors)}
    size = codecs.by_name["int8"]().payload_bytes(1 << 16)
    assert by_name["encode"].bytes_moved == by_name["decode"].bytes_moved == full + size
    assert by_name["encode + feedback"].bytes_moved == 3 * full + size
    small = codecs.by_name["int8"]().payload_bytes((1 << 16) // 8)
    assert by_name["decode-sum-encode"].bytes_moved == 9 * small


@pytest.mark.parametrize("name", ["topk", "threshold"])
def test_sparse_codecs_see_the_same_values_in_every_call(name):
    tensors = kernel_cases.new_tensors(1 << 14, "cpu")
    by_name = {made.name: made for made in kernel_cases.kernels_of(name, tensors)}
    decoded = []
    for _ in range(3):
        by_name["encode + feedback"].run()
        by_name["decode"].run()
        decoded.append(tensors.out.clone())
    assert torch.equal(decoded[0], decoded[1])
    assert torch.equal(decoded[0], decoded[2])
    places = round(kernel_cases.RATIO * (1 << 14))
    assert 0.8 * places < decoded[0].count_nonzero() <= places


@pytest.mark.parametrize("name", [*codecs.by_name, kernel_cases.ROTATION])
def test_every_kernel_and_peer_runs(name):
    tensors = kernel_cases.new_tensors(4096, "cpu")
    for made in [
        *kernel_cases.copies(tensors),
        *kernel_cases.kernels_of(name, tensors),
        *kernel_cases.peers_of(name, tensors),
    ]:
        made.run()
        assert made.bytes_moved > 0


def test_the_non_temporal_copy_copies():
    tensors = kernel_cases.new_tensors(100_003, "cpu")
    kernel_cases.copies(tensors)[1].run()
    assert torch.equal(tensors.x, tensors.out)


@pytest.mark.timeout(120)
def test_a_short_run_writes_rows_and_a_plot(tmp_path):
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    command = [sys.executable, str(BENCHMARKS / "kernels.py"), "--sizes", "4KiB,64KiB", "--codecs", "int8,topk"]
    command += ["--reps", "3", "--json", str(out), "--plot", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pays for itself below" in done.stdout
    result = json.loads(out.read_text())
    wanted = {"kernel", "codec", "device", "isa", "threads", "dtype", "numel", "bytes_moved", "median_s"}
    assert all(wanted | {"memcpy_median_s", "peers_s"} <= set(row) for row in result["rows"])
    assert {row["numel"] for row in result["rows"]} == {1024, 16384}
    assert set(result["crossover_gbit_s"]) == {"int8", "topk"}
    assert picture.stat().st_size > 10_000
    again = subprocess.run(
        [sys.executable, str(BENCHMARKS / "kernels.py"), "--merge", str(out), str(out)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert again.returncode == 0, again.stderr


class FakeEvent:
    """An event of a device whose kernels take as long as the test says."""

    clock_ms = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_ms = FakeEvent.clock_ms

    def elapsed_time(self, later: FakeEvent) -> float:
        return later.at_ms - self.at_ms


def test_times_on_a_gpu_are_the_device_s_behind_a_sleep(monkeypatch):
    slept = []

    def call(ms: float):
        def run() -> None:
            FakeEvent.clock_ms += ms

        return kernel_cases.Kernel("k", "c", 1, run)

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    medians, host_s = gpu_timing.measure([call(2.0), call(0.5)], reps=5, seconds=60)
    assert medians == pytest.approx([2e-3, 5e-4])
    assert len(host_s) == 2
    assert len(slept) == 10
    assert min(slept) >= 1e-4 * 1e9, "shorter than the host needs to queue"


def test_goals_are_those_of_large_tensors():
    assert gpu_timing.goal_of("encode", "int4") == 0.85
    assert gpu_timing.goal_of("encode + feedback", "topk") == 0.5
    assert gpu_timing.goal_of("encode + feedback", "int4") is None
    assert gpu_timing.goal_of("encode", "topk") is None
    assert gpu_timing.goal_of("memcpy", "-") is None


def test_a_check_is_told_of_each_row(tmp_path, monkeypatch):
    monkeypatch.setenv("COMMLIB_GPU_RESULTS", str(tmp_path / "results.jsonl"))
    made = [kernel("memcpy", "-", 8000), kernel("encode", "int8", 5000, 1000)]
    rows = kernels.rows_of(made, [4.0, 5.0], 10**8, "cuda", 1)
    assert kernels.noted(rows, made, [0.1, 0.2])[1]["host_s"] == 0.2
    copy, encode = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert (encode["of_copy"], encode["goal"], encode["is"]) == (0.5, 0.85, "MISSED")
    assert encode["name"] == "int8 encode, 100 M"
    assert "goal" not in copy


def test_elements_in_the_place_of_sizes():
    assert kernels.parse_args(["--elements", "1e6,100"]).sizes == [4_000_000, 400]


def test_a_codec_that_fails_on_a_gpu_costs_no_other_figure(monkeypatch, tmp_path):
    def rows_of_codec(name, tensors, args, threads):
        if name == "int8":
            raise RuntimeError("no kernel image")
        row = {"codec": name, "kernel": "encode", "numel": 1000, "threads": 1, "payload_bytes": 500, "median_s": 1.0}
        return [row, {**row, "kernel": "decode"}]

    noted = []
    monkeypatch.setattr(kernels, "rows_of_codec", rows_of_codec)
    monkeypatch.setattr(kernels, "new_tensors", lambda numel, _: kernel_cases.new_tensors(numel, "cpu"))
    monkeypatch.setattr(kernels.harness, "note", lambda name, **facts: noted.append((name, facts)))
    out = tmp_path / "out.json"
    options = ["--device", "cuda", "--elements", "1000", "--codecs", "int8,topk", "--json", str(out)]
    assert [row["codec"] for row in kernels.run(kernels.parse_args(options))] == ["topk", "topk"]
    assert noted == [("int8, 0.001 M", {"has_failed": True, "text": "RuntimeError('no kernel image')"})]
    assert len(json.loads(out.read_text())["rows"]) == 2
