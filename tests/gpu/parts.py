"""The parts of a check on a GPU, in their order, each with its limit and its commands."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.gpu.machine import ROOT

BENCHMARKS = ROOT / "benchmarks"
#: Options that exclude tests: a damaged payload may name an element twice, and its value is then undefined.
SANITIZERS = {"memcheck": (), "racecheck": ("-k", "not damaged")}
_SANITIZER_OPTIONS = ("--report-api-errors", "no", "--error-exitcode", "9")
_MOST_SHARES = 8
_OF_FOUR_RANKS = "allreduce,bytegrad,diloco"
PYTEST_INI = f"""[pytest]
addopts = -ra --strict-markers --import-mode=importlib -p no:cacheprovider
pythonpath = {ROOT}
markers =
    slow: takes minutes; runs only where COMMLIB_SLOW_TESTS=1
    gpu: needs a CUDA device
    timeout: of pytest-timeout, which need not be there
"""


@dataclass(frozen=True)
class Command:
    """One process of a part.

    Attributes:
        name: In the log and in failures.
        argv: Program and arguments.
        stage: Commands of one stage run side by side, one stage after the other.
        env: Added to the environment.
        tried_with: Arguments to append for a trial without a GPU; None for no trial.
    """

    name: str
    argv: list[str]
    stage: int = 0
    env: dict[str, str] = field(default_factory=dict)
    tried_with: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Part:
    """A part of the check.

    Attributes:
        name: As on the command line.
        limit_s: Seconds after which it is ended.
        status: Its bit in the exit status.
        commands: Its commands.
    """

    name: str
    limit_s: float
    status: int
    commands: list[Command]


def parts(work: Path) -> list[Part]:
    """Return all parts, in their order; their output other than results goes to `work / "made"`."""
    made = work / "made"
    return [
        Part("bits", 60, 2, _bits(work)),
        Part("kernels", 75, 4, _kernels(made)),
        Part("nccl", 75, 8, _ranks(work)),
        Part("train", 75, 16, _train(made)),
        Part("sanitize", 45, 32, _sanitize(work)),
    ]


def pytest_command(work: Path, *args: str) -> list[str]:
    """Return the command that runs tests with settings that need no plugin, and no error where something warns."""
    ini = work / "pytest.ini"
    return [sys.executable, "-m", "pytest", "-c", str(ini), "--rootdir", str(ROOT), *args]


def _bits(work: Path) -> list[Command]:
    shares = max(1, min(_MOST_SHARES, len(os.sched_getaffinity(0)) * 3 // 4))
    argv = pytest_command(work, "-q", str(ROOT / "tests" / "gpu"))
    return [
        Command(
            f"tests, share {idx + 1} of {shares}",
            argv,
            env={"COMMLIB_GPU_SHARE": f"{idx}/{shares}"},
            tried_with=("--collect-only",) if idx == 0 else None,
        )
        for idx in range(shares)
    ]


def _script(name: str, argv: list[str], stage: int) -> Command:
    return Command(name, [sys.executable, *argv], stage, tried_with=("--help",) if stage == 0 else None)


def _kernels(made: Path) -> list[Command]:
    argv = [str(BENCHMARKS / "kernels.py"), "--device", "cuda", "--elements", "100e6,16e6,1e6", "--reps", "15"]
    argv += ["--peer-size", "1GiB", "--seconds", "1", "--total-seconds", "55", "--json", str(made / "kernels-gpu.json")]
    if importlib.util.find_spec("matplotlib") is not None:
        argv += ["--plot", str(made / "kernels-gpu.png")]
    return [_script("kernels", argv, 0)]


def _ranks(work: Path) -> list[Command]:
    commands = []
    for stage, (ranks, seconds, algorithms) in enumerate(((1, 15, ""), (2, 36, ""), (4, 20, _OF_FOUR_RANKS))):
        argv = ["-m", "tests.gpu.several_ranks", "--ranks", str(ranks), "--device", "cuda", "--seconds", str(seconds)]
        argv += ["--remember", str(work / "backend")] if ranks > 1 else []
        argv += ["--algorithms", algorithms] if algorithms else []
        commands.append(_script(f"{ranks} ranks", argv, stage))
    return commands


def _train(made: Path) -> list[Command]:
    budgets = {1: 28, 2: 36}
    script = str(BENCHMARKS / "gpu_train.py")
    return [
        _script(
            f"training, {ranks} ranks",
            [script, "--ranks", str(ranks), "--seconds", str(budget), "--out", str(made)],
            stage,
        )
        for stage, (ranks, budget) in enumerate(budgets.items())
    ]


def _sanitize(work: Path) -> list[Command]:
    tests = pytest_command(work, "-q", str(ROOT / "tests" / "gpu" / "test_sanitized.py"))
    return [
        Command(
            tool,
            ["compute-sanitizer", "--tool", tool, *_SANITIZER_OPTIONS, *tests, *chosen],
            env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )
        for tool, chosen in SANITIZERS.items()
    ]
