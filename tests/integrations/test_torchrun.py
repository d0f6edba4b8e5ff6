"""Jobs that torchrun restarts: ranks meet on a store with entries of an earlier life, and continue identically."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from commlib.checkpoint import blobs
from commlib.errors import ConfigError
from commlib.integrations import torchrun
from tests.contract.subjects import Subject
from tests.multi.pool import RankExit, RankProcesses
from tests.multi.test_examples import EXAMPLES, LAUNCH_S, REPOSITORY, as_a_script
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(240)


def one_life(count: int, *args: str) -> None:
    """Run the example as torchrun starts it for the `count`-th time again."""
    warnings.simplefilter("ignore")
    as_a_script("restarts.py", *args, restarts=count)


def life(store: dist.TCPStore, count: int, *args: str, doomed: bool = False) -> list[RankExit]:
    """Run two ranks on a store; where one is `doomed`, end the other as torchrun does."""
    ranks = RankProcesses(one_life, 2, (count, *args), store.port)
    try:
        if doomed:
            ranks.wait(LAUNCH_S, ranks=[1])
            ranks.signal(0, signal.SIGTERM)
        return ranks.wait(LAUNCH_S)
    finally:
        ranks.close()


def saved(folder: pathlib.Path) -> dict[str, Any]:
    """Return the contents of the last checkpoint, by path, without measurements."""
    (last,) = folder.glob("step-*")
    whole = folder / "whole.pt"
    dcp_to_torch_save(last, whole)
    app = torch.load(whole, weights_only=False)["app"]
    communication = app.pop("communication")
    ranks = {f"rank{rank}": blobs.unpacked(communication[f"rank{rank}"]) for rank in range(2)}
    return {path: value for path, value in leaves({**app, **ranks}) if "/plan/" not in path}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            yield from leaves(each, f"{path}/{key}")
    else:
        yield path, value


def assert_same_checkpoint(one: pathlib.Path, other: pathlib.Path) -> None:
    first, second = saved(one), saved(other)
    assert first.keys() == second.keys()
    assert any("/model/" in path for path in first)
    assert [path for path, value in first.items() if not is_same(value, second[path])] == []


def is_same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def check_restart(algorithm: str, how: str, folder: pathlib.Path) -> None:
    """A rank that ends in one life does not affect the next, which gives the result of an uninterrupted run."""
    options = ["--algorithm", algorithm, "--steps", "9", "--every", "4", "--device", "cpu"]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    broken = [*options, "--checkpoint", str(folder / "broken"), "--fail", f"1:6{how}"]
    first = life(store, 0, *broken, doomed=True)
    assert first[1].returncode == (1 if how else -signal.SIGKILL), first[1].output
    assert "resumes after step 0" in first[1].output
    assert first[0].returncode in (1, -signal.SIGTERM), first[0].output
    for rank in life(store, 1, *broken):
        assert rank.returncode == 0, rank.output
        assert "resumes after step 4" in rank.output
    if Subject(algorithm).runs_by_clocks:
        assert saved(folder / "broken")
        return
    for rank in life(store, 0, *options, "--checkpoint", str(folder / "whole")):
        assert rank.returncode == 0, rank.output
    assert_same_checkpoint(folder / "broken", folder / "whole")


@pytest.mark.slow
def test_a_run_whose_rank_was_killed_goes_on_as_if_unbroken(tmp_path: pathlib.Path) -> None:
    check_restart("topk", "", tmp_path)


#: Weights of each rank's own, the mailbox, background rounds.
OTHERS = ("allreduce", "decentralized", "diloco", "passive_gossip", "async_sgd", "async_averaging")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", OTHERS)
def test_other_algorithms_go_on_as_if_unbroken(algorithm: str, tmp_path: pathlib.Path) -> None:
    check_restart(algorithm, "", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["topk", "async_sgd"])
def test_a_run_whose_rank_raised_goes_on_as_if_unbroken(algorithm: str, tmp_path: pathlib.Path) -> None:
    check_restart(algorithm, ":raise", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("fail", ["1:6", "1:6:raise", "1:8"])
def test_torchrun_starts_the_example_again(fail: str, tmp_path: pathlib.Path) -> None:
    """In step 8 a checkpoint is due, so that rank 0 waits in it, on the user's own group. No process is left."""
    options = ["--algorithm", "topk", "--steps", "9", "--every", "4", "--checkpoint"]
    printed = launched(*options, str(tmp_path / "broken"), "--fail", fail)
    assert len(re.findall(r"resumes after step 0", printed)) == 2, printed
    assert len(re.findall(r"resumes after step 4", printed)) == 2, printed
    processes = [int(found) for found in re.findall(r"\(process (\d+)\)", printed)]
    assert len(set(processes)) == 4
    assert eventually(lambda: not any(map(is_there, processes)))
    launched(*options, str(tmp_path / "whole"))
    assert_same_checkpoint(tmp_path / "broken", tmp_path / "whole")


def launched(*args: str) -> str:
    """Run the example under torchrun on two ranks, and return its output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [*command, "--max-restarts", "1", str(EXAMPLES / "restarts.py"), *args],
        env=env, capture_output=True, text=True, timeout=LAUNCH_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def is_there(process: int) -> bool:
    return pathlib.Path(f"/proc/{process}").exists()


def test_what_torchrun_says_is_not_to_be_given() -> None:
    with pytest.raises(ConfigError, match="rank, store cannot be given"):
        torchrun.init_process_group("gloo", store=None, rank=0)


def test_without_torchrun_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="not started by torchrun"):
        torchrun.init_process_group("gloo")
