"""Failure detection over one TCP connection per pair of ranks, and the attribution of failures to ranks.

[Note: lifelines] The error of a broken collective does not name the cause. A rank sees the connection to a neighbour
close, but the neighbour may have closed it only because its own neighbour failed. So every pair of ranks has an extra
connection, a *lifeline*, that carries single-byte words. An open lifeline means that the peer is alive: the kernel
closes the connections of a killed process, and keeps those of a stopped or busy one. The word that a peer sends before
its lifeline closes gives the reason. A silent peer is never reported as dead. It is reported as late once the timeout
has passed and all ranks that arrived have reported this.

The first rank that notices a failure reports it before it ends its own collectives. One thread per communicator reads
all lifelines and blocks while no data arrives. On news it ends the collectives that can no longer complete, so every
rank learns of the failure at once, whether or not the failed rank is its neighbour.
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

#: Ranks that end within this time after the first one are blamed as well, in seconds.
TOGETHER_S = 0.1
#: A rank that left cleanly is not blamed for this long, as a report about another rank may follow, in seconds.
SETTLE_S = 0.5
#: How much longer a verdict waits for a rank that is searching for the rank that blocks it, in seconds.
LOOKING_S = 10.0
#: How long `close` waits for the thread, in seconds.
_JOIN_S = 5.0


class Word(Enum):
    """The messages that ranks send, one byte each; see [Note: lifelines]."""

    TIMED_OUT = b"T"  # a collective of the sender waited for the whole timeout
    LOST = b"L"  # a collective of the sender broke
    ELSEWHERE = b"P"  # another communicator of the sender broke because of a peer
    GAVE_UP = b"A"  # the sender ends this communicator for a reason of its own
    FAILED = b"E"  # goodbye: an exception ends the sender's process
    LEFT = b"G"  # goodbye
    ASKS = b"?"  # request for HERE
    HERE = b"!"  # reply to ASKS
    LOOKS = b"W"  # the sender checks whether a rank outside this group blocks it; ELSEWHERE or HERE follows


_WORDS = {word.value: word for word in Word}

#: The endings that a peer announces.
_ENDINGS = {Word.GAVE_UP: "gave up", Word.FAILED: "failed", Word.LEFT: "left"}
KILLED = "killed"

HOW = {
    KILLED: "was killed, or its host is down: its connection closed without a goodbye",
    "failed": "ended with an exception",
    "gave up": "ended this model's communication, after an error of its own or in commlib.unwrap",
    "left": "left: its script finished, or it called commlib.unwrap",
}


@dataclass
class Peer:
    """The known state of a peer.

    Attributes:
        has_reported: The peer reported a broken collective of this communicator, so it is not to blame.
        timed_out: The peer reported this after the whole timeout.
        is_bystander: The peer reported that another of its communicators broke because of a peer.
        is_looking: The peer is searching for the rank that blocks it and has not reported the result yet.
        ending: How the peer ended ("killed", "failed", "gave up", "left"); None while it is alive.
        ended_s: When this rank noticed the end, `time.monotonic()`.
        heard_s: When the last word arrived, `time.monotonic()`.
    """

    has_reported: bool = False
    timed_out: bool = False
    is_bystander: bool = False
    is_looking: bool = False
    ending: str | None = None
    ended_s: float = 0.0
    heard_s: float = 0.0

    def hear(self, word: Word) -> None:
        """Process a word."""
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
        """Record how the peer ended; the first call counts."""
        self.is_looking = False
        if self.ending is None:
            self.ending, self.ended_s = ending, time.monotonic()

    @property
    def is_to_blame(self) -> bool:
        """Whether the peer ended for a reason of its own."""
        return self.ending is not None and not self.has_reported and not self.is_bystander


class Verdict(NamedTuple):
    """The ranks to blame for a broken collective.

    Attributes:
        timed_out: Whether ranks did not arrive in time; otherwise a rank died or left.
        ranks: These ranks, within the group; empty if unknown.
        why: The reason, for the error message.
        blames: Whether these ranks are the cause. False if they ended because of another rank's failure.
    """

    timed_out: bool
    ranks: list[int]
    why: str
    blames: bool = True


_ALL_WERE_THERE = "every other rank reports that it was there"


def judge(peers: Mapping[int, Peer], timed_out: bool) -> Verdict:
    """Return the ranks to blame, given the state of `peers`. `timed_out`: this rank waited for the whole timeout."""
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
        return Verdict(True, [], "the absent ranks report that other ranks block them" if absent else _ALL_WERE_THERE)
    if followers := [r for r, peer in peers.items() if peer.ending and peer.is_bystander and not peer.has_reported]:
        return Verdict(False, followers, "ended after a failure in another communicator", False)
    return Verdict(False, [], "no rank is known to have ended; a connection between two ranks broke")


def _ended(peers: Mapping[int, Peer], ranks: list[int]) -> Verdict:
    endings = {peers[rank].ending for rank in ranks}
    return Verdict(False, ranks, "; ".join(HOW[ending] for ending in sorted(filter(None, endings))))


class Lifelines:
    """This rank's lifelines and the thread that reads them.

    Args:
        sockets: Connected sockets, by peer. This object takes ownership.
        react: Called on the thread after news. Returns the seconds until its next call, or None to wait for news. It
            must not hold a reference to the object that closes the lifelines.
    """

    def __init__(self, sockets: Mapping[int, socket.socket], react: Callable[[Lifelines], float | None]) -> None:
        self.peers = {peer: Peer() for peer in sockets}
        self.said: set[Word] = set()
        self.has_news = False  # whether any peer has sent a word or ended; stays False in most runs
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
        """Send a word to every peer, at most once. Does not block."""
        with self._speaking:
            if word in self.said or self._is_closed:
                return
            self.said.add(word)
            for each in self._sockets.values():
                _send(each, word)

    def ask(self) -> None:
        """Request a sign of life from every peer, which updates `Peer.heard_s`. Does not block."""
        with self._speaking:
            for each in () if self._is_closed else self._sockets.values():
                _send(each, Word.ASKS)

    def report(self, timed_out: bool) -> None:
        """Report a broken collective to the peers, and ELSEWHERE to the peers of all other communicators."""
        self.say(Word.TIMED_OUT if timed_out else Word.LOST)
        blame_elsewhere(self)

    def give_up(self) -> None:
        """Notify the peers that this rank ends the communicator, unless it has already given a reason."""
        if not self.said:
            self.say(Word.GAVE_UP)

    @property
    def has_broken(self) -> bool:
        """Whether a peer has reported that this communicator is unusable."""
        return any(peer.has_reported or peer.ending == "gave up" for peer in self.peers.values())

    def lost(self) -> dict[int, Peer]:
        """Return the peers that have ended, except those that left cleanly.

        A peer that left cleanly has completed all collectives that it took part in. This rank may be behind and can
        still receive the data. Collectives that the peer did not join fail when its connections close.
        """
        return {rank: peer for rank, peer in self.peers.items() if peer.ending not in (None, "left")}

    def bystanders(self) -> set[int]:
        """Return the ranks that have reported a failure of another rank."""
        return {rank for rank, peer in self.peers.items() if peer.has_reported or peer.is_bystander}

    def verdict(self, limit_s: float) -> Verdict:
        """Return the ranks to blame for a broken collective, as soon as they are determined.

        Waits at most `limit_s`, plus `LOOKING_S` while a rank is searching for the rank that blocks it.
        """
        began_s = time.monotonic()
        with self._news:
            while (left_s := self._unsettled_s(began_s, limit_s)) > 0:
                self._news.wait(left_s)
        return judge(self.peers, Word.TIMED_OUT in self.said)

    def _unsettled_s(self, began_s: float, limit_s: float) -> float:
        """Return how much longer a word may arrive that changes the verdict, in seconds."""
        now_s, peers = time.monotonic(), self.peers.values()
        ends = [began_s + limit_s + LOOKING_S * any(peer.is_looking for peer in peers)]
        ends += [peer.ended_s + TOGETHER_S for peer in peers if peer.is_to_blame and peer.ending != "left"]
        if any(peer.is_to_blame for peer in peers):
            ends.append(began_s + SETTLE_S)
        late = Word.TIMED_OUT in self.said  # then a bystander that has not arrived is excused
        if all(peer.has_reported or peer.ending is not None or (late and peer.is_bystander) for peer in peers):
            ends.append(began_s)
        return min(ends) - now_s

    def ring(self) -> None:
        """Wake the thread, so that it checks the pending works."""
        with contextlib.suppress(OSError):
            self._ringer.send(b"!")

    def close(self, goodbye: Word) -> None:
        """Send the goodbye and end the thread and the connections. Idempotent."""
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
        """Process the data from a peer (None: this process); return whether more may arrive."""
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
                _log.warning("dropped the lifeline of rank %d: it sent %r, an unknown word", peer, bytes([byte]))
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
os.register_at_fork(after_in_child=_all.clear)  # a child must not send words in its parent's name


def blame_elsewhere(told: Lifelines | None = None) -> None:
    """Send ELSEWHERE to the peers of every communicator except `told`: this process may end because of a peer."""
    for lifelines in _all.alive():
        if lifelines is not told:
            lifelines.say(Word.ELSEWHERE)
