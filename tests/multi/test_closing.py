"""Models that are dropped without `unwrap`: ended by the closing thread, wherever the collector came upon them."""

from __future__ import annotations

import atexit
import functools
import gc
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlib
from commlib.engine.rounds import drivers
from commlib.engine.rounds.streams import StreamDriver
from commlib.errors import CommlibError
from commlib.replica import replica_of
from commlib.transport import closing
from tests.contract.contracts_faults import collect_within_each_lock
from tests.contract.probes import Locks, Probed, drop, lead_back
from tests.contract.subjects import Subject
from tests.multi.common import Mlp, data, mlp_loss, seeded, sgd
from tests.multi.fault_scripts import (
    HANG_S,
    LONG_S,
    VICTIM,
    Deep,
    come_together,
    die,
    num_gloo_threads,
    report,
    report_error,
    train_some,
)
from tests.multi.nccl_stand_in import Kernel, in_place_of_nccl
from tests.multi.notices import await_told, others, tell
from tests.multi.pool import on_ranks, run_ranks, spawn_ranks, start_ranks
from tests.multi.rank_worker import default_group_from_env
from tests.multi.test_faults import reports
from tests.structure import names_of_locks

# --- within locks ----------------------------------------------------------------------------------------------------

#: Locks in which no dropped model is collected here, and why.
ELSEWHERE = {
    "kernels.cuda": "held where a kernel is compiled for a GPU",
    "codecs": "held where codecs of other packages are registered",
    "transformers": "of a set as that of the optimizers",
    "accelerate.wrapped": "of a table; tests/unit/test_weak.py",
    "accelerate.waiting": "of a table; tests/unit/test_weak.py",
    "sharded models": "of a table; tests/unit/test_weak.py",
    "wrap.alone": "of a table; tests/unit/test_weak.py",
    "membership": "held where a process joins a job; tests/unit/test_membership.py",
    "view store": "as that of the membership",
    "elastic sessions": "as that of the membership",
    "elastic donor": "held where a joining member connects; tests/unit/test_precopy.py",
    "elastic pre-copy": "as that of the donor",
}


def over_gloo(name: str) -> set[str]:
    options = {"scaler": torch.amp.GradScaler("cpu")} if name == "topk" else {}
    return collect_within_each_lock(Subject(name), **options)


