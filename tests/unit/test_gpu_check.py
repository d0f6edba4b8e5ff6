"""scripts/gpu_check as far as possible without a GPU: its plan, its limits, and its handling of failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gpu import check, compile_kernels, machine, results, several_ranks
from tests.gpu.parts import Command, Part, parts
from tests.waiting import Alarm, eventually

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the changes that a check makes to the environment of this process."""
    for name in (results.FILE_VARIABLE, results.PART_VARIABLE):
        monkeypatch.setenv(name, "")


def new_check(tmp_path: Path, *args: str) -> check.Check:
    work = tmp_path / "work"
    work.mkdir()
    return check.Check(check.parse_args(["--out", str(tmp_path / "out"), *args]), work)


def python(code: str, stage: int = 0, name: str = "it") -> Command:
    return Command(name, [sys.executable, "-c", code], stage)


ADDS = "from tests.gpu import results; results.add('figure', results.PASSED, ms=2.5)"


def test_parts_come_in_order_with_limits_that_fit_7_minutes(tmp_path: Path) -> None:
    every = parts(tmp_path)
    assert tuple(part.name for part in every) == check.NAMES
    assert sum(part.limit_s for part in every) <= 330
    assert [part.status for part in every] == [2, 4, 8, 16, 32]
    for part in every:
        stages = {command.stage: 0.0 for command in part.commands}
        for command in part.commands:
            for option in ("--seconds", "--total-seconds"):
                if option in command.argv and part.name != "kernels":
                    seconds = float(command.argv[command.argv.index(option) + 1])
                    stages[command.stage] = max(stages[command.stage], seconds)
        assert sum(stages.values()) <= part.limit_s, f"{part.name} has no time for {stages}"


def test_a_check_begins_without_the_packages_that_it_looks_for() -> None:
    code = "import sys, tests.gpu.check; print(sorted({'torch', 'numpy', 'commlib', 'pytest'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_unknown_parts_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check.parse_args(["--only", "bits,speed"])
    assert "speed" in capsys.readouterr().err


def test_a_part_passes_where_its_commands_do(tmp_path: Path) -> None:
    one = new_check(tmp_path)
    one.run_part(Part("bits", 30, 2, [python(ADDS)]))
    assert one.status == 0
    (found,) = results.read(one.out / "results.jsonl")
    assert (found["part"], found["ms"]) == ("bits", 2.5)
    with tarfile.open(one.out / "gpu_check.tar.gz") as archive:
        assert {"results.jsonl", "bits.log"} <= set(archive.getnames())


def test_what_fails_is_in_the_exit_status_and_named(tmp_path: Path) -> None:
    one = new_check(tmp_path)
    one.run_part(Part("bits", 30, 2, [python(f"{ADDS}; raise SystemExit(7)")]))
    one.run_part(Part("kernels", 30, 4, [python("pass")]))
    one.run_part(Part("nccl", 30, 8, [python(ADDS)]))
    one.run_part(Part("train", 30, 16, [Command("gone", ["/no/such/program"])]))
    assert one.status == 2 + 4 + 16
    texts = {row["part"]: row["text"] for row in results.read(one.out / "results.jsonl") if row["outcome"] == "failed"}
    assert texts["bits"] == "ended with code 7"
    assert "nothing passed" in texts["kernels"]
    assert "No such file" in (one.out / "train.log").read_text()


