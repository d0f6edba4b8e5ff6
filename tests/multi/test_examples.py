"""The training examples: they run as a user runs them, agree with DDP bit for bit, resume, and differ in one line."""

from __future__ import annotations

import difflib
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.loopback import OWN_LOOPBACK, needs_own_loopback
from tests.multi.pool import RankExit, spawn_ranks

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
#: How long a script's last collectives may take to let go of their tensors. torch ends Gloo's threads while it holds
#: the interpreter's lock, and one that waits for that to free a tensor is waited for without end; DDP's scripts, too.
_QUIET_S = 0.2
LAUNCH_S = 100  # a launch imports torch in three processes; a busy machine takes a while

pytestmark = pytest.mark.timeout(240)


def torchrun(script: str, *args: str | int | pathlib.Path, where: Sequence[str] = ()) -> str:
    """Run a script on two ranks as a user does, and return its output; `where` is a prefix of the command."""
    command = [*where, sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "COLUMNS": "120"}
    done = subprocess.run(
        [*command, str(EXAMPLES / script), *map(str, args)],
        env=env, capture_output=True, text=True, timeout=LAUNCH_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def as_a_script(script: str, *args: str, restarts: int = 0) -> None:
    """Run a script in this forked rank, in the environment that torchrun makes."""
    warnings.resetwarnings()
    sys.argv = [str(EXAMPLES / script), *args]
    sys.path.insert(0, str(EXAMPLES))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ["STORE_PORT"], "COLUMNS": "120"}
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restarts)
    destroy = dist.destroy_process_group
    dist.destroy_process_group = lambda *group: time.sleep(_QUIET_S) or destroy(*group)
    runpy.run_path(sys.argv[0], run_name="__main__")


def forked(script: str, *args: str | int | pathlib.Path, ranks: int = 2) -> list[RankExit]:
    """Run a script as `torchrun` does, but without importing torch again."""
    return spawn_ranks(as_a_script, ranks, script, *map(str, args), timeout=LAUNCH_S)


def train(script: str, *args: str | int | pathlib.Path) -> str:
    """Run a script on two ranks, and return what rank 0 printed."""
    exits = forked(script, *args)
    assert [rank.returncode for rank in exits] == [0, 0], exits
    return exits[0].output


def losses(path: pathlib.Path) -> list[float]:
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, str]:
    """Two uninterrupted epochs with commlib; the folder and the output."""
    folder = tmp_path_factory.mktemp("digits")
    printed = torchrun("train_digits.py", "--epochs", 2, "--losses", folder / "log", "--checkpoint", folder / "state")
    return folder, printed


@pytest.mark.parametrize("task", ["digits", "bytes"])
def test_diff_to_ddp_is_one_line_and_the_import(task):
    ddp, commlib = ((EXAMPLES / f"train_{task}{end}.py").read_text().splitlines() for end in ("_ddp", ""))
    changed = [line for line in difflib.ndiff(ddp, commlib) if line[0] in "+-" and line[1:].strip()]
    assert sorted(changed) == [
        "+     model = commlib.wrap(model, algorithm=args.algorithm, optimizer=optimizer)",
        "+ import commlib",
        "-     model = DDP(model)",
        "- from torch.nn.parallel import DistributedDataParallel as DDP",
    ]


