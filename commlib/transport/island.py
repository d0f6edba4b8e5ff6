"""Lifelines between the ranks that hold the shards of one model replica, and reports of their failures to other ranks.

[Note: islands] The ranks of an island ([Note: replicas of shards]) wait for each other in collectives of FSDP2 or
tensor parallelism, whose errors and timeouts commlib does not control. If one of them has exited or is stopped, the
others miss the collectives of their own groups and would be blamed. Each rank therefore also has lifelines to the other
ranks of its island:

    an island rank has exited     log it, send ELSEWHERE to the group, end the exchanges in progress
    an island rank: ELSEWHERE     a failure in its group: log it, send ELSEWHERE to the group
    a failure in the group        send ELSEWHERE to the island; log it if no exchange of this rank is in progress
    a peer TIMED_OUT              send LOOKS to the group, whose verdict then waits, and ASKS to the island. If an
                                  island rank does not answer, it is stopped or its host is down: log it and send
                                  ELSEWHERE to the group, else HERE

commlib never ends a collective of another library.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

from commlib.errors import PeerFailure, PeerTimeout, TransportError
from commlib.transport.base import EndedError
from commlib.transport.lifelines import HOW, Lifelines, Peer, Word, blame_elsewhere
from commlib.transport.rendezvous import all_said, meet

_log = logging.getLogger("commlib")

#: How long an island rank may take to answer ASKS, in seconds.
_ANSWER_S = 3.0
#: The polling interval for these answers, in seconds.
_LOOK_S = 0.05

_MEANWHILE = (
    "Its next exchange raises or times out; a collective of FSDP2 or tensor parallelism in which it waits may last as "
    "long as the timeout of its process group"
)


class Island:
    """This rank's lifelines to the other ranks of its island; see [Note: islands].

    Args:
        sockets: Connected sockets, by a rank's index in `ranks`. This object takes ownership.
        rank: This rank, in the default group.
        ranks: The ranks of the island, in the default group.
        abort: Ends the exchanges with the group. Called on the thread of these lifelines.
    """

    def __init__(
        self, sockets: Mapping[int, socket.socket], rank: int, ranks: Sequence[int], abort: Callable[[], None]
    ) -> None:
        self.failure: TransportError | None = None  # the error for a lost island rank
        self._rank, self._ranks, self._abort = rank, ranks, abort
        self._logged: set[str] = set()
        self._asked_s: float | None = None
        self._lifelines = Lifelines(sockets, self._react)

    def _react(self, mates: Lifelines) -> None:
        """React to news from the island, on the thread of its lifelines."""
        for place, peer in mates.peers.items():
            if peer.ending not in (None, "left"):
                self._lose(self._ranks[place], peer)
            elif peer.is_bystander or peer.has_reported:
                self._pass_on(f"{_mate(self._ranks[place])}, is affected by another rank's failure; see its error")
                blame_elsewhere(mates)

    def _lose(self, rank: int, peer: Peer) -> None:
        how = HOW[peer.ending or ""] if peer.is_to_blame else "ended after another rank's failure; see its error"
        words = f"{_mate(rank)}, {how}"
        self.failure = self.failure or PeerFailure(f"rank {self._rank}: {words}", [rank] if peer.is_to_blame else [])
        (self._log if peer.is_to_blame else self._pass_on)(words)
        blame_elsewhere(self._lifelines)
        self._abort()

    def hear(self, group: Lifelines, is_waiting: bool) -> float | None:
        """React to news from the group, on the thread of its lifelines; return the seconds until the next call.

        Args:
            group: The group's lifelines.
            is_waiting: Whether an exchange of this rank is in progress, which will raise.
        """
        if not group.lost() and not group.bystanders():
            return None
        self._lifelines.say(Word.ELSEWHERE)
        if not is_waiting:
            self._pass_on("a rank of this rank's group has exited or failed; its own error names the cause")
        return self._look(group) if any(peer.timed_out for peer in group.peers.values()) else None

    def _look(self, group: Lifelines) -> float | None:
        """Check for stopped island ranks, for which this rank may be waiting while its group waits for it."""
        if self._asked_s is None:
            self._asked_s = time.monotonic()
            group.say(Word.LOOKS)
            self._lifelines.ask()
        mates = self._lifelines.peers.items()
        silent = [place for place, peer in mates if peer.ending is None and peer.heard_s < self._asked_s]
        if silent and time.monotonic() < self._asked_s + _ANSWER_S:
            return _LOOK_S
        for place in silent:
            how = f"does not answer within {_ANSWER_S:g} s: it is stopped, or its host is down"
            self._log(f"{_mate(self._ranks[place])}, {how}")
        group.say(Word.ELSEWHERE if silent else Word.HERE)
        return None

    def check(self) -> None:
        """Raise `EndedError` if an island rank was lost."""
        if self.failure is not None:
            raise EndedError(str(self.failure))

    def close(self, goodbye: Word) -> bool:
        """Send a goodbye; return whether a failure in the island is known, which excuses this rank."""
        self._lifelines.close(goodbye)
        return bool(self._lifelines.lost() or self._lifelines.bystanders())

    def _pass_on(self, words: str) -> None:
        """Log a failure that other ranks report, unless one was logged before: it arrives repeatedly."""
        if not self._logged:
            self._log(words)

    def _log(self, words: str) -> None:
        """Log a failure once."""
        if words not in self._logged:
            self._logged.add(words)
            _log.error("rank %d: %s. %s", self._rank, words, _MEANWHILE)


def _mate(rank: int) -> str:
    return f"rank {rank}, which holds other shards of this rank's model"


def join_island(
    store: dist.Store, rank: int, ranks: Sequence[int], timeout_s: float, abort: Callable[[], None]
) -> Island:
    """Connect the ranks of an island. Collective over them.

    Args:
        store: The default group's store.
        rank: See `Island`.
        ranks: See `Island`.
        timeout_s: How long to wait for the other ranks.
        abort: See `Island`.

    Raises:
        PeerTimeout: Ranks did not arrive.
        PeerFailure: Ranks died.
        TransportError: The ranks cannot be connected.
    """
    name = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]
    place, store = list(ranks).index(rank), dist.PrefixStore(f"commlib/island/{name}", store)
    _, part, made, accepted = meet(store, place, ranks, timeout_s, Word.LOST.value)
    used = {mate: (made if place < mate else accepted)[mate] for mate in made}
    island = Island(used, rank, ranks, abort)
    try:  # a connection that closes before all ranks have connected means that its rank died
        all_said(dist.PrefixStore("connected", part), place, ranks, "", timeout_s, island.check)
    except (TimeoutError, EndedError) as error:
        island.close(Word.GAVE_UP)
        late = PeerTimeout(f"rank {rank}: connecting the ranks of an island failed: {error}")
        raise island.failure or late from error
    finally:
        for each in {*made.values(), *accepted.values()}.difference(used.values()):
            each.close()
    return island