def test_a_part_ends_at_its_limit_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, child, beside = new_check(tmp_path), tmp_path / "child", tmp_path / "beside"
    code = (
        f"{ADDS}; import pathlib, subprocess, sys, time\n"
        f"made = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])\n"
        f"beside = pathlib.Path({str(beside)!r})\n"
        f"while not (beside.exists() and beside.read_text()): time.sleep(0.01)\n"
        f"open({str(child)!r}, 'w').write(str(made.pid)); time.sleep(3600)"
    )
    says = f"import os; print('beside', flush=True); open({str(beside)!r}, 'w').write(str(os.getpid()))"

    def is_late() -> bool:
        return child.exists() and bool(child.read_text()) and not _runs(int(beside.read_text()))

    monkeypatch.setattr(check, "time", Alarm(is_late))
    one.run_part(Part("bits", 5.0, 2, [python(code), python(says, name="beside"), python(ADDS, 1, "later")]))
    assert one.status == 2
    failed = {row["name"]: row["text"] for row in results.read(one.out / "results.jsonl") if row["outcome"] == "failed"}
    assert failed["it"] == "ended at the limit"
    assert "beside" not in failed
    assert "beside" in (one.out / "bits.log").read_text()
    pid = int(child.read_text())
    assert eventually(lambda: not _runs(pid)), "a process of the part runs on"


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_wheels_are_unpacked_and_found(tmp_path: Path) -> None:
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    site.mkdir()
    with pytest.raises(FileNotFoundError, match=r"ends in \.whl"):
        machine.install_wheels(wheels, site)
    with zipfile.ZipFile(wheels / "nowhere_else-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("nowhere_else.py", "VALUE = 1\n")
    wanted = {"nowhere_else": "nowhere-else", "json": "json", "not_at_all": "not-at-all"}
    assert machine.missing(wanted, site) == ["nowhere-else", "not-at-all"]
    assert machine.install_wheels(wheels, site) == ["nowhere_else-1.0-py3-none-any.whl"]
    assert machine.missing(wanted, site) == ["not-at-all"]
    env = machine.environment(site, tmp_path / "cache")
    command = [sys.executable, "-c", "import commlib, nowhere_else; print(commlib.__file__)"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == str(ROOT / "commlib" / "__init__.py")


def test_without_a_device_a_run_stops_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "device_of_this_machine", lambda env: None)
    monkeypatch.setattr(machine, "ON_A_GPU", {})
    monkeypatch.setattr(machine, "is_built", lambda: True)
    assert check.main(["--out", str(tmp_path / "out")]) == check.UNPREPARED
    texts = [row["text"] for row in results.read(tmp_path / "out" / "results.jsonl") if row["outcome"] == "failed"]
    assert texts == ["torch sees no CUDA device, or cannot be imported"]


def test_missing_packages_are_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "NEEDED", {"no_such_module": "no-such-package"})
    assert check.main(["--dry", "--out", str(tmp_path / "out")]) == check.UNPREPARED
    (found,) = [row for row in results.read(tmp_path / "out" / "results.jsonl") if row["outcome"] == "failed"]
    assert "no-such-package" in found["text"]
    assert "--wheels" in found["text"]


def test_every_kernel_is_compiled_and_failures_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = compile_kernels.all_kernels()
    assert len(every) == len(set(every)) > 300
    monkeypatch.setattr(compile_kernels, "all_kernels", lambda: every[:6])
    monkeypatch.setattr(compile_kernels, "choose_compiler", lambda: "a compiler")
    monkeypatch.setattr(compile_kernels.concurrent.futures, "ProcessPoolExecutor", _InThisProcess)
    made: list[str] = []

    def cubin(kernel, architecture: str) -> bytes:
        made.append(architecture)
        if kernel == every[3]:
            raise compile_kernels.CodecError("no such instruction")
        return b"1234"

    monkeypatch.setattr(compile_kernels.cuda, "cubin", cubin)
    path = tmp_path / "results.jsonl"
    monkeypatch.setenv(results.FILE_VARIABLE, str(path))
    assert compile_kernels.main(["--architecture", "90"]) == 1
    (found,) = results.read(path)
    assert (found["outcome"], found["kernels"], found["nbytes"]) == ("failed", 6, 20)
    assert "no such instruction" in found["text"]
    assert set(made) == {"sm_90"}


class _InThisProcess:
    def __init__(self, jobs: int, initializer) -> None: ...

    def __enter__(self) -> SimpleNamespace:
        return SimpleNamespace(map=lambda function, *lists, chunksize: list(map(function, *lists)))

    def __exit__(self, *error: object) -> None: ...