def over_nccl(name: str) -> set[str]:
    """The same over a stand-in of NCCL, whose works the host waits for."""
    wait_as_nccl = Kernel.wait

    def wait(kernel: Kernel) -> None:
        kernel._work.wait()
        wait_as_nccl(kernel)

    with in_place_of_nccl(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(drivers, "ThreadDriver", lambda: StreamDriver(torch.device("cpu")))
        patch.setattr(Kernel, "wait", wait)
        return collect_within_each_lock(Subject(name))


def test_a_dropped_model_is_collected_within_each_lock_there_is() -> None:
    found = set(ELSEWHERE).union(*run_ranks(over_nccl, 2, "allreduce"))
    for name in ("topk", "async_averaging", "async_sgd", "passive_gossip"):
        found.update(*run_ranks(over_gloo, 2, name))
    assert found == set(names_of_locks())


def lose_a_peer_beside_a_dropped_model() -> None:
    """A rank that loses a peer tells those of every communicator, also that of a model that goes just then."""
    rank = default_group_from_env(timeout_s=LONG_S)
    model: Any = commlib.wrap(seeded(Deep), timeout=LONG_S, bucket_cap_mb=0.01)
    dropped: list[Any] = [commlib.wrap(seeded(Mlp), timeout=LONG_S)]
    lead_back(dropped[0])
    for step in range(2):
        model(data(step, 4, 32)).sum().backward()
    lines = replica_of(dropped[0]).engine.transport._lifelines
    act = [functools.partial(drop, dropped)]
    lines._speaking = Probed(lines._speaking, lambda: [act.pop()() for _ in act[:1]])
    come_together("trained")
    if rank == VICTIM:
        model.trap = die
    try:
        for step in range(3):
            model(data(step, 4, 32)).sum().backward()
    except CommlibError as error:
        report_error(error)
        report(event="collected", is_so=not dropped and not act)
        raise


def test_a_model_that_goes_while_its_peers_are_told_of_a_failure_holds_up_nobody() -> None:
    with start_ranks(lose_a_peer_beside_a_dropped_model, 3) as ranks:
        for exit_ in ranks.wait(HANG_S, [0, 2]):
            (error,) = reports(exit_, "error")
            assert (error["kind"], error["ranks"]) == ("PeerFailure", [VICTIM])
            assert reports(exit_, "collected")[0]["is_so"]
            assert exit_.returncode == 1, exit_.output


@on_ranks(2)
def test_a_model_that_goes_while_another_takes_the_driver_holds_up_nobody() -> None:
    with Locks().probed() as locks:
        dropped: list[Any] = [commlib.wrap(seeded(Mlp))]
        lead_back(dropped[0])
        locks.armed["drivers"] = functools.partial(drop, dropped)
        model = commlib.wrap(seeded(Mlp))
        assert not locks.armed
        train_some(model)
        commlib.unwrap(model)
    assert not [each for each in threading.enumerate() if each.name == "commlib-closing"]


# --- the end ---------------------------------------------------------------------------------------------------------


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train until all ranks have: one that leaves before is reported to those that train on."""
    for step in range(5):
        mlp_loss(model, step).backward()
        optimizer.step()
    tell("trained")
    await_told("trained", others())


def destroy_and_drop(algorithm: str) -> None:
    """Train, end the default group, and then drop the model."""
    default_group_from_env(timeout_s=LONG_S)
    model = seeded(Mlp)
    optimizer = sgd(model)
    commlib.wrap(model, algorithm, optimizer=optimizer, timeout=LONG_S)
    train(model, optimizer)
    dist.destroy_process_group()
    del model, optimizer
    gc.collect()
    closing.drain()
    left = [each.name for each in threading.enumerate() if each.name.startswith("commlib-")]
    report(event="dropped", gloo=num_gloo_threads(0), left=left)


@pytest.mark.parametrize("algorithm", ["allreduce", "streaming_diloco", "async_sgd"])
def test_a_model_that_is_dropped_after_its_group_was_destroyed_ends(algorithm: str) -> None:
    for exit_ in spawn_ranks(destroy_and_drop, 2, algorithm):
        assert exit_.returncode == 0, exit_.output
        (facts,) = reports(exit_, "dropped")
        assert (facts["gloo"], facts["left"]) == (0, []), facts
        assert len(exit_.output.splitlines()) == 1, exit_.output


def exit_without_threads(algorithm: str) -> None:
    """Train and exit, where no thread can be started from the beginning of the exit (Python 3.12)."""
    default_group_from_env(timeout_s=LONG_S)
    model = seeded(Mlp)
    optimizer = sgd(model)
    commlib.wrap(model, algorithm, optimizer=optimizer, timeout=LONG_S)
    train(model, optimizer)
    dropped = commlib.wrap(seeded(Mlp), timeout=LONG_S)
    lead_back(dropped)
    atexit.register(refuse_threads)
    report(event="ending")


def refuse_threads() -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError(f"can't create new thread at interpreter shutdown: {thread.name}")

    threading.Thread.start = start  # type: ignore[method-assign]


@pytest.mark.parametrize("algorithm", ["allreduce", "topk", "streaming_diloco", "async_averaging", "async_sgd"])
def test_an_exit_needs_no_new_thread(algorithm: str) -> None:
    for exit_ in spawn_ranks(exit_without_threads, 2, algorithm):
        assert exit_.returncode == 0, exit_.output
        assert [line for line in exit_.output.splitlines() if "REPORT" not in line] == [], exit_.output


class Slow:
    """Ends long after it was dropped."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        closing.Finalizer(self, functools.partial(self.end, self.ended), "something slow")

    @staticmethod
    def end(ended: threading.Event) -> None:
        time.sleep(0.3)
        ended.set()


@on_ranks(2)
def test_wrap_and_the_last_unwrap_wait_for_what_was_dropped() -> None:
    kept = commlib.wrap(seeded(Mlp))
    ended = Slow().ended
    other = commlib.wrap(seeded(Mlp))
    assert ended.is_set()
    commlib.unwrap(other)
    ended = Slow().ended
    commlib.unwrap(kept)
    assert ended.is_set()
    assert not [each.name for each in threading.enumerate() if each.name.startswith("commlib-")]
