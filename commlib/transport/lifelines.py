"""Who is alive, who reports a failure, and who is to blame for it: one TCP connection per pair of ranks.

[Note: lifelines] A collective that breaks does not say why: a rank sees the connection of a neighbour end, who has only
ended it because its own neighbour did. So every pair of ranks has a connection of its own that carries single bytes,
and otherwise says by being open that the peer is alive: the kernel closes those of a killed process, and keeps those of
one that is stopped or busy. What a peer says before its connection ends tells why it ends. Silence accuses nobody of
having died; it does of not having come, once the timeout is over and all who came have said so.

The first rank that notices says so, before it ends its own collectives. One thread reads all lifelines of a
communicator, blocked while nothing comes. When there is news it ends the collectives that are in vain, so that every
rank knows at once, whether the rank that is gone is its neighbour or not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from commlib import locks
from commlib.weak import WeakMembers

_log = logging.getLogger("commlib")

#: How much later than the first that ended another one is to blame as well, in seconds.
TOGETHER_S = 0.1
#: How long a rank that left in good order is not blamed yet, as the word on another may be on its way, in seconds.
SETTLE_S = 0.5
#: How much longer a verdict waits for a rank that looks for the one that holds it up, in seconds.
LOOKING_S = 10.0
#: How long closing waits for the thread, in seconds.
_JOIN_S = 5.0


class Word(Enum):
    """What a rank says, one byte each; see [Note: lifelines]."""

    TIMED_OUT = b"T"  # I waited in vain for the whole timeout
    LOST = b"L"  # a collective of mine broke
    ELSEWHERE = b"P"  # another communicator of mine broke, because of a peer
    GAVE_UP = b"A"  # I end this communicator, for a reason of my own
    FAILED = b"E"  # goodbye: an exception ends my process
    LEFT = b"G"  # goodbye
    ASKS = b"?"  # say that you are there
    HERE = b"!"  # I am there
    LOOKS = b"W"  # I look whether a rank outside this group holds me up; ELSEWHERE or HERE follows


_WORDS = {word.value: word for word in Word}

#: How a peer that ended, for a reason of its own, did so.
_ENDINGS = {Word.GAVE_UP: "gave up", Word.FAILED: "failed", Word.LEFT: "left"}
KILLED = "killed"

HOW = {
    KILLED: "was killed, or its machine is gone: its connection ended without a goodbye",
    "failed": "ended with an exception",
    "gave up": "ended this model's communication, after an error of its own or in commlib.unwrap",
    "left": "left: its script is over, or it called commlib.unwrap",
}


@dataclass
class Peer:
    """What is known of a peer.

    Attributes:
        has_reported: It said that a collective of this communicator broke, so that it is not to blame.
        timed_out: That, after the whole timeout.
        is_bystander: It said that another of its communicators broke because of a peer.
        is_looking: It said that it looks for a rank that holds it up, and not yet what it found.
        ending: How it ended ("killed", "failed", "gave up", "left"); None while it has not.
        ended_s: When that was noticed, `time.monotonic()`.
        heard_s: When it last said something.
    """

    has_reported: bool = False
    timed_out: bool = False
    is_bystander: bool = False
    is_looking: bool = False
    ending: str | None = None
    ended_s: float = 0.0
    heard_s: float = 0.0

    def hear(self, word: Word) -> None:
        """Take a word."""
        self.heard_s = time.monotonic()
        self.is_looking = word is Word.LOOKS or (self.is_looking and word is Word.ASKS)
        if word in _ENDINGS:
            self.end(_ENDINGS[word])
        elif word in (Word.ASKS, Word.HERE, Word.LOOKS):
            return
        elif word is Word.ELSEWHERE:
            self.is_bystander = True
        else:
            self.has_reported = True
            self.timed_out |= word is Word.TIMED_OUT

    def end(self, ending: str) -> None:
        """Note how it ended; the first word counts."""
        self.is_looking = False
        if self.ending is None:
            self.ending, self.ended_s = ending, time.monotonic()

    @property
    def is_to_blame(self) -> bool:
        """Whether it ended for a reason of its own."""
        return self.ending is not None and not self.has_reported and not self.is_bystander


class Verdict(NamedTuple):
    """Who is to blame for a collective that broke.

    Attributes:
        timed_out: Whether ranks did not come in time; else a rank died or left.
        ranks: Those ranks, within the group; empty where they are not known.
        why: Words.
        blames: Whether these ranks are to blame, and not only met by what another one did.
    """

    timed_out: bool
    ranks: list[int]
    why: str
    blames: bool = True


_ALL_WERE_THERE = "every other rank says that it was there"


def judge(peers: Mapping[int, Peer], timed_out: bool) -> Verdict:
    """Return who is to blame, by what is known. `timed_out`: this rank waited in vain for the whole timeout."""
    culprits = [rank for rank, peer in peers.items() if peer.is_to_blame and peer.ending != "left"]
    if culprits:
        first_s = min(peers[rank].ended_s for rank in culprits)
        return _ended(peers, [rank for rank in culprits if peers[rank].ended_s <= first_s + TOGETHER_S])
    if left := [rank for rank, peer in peers.items() if peer.is_to_blame]:
        return _ended(peers, left)
    if timed_out or any(peer.timed_out for peer in peers.values()):
        absent = {rank: peer for rank, peer in peers.items() if not peer.has_reported and peer.ending is None}
        if silent := [rank for rank, peer in absent.items() if not peer.is_bystander]:
            return Verdict(True, silent, "")
        return Verdict(True, [], "those who did not come say that others hold them up" if absent else _ALL_WERE_THERE)
    if followers := [r for r, peer in peers.items() if peer.ending and peer.is_bystander and not peer.has_reported]:
        return Verdict(False, followers, "ended after a failure in another communicator of theirs", False)
    return Verdict(False, [], "no rank is known to have ended; the connection between two of them broke")


def _ended(peers: Mapping[int, Peer], ranks: list[int]) -> Verdict:
    endings = {peers[rank].ending for rank in ranks}
    return Verdict(False, ranks, "; ".join(HOW[ending] for ending in sorted(filter(None, endings))))


class Lifelines:
    """This rank's ends of its lifelines, and the thread that reads them.

    Args:
        sockets: Connected sockets, by peer; owned from here on.
        react: Called on the thread after news, and after as many seconds as it returned; None waits for news.
            It must not hold what closes the lifelines.
    """

    def __init__(self, sockets: Mapping[int, socket.socket], react: Callable[[Lifelines], float | None]) -> None:
        self.peers = {peer: Peer() for peer in sockets}
        self.said: set[Word] = set()
        self.has_news = False  # whether any peer has said anything: false all the time in most runs
        self._sockets = dict(sockets)
        self._react = react
        self._news = locks.condition("lifelines.news")
        self._speaking = locks.lock("lifelines.speaking")
        self._is_closed = False
        self._bell, self._ringer = socket.socketpair()
        for each in (*self._sockets.values(), self._bell, self._ringer):
            each.setblocking(False)
        for each in self._sockets.values():
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        self._thread = threading.Thread(target=self._run, name="commlib-lifelines", daemon=True)
        self._thread.start()
        _all.add(self)

    def say(self, word: Word) -> None:
        """Tell every peer; only once. Returns at once."""
        with self._speaking:
            if word in self.said or self._is_closed:
                return
            self.said.add(word)
            for each in self._sockets.values():
                _send(each, word)

    def ask(self) -> None:
        """Have every peer say that it is there: `Peer.heard_s` is then later than now. Returns at once."""
        with self._speaking:
            for each in () if self._is_closed else self._sockets.values():
                _send(each, Word.ASKS)

    def report(self, timed_out: bool) -> None:
        """Tell the peers that a collective broke; on other communicators, that a peer ended one of this process."""
        self.say(Word.TIMED_OUT if timed_out else Word.LOST)
        blame_elsewhere(self)

    def give_up(self) -> None:
        """Tell the peers that this rank ends the communicator, unless it has told them before why."""
        if not self.said:
            self.say(Word.GAVE_UP)

    @property
    def has_broken(self) -> bool:
        """Whether a peer has said that this communicator is of no more use."""
        return any(peer.has_reported or peer.ending == "gave up" for peer in self.peers.values())

    def lost(self) -> dict[int, Peer]:
        """Return the peers that have ended, but not in good order.

        One that left in good order has done its part of all that it took part in, though this rank may not have come
        to it yet: what it sent is still to be received. What it did not take part in breaks with its connections.
        """
        return {rank: peer for rank, peer in self.peers.items() if peer.ending not in (None, "left")}

    def bystanders(self) -> set[int]:
        """Return the ranks that have said that they met another one's failure."""
        return {rank for rank, peer in self.peers.items() if peer.has_reported or peer.is_bystander}

    def verdict(self, limit_s: float) -> Verdict:
        """Return who is to blame for a collective that broke, as soon as it is clear.

        At the latest after `limit_s`, and `LOOKING_S` more while a rank looks for the one that holds it up.
        """
        began_s = time.monotonic()
        with self._news:
            while (left_s := self._unsettled_s(began_s, limit_s)) > 0:
                self._news.wait(left_s)
        return judge(self.peers, Word.TIMED_OUT in self.said)

    def _unsettled_s(self, began_s: float, limit_s: float) -> float:
        """Return how much longer words may come that change the verdict, in seconds."""
        now_s, peers = time.monotonic(), self.peers.values()
        ends = [began_s + limit_s + LOOKING_S * any(peer.is_looking for peer in peers)]
        ends += [peer.ended_s + TOGETHER_S for peer in peers if peer.is_to_blame and peer.ending != "left"]
        if any(peer.is_to_blame for peer in peers):
            ends.append(began_s + SETTLE_S)
        late = Word.TIMED_OUT in self.said  # then a bystander that has not come is excused
        if all(peer.has_reported or peer.ending is not None or (late and peer.is_bystander) for peer in peers):
            ends.append(began_s)
        return min(ends) - now_s

    def ring(self) -> None:
        """Have the thread look at the works under way."""
        with contextlib.suppress(OSError):
            self._ringer.send(b"!")

    def close(self, goodbye: Word) -> None:
        """Say goodbye, end the thread and the connections. Harmless when called twice."""
        self.say(goodbye)
        with self._speaking:
            if self._is_closed:
                return
            self._is_closed = True
        self.ring()
        self._thread.join(_JOIN_S)
        for each in (*self._sockets.values(), self._bell, self._ringer):
            each.close()

    def _run(self) -> None:
        poll = select.poll()
        ears: dict[int, int | None] = {each.fileno(): peer for peer, each in self._sockets.items()}
        ears[self._bell.fileno()] = None
        for fd in ears:
            poll.register(fd, select.POLLIN)
        wait_s: float | None = None
        while not self._is_closed:
            for fd, _ in poll.poll(None if wait_s is None else 1000 * wait_s):
                if not self._listen(ears[fd]):
                    poll.unregister(fd)
            if self._is_closed:
                return
            with self._news:
                self._news.notify_all()
            wait_s = self._react(self)

    def _listen(self, peer: int | None) -> bool:
        """Take what a peer (None: this process) says; return whether more may come."""
        source = self._bell if peer is None else self._sockets[peer]
        try:
            heard = source.recv(64)
        except BlockingIOError:
            return True
        except OSError:
            heard = b""
        if peer is None:
            return bool(heard)
        self.has_news = True
        for byte in heard:
            word = _WORDS.get(bytes([byte]))
            if word is None:
                _log.warning("dropped the lifeline of rank %d: it said %r, which is no word", peer, bytes([byte]))
                heard = b""
                break
            self.peers[peer].hear(word)
            if word is Word.ASKS:
                _send(source, Word.HERE)
        if not heard:
            self.peers[peer].end(KILLED)
        return bool(heard)


def _send(connection: socket.socket, word: Word) -> None:
    with contextlib.suppress(OSError):
        connection.send(word.value, socket.MSG_NOSIGNAL)


_all: WeakMembers[Lifelines] = WeakMembers(locks.lock("lifelines", is_of_process=True))
os.register_at_fork(after_in_child=_all.clear)  # a child speaks for itself alone


def blame_elsewhere(told: Lifelines | None = None) -> None:
    """Tell the peers of every communicator but one that a peer ended another one: this process may end as well."""
    for lifelines in _all.alive():
        if lifelines is not told:
            lifelines.say(Word.ELSEWHERE)