@pytest.mark.timeout(170)
def test_ranks_are_held_to_the_cpu_and_survive_a_killed_one(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "tests.gpu.several_ranks", "--ranks", "2", "--device", "cpu", "--seconds", "140"]
    command += ["--algorithms", "topk,allreduce,local_sgd", "--remember", str(tmp_path / "backend")]
    env = {**machine.environment(tmp_path, tmp_path), results.FILE_VARIABLE: str(path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=160, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {row["name"].rpartition(": ")[2]: row for row in results.read(path)}
    assert {row["outcome"] for row in found.values()} == {"passed"}
    assert found["topk"]["from_cpu"] == 0
    assert found["encoded shards"]["from_cpu"] == 0
    wanted = {"allreduce", "local_sgd", "closing behind queued collectives", "a late rank", "a rank is killed", "exit"}
    assert wanted <= set(found)
    assert (tmp_path / "backend").read_text() == "gloo"


@pytest.mark.timeout(170)
def test_the_tests_for_a_gpu_are_collected_and_shared_out(tmp_path: Path) -> None:
    def collected(share: str) -> set[str]:
        env = {**machine.environment(tmp_path, tmp_path), "COMMLIB_GPU_SHARE": share}
        env.pop("COMMLIB_TEST_SHARD", None)  # of this session
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/gpu"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT, check=True)
        return {line for line in done.stdout.splitlines() if "::" in line}

    first, second = collected("0/2"), collected("1/2")
    assert not first & second
    assert abs(len(first) - len(second)) <= 1
    assert len(first | second) > 150


def test_results_of_tests_are_noted_as_they_come(tmp_path: Path) -> None:
    test = tmp_path / "test_it.py"
    test.write_text("def test_good(): pass\ndef test_bad(): assert 1 == 2\n")
    (tmp_path / "conftest.py").write_text("from tests.gpu.conftest import *  # noqa\n")
    path = tmp_path / "results.jsonl"
    env = {**machine.environment(tmp_path, tmp_path), results.FILE_VARIABLE: str(path), results.PART_VARIABLE: "bits"}
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(tmp_path), str(test)]
    subprocess.run(command, env=env, capture_output=True, check=False, cwd=tmp_path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["name"], row["outcome"]) for row in rows] == [
        ("test_it.py::test_good", "passed"),
        ("test_it.py::test_bad", "failed"),
    ]
    assert "assert 1 == 2" in rows[1]["text"]


def test_where_nccl_refuses_or_does_not_answer_the_ranks_start_again_with_gloo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, remembered = tmp_path / "results.jsonl", tmp_path / "backend"
    monkeypatch.setenv(results.FILE_VARIABLE, str(path))
    tried: list[str] = []
    said = {"nccl": "NCCL WARN Duplicate GPU detected", "gloo": several_ranks.WORKS}

    def run(args, backend: str, deadline: float) -> int:
        tried.append(backend)
        codes = [0, -9] if backend == "gloo" else [5, 5]
        return several_ranks._judge(args, backend, codes, [said[backend]] * 2)

    monkeypatch.setattr(several_ranks, "run", run)
    options = ["--ranks", "2", "--remember", str(remembered)]
    assert several_ranks.main(options) == 0
    assert several_ranks.main(options) == 0
    assert tried == ["nccl", "gloo", "gloo"], "the second run knows"
    refused, well = results.read(path)[:2]
    assert (refused["outcome"], refused["text"]) == ("skipped", "\n".join([said["nccl"]] * 2))
    assert well["outcome"] == "passed"


def test_ranks_that_end_badly_are_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(results.FILE_VARIABLE, str(tmp_path / "results.jsonl"))
    args, well = several_ranks.parse_args(["--ranks", "2"]), several_ranks.WORKS
    assert several_ranks._judge(args, "gloo", [0, -9], [well, well]) == 0
    assert several_ranks._judge(args, "gloo", [0, 0], [well, well]) == 1, "nobody was killed"
    assert several_ranks._judge(args, "gloo", [0, -9], [f"{well}\n{several_ranks.FAILED} topk", well]) == 1
    assert several_ranks._judge(args, "gloo", [None, -9], [well, well]) == 1, "it hangs"
    assert several_ranks._judge(args, "gloo", [0, -9], [well, "terminate called without an exception"]) == 1
