"""Works that do not end are abandoned; the state of the peers determines when works are ended."""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commlib.transport import backends, lifelines
from commlib.transport.backends import Connection, Connections, TorchWork
from commlib.transport.base import EndedError, Exchange
from commlib.transport.lifelines import KILLED, Peer, Word
from commlib.transport.point_to_point import GlooExchanges
from tests.waiting import LIMIT_S, Clock


class Backend:
    """A Gloo backend that knows its name only."""

    def name(self) -> str:
        return "gloo"


class Work:
    """As torch's: `wait` with a limit raises when that is over."""

    def __init__(self) -> None:
        self.future: Future[None] = Future()

    def wait(self, limit: timedelta | None = None) -> None:
        try:
            self.future.result(None if limit is None else limit.total_seconds())
        except TimeoutError:
            raise RuntimeError("Operation timed out!") from None

    def is_completed(self) -> bool:
        return self.future.done()

    def get_future(self) -> Future[None]:
        return self.future


class Peers:
    """What `Connections.react` asks of lifelines."""

    def __init__(self, **peers: Peer) -> None:
        self.peers = {int(name[1:]): peer for name, peer in peers.items()}

    @property
    def has_broken(self) -> bool:
        return any(peer.has_reported for peer in self.peers.values())

    def lost(self) -> dict[int, Peer]:
        return {rank: peer for rank, peer in self.peers.items() if peer.ending not in (None, "left")}


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> Connections:
    made = Connections()
    made.by_group["all"] = Connection(range(3))
    made.by_group["all"].backend = Backend()
    monkeypatch.setattr(Connection, "abort", lambda self: None)
    return made


def begin(connections: Connections, *partners: int) -> tuple[Work, TorchWork]:
    work = Work()
    return work, TorchWork(work, connections.by_group["all"], partners)


def test_a_long_wait_ends_with_the_data(connections: Connections) -> None:
    work, made = begin(connections, 1)
    threading.Timer(3 * backends._SLICE.total_seconds(), work.future.set_result, [None]).start()
    made.wait()
    assert not connections.by_group["all"].pending


def test_a_work_raises_its_own_error(connections: Connections) -> None:
    work, made = begin(connections, 1)
    work.future.set_exception(RuntimeError("closed"))
    with pytest.raises(RuntimeError, match="closed"):
        made.wait()


def test_an_abandoned_work_ends_its_wait_and_calls_back_once(connections: Connections) -> None:
    work, made = begin(connections, 1)
    calls: list[int] = []
    made.add_done_callback(lambda: calls.append(1))
    threading.Timer(0.05, made.abandon).start()
    with pytest.raises(EndedError):
        made.wait()
    assert calls == [1]
    assert made.is_stuck()
    made.add_done_callback(lambda: calls.append(2))
    work.future.set_result(None)
    assert calls == [1, 2]
    assert not made.is_stuck()


def test_a_failed_work_does_not_hold_the_backends(connections: Connections) -> None:
    """Its error, and so its frames, may be kept for long; a second wait raises the same error."""
    work, made = begin(connections, 1)
    work.future.set_exception(RuntimeError("closed"))
    with pytest.raises(RuntimeError, match="closed"):
        made.wait()
    assert made._work is not work
    with pytest.raises(RuntimeError, match="closed"):
        made.wait()
    assert made.is_under_way() is False
    calls: list[int] = []
    made.add_done_callback(lambda: calls.append(1))
    assert calls == [1]


def test_the_backend_of_a_stuck_work_is_destroyed_once_it_has_ended(
    connections: Connections, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "_stuck", collections.deque())
    work, _ = begin(connections, 1)
    backend = weakref.ref(connections.by_group["all"].backend)
    connections.by_group["all"].end()
    assert backend() is not None
    Connection(range(3)).end()
    assert backend() is not None
    work.future.set_result(None)
    Connection(range(3)).end()
    assert backend() is None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of `backends` and `lifelines`."""
    made = Clock()
    monkeypatch.setattr(backends, "time", made)
    monkeypatch.setattr(lifelines, "time", made)
    return made


def known(*words: Word, killed_before_s: float | None = None) -> Peer:
    peer = Peer()
    for word in words:
        peer.hear(word)
    if killed_before_s is not None:
        peer.end(KILLED)
        peer.ended_s -= killed_before_s
    return peer


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("peer", "partners", "is_ended"),
    [
        (lambda: known(), (1,), False),
        (lambda: known(Word.LOST), (2,), True),
        (lambda: known(killed_before_s=9.0), (1,), True),
        (lambda: known(killed_before_s=0.0), (1,), False),  # its last messages may be on their way
        (lambda: known(killed_before_s=9.0), (2,), False),
        (lambda: known(Word.LEFT), (1,), False),
    ],
)
def test_works_are_ended_when_they_are_in_vain(
    connections: Connections, peer: Callable[[], Peer], partners: tuple[int, ...], is_ended: bool
) -> None:
    begin(connections, *partners)
    peers: Any = Peers(r1=peer(), r2=known())
    again_s = connections.react(peers)
    assert (connections.aborted_s is not None) == is_ended
    is_due_later = is_ended or (peers.peers[1].ending == KILLED and 1 in partners)
    assert (again_s is not None) == is_due_later


def test_works_that_do_not_end_with_their_connections_are_abandoned(connections: Connections, clock: Clock) -> None:
    _, stuck = begin(connections, 1)
    peers: Any = Peers(r1=known(Word.LOST))
    again_s = connections.react(peers)
    assert again_s is not None
    clock.sleep(again_s - 0.01)
    assert connections.react(peers) == pytest.approx(0.01)
    assert not stuck.is_abandoned
    clock.sleep(0.02)
    assert connections.react(peers) is None
    assert stuck.is_abandoned
    with pytest.raises(EndedError):
        stuck.wait()


def test_receives_that_were_posted_before_a_send_raised_are_waited_for() -> None:
    """A work that nobody waits for would keep Gloo writing into memory that is used for something else."""

    class Posted:
        def __init__(self) -> None:
            self.was_waited_for = threading.Event()

        def wait(self, limit: timedelta) -> None:
            self.was_waited_for.set()

    class Sendless:
        def __init__(self) -> None:
            self.posted = Posted()
            self.options = SimpleNamespace(_timeout=timedelta(seconds=5))

        def recv(self, *_: Any) -> Posted:
            return self.posted

        def send(self, *_: Any) -> Posted:
            raise RuntimeError("closed")

    backend = Sendless()
    exchanges = GlooExchanges(backend)
    with pytest.raises(RuntimeError, match="closed"):
        exchanges.issue(Exchange([(1, torch.ones(1))], [(1, torch.ones(1))], size=2))
    assert backend.posted.was_waited_for.wait(LIMIT_S)
    exchanges.end(5.0)
