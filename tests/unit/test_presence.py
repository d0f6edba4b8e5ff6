"""Who counts as dead before there are lifelines: one whose connection ended, and nobody on less than that."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from commlib.errors import PeerFailure, PeerTimeout
from commlib.transport import presence, rendezvous
from commlib.transport.presence import Mark, Presence
from commlib.transport.rendezvous import Meeting
from tests.waiting import eventually

ELSEWHERE = "another host's namespace"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time for which a state must persist."""
    monkeypatch.setattr(presence, "CERTAIN_S", 0.05)
    monkeypatch.setattr(presence, "_RETRY_S", 0.01)


@pytest.fixture
def own() -> Iterator[Presence]:
    with contextlib.closing(Presence("00aa", "127.0.0.1", 4)) as made:
        yield made


@contextlib.contextmanager
def another(attempt: str = "11bb") -> Iterator[Presence]:
    with contextlib.closing(Presence(attempt, "127.0.0.1", 4)) as made:
        yield made


@contextlib.contextmanager
def listening() -> Iterator[tuple[socket.socket, Mark]]:
    """A socket that listens and answers nothing, as that of a stopped process, and a mark that says so."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        mark = Presence("11bb", "no address", 0).mark
        yield listener, mark._replace(address="127.0.0.1", port=listener.getsockname()[1])


def is_found(own: Presence, mark: Mark, is_agreed: bool = False) -> Callable[[], bool]:
    return lambda: set(own.gone({1: mark}, is_agreed)) == {1}


def stays_unfound(own: Presence, mark: Mark, is_agreed: bool = False) -> bool:
    """Look many times as long as certainty takes, and at least three times."""
    until_s = time.monotonic() + 10 * presence.CERTAIN_S
    found = [own.gone({1: mark}, is_agreed)]
    while time.monotonic() < until_s or len(found) < 4:
        time.sleep(0.01)
        found.append(own.gone({1: mark}, is_agreed))
    return not any(found)


def refused(mark: Mark) -> Mark:
    """Return a mark with a port at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return mark._replace(address="127.0.0.1", port=listener.getsockname()[1])


def greeted(own: Presence, peer: Presence, mark: Mark) -> bool:
    own.gone({1: mark}, False)
    peer.greet()
    own.gone({1: mark}, False)
    return own._sights[1].has_greeted


def test_a_mark_is_read_as_it_was_written(own: Presence) -> None:
    found = Mark.parse(own.mark.words())
    assert found is not None
    assert found._replace(written_s=0) == own.mark._replace(written_s=0)
    assert found.is_of_this_life
    assert found.is_reachable
    for words in ("", "old", "00aa x - - 0", own.mark.words() + " more"):
        assert Mark.parse(words) is None


def test_one_that_is_there_is_not_accused_however_often_one_looks(own: Presence) -> None:
    with another() as peer:
        assert eventually(lambda: greeted(own, peer, peer.mark))
        assert stays_unfound(own, peer.mark)


