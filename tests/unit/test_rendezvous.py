"""How ranks meet in a store: they agree on a name that nobody used, whatever was left there, or say who is missing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from commlib.errors import PeerFailure, PeerTimeout, TransportError
from commlib.transport import rendezvous
from commlib.transport.base import EndedError
from commlib.transport.plain import decode, encode
from commlib.transport.rendezvous import Meeting, all_said
from tests.waiting import ENDLESS_S, LIMIT_S, Clock, eventually, in_time


@pytest.fixture(params=["tcp", "file", "hash"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Of each kind, one that all ranks share, as a job's is."""
    kinds: dict[str, Callable[[], Any]] = {
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, 1, True),
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 1),
        "hash": dist.HashStore,
    }
    return kinds[request.param]()


_meetings: list[Meeting] = []


@pytest.fixture(autouse=True)
def close_meetings() -> Iterator[None]:
    yield
    while _meetings:
        _meetings.pop().close()


def attend(*args: Any) -> Meeting:
    _meetings.append(Meeting(*args))
    return _meetings[-1]


def meet(
    store: Any, ranks: Sequence[int], world_size: int, timeout_s: float = LIMIT_S, wait_s: Sequence[float] = ()
) -> list[Any]:
    """Let some ranks meet, each in a thread and some late; returns a meeting or an error of each."""

    def attend_late(rank: int) -> Any:
        time.sleep(wait_s[rank] if wait_s else 0.0)
        try:
            return attend(store, rank, [10 * each for each in range(world_size)], timeout_s)
        except TransportError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(attend_late, ranks))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """By which the ranks wait."""
    made = Clock(real_sleep_s=0.001)
    monkeypatch.setattr(rendezvous, "time", made)
    return made


def meet_in_vain(store: Any, present: Sequence[int], world_size: int, clock: Clock) -> list[Any]:
    """Let some ranks come, and the time be over once all of them are there; returns the error of each."""
    where = dist.PrefixStore("commlib/meeting", store)

    def mark(rank: int) -> bytes:
        return where.get(f"here/{rank}") if where.check([f"here/{rank}"]) else b"-"

    before = {rank: mark(rank) for rank in present}

    def is_here(rank: int) -> bool:
        return mark(rank).startswith(b"+") and mark(rank) != before[rank]

    def has_answered(rank: int) -> bool:
        """Whether a rank has acknowledged, where rank 0 believes that all are here and invites."""
        believes = 0 in present and all(mark(each).startswith(b"+") for each in range(world_size))
        if not believes or rank == 0:
            return True
        invited = decode(where.get("invitation")) if where.check(["invitation"]) else [""]
        return where.check([f"ack/{invited[0]}/{rank}"]) and mark(rank).split(b" ")[1].decode() in invited

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(meet, store, present, world_size)
        have_come = eventually(lambda: all(map(is_here, present)) and all(map(has_answered, present)))
        clock.now_s += ENDLESS_S
        assert have_come
        return found.result(LIMIT_S)


def names(meetings: Sequence[Any]) -> set[str]:
    assert all(isinstance(meeting, Meeting) for meeting in meetings), meetings
    return {meeting.name for meeting in meetings}


def test_ranks_agree_on_a_new_name_each_time(store: Any) -> None:
    found = [names(meet(store, range(4), 4)) for _ in range(5)]
    assert all(len(each) == 1 for each in found)
    assert len(set.union(*found)) == 5


def test_several_meetings_in_a_row_whoever_is_faster(store: Any) -> None:
    """Rank 0 invites to the next one before the others have left the last."""

    def all_of(rank: int) -> list[str]:
        made = []
        for turn in range(6):
            time.sleep(0.02 if (rank + turn) % 3 == 0 else 0.0)
            made.append(attend(store, rank, range(3), LIMIT_S).name)
        return made

    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(all_of, range(3))
    assert all(other == first for other in others)
    assert len(set(first)) == 6


@pytest.mark.parametrize("absent", [[0], [1], [2], [0, 2], [1, 2]], ids=str)
def test_who_misses_it_is_named_by_all_and_the_next_one_works(store: Any, absent: list[int], clock: Clock) -> None:
    present = [rank for rank in range(3) if rank not in absent]
    for _ in range(2):
        for error in meet_in_vain(store, present, 3, clock):
            assert isinstance(error, PeerTimeout)
            assert error.ranks == {10 * rank for rank in absent}
    assert len(names(meet(store, range(3), 3))) == 1


def test_who_was_there_alone_before_is_missing_all_the_same(store: Any) -> None:
    meet(store, [1], 2, timeout_s=0.1)
    (error,) = meet(store, [0], 2, timeout_s=0.1)
    assert error.ranks == {10}
    (error,) = meet(store, [1], 2, timeout_s=0.1)
    assert error.ranks == {0}


def test_what_a_killed_rank_left_is_not_taken_for_it(store: Any, clock: Clock) -> None:
    """Another life of the job on the same store: the old one ended in the middle of a meeting."""
    old = dist.PrefixStore("commlib/meeting", store)
    for rank in range(3):
        old.set(f"here/{rank}", f"+ old{rank} 1.00 - - 0")
    old.set("invitation", encode(["oldname", "old0", "old1", "old2"]).decode())
    old.set("ack/oldname/1", "1")
    errors = meet_in_vain(store, [0, 1], 3, clock)
    assert all(isinstance(error, PeerTimeout) and error.ranks == {20} for error in errors), errors
    found = names(meet(store, range(3), 3, wait_s=[0.0, 0.1, 0.2]))
    assert len(found) == 1
    assert "oldname" not in str(found)


