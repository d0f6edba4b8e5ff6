"""Lifelines: the words of peers, how peers end, and which rank is to blame for a failure."""

from __future__ import annotations

import gc
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from commlib.transport import lifelines as module
from commlib.transport.lifelines import KILLED, TOGETHER_S, Lifelines, Peer, Word, judge
from tests.waiting import ENDLESS_S, LIMIT_S, eventually, in_time


class Ranks:
    """Ranks as threads of one process, each with a lifeline to every other."""

    def __init__(self, world_size: int) -> None:
        ends: list[dict[int, socket.socket]] = [{} for _ in range(world_size)]
        for low in range(world_size):
            for high in range(low + 1, world_size):
                ends[low][high], ends[high][low] = socket.socketpair()
        self.sockets = ends
        self.news = [0] * world_size
        self.lines = [Lifelines(ends[rank], self._react(rank)) for rank in range(world_size)]
        module._all.discard(*self.lines)  # they stand for processes, each with communicators of its own

    def _react(self, rank: int) -> Callable[[Lifelines], float | None]:
        def react(_: Lifelines) -> None:
            self.news[rank] += 1

        return react

    def kill(self, rank: int) -> None:
        for each in self.sockets[rank].values():
            each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for each in self.lines:
            each.close(Word.LEFT)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks(4)
    yield made
    made.close()


def test_a_killed_rank_is_named_by_all_while_nobody_else_says_anything(ranks: Ranks) -> None:
    ranks.kill(1)
    for rank in (0, 2, 3):
        verdict = in_time(lambda rank=rank: ranks.lines[rank].verdict(ENDLESS_S))
        assert (verdict.timed_out, verdict.ranks) == (False, [1])
        assert "was killed" in verdict.why


def test_a_verdict_waits_for_the_word_that_comes_later(ranks: Ranks) -> None:
    threading.Timer(0.3, ranks.kill, [1]).start()
    assert ranks.lines[0].verdict(LIMIT_S).ranks == [1]


@pytest.mark.parametrize(("word", "is_lost"), [(Word.LEFT, False), (Word.FAILED, True), (Word.GAVE_UP, True)])
def test_a_rank_that_leaves_in_good_order_is_not_lost(ranks: Ranks, word: Word, is_lost: bool) -> None:
    """The data that it has sent can still be received."""
    ranks.lines[1].close(word)
    assert eventually(lambda: ranks.lines[0].peers[1].ending is not None)
    assert list(ranks.lines[0].lost()) == ([1] if is_lost else [])


def test_those_who_report_and_end_after_another_one_are_not_blamed(ranks: Ranks) -> None:
    """Rank 3 comes very late: the others have reported, raised, and left or been killed meanwhile."""
    ranks.kill(1)
    ranks.lines[0].report(False)
    ranks.lines[0].close(Word.FAILED)
    ranks.lines[2].report(False)
    ranks.kill(2)
    assert eventually(lambda: sum(peer.ending is not None for peer in ranks.lines[3].peers.values()) == 3)
    assert ranks.lines[3].verdict(LIMIT_S).ranks == [1]
    assert ranks.lines[3].bystanders() == {0, 2}


@pytest.mark.parametrize(
    ("word", "why"),
    [(Word.LEFT, "left: its"), (Word.FAILED, "with an exception"), (Word.GAVE_UP, "ended this model's")],
)
def test_how_a_rank_ended_is_told(ranks: Ranks, word: Word, why: str) -> None:
    ranks.lines[2].close(word)
    verdict = ranks.lines[0].verdict(LIMIT_S)
    assert verdict.ranks == [2]
    assert why in verdict.why


def test_silence_accuses_nobody_of_having_died(ranks: Ranks) -> None:
    ranks.lines[0].report(False)
    assert ranks.lines[0].verdict(0.2).ranks == []


def test_after_the_timeout_those_who_have_said_nothing_did_not_come(ranks: Ranks) -> None:
    ranks.lines[0].report(True)
    ranks.lines[2].report(False)
    assert eventually(lambda: ranks.lines[0].peers[2].has_reported and ranks.lines[2].peers[0].has_reported)
    for rank in (0, 2):
        verdict = ranks.lines[rank].verdict(0.2)
        assert (verdict.timed_out, verdict.ranks) == (True, [1, 3])


def test_giving_up_is_only_said_where_nothing_was_said_before(ranks: Ranks) -> None:
    ranks.lines[0].report(False)
    ranks.lines[0].give_up()
    ranks.lines[1].give_up()
    assert eventually(lambda: ranks.lines[2].peers[1].ending == "gave up" and ranks.lines[2].peers[0].has_reported)
    assert ranks.lines[2].peers[0].ending is None


def test_a_peer_that_failed_on_another_communicator_is_excused_on_all() -> None:
    first, second = Ranks(2), Ranks(2)
    module._all.add(first.lines[0], second.lines[0])  # both of one process
    first.lines[0].report(False)
    assert eventually(lambda: second.lines[1].bystanders() == {0})
    second.kill(0)
    verdict = second.lines[1].verdict(LIMIT_S)
    assert (verdict.ranks, verdict.why) == ([0], "ended after a failure in another communicator")
    first.close()
    second.close()


