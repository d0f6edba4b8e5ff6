"""The pool itself: results by rank, failures with their tracebacks, hangs with their stacks, no leftovers."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.multi import pool
from tests.multi.pool import NUM_RANKS, POOL, RankError, RankHang, on_ranks, run_ranks, spawn_ranks, start_ranks
from tests.multi.rank_worker import default_group_from_env


def rank_and_sum(offset: int) -> tuple[int, int, float]:
    value = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(value)
    return dist.get_rank(), dist.get_world_size(), value.item()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("seventeen")


def fail_and_leave_waiting() -> None:
    fail_on(1)
    dist.barrier()


def sleep_on(rank: int, path: str) -> None:
    """Sleep on one rank, which makes a file first."""
    if dist.get_rank() == rank:
        Path(path).touch()
        time.sleep(60)


def reset_signals() -> None:
    """Do what Lightning does at the end of a training."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if (handler := signal.getsignal(number)) is not None:
            signal.signal(number, handler)


def die() -> None:
    if dist.get_rank() == 1:
        os._exit(7)


def warn() -> None:
    warnings.warn("look out", UserWarning, stacklevel=1)


def fail_in_thread() -> None:
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()


def exit_with(code: int) -> None:
    rank = default_group_from_env()
    print(f"rank {rank} of {dist.get_world_size()}")
    sys.exit(code + rank)


def wait_for_signal() -> None:
    print("ready")
    time.sleep(60)


@pytest.mark.parametrize("world_size", range(1, NUM_RANKS + 1))
def test_results_come_back_by_rank(world_size: int) -> None:
    total = sum(range(world_size)) + 10.0 * world_size
    assert run_ranks(rank_and_sum, world_size, 10) == [(rank, world_size, total) for rank in range(world_size)]


@on_ranks(2, 3)
@pytest.mark.parametrize("offset", [0, 5])
def test_a_body_runs_on_every_rank(offset: int) -> None:
    rank, world_size, total = rank_and_sum(offset)
    assert (rank < world_size, total) == (True, sum(range(world_size)) + offset * world_size)


def test_a_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 3 failed in fail_on(.|\n)*ValueError: seventeen"):
        run_ranks(fail_on, 3, 1)


def test_ranks_left_waiting_fail_with_the_first() -> None:
    with pytest.raises(RankError, match="seventeen"):
        run_ranks(fail_and_leave_waiting, 2)


def test_a_hang_names_ranks_and_stacks_and_the_pool_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is up once rank 1 sleeps."""
    asleep = tmp_path / "asleep"

    def wait_for_sleep(connections: Sequence[Connection], timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        while not (ready := wait(connections, 0.05)) and not asleep.exists() and time.monotonic() < deadline:
            pass
        return ready

    run_ranks(reset_signals, 2)
    monkeypatch.setattr(pool, "wait", wait_for_sleep)
    before = POOL.pids()
    with pytest.raises(RankHang, match=r"rank 1 hung in sleep_on(.|\n)*in sleep_on"):
        run_ranks(sleep_on, 2, 1, str(asleep))
    monkeypatch.undo()
    assert not set(before) & set(POOL.pids())
    assert len(run_ranks(rank_and_sum, 2, 0)) == 2


def test_a_dead_rank_is_an_error_and_the_pool_recovers() -> None:
    with pytest.raises(RankError, match="rank 1 of 2 failed(.|\n)*exit code 7"):
        run_ranks(die, 2)
    assert len(run_ranks(rank_and_sum, 4, 0)) == 4


def test_warnings_and_thread_exceptions_are_failures() -> None:
    with pytest.raises(RankError, match="UserWarning: look out"):
        run_ranks(warn, 1)
    with pytest.raises(RankError, match="ZeroDivisionError"):
        run_ranks(fail_in_thread, 1)


def test_spawned_ranks_report_exit_codes_and_output() -> None:
    exits = spawn_ranks(exit_with, 2, 3)
    assert [rank.returncode for rank in exits] == [3, 4]
    assert exits[1].output.strip() == "rank 1 of 2"


def test_spawned_ranks_take_signals() -> None:
    with start_ranks(wait_for_signal, 1) as ranks:
        ranks.wait_for(0, "ready")
        ranks.signal(0, signal.SIGTERM)
        assert ranks.wait(60)[0].returncode == -signal.SIGTERM
