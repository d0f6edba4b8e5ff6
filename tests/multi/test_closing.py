"""Models that are dropped without `unwrap`: ended by the closing thread, wherever the collector came upon them."""

from __future__ import annotations

import pytest
import torch

from commlib.engine.rounds import drivers
from commlib.engine.rounds.streams import StreamDriver
from tests.contract.contracts_faults import collect_within_each_lock
from tests.contract.subjects import Subject
from tests.multi.nccl_stand_in import Kernel, in_place_of_nccl
from tests.multi.pool import run_ranks
from tests.structure import names_of_locks


def over_nccl(name: str) -> set[str]:
    issue_wait = Kernel.wait

    def wait(kernel: Kernel) -> None:
        kernel._work.wait()
        issue_wait(kernel)

    with in_place_of_nccl(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(drivers, "ThreadDriver", lambda: StreamDriver(torch.device("cpu")))
        patch.setattr(Kernel, "wait", wait)
        return collect_within_each_lock(Subject(name))


def over_gloo(name: str) -> set[str]:
    options = {"scaler": torch.amp.GradScaler("cpu")} if name == "topk" else {}
    return collect_within_each_lock(Subject(name), **options)


#: Locks in which no dropped model is collected here, and why.
ELSEWHERE = {
    "kernels.cuda": "held where a kernel is compiled for a GPU",
    "codecs": "held where codecs of other packages are registered",
    "transformers": "of a set as that of the optimizers",
    "accelerate.wrapped": "of a table; tests/unit/test_weak.py",
    "accelerate.waiting": "of a table; tests/unit/test_weak.py",
}


def test_a_dropped_model_is_collected_within_each_lock_there_is() -> None:
    found = set(ELSEWHERE).union(*run_ranks(over_nccl, 2, "allreduce"))
    for name in ("topk", "async_averaging", "async_sgd", "passive_gossip"):
        found.update(*run_ranks(over_gloo, 2, name))
    assert found == set(names_of_locks())
