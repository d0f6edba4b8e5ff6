"""However a script with an algorithm in the background ends, it ends: at once, and leaves no thread behind.

A shutdown that waits for a peer is a hang for these tests, as the timeouts are longer.
"""

from __future__ import annotations

import itertools
import json
import logging
import signal
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.multi.common import Mlp, mlp_loss, seeded
from tests.multi.fault_scripts import HANG_S, LONG_S, num_threads, report_end
from tests.multi.pool import RankExit, start_ranks
from tests.multi.rank_worker import default_group_from_env

NAMES = ["async_averaging", "passive_gossip", "async_sgd", "hogwild"]
QUIET = ["just-end", "destroy", "unwrap-destroy", "destroy-unwrap"]
LOUD = ["exception", "interrupt"]  # every third
WAYS = [QUIET[0], QUIET[1], LOUD[0], QUIET[2], QUIET[3], LOUD[1]]

NUM_STARTS = 200


# --- scripts of the ranks --------------------------------------------------------------------------------------------


def run(name: str, way: str) -> None:
    """Train while the ranks average in the background, then end in some way, most likely in the middle of a round."""
    import commlib

    logging.basicConfig(level=logging.ERROR)
    rank = default_group_from_env(timeout_s=LONG_S)
    before = num_threads()
    model = seeded(Mlp)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    options = {} if name == "hogwild" else {"period": 1}
    commlib.wrap(model, commlib.algorithms.get(name)(**options), optimizer=optimizer, timeout=LONG_S)
    train(model, optimizer, 10 + 3 * rank)
    if way == "exception":
        raise KeyError("the user's own error")
    if way == "interrupt":
        train_until_interrupted(model, optimizer)
    for part in way.split("-"):
        if part == "unwrap":
            commlib.unwrap(model)
        elif part == "destroy":
            dist.destroy_process_group()
    report_end(before, waits="unwrap" in way)
    sys.exit(0)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        mlp_loss(model, step).backward()
        optimizer.step()


def train_until_interrupted(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    print("training", flush=True)
    while True:
        train(model, optimizer, 1)


# --- the tests -------------------------------------------------------------------------------------------------------


def facts(ranks: list[RankExit], event: str) -> list[dict[str, Any]]:
    """Return the reports of the ranks. A rank whose peer failed first may not reach its own end."""
    lines = [line for rank in ranks for line in rank.output.splitlines() if f'"event": "{event}"' in line]
    return [json.loads(line.partition("REPORT ")[2]) for line in lines]


def start_and_end(name: str, way: str, hit: tuple[int, ...] = (0, 1)) -> None:
    with start_ranks(run, 2, name, way) as ranks:
        if way == "interrupt":
            for rank in (0, 1):
                ranks.wait_for(rank, "training")
            for rank in hit:
                ranks.signal(rank, signal.SIGINT)
        for exit_ in ranks.wait(HANG_S):
            assert "Exception ignored" not in exit_.output, exit_.output
            (check_quiet if way in QUIET else check_loud)(exit_, way)


def check_quiet(exit_: RankExit, way: str) -> None:
    assert exit_.returncode == 0, exit_.output
    assert [line for line in exit_.output.splitlines() if not line.startswith("REPORT ")] == [], exit_.output
    if "unwrap" in way:
        (end,) = facts([exit_], "end")
        assert end["after"] == end["before"], end


def check_loud(exit_: RankExit, way: str) -> None:
    """The process ends with the user's own error; or with that of the other rank, where that was first."""
    assert exit_.returncode in (1, 130, -signal.SIGINT), exit_.output
    own = "KeyError" if way == "exception" else "KeyboardInterrupt"
    assert own in exit_.output or "PeerFailure" in exit_.output, exit_.output


CASES = list(itertools.islice(itertools.cycle(itertools.product(WAYS, NAMES)), NUM_STARTS))
SHORT = [case for idx, case in enumerate(CASES[:24]) if (idx + idx // 4) % 2 == 0]  # every way, every algorithm


@pytest.mark.parametrize(("way", "name"), SHORT, ids=[f"{name}-{way}" for way, name in SHORT])
def test_starts_and_exits(way: str, name: str) -> None:
    start_and_end(name, way)


@pytest.mark.slow
@pytest.mark.timeout(60 * 60)
def test_two_hundred_starts_and_exits() -> None:
    for way, name in CASES:
        start_and_end(name, way)


@pytest.mark.parametrize("name", NAMES[:3])
def test_a_rank_that_is_interrupted_alone_ends_the_others_with_a_clear_error(name: str) -> None:
    start_and_end(name, "interrupt", hit=(1,))


@pytest.mark.parametrize("name", NAMES[:3])
def test_a_rank_that_is_killed_is_named_at_the_next_step_end(name: str) -> None:
    with start_ranks(run, 2, name, "interrupt") as ranks:
        for rank in (0, 1):
            ranks.wait_for(rank, "training")
        ranks.signal(1, signal.SIGKILL)
        (exit_,) = ranks.wait(HANG_S, [0])
        assert exit_.returncode == 1
        assert "PeerFailure" in exit_.output, exit_.output
        assert "rank 1 disconnected without a goodbye" in exit_.output, exit_.output


@pytest.mark.parametrize("name", NAMES[:3])
def test_a_stopped_rank_is_not_a_dead_one(name: str) -> None:
    """The others go on; when it continues, all go on together."""
    with start_ranks(run, 2, name, "interrupt") as ranks:
        for rank in (0, 1):
            ranks.wait_for(rank, "training")
        ranks.signal(1, signal.SIGSTOP)
        time.sleep(3.0)
        ranks.signal(1, signal.SIGCONT)
        time.sleep(1.0)
        assert all(process.poll() is None for process in ranks.processes), [ranks.output(rank) for rank in (0, 1)]
        for rank in (0, 1):
            ranks.signal(rank, signal.SIGINT)
        for exit_ in ranks.wait(HANG_S):
            check_loud(exit_, "interrupt")
