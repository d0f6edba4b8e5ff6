"""The batch scripts for Slurm, in a cluster of two nodes on this machine (tests/slurm_cluster.sh)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loopback import MISSING
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
_TOOLS = ("slurmctld", "slurmd", "sbatch", "srun", "munged")
_ABSENT = [*MISSING, *(f"`{tool}`" for tool in _TOOLS if shutil.which(tool) is None)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(_ABSENT), reason="Slurm needs " + "; ".join(_ABSENT)),
]


def in_cluster(folder: Path, *command: str) -> list[str]:
    return [str(ROOT / "tests" / "slurm_cluster.sh"), str(folder), *command]


def submit(folder: Path, script: str, *arguments: str) -> tuple[int, str]:
    """Return the exit code and the output of a job."""
    path, log = ROOT / "examples" / "cluster" / script, folder / "job.log"
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    command = in_cluster(folder, "sbatch", "--wait", f"--output={log}", str(path), *arguments)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert "Submitted batch job" in done.stdout, done.stdout + done.stderr
    return done.returncode, log.read_text()


def processes(folder: Path) -> list[bytes]:
    """Return the command lines that contain the folder."""
    found = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
    return [line for line in found if str(folder).encode() in line]


@pytest.mark.parametrize("script", ["slurm_srun.sh", "slurm_torchrun.sh"])
def test_a_job_on_two_nodes_trains_to_its_end(script: str, tmp_path: Path) -> None:
    returncode, output = submit(tmp_path, script, "examples/train_digits.py", "--algorithm", "bytegrad")
    assert returncode == 0, output
    assert output.count("epoch ") == 10, output
    assert eventually(lambda: not processes(tmp_path))


def test_the_tasks_of_srun_are_ranks_on_two_nodes(tmp_path: Path) -> None:
    returncode, output = submit(tmp_path, "slurm_srun.sh", "-m", "commlib", "doctor", "--peers")
    assert returncode == 0, output
    assert "ranks [0, 1, 2, 3]" in output
    for pair in ("0 lo 10.77.1.1 - 1 ", "1 lo 10.77.1.1 - 2 ", "2 lo 10.77.1.1 - 3 "):
        assert pair in output


@pytest.mark.parametrize("script", ["slurm_srun.sh", "slurm_torchrun.sh"])
def test_a_job_fails_with_its_script(script: str, tmp_path: Path) -> None:
    failing = tmp_path / "failing.py"
    failing.write_text("import os, time\nif os.environ['RANK'] == '3':\n    raise SystemExit(3)\ntime.sleep(600)\n")
    returncode, output = submit(tmp_path, script, str(failing))
    assert returncode != 0, output


def test_nothing_remains_of_a_cluster_that_is_killed(tmp_path: Path) -> None:
    started = tmp_path / "started"
    with subprocess.Popen(in_cluster(tmp_path, "sh", "-c", f"touch {started}; sleep 600")) as cluster:
        assert eventually(started.exists)
        assert len(processes(tmp_path)) > 4
        cluster.send_signal(signal.SIGKILL)
    assert eventually(lambda: not processes(tmp_path))
