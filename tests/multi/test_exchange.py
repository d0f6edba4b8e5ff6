"""Point to point: exchanges of the transport, operations built on them, and the failure of a peer."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from commlib.errors import ConfigError, TransportError
from commlib.primitives.butterfly import butterfly_all_reduce, halving_all_reduce, split
from commlib.transport import torch_dist
from commlib.transport.base import Communication, Communicator
from commlib.transport.groups import resolve_group
from commlib.transport.torch_dist import TorchTransport
from tests.multi.fault_scripts import HANG_S, LONG_S, VICTIM, report, train_weights_into_trap
from tests.multi.notices import await_told, tell
from tests.multi.pool import RankExit, on_ranks, start_ranks
from tests.multi.rank_worker import default_group_from_env
from tests.waiting import eventually


@contextmanager
def connected(timeout_s: float = LONG_S) -> Iterator[tuple[TorchTransport, Communicator]]:
    transport = TorchTransport(resolve_group(None), torch.device("cpu"), timedelta(seconds=timeout_s))
    try:
        yield transport, Communicator(transport.rank, transport.world_size)
    finally:
        transport.close()


def run(communication: Communication, transport: TorchTransport) -> int:
    """Run a generator to its end; returns how many requests it made."""
    num = 0
    for request in communication:
        transport.issue(request).wait()
        num += 1
    return num


def same_on_all_ranks(value: Any) -> bool:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return all(other == everyone[0] for other in everyone)


# --- The verb -------------------------------------------------------------------------------------------


@on_ranks(2, 3, 4)
def test_what_is_sent_arrives_in_order_and_in_any_direction() -> None:
    """Everyone to everyone, sizes by sender and receiver, several exchanges under way, ended in reverse."""
    with connected() as (transport, comm):
        works, received = [], []
        others = [rank for rank in range(comm.world_size) if rank != comm.rank]
        for turn in range(5):
            sends = [(to, torch.full((1 + comm.rank + 10 * to,), 100.0 * turn + comm.rank)) for to in others]
            receives = [(by, torch.zeros(1 + by + 10 * comm.rank)) for by in others]
            request = comm.exchange(sends, receives)
            assert request.wire_bytes() == sum(4 * (1 + comm.rank + 10 * to) for to in others)
            works.append(transport.issue(request))
            received.append(receives)
        for work in reversed(works):
            work.wait()
        for turn, receives in enumerate(received):
            assert all((tensor == 100.0 * turn + by).all() for by, tensor in receives)
        assert transport.bytes_sent == 5 * sum(4 * (1 + comm.rank + 10 * to) for to in others)


@on_ranks(3)
def test_no_rank_has_the_communicator_before_all_are_connected() -> None:
    """A rank that left at once would break the connecting of the others."""
    connected_s: list[float] = []

    def late_on_rank_0(*args: Any) -> Any:
        backend = make_backend(*args)
        time.sleep(0.5 if dist.get_rank() == 0 else 0.0)
        connected_s.append(time.monotonic())
        return backend

    make_backend = torch_dist._make_backend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_dist, "_make_backend", late_on_rank_0)
        with connected() as (transport, _):
            returned_s = time.monotonic()
            times = transport.gather_objects((*connected_s, returned_s))
    latest_s = max(made_s for made_s, _ in times)
    assert all(had_s >= latest_s for _, had_s in times), times


@on_ranks(3)
def test_directed_and_idle_ranks() -> None:
    """0 sends to 1, 1 to nobody, 2 does nothing at all; empty tensors need no message."""
    with connected() as (transport, comm):
        value = torch.zeros(3)
        none = torch.zeros(0)
        request = [
            comm.exchange([(1, torch.ones(3))], []) if comm.rank == 0 else None,
            comm.exchange([], [(0, value)]) if comm.rank == 1 else None,
            comm.exchange([(0, none)], [(1, none)]) if comm.rank == 2 else None,
        ][comm.rank]
        assert request is not None
        assert request.is_empty() == (comm.rank == 2)
        assert request.wire_bytes() == (12 if comm.rank == 0 else 0)
        transport.issue(request).wait()
        assert value.tolist() == [1.0 if comm.rank == 1 else 0.0] * 3


@on_ranks(2)
def test_callbacks_come_after_the_data() -> None:
    with connected() as (transport, comm):
        done = threading.Event()
        value = torch.zeros(1 << 18)
        work = transport.issue(comm.exchange([(1 - comm.rank, torch.ones(1 << 18))], [(1 - comm.rank, value)]))
        work.add_done_callback(done.set)
        assert done.wait(60)
        assert value.sum() == 1 << 18
        late = threading.Event()
        work.add_done_callback(late.set)
        assert late.is_set(), "a callback that comes late is called at once"


@on_ranks(2, 3, 4)
def test_all_to_alls_large_and_small_and_exchanges_under_way_together() -> None:
    """Chunks of a megabyte use exchanges, small ones use Gloo; all give the values that the ranks sent."""
    with connected() as (transport, comm):
        size, works, outputs = comm.world_size, [], []
        for turn, chunk in enumerate((1 << 18, 3, 1 << 13, 1 << 18)):
            whom = torch.arange(size).repeat_interleave(chunk)
            output = torch.full((size * chunk,), -1.0)
            request = comm.all_to_all(output, 1000.0 * turn + 10 * comm.rank + whom)
            works.append(transport.issue(request))
            outputs.append(output)
            value = torch.zeros(5)
            neighbours = (comm.rank + 1) % size, (comm.rank - 1) % size
            sends, receives = [(neighbours[0], torch.full((5,), 1.0 * turn))], [(neighbours[1], value)]
            works.append(transport.issue(comm.exchange(sends, receives)))
            outputs.append(value)
        for work in reversed(works):
            work.wait()
        for turn in range(4):
            by = outputs[2 * turn].view(size, -1)
            for rank in range(size):
                assert (by[rank] == 1000.0 * turn + 10 * rank + comm.rank).all()
            assert (outputs[2 * turn + 1] == turn).all()


@on_ranks(3)
def test_an_abort_ends_an_all_to_all_that_a_rank_does_not_join() -> None:
    """Rank 0 aborts; this ends it also for rank 2, which waits for rank 1 first, while rank 1 neither joins nor leaves.

    The timeout ends nothing: it is longer than rank 1 stays.
    """
    with connected() as (transport, comm):
        if comm.rank == 1:
            await_told("ended", [0, 2])
            return
        work = transport.issue(comm.all_to_all(torch.zeros(3 << 18), torch.zeros(3 << 18)))
        tell("issued")
        if comm.rank == 0:
            await_told("issued", [2])
            transport.abort()
        with pytest.raises(RuntimeError):
            work.wait()
        tell("ended")


def test_ranks_outside_of_the_group_and_the_own_one_are_refused() -> None:
    comm = Communicator(1, 3)
    for rank in (1, 3, -1):
        with pytest.raises(ConfigError, match=rf"ranks in 0\.\.2 other than this one, 1; got {rank}"):
            comm.exchange([(rank, torch.ones(1))], [])


@on_ranks(2)
def test_the_waiter_ends_with_the_transport() -> None:
    before = set(threading.enumerate())
    with connected() as (transport, comm):
        transport.issue(comm.exchange([(1 - comm.rank, torch.ones(1))], [(1 - comm.rank, torch.ones(1))])).wait()
        assert "commlib-exchange" in [thread.name for thread in threading.enumerate()]
    assert eventually(lambda: set(threading.enumerate()) <= before), threading.enumerate()


@on_ranks(2, timeout=60)
def test_an_abort_ends_a_receive_here_and_at_the_peer_at_once() -> None:
    """Nobody ever sends; rank 0 aborts. The timeout is longer than the test may take."""
    with connected() as (transport, comm):
        work = transport.issue(comm.exchange([], [(1 - comm.rank, torch.zeros(4))]))
        tell("issued")
        if comm.rank == 0:
            await_told("issued", [1])
            transport.abort()
        with pytest.raises(RuntimeError):
            work.wait()
        assert isinstance(transport.diagnose(RuntimeError("closed"), "the exchange"), TransportError)


# --- All-reduce by exchanges ----------------------------------------------------------------------------


def integers(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers, whose sums are exact in every dtype and order."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(-8, 9, (numel,), generator=generator).to(dtype)


FRACTIONS: list[Sequence[float] | None] = [None, [1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 0, 0, 1, 0, 0, 0]]


@on_ranks(1, 3, 4, slow=(2,))
@pytest.mark.parametrize("numel", [0, 1, 7, 1000])
def test_butterfly_all_reduces_are_the_exact_sum(numel: int) -> None:
    size = dist.get_world_size()
    with connected() as (transport, comm):
        ways: list[Any] = [halving_all_reduce]
        for given in FRACTIONS:
            part = None if given is None else given[:size] if size > 1 else [1.0]
            ways.append(lambda tensor, comm, part=part: butterfly_all_reduce(tensor, comm, part))
        for way, dtype in itertools.product(ways, [torch.float32, torch.float64, torch.bfloat16]):
            tensor = integers(comm.rank, numel, dtype)
            num_requests = run(way(tensor, comm), transport)
            expected = sum((integers(rank, numel, dtype) for rank in range(size)), torch.zeros(numel, dtype=dtype))
            assert torch.equal(tensor, expected)
            assert same_on_all_ranks(num_requests)


@on_ranks(2, 3, 4)
def test_butterfly_all_reduces_leave_the_same_bits_everywhere_and_send_what_they_should() -> None:
    numel = 12_000
    size = dist.get_world_size()
    with connected() as (transport, comm):
        for way in (butterfly_all_reduce, halving_all_reduce):
            tensor = torch.randn(numel, generator=torch.Generator().manual_seed(comm.rank))
            before = transport.bytes_sent
            run(way(tensor, comm), transport)
            assert same_on_all_ranks(tensor.numpy().tobytes())
            if way is butterfly_all_reduce or size != 3:
                assert transport.bytes_sent - before == 2 * (size - 1) / size * tensor.nbytes


def test_parts_are_in_proportion() -> None:
    assert split(10, [1, 1]) == [(0, 5), (5, 10)]
    assert split(10, [0, 3, 1]) == [(0, 0), (0, 8), (8, 10)]
    assert split(0, [1, 1]) == [(0, 0), (0, 0)]
    for numel, count in itertools.product((1, 9, 1000), (1, 3, 8)):
        parts = split(numel, np.random.default_rng(count).random(count).tolist())
        assert [begin for begin, _ in parts] == [0, *(end for _, end in parts[:-1])]
        assert parts[-1][1] == numel
    for wrong in ([0.0, 0.0], [1.0, -0.5], [float("nan"), 1.0], [float("inf"), 1.0]):
        with pytest.raises(ConfigError, match="fractions"):
            split(10, wrong)
    with pytest.raises(ConfigError, match="each of 3 ranks, got 2"):
        next(butterfly_all_reduce(torch.ones(3), Communicator(0, 3), [1, 1]))


# --- Peers that go --------------------------------------------------------------------------------------


def reports(rank: RankExit, event: str) -> list[dict[str, Any]]:
    lines = [line.partition("REPORT ")[2] for line in rank.output.splitlines() if "REPORT " in line]
    return [facts for facts in map(json.loads, lines) if facts["event"] == event]


@pytest.mark.thin
@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        ("die", "decentralized"),
        ("stop", "decentralized"),
        ("die", "low_precision_decentralized"),
        pytest.param("stall", "low_precision_decentralized", marks=pytest.mark.slow),
        pytest.param("fail", "low_precision_decentralized", marks=pytest.mark.slow),
    ],
)
def test_a_fault_before_a_round_of_neighbours(kind: str, algorithm: str) -> None:
    """Four ranks: the victim's neighbours see the fault at once, the opposite rank through them; all name the victim.

    A victim that fails in its own code has a round in progress, and may report the end of that round while it exits.
    """
    kinds = ["PeerFailure"] if kind == "die" else ["PeerTimeout", "PeerFailure"]
    whom = rf"rank {VICTIM} (was killed|did not arrive|ended)"
    others = [rank for rank in range(4) if rank != VICTIM]
    with start_ranks(train_weights_into_trap, 4, kind, algorithm) as ranks:
        for exit_ in ranks.wait(HANG_S, others):
            found = reports(exit_, "error")
            assert found, f"rank {exit_.rank} raised no error of ours:\n{exit_.output}"
            assert found[0]["kind"] in kinds, found[0]
            for word in ("exchange", "bucket", r"layers\.", whom):
                assert re.search(word, found[0]["message"]), f"{word!r} is not in the message: {found[0]['message']}"
            assert found[0]["ranks"] == [VICTIM]
            assert exit_.returncode == 1, exit_.output


def end_with_an_exchange_under_way(way: str, verb: str) -> None:
    """Rank 1 never sends what rank 0 waits for; rank 0 ends its script meanwhile, in one of several ways."""
    rank = default_group_from_env(timeout_s=LONG_S)
    transport = TorchTransport(resolve_group(None), torch.device("cpu"), timedelta(seconds=LONG_S))
    comm = Communicator(rank, 2)
    transport.issue(comm.exchange([(1 - rank, torch.ones(4))], [(1 - rank, torch.ones(4))])).wait()
    if rank == 0 and verb == "exchange":
        transport.issue(comm.exchange([], [(1, torch.zeros(4))]))
    elif rank == 0:
        transport.issue(comm.all_to_all(torch.zeros(1 << 18), torch.zeros(1 << 18)))
    tell("asked")
    if rank == 1:
        await_told("asked", [0])
    if way == "close":
        transport.close()
        report(event="closed", threads=[thread.name for thread in threading.enumerate()])
    if way == "exception":
        raise KeyError("the user's own error")


@pytest.mark.parametrize("verb", ["exchange", "all_to_all"])
@pytest.mark.parametrize("way", ["just-end", "close", "exception"])
def test_a_process_ends_at_once_with_an_exchange_under_way(way: str, verb: str) -> None:
    """One that waited for the timeout would hang for this test."""
    with start_ranks(end_with_an_exchange_under_way, 2, way, verb) as ranks:
        for exit_ in ranks.wait(HANG_S):
            assert exit_.returncode == (1 if way == "exception" else 0), exit_.output
            assert "terminate called" not in exit_.output
            for facts in reports(exit_, "closed"):
                assert "commlib-exchange" not in facts["threads"]
