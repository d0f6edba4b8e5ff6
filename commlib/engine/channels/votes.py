"""Whether all ranks have come to a round, without waiting for them.

A rank that comes to round k tells every other one so, and goes on. The collectives of the round are issued, in the
background, when the last rank has come: so the ordinary timeout applies to them, and none to a rank that is slow,
evaluates or saves. A rank that has left ends the rounds quietly; one that died is an error at the next step's end.

[Note: loaded weights] Where users load other weights, one rank may have come to a round before that, and another comes
to it afterwards: its result would bring the old weights back. So each vote says how often weights were loaded before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from commlib import locks
from commlib.transport.base import Transport
from commlib.transport.mailbox import Mailbox, Message

_log = logging.getLogger("commlib")

_VOTE = 1

#: How long a failed collective waits for the word of the peers on who left or died, in seconds.
_VERDICT_S = 3.0


class Votes:
    """The rounds that the ranks have come to. Collective to make.

    Args:
        transport: The ranks, and how they find each other.

    Attributes:
        are_mixed: Whether the last round that was launched is of weights some of which were loaded since, on any rank.
    """

    def __init__(self, transport: Transport) -> None:
        self._rank = transport.rank
        self._lock = locks.lock("votes")
        self._came_to = [0] * transport.world_size
        self._num_loads = [0] * transport.world_size  # before each rank's latest vote
        self.are_mixed = False
        self._launch: Callable[[], None] | None = None
        self._failed_s: float | None = None
        self._has_ended = False
        self._mailbox = Mailbox(transport, self._answer)

    @property
    def bytes_sent(self) -> float:
        """Bytes sent, which are none: a vote has no payload."""
        return self._mailbox.bytes_sent

    def cast(self, number: int, num_loads: int, launch: Callable[[], None]) -> None:
        """Come to a round.

        Args:
            number: The round's: 1, 2, ...
            num_loads: How often the user has loaded weights so far.
            launch: Called once all ranks have come, from this or another thread.
        """
        with self._lock:
            self._launch = launch
        self._came(self._rank, number, num_loads)
        for peer in self._mailbox.present():
            self._mailbox.ask(peer, Message(_VOTE, number, num_terms=num_loads), lambda _: None)

    def _answer(self, peer: int, message: Message, reply: Callable[[Message], None]) -> None:
        reply(Message(_VOTE))
        self._came(peer, message.number, message.num_terms)

    def _came(self, rank: int, number: int, num_loads: int) -> None:
        with self._lock:
            self._came_to[rank], self._num_loads[rank] = number, num_loads
            if self._launch is None or min(self._came_to) < self._came_to[self._rank]:
                return
            launch, self._launch = self._launch, None
            self.are_mixed = len(set(self._num_loads)) > 1
        launch()

    def have_ended(self) -> bool:
        """Return whether a rank has left, so that there are no rounds any more.

        Raises:
            PeerFailure: A rank died, or failed.
        """
        if not self._has_ended:
            self._mailbox.check()
            gone = sorted(set(range(len(self._came_to))) - {self._rank, *self._mailbox.present()})
            self._has_ended = bool(gone)
            if gone:
                _log.info("rank %d: ranks %s have left; averaging ends, training goes on", self._rank, gone)
        return self._has_ended

    def explains_soon(self) -> bool:
        """Return whether the peers' word on a collective that failed may still come. Asked at every step's end."""
        self._failed_s = self._failed_s or time.monotonic()
        return time.monotonic() - self._failed_s < _VERDICT_S

    def close(self) -> None:
        """Say goodbye. Harmless when called twice."""
        self._mailbox.close()