@pytest.mark.parametrize("place", [None, ELSEWHERE])
def test_one_whose_connection_ended_is_dead_also_on_another_host(
    own: Presence, place: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with another() as peer:
        mark = peer.mark
        if place is not None:
            mark = mark._replace(place=place)
            monkeypatch.setattr(Mark, "is_reachable", True)
        assert eventually(lambda: greeted(own, peer, mark))
    assert eventually(is_found(own, mark))
    assert "its connection closed; last error: " in own.gone({1: mark}, False)[1]


def test_one_that_has_taken_its_mark_back_is_not_dead(own: Presence) -> None:
    with another() as peer:
        assert eventually(lambda: greeted(own, peer, peer.mark))
    assert own.gone({}, False) == {}
    with another("22cc") as restarted:
        assert stays_unfound(own, restarted.mark)


def test_one_that_is_connected_again_was_not_dead(own: Presence) -> None:
    """Whatever ended the connection between two hosts, the process is there."""
    with another() as peer:
        assert eventually(lambda: greeted(own, peer, peer.mark))
        for guest in peer._guests:
            guest.close()

        def is_back() -> bool:
            own.gone({1: peer.mark}, False)
            peer.greet()
            return own._sights[1]._down_s is not None or len(peer._guests) > 1

        assert eventually(is_back)
        assert eventually(lambda: greeted(own, peer, peer.mark) and own._sights[1]._down_s is None)
        assert stays_unfound(own, peer.mark)


def test_silence_accuses_nobody(own: Presence) -> None:
    with listening() as (_, mark):
        assert stays_unfound(own, mark)
        assert stays_unfound(own, mark, is_agreed=True)


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n", b"11bc"], ids=["nothing", "http", "another"])
def test_another_process_at_the_address_accuses_nobody(own: Presence, says: bytes) -> None:
    """As one that took the port of a dead process of an earlier life, or a proxy."""
    with listening() as (listener, mark):
        listener.setblocking(False)
        ended = []

        def look() -> bool:
            with contextlib.suppress(BlockingIOError):
                connection, _ = listener.accept()
                connection.sendall(says)
                connection.close()
                ended.append(connection)
            assert own.gone({1: mark}, True) == {}
            return len(ended) > 5

        assert eventually(look)


def test_a_refused_connection_counts_in_this_life_and_here_only(own: Presence) -> None:
    mark = refused(own.mark)
    assert eventually(is_found(own, mark))
    earlier = mark._replace(attempt="22cc", written_s=presence._started_s() - 1)
    assert stays_unfound(own, earlier)
    assert eventually(is_found(own, earlier, is_agreed=True))


def test_a_loopback_address_of_another_host_is_left_alone(own: Presence) -> None:
    mark = refused(own.mark)._replace(place=ELSEWHERE)
    assert not mark.is_reachable
    assert stays_unfound(own, mark, is_agreed=True)
    assert own._sights == {}
    for place in (ELSEWHERE, "-"):
        assert own.mark._replace(address="10.1.2.3", place=place).is_reachable
        assert not own.mark._replace(place=place).is_of_this_life


def test_a_rank_that_cannot_listen_is_left_alone() -> None:
    with contextlib.closing(Presence("00aa", "203.0.113.1", 4)) as nowhere:  # no address of this host
        assert nowhere.mark.address == "-"
        assert not nowhere.mark.is_reachable
        nowhere.greet()


# --- in a meeting ----------------------------------------------------------------------------------------------------


def meet_beside(store: Any, mark: Mark, timeout_s: float = 30.0, sign: str = "+") -> PeerFailure | PeerTimeout:
    """Let rank 0 of 2 meet where rank 1 has left a mark; return the error."""
    dist.PrefixStore("commlib/meeting", store).set("here/1", f"{sign} {mark.words()}")
    with pytest.raises((PeerFailure, PeerTimeout)) as caught:
        Meeting(store, 0, [0, 10], timeout_s)
    return caught.value


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MOMENT_S", 0.0)
    monkeypatch.setattr(rendezvous, "LOOK_S", 0.01)


def test_a_rank_that_died_is_named_and_only_once(own: Presence) -> None:
    """Who goes on after it waits for the one that takes its place."""
    store, mark = dist.HashStore(), refused(own.mark._replace(attempt="33dd"))
    error = meet_beside(store, mark)
    assert isinstance(error, PeerFailure)
    assert error.ranks == {10}
    assert "rank 10 died during it" in str(error)
    assert isinstance(meet_beside(store, mark, timeout_s=0.5), PeerTimeout)


def test_what_a_killed_rank_of_an_earlier_life_left_accuses_nobody(own: Presence) -> None:
    mark = refused(own.mark._replace(attempt="44ee", written_s=presence._started_s() - 1))
    error = meet_beside(dist.HashStore(), mark, timeout_s=0.5)
    assert isinstance(error, PeerTimeout)


@pytest.mark.parametrize("began_before", [True, False])
def test_what_another_rank_has_found_concerns_who_was_there_then(own: Presence, began_before: bool) -> None:
    """Rank 1 is on a host that this rank cannot look at."""
    store, mark = dist.HashStore(), own.mark._replace(attempt=f"55f{began_before:d}", place=ELSEWHERE)
    meeting = dist.PrefixStore("commlib/meeting", store)
    at = meeting.add("time", 5) + (100 if began_before else 0)
    meeting.set("gone", rendezvous.encode([at, 1, mark.attempt, "refused"]).decode())
    error = meet_beside(store, mark, timeout_s=30.0 if began_before else 0.5)
    assert isinstance(error, PeerFailure if began_before else PeerTimeout)
    assert error.ranks == {10}
    other = mark._replace(attempt="66aa")  # the rank was started again
    assert isinstance(meet_beside(store, other, timeout_s=0.5), PeerTimeout)
