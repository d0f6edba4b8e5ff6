"""Ranks that communicate over a stand-in of NCCL: who is told what when a peer goes, and how communicators end."""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commlib.errors import CommlibError
from commlib.transport import nccl
from commlib.transport.base import Communicator
from commlib.transport.groups import resolve_group
from commlib.transport.torch_dist import TorchTransport
from tests.multi import nccl_stand_in
from tests.multi.fault_scripts import VICTIM, die, report, report_error, stop
from tests.multi.nccl_stand_in import in_place_of_nccl
from tests.multi.pool import on_ranks, start_ranks
from tests.multi.rank_worker import default_group_from_env
from tests.multi.test_faults import reports
from tests.waiting import eventually


def connect(timeout_s: float = 20.0) -> tuple[TorchTransport, Communicator]:
    transport = TorchTransport(resolve_group(None), torch.device("cpu"), timedelta(seconds=timeout_s))
    return transport, Communicator(transport.rank, transport.world_size)


def words_of(error: CommlibError) -> tuple[type, str, set[int]]:
    return type(error), str(error), set(getattr(error, "ranks", ()))


class Engine:
    """What asks to be told of failures, and checks for them as often as it likes."""

    def __init__(self, transport: TorchTransport) -> None:
        self.transport = transport
        self.told = threading.Event()
        self.error: Any = None
        transport.on_failure(self.abandon)

    def abandon(self, error: Exception) -> None:
        self.error = error
        self.transport.abort()
        self.told.set()


def issue_and_go_on(ending: str, timeout_s: float) -> None:
    """Issue collectives and never wait for one on the host, as a CUDA step does; one rank ends instead."""
    rank = default_group_from_env(timeout_s=60)
    with in_place_of_nccl():
        transport, comm = connect(timeout_s)
        engine = Engine(transport)
        for _ in range(3):
            transport.issue(comm.all_reduce(torch.ones(1000))).wait()
        while transport._connections.by_group["all"].under_way():
            time.sleep(0.01)
        transport.gather_objects(None)  # and so on all ranks
        began_s = time.monotonic()
        store = dist.distributed_c10d._get_default_store()
        if rank == VICTIM:
            store.wait(["0 has issued", "2 has issued"])
            {"killed": die, "stopped": stop, "left": transport.close}[ending]()
            time.sleep(15)
            return
        transport.issue(comm.all_reduce(torch.ones(1000))).wait()
        store.set(f"{rank} has issued", "")
        report(event="returned", waited_s=time.monotonic() - began_s)
        assert engine.told.wait(30)
        assert transport.failure is engine.error
        assert engine.error is not None
        report_error(engine.error, began_s)
        with pytest.raises(CommlibError) as later, transport.explaining("a later collective"):
            transport.issue(comm.all_reduce(torch.ones(1000)))
        report(event="later", is_the_same=words_of(later.value) == words_of(engine.error))
        transport.close()
        report(event="closed", calls=nccl_stand_in.CALLS[-1:], waited_s=time.monotonic() - began_s)


@pytest.mark.parametrize(
    ("ending", "timeout_s", "least_s", "most_s", "kind", "words"),
    [
        ("killed", 30.0, 0.0, 3.0, "PeerFailure", "a peer was lost; rank 1 was killed"),
        ("stopped", 3.0, 2.5, 8.0, "PeerTimeout", "no answer within 3 s; rank 1 did not come"),
        ("left", 60.0, 4.0, 12.0, "PeerFailure", "a peer was lost; rank 1 left"),
    ],
)
def test_a_collective_that_nobody_waits_for_fails(
    ending: str, timeout_s: float, least_s: float, most_s: float, kind: str, words: str
) -> None:
    with start_ranks(issue_and_go_on, 3, ending, timeout_s) as ranks:
        for exit_ in ranks.wait(45, [0, 2]):
            assert exit_.returncode == 0, exit_.output
            assert reports(exit_, "returned")[0]["waited_s"] < 2.0, "the host does not wait"
            (error,) = reports(exit_, "error")
            assert error["kind"] == kind
            assert error["ranks"] == [VICTIM]
            assert re.search(words, error["message"]), error["message"]
            assert "all_reduce number 3 of" in error["message"]
            assert least_s <= error["waited_s"] < most_s
            assert reports(exit_, "later")[0]["is_the_same"]
            assert reports(exit_, "closed")[0]["calls"] == ["abort"]


