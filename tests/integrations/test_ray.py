"""Ray Train: the example and the plain one, equal bit for bit, and resumed from Ray's checkpoints."""

from __future__ import annotations

import difflib
import json
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from commlib.errors import ConfigError
from tests.multi.common import ddp, raises_on_every_rank, wrap
from tests.multi.pool import on_ranks
from tests.multi.test_examples import EXAMPLES, REPOSITORY

_LIMIT_S = 1500


def test_the_diff_to_plain_ray_is_two_lines_and_the_import() -> None:
    plain, commlib = ((EXAMPLES / f"ray_digits{end}.py").read_text().splitlines() for end in ("_ddp", ""))
    changed = [line for line in difflib.ndiff(plain, commlib) if line[0] in "+-" and line[1:].strip()]
    assert sorted(changed) == [
        "+     model = commlib.wrap(model, algorithm=args.algorithm, optimizer=optimizer)",
        "+     model = prepare_model(CNN(), parallel_strategy=None)",
        "+ import commlib",
        "-     model = prepare_model(CNN())",
    ]


@on_ranks(2)
def test_a_model_that_ray_has_prepared_for_ddp_is_refused() -> None:
    with raises_on_every_rank(
        ConfigError, "is a DistributedDataParallel", "wrap the bare module", "parallel_strategy=None"
    ):
        wrap(ddp(nn.Linear(2, 2)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder with the output of `ray_script`; the cluster has ended."""
    folder = tmp_path_factory.mktemp("ray")
    paths = os.pathsep.join([str(REPOSITORY), str(EXAMPLES)])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.integrations.ray_script", str(folder)], cwd=REPOSITORY, env=env,
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            returncode = process.wait(_LIMIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # the cluster's processes end with the one that started it
                process.wait()
    assert returncode == 0, (folder / "log").read_text()[-8000:]
    return folder


def losses(path: pathlib.Path) -> list[float]:
    return [loss for line in path.read_text().splitlines() for loss in json.loads(line)["losses"]]


def last_checkpoint(folder: pathlib.Path, rank: int) -> dict[str, Any]:
    last = max(path for path in folder.glob("digits/checkpoint_*") if path.is_dir())
    return torch.load(last / f"rank{rank}.pt")


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_allreduce_trains_as_ddp_does_in_ray(runs: pathlib.Path) -> None:
    plain, commlib = losses(runs / "ddp.losses"), losses(runs / "allreduce.losses")
    assert len(plain) == 2 * (1437 // 2 // 32)
    assert plain == commlib
    for rank in range(2):
        one, other = (last_checkpoint(runs / name, rank)["model"] for name in ("ddp", "allreduce"))
        different = [key for key in one if not torch.equal(one[key], other[key])]
        assert all("running" in key for key in different), different  # DDP's are rank 0's in the next forward only
        assert rank == 1 or not different


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_a_run_goes_on_from_rays_checkpoint_bit_for_bit(runs: pathlib.Path) -> None:
    assert losses(runs / "resumed.losses") == losses(runs / "whole.losses")
    residuals = []
    for rank in range(2):
        one, other = (last_checkpoint(runs / name, rank) for name in ("whole", "resumed"))
        assert all(torch.equal(one["model"][key], other["model"][key]) for key in one["model"])
        assert one["algorithm"]["rank"] == rank
        residuals.append(one["algorithm"]["state"])
    assert str(residuals[0]) != str(residuals[1]), "the state of topk is each rank's own"
