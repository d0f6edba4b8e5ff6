"""Positions of the batches that members draw, without a message per batch.

[Note: positions] The batches of all epochs are numbered; a *position* is such a number. Between two agreements, the
member of rank r of W draws the positions base + r, base + W + r, and so on. All members agree on the largest `end` of
their draws at the end of each round, with the number that shows that all have its result, and when they enter a view.
It is their next base. So no two members draw the same position, and if all draw equally often, none is left out.

New members enter while the others have drawn their batches for the round. So their first draws are *reserved*
positions, directly after those of the others, and the base of all follows them.

An epoch ends with the draw whose first position, that of rank 0, lies in the next epoch. All members make the same
draw then. The positions of the other ranks in the last draw may be of the next epoch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Draw:
    """A batch that a member draws.

    Attributes:
        position: The number of the batch, counted over all epochs.
        epoch: The epoch of the draw, the same on all members.
    """

    position: int
    epoch: int


class Positions:
    """The positions that one member draws. See [Note: positions].

    Args:
        per_epoch: The number of batches of an epoch.
    """

    def __init__(self, per_epoch: int) -> None:
        self.per_epoch = per_epoch
        self._base, self._rank, self._world_size = 0, 0, 1
        self._num_drawn = 0  # since the last agreement, without reserved ones
        self._reserved: tuple[Draw, ...] = ()

    @property
    def end(self) -> int:
        """The first position after the draws that this member, and others with as many draws, have made."""
        return self._base + self._num_drawn * self._world_size

    @property
    def next(self) -> Draw:
        """The next draw."""
        return self._reserved[0] if self._reserved else self._regular(self._num_drawn)

    @property
    def last_epoch(self) -> int:
        """The epoch of the last draw since the agreement; -1 without one."""
        return self._regular(self._num_drawn - 1).epoch if self._num_drawn else -1

    def predicted(self) -> Iterator[Draw]:
        """Yield the next draws of the current epoch, as they will be if the members do not change."""
        ahead, epoch = copy.copy(self), self.next.epoch
        while ahead.next.epoch == epoch:
            yield ahead.take()

    def take(self) -> Draw:
        """Make the next draw."""
        draw = self.next
        if self._reserved:
            self._reserved = self._reserved[1:]
        else:
            self._num_drawn += 1
        return draw

    def agree(self, base: int, rank: int, world_size: int) -> None:
        """Continue at a base that all members agree on.

        Args:
            base: The largest `end` of all members.
            rank: This member's rank.
            world_size: The number of members.
        """
        self._base, self._rank, self._world_size, self._num_drawn = base, rank, world_size, 0

    def admit(self, base: int, epoch: int, rank: int, world_size: int, new: Sequence[int]) -> None:
        """Continue in a view with new members.

        Args:
            base: The largest `end` of the other members.
            epoch: The largest `last_epoch` of the other members. If it is not -1, they have drawn their batches for
                the round under way, and each new member draws one reserved position.
            rank: This member's rank.
            world_size: The number of members.
            new: The ranks of the new members.
        """
        reserved = new if epoch >= 0 else ()
        if rank in new:
            self._reserved = tuple(Draw(base + each, epoch) for each, its in enumerate(reserved) if its == rank)
        self.agree(base + len(reserved), rank, world_size)

    def restart(self, position: int) -> None:
        """Continue at a position, as the only member."""
        self._reserved = ()
        self.agree(position, 0, 1)

    def _regular(self, number: int) -> Draw:
        first = self._base + number * self._world_size
        return Draw(first + self._rank, first // self.per_epoch)
