"""The example of transformers' Trainer: it is the plain script bit for bit, but for two lines, and resumes."""

from __future__ import annotations

import difflib
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.integrations.transformers_runs import launched
from tests.multi.pool import run_ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def as_a_script(script: str, *options: str) -> None:
    """Run a script in this rank, in the environment that torchrun makes."""
    argv, path = [str(EXAMPLES / script), *options], [str(EXAMPLES), *sys.path]
    with launched(), mock.patch.object(sys, "argv", argv), mock.patch.object(sys, "path", path):
        runpy.run_path(argv[0], run_name="__main__")


def train(script: str, output: Path, *options: str, steps: int = 12) -> tuple[list[dict[str, Any]], bytes]:
    """Run a script on two ranks; return its log, without entries that depend on the clock, and the model's file."""
    own = ("--output", str(output), "--steps", str(steps), "--every", "4", "--batch", "2")
    run_ranks(as_a_script, 2, script, *own, *options)
    return logs_of(output / f"checkpoint-{steps}"), (output / "model.safetensors").read_bytes()


def logs_of(checkpoint: Path) -> list[dict[str, Any]]:
    logs = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    words = ("comm/", "runtime", "per_second")
    return [{name: v for name, v in log.items() if not any(word in name for word in words)} for log in logs]


def test_diff_to_the_plain_script_is_the_import_and_one_line() -> None:
    plain, commlib = ((EXAMPLES / f"transformers_bytes{end}.py").read_text().splitlines() for end in ("_ddp", ""))
    changed = [line for line in difflib.ndiff(plain, commlib) if line[0] in "+-" and line[1:].strip()]
    assert sorted(changed) == [
        "+         algorithm=args.algorithm,",
        "+ from commlib.integrations.transformers import Trainer",
        "+ from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments",
        "- from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments",
    ]


@pytest.mark.slow
def test_the_example_is_the_plain_script_bit_for_bit_and_resumes(tmp_path: Path) -> None:
    expected = train("transformers_bytes_ddp.py", tmp_path / "ddp")
    got = train("transformers_bytes.py", tmp_path / "commlib")
    assert got == expected
    assert [log["step"] for log in got[0] if "loss" in log] == [4, 8, 12]
    shutil.rmtree(tmp_path / "commlib/checkpoint-12")
    assert train("transformers_bytes.py", tmp_path / "commlib", "--resume") == got


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_example_runs_as_a_user_runs_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(EXAMPLES / "transformers_bytes.py"), "--algorithm", "topk", "--output", str(tmp_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(
        [*command, "--steps", "60", "--every", "30"],
        env=env, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the model continues: b'import " in done.stdout
    losses = [log["loss"] for log in logs_of(tmp_path / "checkpoint-60") if "loss" in log]
    assert losses[-1] < losses[0] < 5.5