def test_what_ranks_say_reaches_all_in_rank_order(store: Any) -> None:
    meetings = meet(store, range(3), 3)
    for turn in range(3):
        with ThreadPoolExecutor(3) as pool:
            said = list(
                pool.map(lambda meeting, turn=turn: meeting.gather_objects((meeting.rank, turn, b"x")), meetings)
            )
        assert said == [[(rank, turn, b"x") for rank in range(3)]] * 3


def test_who_says_nothing_is_named(store: Any, clock: Clock) -> None:
    first, _ = meet(store, range(2), 2, timeout_s=1.0)
    clock.now_s += 1.1
    with pytest.raises(PeerTimeout, match="rank 10 did not arrive within 1 s") as caught:
        first.gather_objects(1)
    assert caught.value.ranks == {10}


def test_a_rank_that_gave_up_is_not_taken_for_the_one_that_died(store: Any) -> None:
    """Rank 1 found out that rank 2 is dead and closed its connections; rank 0 sees only that of rank 1 end."""
    zero, one, _ = meet(store, range(3), 3)
    assert one.diagnose(ConnectionError("refused"), "connecting", [2]).ranks == {20}
    error = zero.diagnose(ConnectionError("ended"), "connecting", [1])
    assert isinstance(error, PeerFailure)
    assert error.ranks == {20}
    assert "rank 20 died during it" in str(error)


def test_what_is_no_plain_value_names_who_wrote_it(store: Any) -> None:
    zero, one = meet(store, range(2), 2)
    one.store.set("told/0/1", "{")
    with pytest.raises(TransportError, match="rank 10 wrote into the store 1 bytes"):
        zero.gather_objects(0)


def test_what_a_backend_waits_for_holds_up_nobody_else(store: Any) -> None:
    store.set_timeout(timedelta(seconds=ENDLESS_S))
    (one,) = meet(store, [0], 1)
    backends_own = one.own_store()
    waiting = threading.Thread(target=backends_own.get, args=("a peer's address",), daemon=True)
    waiting.start()
    time.sleep(0.2)  # so that it is asked before the others most of the time
    assert in_time(lambda: store.add("a key of the user's", 1)) == 1
    one.store.set("a peer's address", "here")
    waiting.join(LIMIT_S)
    assert not waiting.is_alive()
    assert backends_own.get("a peer's address") == b"here"


def test_a_store_that_cannot_be_had_twice_is_taken_as_it_is() -> None:
    class Own(dist.Store):
        """A user's store, with the methods that torch requires."""

        def __init__(self) -> None:
            super().__init__()
            self.kept = dist.HashStore()

        def set(self, key: str, value: Any) -> None:
            self.kept.set(key, value)

        def get(self, key: str) -> bytes:
            return self.kept.get(key)

        def add(self, key: str, value: int) -> int:
            return self.kept.add(key, value)

        def check(self, keys: list[str]) -> bool:
            return self.kept.check(keys)

    store = Own()
    zero, one = meet(store, range(2), 2)
    zero.own_store().set("key", "value")
    assert one.own_store().get("key") == b"value"


def test_a_store_that_is_gone_is_an_error_that_says_so() -> None:
    hosts = [dist.TCPStore("127.0.0.1", 0, 1, True)]
    client = dist.TCPStore("127.0.0.1", hosts[0].port, 1, False)
    failed: list[Exception] = []

    def attend() -> None:
        try:
            Meeting(client, 1, range(2), LIMIT_S)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=attend)
    thread.start()
    assert eventually(lambda: hosts[0].check(["commlib/meeting/here/1"]))
    hosts.clear()
    thread.join(2 * LIMIT_S)
    assert isinstance(failed[0], TransportError)
    assert "store does not answer" in str(failed[0])


def test_a_set_up_that_nobody_waits_for_does_not_keep_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the wait, not the thread that waits in the store's calls."""
    store = dist.HashStore()

    def run(make: Callable[[], Any]) -> None:
        with pytest.raises(TransportError, match="abandoned on this rank"):
            make()
        ended.set()

    def interrupted(make: Callable[[], Any], _: object) -> None:
        threading.Thread(target=run, args=(make,)).start()
        assert eventually(lambda: store.check(["commlib/meeting/here/0"]))
        raise KeyboardInterrupt

    ended = threading.Event()
    monkeypatch.setattr(rendezvous, "attend", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rendezvous.meet(store, 0, range(2), 60.0, b"")
    assert ended.wait(LIMIT_S)
    assert store.get("commlib/meeting/here/0").startswith(b"-")


@pytest.mark.parametrize("gives_up", [False, True])
def test_who_said_nothing_in_the_store_is_named(store: Any, gives_up: bool) -> None:
    """Whether the time is over, or peers have given up before."""

    def check() -> None:
        if gives_up:
            raise EndedError("a peer gave up")

    with pytest.raises(
        EndedError if gives_up else TimeoutError,
        match=("a peer gave up; " if gives_up else "timed out: ") + "rank 7 wrote nothing",
    ):
        all_said(store, 0, [4, 7], "here", ENDLESS_S if gives_up else 0.1, check)
    store.set("1", "here too")
    assert all_said(store, 0, [4, 7], "here", LIMIT_S, lambda: None) == [b"here", b"here too"]
