"""Detects when all ranks have reached a round, without blocking.

A rank that reaches round k notifies every other rank and continues. The collectives of the round are issued in the
background when the last rank has reached it. The collective timeout therefore does not apply to a rank that is slow,
evaluates or saves a model. When a rank leaves, the rounds end without an error. When a rank dies, the end of the next
step raises an error.

[Note: loaded weights] When users load other weights, one rank may reach a round before loading, and another rank after
it. The result of that round would restore the old weights. Each vote therefore reports how often weights were loaded.
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

#: Seconds that a failed collective waits for peers to report which rank left or died.
_VERDICT_S = 3.0


class Votes:
    """Tracks the rounds that the ranks have reached. Construction is collective.

    Args:
        transport: Connects the ranks.

    Attributes:
        are_mixed: Whether some ranks reached the last launched round before weights were loaded, and others after it.
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
        """Bytes sent; always 0, because a vote has no payload."""
        return self._mailbox.bytes_sent

    def cast(self, number: int, num_loads: int, launch: Callable[[], None]) -> None:
        """Vote for a round that this rank has reached.

        Args:
            number: Number of the round: 1, 2, ...
            num_loads: How often the user has loaded weights so far.
            launch: Called once all ranks have reached the round, from this or another thread.
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
        """Return whether a rank has left, which ends the rounds.

        Raises:
            PeerFailure: A rank died, or failed.
        """
        if not self._has_ended:
            self._mailbox.check()
            gone = sorted(set(range(len(self._came_to))) - {self._rank, *self._mailbox.present()})
            self._has_ended = bool(gone)
            if gone:
                _log.info("rank %d: ranks %s have left; averaging ends, training continues", self._rank, gone)
        return self._has_ended

    def explains_soon(self) -> bool:
        """Return whether peers may still report why a collective failed. Called at the end of every step."""
        self._failed_s = self._failed_s or time.monotonic()
        return time.monotonic() - self._failed_s < _VERDICT_S

    def close(self) -> None:
        """Notify the peers that this rank leaves. Idempotent."""
        self._mailbox.close()
