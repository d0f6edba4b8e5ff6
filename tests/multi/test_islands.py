"""Islands of sharded models in which a rank fails: who is blamed, and who is told."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.multi.common import seeded
from tests.multi.fault_scripts import HANG_S, LONG_S, SHORT_S, TRAPS, report_error
from tests.multi.notices import await_told, others, tell
from tests.multi.pool import RankExit, start_ranks
from tests.multi.rank_worker import default_group_from_env
from tests.multi.test_blame import facts
from tests.multi.test_sharded import Net, fsdp, momentum, train, wrapped

#: The islands are ranks 0 and 1, and ranks 2 and 3: rank 1 shares an island with rank 0, and a group with rank 3.
VICTIM = 1
#: How long FSDP2's own collectives wait.
FSDP_S = 25.0


def mesh_with_limit() -> DeviceMesh:
    """Return the mesh of docs/how-to/sharded.md, whose groups have a time limit."""
    islands, copies = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    limit = timedelta(seconds=FSDP_S)
    groups = [dist.new_subgroups_by_enumeration(ranks, timeout=limit)[0] for ranks in (copies, islands)]
    return DeviceMesh.from_group(groups, "cpu", mesh=islands, mesh_dim_names=("replicate", "shard"))


def train_until_trapped(kind: str, timeout_s: float) -> None:
    rank = default_group_from_env(timeout_s=LONG_S)
    mesh = mesh_with_limit()
    model = fsdp(seeded(Net), mesh)
    optimizer = momentum(model)
    wrapped(model, mesh, "allreduce", optimizer, timeout=timeout_s)
    train(model, optimizer, range(3))
    tell("trained")
    if rank == VICTIM:
        await_told("trained", others())
        TRAPS[kind]()
    try:
        train(model, optimizer, range(3, 50))
    except Exception as error:
        report_error(error)
        raise


def ends(kind: str, timeout_s: float) -> dict[int, RankExit]:
    survivors = tuple(rank for rank in range(4) if rank != VICTIM)
    with start_ranks(train_until_trapped, 4, kind, timeout_s) as ranks:
        return dict(zip(survivors, ranks.wait(HANG_S, survivors), strict=True))


def logged(exit_: RankExit) -> list[str]:
    return [line for line in exit_.output.splitlines() if line.startswith(f"rank {exit_.rank}: ")]


@pytest.mark.parametrize(
    ("kind", "how"),
    [("die", "was killed, or its host is down"), ("fail", "ended with an exception")],
)
def test_ranks_whose_mate_is_gone_are_not_blamed(kind: str, how: str) -> None:
    exits = ends(kind, LONG_S)
    peer = facts(exits[3], "error")
    assert (peer["kind"], peer["ranks"]) == ("PeerFailure", [VICTIM]), peer
    for exit_ in exits.values():
        found = facts(exit_, "error")
        assert set(found["ranks"]) <= {VICTIM}, found
    assert f"rank 0: rank 1, which holds other shards of this rank's model, {how}" in exits[0].output
    assert len(logged(exits[2])) <= 1, "one line is enough for reports from several ranks"


def test_a_rank_whose_mate_is_stopped_is_told_and_not_blamed() -> None:
    exits = ends("stop", SHORT_S)
    peer = facts(exits[3], "error")
    assert (peer["kind"], peer["ranks"]) == ("PeerTimeout", [VICTIM]), peer
    assert "rank 0: rank 1, which holds other shards of this rank's model, does not answer" in exits[0].output
    assert facts(exits[0], "error")["kind"] == "RuntimeError", "FSDP2's own, by its group's limit"
    waited = facts(exits[2], "error")  # for rank 0, which waits for rank 1
    assert waited["ranks"] == [], waited
    assert len(logged(exits[2])) <= 1, "one line is enough for reports from several ranks"
