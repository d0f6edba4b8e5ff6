"""The example for accelerate: an accelerate script and two lines, as with DDP bit for bit, resumed bit for bit."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multi.test_examples import EXAMPLES, LAUNCH_S, REPOSITORY, forked, losses, train

pytestmark = pytest.mark.timeout(240)


def test_diff_to_plain_accelerate_is_two_lines():
    plain, commlib = ((EXAMPLES / f"accelerate_digits{end}.py").read_text().splitlines() for end in ("_ddp", ""))
    changed = [line for line in difflib.ndiff(plain, commlib) if line[0] in "+-?" and line[1:].strip()]
    assert changed == [
        "+ import commlib.integrations.accelerate",
        "+     commlib.integrations.accelerate.use(accelerator, args.algorithm)",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["no", pytest.param("bf16", marks=pytest.mark.slow)])
def test_digits_match_ddp_bit_for_bit_and_learn(precision: str, tmp_path: Path) -> None:
    options = ("--cpu", "--epochs", 2, "--mixed-precision", precision, "--losses")
    printed = [train(f"accelerate_digits{end}.py", *options, tmp_path / f"log{end}") for end in ("_ddp", "")]
    scores = [re.findall(r"accuracy ([\d.]+)%", text) for text in printed]
    assert scores[0] == scores[1]
    assert float(scores[0][-1]) > 90
    assert len(losses(tmp_path / "log")) == 2 * 45
    assert losses(tmp_path / "log") == losses(tmp_path / "log_ddp")


@pytest.mark.slow  # test_accelerate_checkpoint.py tests its parts
@pytest.mark.parametrize("algorithm", ["topk", "allreduce", "local_sgd"])
def test_digits_resume_bit_for_bit(algorithm: str, tmp_path: Path) -> None:
    def run(name: str) -> None:
        state = ("--losses", tmp_path / name, "--checkpoint", tmp_path / f"{name}-state")
        train("accelerate_digits.py", "--cpu", "--algorithm", algorithm, "--epochs", 2, *state)

    run("whole")
    first = "checkpoints/checkpoint_0"  # as if the run had ended after it
    shutil.copytree(tmp_path / "whole-state" / first, tmp_path / "resumed-state" / first)
    run("resumed")
    assert losses(tmp_path / "whole")[45:] == losses(tmp_path / "resumed")
    whole, resumed = (
        (tmp_path / f"{name}-state/checkpoints/checkpoint_1/model.safetensors").read_bytes()
        for name in ("whole", "resumed")
    )
    assert whole == resumed


@pytest.mark.slow
def test_digits_resumed_by_another_number_of_ranks_says_why_not(tmp_path: Path) -> None:
    options = ("--cpu", "--algorithm", "topk", "--checkpoint", tmp_path / "state")
    train("accelerate_digits.py", "--epochs", 1, *options)
    ranks = forked("accelerate_digits.py", "--epochs", 2, *options, ranks=1)
    assert ranks[0].returncode == 1
    assert "saved by 2 ranks" in ranks[0].output
    assert "Start 2 ranks, or remove commlib.json" in ranks[0].output


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        ("torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
        (
            *("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
            *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
        ),
    ],
    ids=["torchrun", "accelerate-launch"],
)
def test_digits_run_by_both_launchers(launcher: tuple[str, ...], tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    script = [str(EXAMPLES / "accelerate_digits.py"), "--cpu", "--epochs", "1", "--algorithm", "bytegrad"]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, *script, "--losses", str(tmp_path / "log")],
        env=env, capture_output=True, text=True, timeout=LAUNCH_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(losses(tmp_path / "log")) == 45
    assert losses(tmp_path / "log")[-1] < losses(tmp_path / "log")[0]