def test_a_peer_that_is_asked_answers_and_one_that_is_stopped_does_not(ranks: Ranks) -> None:
    asked_s = time.monotonic()
    ranks.lines[1].say(Word.LOST)
    assert eventually(lambda: ranks.lines[0].peers[1].heard_s > asked_s)
    asked_s = time.monotonic()
    ranks.lines[0].ask()
    assert eventually(lambda: all(peer.heard_s > asked_s for peer in ranks.lines[0].peers.values()))
    assert [peer.has_reported for peer in ranks.lines[0].peers.values()] == [True, False, False]
    assert all(peer.ending is None for peer in ranks.lines[1].peers.values())


@pytest.mark.parametrize(("word", "blamed"), [(Word.ELSEWHERE, []), (Word.HERE, [1])])
def test_a_verdict_waits_for_what_a_rank_finds_that_looks_for_one_that_holds_it_up(
    ranks: Ranks, word: Word, blamed: list[int]
) -> None:
    for reporting in (0, 2, 3):
        ranks.lines[reporting].report(True)
    ranks.lines[1].say(Word.LOOKS)
    assert eventually(lambda: ranks.lines[0].peers[1].is_looking and len(ranks.lines[0].bystanders()) == 2)
    threading.Timer(0.5, ranks.lines[1].say, [word]).start()
    verdict = ranks.lines[0].verdict(0.1)
    assert (verdict.timed_out, verdict.ranks) == (True, blamed)
    assert not ranks.lines[0].peers[1].is_looking


def test_what_is_no_word_ends_the_lifeline_with_a_log_line(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "commlib"):
        ranks.sockets[2][0].send(b"%")
        assert eventually(lambda: ranks.lines[0].peers[2].ending == KILLED)
    assert "dropped the lifeline of rank 2" in caplog.text


def test_an_idle_communicator_costs_nothing(ranks: Ranks) -> None:
    time.sleep(0.3)  # in which there could be news
    assert ranks.news == [0] * 4


def test_the_thread_looks_again_when_it_is_asked_to() -> None:
    looks: list[int] = []
    left, right = socket.socketpair()

    def react(_: Lifelines) -> float | None:
        looks.append(1)
        return 0.05 if len(looks) < 3 else None

    lines = Lifelines({1: left}, react)
    lines.ring()
    assert eventually(lambda: len(looks) == 3)
    time.sleep(0.2)  # in which it could look once more
    assert len(looks) == 3
    lines.close(Word.LEFT)
    right.close()


def test_nothing_is_left_by_close() -> None:
    before = set(threading.enumerate())
    ranks = Ranks(3)
    assert len(set(threading.enumerate()) - before) == 3
    ranks.close()
    ranks.close()
    assert eventually(lambda: set(threading.enumerate()) <= before)
    assert all(each.fileno() == -1 for ends in ranks.sockets for each in ends.values())
    del ranks
    gc.collect()


# --- the verdict alone -----------------------------------------------------------------------------------------------


def peer(*words: Word, killed: bool = False, at_s: float = 0.0) -> Peer:
    made = Peer()
    for word in words:
        made.hear(word)
    if killed:
        made.end(KILLED)
    made.ended_s = at_s
    return made


T, L, P, A, E, G = Word.TIMED_OUT, Word.LOST, Word.ELSEWHERE, Word.GAVE_UP, Word.FAILED, Word.LEFT


@pytest.mark.parametrize(
    ("peers", "timed_out", "expected"),
    [
        ([peer(), peer(killed=True)], False, (False, [1])),
        ([peer(killed=True), peer(killed=True, at_s=TOGETHER_S / 2)], False, (False, [0, 1])),  # one machine of several
        ([peer(killed=True), peer(killed=True, at_s=5.0)], False, (False, [0])),  # a launcher ends the rest
        ([peer(E, at_s=1.0), peer(killed=True, at_s=5.0)], False, (False, [0])),
        (
            [peer(G, at_s=1.0), peer(killed=True, at_s=5.0)],
            False,
            (False, [1]),
        ),  # leaving in order hurts nobody at first
        ([peer(G, at_s=1.0), peer(L), peer(G, at_s=9.0)], False, (False, [0, 2])),
        ([peer(L, E, at_s=1.0), peer(killed=True, at_s=5.0)], False, (False, [1])),
        ([peer(P, killed=True, at_s=1.0), peer(killed=True, at_s=1.0)], False, (False, [1])),
        ([peer(P, killed=True), peer()], False, (False, [0])),
        ([peer(A), peer(L), peer()], False, (False, [0])),
        ([peer(A, E), peer(L), peer()], True, (False, [0])),
        ([peer(), peer(L), peer(T)], False, (True, [0])),
        ([peer(), peer(L), peer(L)], True, (True, [0])),
        ([peer(), peer(T, E), peer(P)], False, (True, [0])),
        ([peer(T), peer(P)], False, (True, [])),
        ([peer(L), peer(T)], True, (True, [])),
        ([peer(), peer(L)], False, (False, [])),
    ],
)
def test_who_is_to_blame(peers: list[Peer], timed_out: bool, expected: tuple[bool, list[int]]) -> None:
    verdict = judge(dict(enumerate(peers)), timed_out)
    assert (verdict.timed_out, verdict.ranks) == expected
    assert verdict.why or verdict.timed_out