@on_ranks(2)
def test_what_hosts_agree_on_does_not_go_over_nccl() -> None:
    with in_place_of_nccl():
        transport, _ = connect()
        assert transport.gather_objects(transport.rank * 10) == [0, 10]
        assert nccl_stand_in.CALLS == []
        transport.close()
        assert nccl_stand_in.CALLS == ["shutdown"]


@on_ranks(2)
def test_a_rank_that_closes_waits_for_the_kernels_that_its_peers_have_not_joined_yet() -> None:
    with in_place_of_nccl():
        transport, comm = connect()
        value = torch.ones(100)
        time.sleep(1.0 * transport.rank)
        transport.issue(comm.all_reduce(value)).wait()
        transport.close()
        assert value.tolist() == [2.0] * 100
        assert nccl_stand_in.CALLS == ["all allreduce", "shutdown"]


@on_ranks(2)
def test_communicators_have_names_and_ranks_for_torchs_logs() -> None:
    with in_place_of_nccl():
        transport, _ = connect()
        backend: Any = transport._connections.by_group["all"].backend
        names = transport.gather_objects(backend.name)
        assert re.fullmatch(r"commlib\.[0-9a-f]+\.all", names[0])
        assert names[0] == names[1]
        assert backend.ranks == [0, 1]
        other, _ = connect()
        assert other._connections.by_group["all"].backend.name != names[0]
        other.close()
        transport.close()


@on_ranks(2)
def test_a_rank_that_does_not_come_to_connect_is_late() -> None:
    """NCCL's own waiting for it has no end."""
    is_over = threading.Event()

    def make(*_: Any) -> None:
        is_over.wait(4.0 if dist.get_rank() == 1 else 60.0)
        raise RuntimeError("no connection, says the test")

    with in_place_of_nccl(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl, "make", make)
        began_s = time.monotonic()
        with pytest.raises(CommlibError, match="making the communicator in commlib.wrap"):
            connect(timeout_s=2.0)
        assert time.monotonic() - began_s < 10.0
    is_over.set()


@on_ranks(2)
def test_a_device_has_one_order_over_the_communicators_of_several_models() -> None:
    """A second communicator's kernel waits on its stream for the first one's; asynchronous rounds are left out."""
    with in_place_of_nccl():
        (one, comm), (two, _), (free, _) = connect(), connect(), connect()
        free.in_order = False
        held: list[str] = []
        hold_back = nccl.NcclWork.hold_back
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nccl.NcclWork, "hold_back", lambda work: (held.append(work.what), hold_back(work))[1])
            for transport in (one, one, free, two, free, one):
                transport.issue(comm.all_reduce(torch.ones(4))).wait()
        assert len(held) <= 2  # none that was seen to have ended
        assert all("number" in what for what in held)
        for transport in (one, two, free):
            transport.close()


@on_ranks(2)
def test_a_transport_that_nobody_holds_ends_with_its_watch() -> None:
    """The watch's thread and the callbacks must not keep it alive, nor through it a model."""
    with in_place_of_nccl():
        transport, comm = connect()
        engine = Engine(transport)
        transport.issue(comm.all_reduce(torch.ones(4))).wait()
        alive = [weakref.ref(transport), weakref.ref(engine)]
        del transport, engine
        gc.collect()
        assert [each() for each in alive] == [None, None]
        assert eventually(lambda: nccl_stand_in.CALLS[-1] == "shutdown")
        assert eventually(lambda: not [each for each in threading.enumerate() if each.name == "commlib-watch"])