def test_digits_match_ddp_bit_for_bit_and_learn(digits_run, tmp_path):
    folder, printed = digits_run
    ddp_printed = train("train_digits_ddp.py", "--epochs", 2, "--losses", tmp_path / "log")
    scores = [re.findall(r"accuracy ([\d.]+)%", text) for text in (printed, ddp_printed)]
    assert scores[0] == scores[1]
    assert float(scores[0][-1]) > 90
    assert len(losses(tmp_path / "log")) == 2 * (1437 // 2 // 32)
    assert losses(tmp_path / "log") == losses(folder / "log")


def test_digits_resume_bit_for_bit(digits_run, tmp_path):
    folder, _ = digits_run
    for epochs in (1, 2):
        train("train_digits.py", "--epochs", epochs, "--losses", tmp_path / "log", "--checkpoint", tmp_path / "state")
    assert losses(tmp_path / "log") == losses(folder / "log")
    for rank in range(2):
        one, other = (torch.load(root / f"state/step-00000002/rank{rank}.pt") for root in (folder, tmp_path))
        assert one["model"].keys() == other["model"].keys()
        assert all(torch.equal(one["model"][key], other["model"][key]) for key in one["model"])
        assert torch.equal(one["rng"], other["rng"])


def test_checkpoint_of_other_world_size_is_refused(digits_run):
    folder, _ = digits_run
    (rank,) = forked("train_digits.py", "--epochs", 3, "--checkpoint", folder / "state", ranks=1)
    assert rank.returncode == 1
    assert "was saved by 2 ranks, this run has 1" in rank.output


def test_bytes_match_ddp_bit_for_bit(tmp_path):
    for script in ("train_bytes_ddp.py", "train_bytes.py"):
        printed = train(script, "--steps", 20, "--every", 10, "--batch", 4, "--losses", tmp_path / script)
    ddp, commlib = losses(tmp_path / "train_bytes_ddp.py"), losses(tmp_path / "train_bytes.py")
    assert len(ddp) == 20
    assert ddp == commlib
    assert commlib[-1] < commlib[0] - 0.5
    assert re.findall(r"step +(\d+) ", printed) == ["10", "20"]


def test_the_tutorial_shows_its_script():
    page = (REPOSITORY / "docs" / "tutorial.md").read_text(encoding="utf-8")
    assert f"```python\n{(EXAMPLES / 'tutorial.py').read_text(encoding='utf-8')}```" in page


def test_the_tutorials_script_resumes_to_the_same_loss(tmp_path):
    whole = train("tutorial.py", "--steps", 40)
    first, rest = (train("tutorial.py", "--steps", steps, "--checkpoint", tmp_path / "run") for steps in (20, 40))
    found = [re.findall(r"loss ([\d.]+) after (\d+) steps", text) for text in (whole, first, rest)]
    assert "rank 0 resumes after step 20" in rest
    assert found[0] == found[2]
    assert found[1] != found[2]
    assert "0.34 MB sent per rank (compression x1.00)" in rest


@pytest.mark.slow
@needs_own_loopback
def test_demo_compares_with_ddp_and_draws(tmp_path):
    """On a loopback of its own: it counts all bytes there, other tests' too."""
    printed = torchrun("demo.py", "--epochs", 1, "--plot", tmp_path / "folder" / "demo.png", where=OWN_LOOPBACK)
    rows = {
        name: re.search(rf"^ *{name} .*$", printed, re.MULTILINE)
        for name in ("DDP", "commlib allreduce", "commlib bf16", "commlib bytegrad")
    }
    assert all(rows.values()), printed
    assert rows["commlib allreduce"][0].rstrip().endswith("yes")
    assert "no (step" in rows["commlib bf16"][0]
    sent = {name: float(re.search(r"([\d.]+) MB", row[0])[1]) for name, row in rows.items()}
    assert sent["commlib bytegrad"] < 0.75 * sent["commlib bf16"] < 0.75 * 0.75 * sent["DDP"]
    assert (tmp_path / "folder" / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def lone_rank(tmp_path, monkeypatch):
    """This process as the only rank, and the examples importable."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("lone_rank")
def test_interrupted_save_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    import checkpoint

    model = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert checkpoint.load(str(tmp_path / "state"), model, optimizer) == 0
    checkpoint.save(str(tmp_path / "state"), model, optimizer, 1)
    saved = model.module.weight.detach().clone()
    with torch.no_grad():
        model.module.weight.zero_()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", _write_half)
        with pytest.raises(OSError, match="disk full"):
            checkpoint.save(str(tmp_path / "state"), model, optimizer, 2)
    assert checkpoint.load(str(tmp_path / "state"), model, optimizer) == 1
    assert torch.equal(model.module.weight, saved)
    checkpoint.save(str(tmp_path / "state"), model, optimizer, 3)
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["step-00000003"]


def _write_half(state, file) -> None:
    file.write(b"half")
    raise OSError("disk full")


@pytest.mark.slow
def test_sharded_islands_learn_and_resume_bit_for_bit(tmp_path):
    def run(steps, place, *options):
        options = options or ("--algorithm", "diloco", "--period", 5, "--checkpoint", tmp_path / place)
        options = ("--steps", steps, "--every", 12, "--losses", tmp_path / f"{place}.log", *options)
        exits = forked("train_sharded.py", *options, ranks=4)
        assert [rank.returncode for rank in exits] == [0, 0, 0, 0], exits
        return [json.loads(line) for line in (tmp_path / f"{place}.log").read_text().splitlines()]

    whole = run(24, "whole")
    run(12, "resumed")
    assert run(24, "resumed") == whole
    assert [row["step"] for row in whole] == [12, 24]
    assert whole[1]["bits"] < whole[0]["bits"] < 8.0  # of a byte that is not predicted at all
    # torch's own averages of gradients between the islands, in every step, start similarly.
    encoded = ("--algorithm", "allreduce", "--weights", "int8", "--gradients", "int8")
    assert run(12, "encoded", *encoded)[0]["bits"] == pytest.approx(whole[0]["bits"], rel=0.1)
    assert run(12, "hsdp", "--algorithm", "hsdp")[0]["bits"] == pytest.approx(whole[0]["bits"], rel=0.1)
