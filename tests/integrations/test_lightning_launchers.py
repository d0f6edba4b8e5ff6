"""How Lightning's processes are started, and the example."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multi.test_examples import EXAMPLES, losses, torchrun, train


def script(*args: str | Path) -> str:
    """Run a script with plain `python`, as a user does, and return its output."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    }
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    command = [sys.executable, *map(str, args)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["allreduce", "local_sgd"])
def test_ranks_that_lightning_spawns_forks_or_starts_train_the_same(algorithm):
    """The module in the process that calls `fit` has the weights."""
    here = Path(__file__).with_name("lightning_spawn_script.py")
    hashes = [re.findall(r"weights (\w+)", script(here, method, algorithm)) for method in ("spawn", "fork", "popen")]
    assert len(hashes[0]) == len(hashes[1]) == 1
    assert set(hashes[2]) == set(hashes[1]) == set(hashes[0])


def test_the_examples_differ_in_the_strategy():
    ddp, commlibs = ((EXAMPLES / f"lightning_digits{end}.py").read_text().splitlines() for end in ("_ddp", ""))
    changed = [line for line in difflib.ndiff(ddp, commlibs) if line[0] in "+-" and line[1:].strip()]
    assert sorted(changed) == [
        '+         strategy=f"commlib_{args.algorithm}",',
        "+ import commlib.integrations.lightning  # noqa: F401 (registers the strategies)",
        '-         strategy="ddp",',
    ]


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_the_example_trains_as_ddp_does(tmp_path):
    for end in ("_ddp", ""):
        train(f"lightning_digits{end}.py", "--epochs", 1, "--losses", tmp_path / f"losses{end}")
    assert len(losses(tmp_path / "losses")) == 1437 // 2 // 32
    assert losses(tmp_path / "losses") == losses(tmp_path / "losses_ddp")


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("algorithm", ["allreduce", "local_sgd"])
def test_the_example_learns_and_resumes_bit_for_bit_from_either_launcher(tmp_path, algorithm):
    options = ["--algorithm", algorithm]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    printed = torchrun("lightning_digits.py", *options, "--epochs", 2, "--losses", whole)
    assert float(re.findall(r"accuracy ([\d.]+)%", printed)[-1]) > 85
    options += ["--losses", str(parts), "--checkpoint", str(tmp_path / "saved")]
    script(EXAMPLES / "lightning_digits.py", *options, "--epochs", "1")
    torchrun("lightning_digits.py", *options, "--epochs", 2)
    assert losses(parts) == losses(whole)
