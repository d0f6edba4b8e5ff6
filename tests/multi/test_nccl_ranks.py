"""Ranks that communicate over a stand-in of NCCL: who is told what when a peer goes, and how communicators end."""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from commlib.errors import CommlibError
from commlib.transport import nccl
from commlib.transport.base import Communicator
from commlib.transport.groups import resolve_group
from commlib.transport.torch_dist import TorchTransport
from tests.multi import nccl_stand_in
from tests.multi.fault_scripts import HANG_S, LONG_S, SHORT_S, VICTIM, die, report, report_error, stop
from tests.multi.nccl_stand_in import in_place_of_nccl
from tests.multi.notices import LIMIT_S, await_told, others, tell
from tests.multi.pool import on_ranks, start_ranks
from tests.multi.rank_worker import default_group_from_env
from tests.multi.test_faults import reports
from tests.waiting import eventually


def connect(timeout_s: float = LONG_S) -> tuple[TorchTransport, Communicator]:
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
    """Issue collectives and never wait for one on the host, as a CUDA step does; one rank ends instead.

    It ends once the others have gone on, so that a host which waits would wait for ever.
    """
    rank = default_group_from_env(timeout_s=LONG_S)
    with in_place_of_nccl():
        transport, comm = connect(timeout_s)
        engine = Engine(transport)
        for _ in range(3):
            transport.issue(comm.all_reduce(torch.ones(1000))).wait()
        assert eventually(lambda: not transport._connections.by_group["all"].under_way())
        transport.gather_objects(None)  # and so on all ranks
        if rank == VICTIM:
            await_told("went on", others())
            {"killed": die, "stopped": stop, "left": transport.close}[ending]()
            await_told("closed", others())
            return
        issued_s = time.monotonic()
        transport.issue(comm.all_reduce(torch.ones(1000))).wait()
        tell("went on")
        assert engine.told.wait(LIMIT_S)
        report(event="told", after_s=time.monotonic() - issued_s)
        assert transport.failure is engine.error
        assert engine.error is not None
        report_error(engine.error)
        with pytest.raises(CommlibError) as later, transport.explaining("a later collective"):
            transport.issue(comm.all_reduce(torch.ones(1000)))
        report(event="later", is_the_same=words_of(later.value) == words_of(engine.error))
        transport.close()
        report(event="closed", calls=nccl_stand_in.CALLS[-1:])
        tell("closed")


@pytest.mark.parametrize(
    ("ending", "timeout_s", "least_s", "kind", "words"),
    [
        ("killed", LONG_S, 0.0, "PeerFailure", "a peer was lost; rank 1 was killed"),
        ("stopped", SHORT_S, SHORT_S, "PeerTimeout", f"no answer within {SHORT_S:g} s; rank 1 did not arrive"),
        ("left", LONG_S, 4.0, "PeerFailure", "a peer was lost; rank 1 left"),
    ],
)
def test_a_collective_that_nobody_waits_for_fails(
    ending: str, timeout_s: float, least_s: float, kind: str, words: str
) -> None:
    with start_ranks(issue_and_go_on, 3, ending, timeout_s) as ranks:
        exits = ranks.wait(HANG_S, [0, 2])
    for exit_ in exits:
        assert exit_.returncode == 0, exit_.output
        (error,) = reports(exit_, "error")
        assert error["kind"] == kind
        assert error["ranks"] == [VICTIM]
        assert re.search(words, error["message"]), error["message"]
        assert "all_reduce number 3 of" in error["message"]
        assert reports(exit_, "later")[0]["is_the_same"]
        assert reports(exit_, "closed")[0]["calls"] == ["abort"]
    assert max(reports(exit_, "told")[0]["after_s"] for exit_ in exits) >= least_s


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
    finish = nccl.NcclConnection.finish

    def told_finish(connection: nccl.NcclConnection, may_go_on: Callable[[], bool]) -> None:
        tell("closing")
        finish(connection, may_go_on)

    with in_place_of_nccl(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl.NcclConnection, "finish", told_finish)
        transport, comm = connect()
        value = torch.ones(100)
        await_told("closing", range(transport.rank))
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
        is_over.wait(LIMIT_S)
        raise RuntimeError("no connection, says the test")

    with in_place_of_nccl(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl, "make", make)
        with pytest.raises(CommlibError, match="creating the communicator in commlib.wrap"):
            connect(timeout_s=2.0)
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
