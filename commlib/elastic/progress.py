"""The rounds that the members of a view have, and the last one on which they agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from commlib.errors import CommlibError


@dataclass
class Progress:
    """The rounds that one member has.

    Attributes:
        agreed: The last round of which it knows that all members had the result.
        complete: The last round of which it has the result, and the number of the view in which that round ran.
        is_new: Whether it has not received the others' state yet.
        model: A digest of its model and options.
    """

    agreed: int = 0
    complete: tuple[int, int] = (0, 0)
    is_new: bool = True
    model: str = ""

    def follow(self, agreement: Agreement) -> None:
        """Take an agreement: a complete round counts, or it is repeated."""
        if self.is_new:
            return
        self.agreed = max(self.agreed, agreement.agreed)
        if self.complete[0] > agreement.agreed:
            self.complete = (0, 0)

    def enter(self, agreement: Agreement) -> None:
        """Note that this member has the others' state."""
        self.is_new, self.agreed = False, agreement.agreed

    def said(self) -> dict[str, Any]:
        """Return a plain value for the other members."""
        return asdict(self)

    @staticmethod
    def told(value: Mapping[str, Any]) -> Progress:
        """Return the progress that `said` turned into `value`."""
        return Progress(value["agreed"], tuple(value["complete"]), value["is_new"], value["model"])


@dataclass(frozen=True)
class Agreement:
    """What the members of a view agree on.

    Attributes:
        agreed: The last round whose result all of them have; they continue with the next one.
        donor: The rank whose state the new members receive.
        new: The ranks of the new members.
    """

    agreed: int
    donor: int
    new: tuple[int, ...]


def agree(members: Sequence[Progress]) -> Agreement:
    """Return the agreement of the members of a view, in rank order. See [Note: agreement] in `engine/session.py`.

    If all members are new, the one with the most rounds gives its state; of several, the first.

    Raises:
        CommlibError: The members have models or options that differ, or rounds that exclude each other.
    """
    models = {member.model for member in members}
    if len(models) > 1:
        counts = {model: sum(member.model == model for member in members) for model in sorted(models)}
        raise CommlibError(f"the members have different models or options: {counts}")
    new = [rank for rank, member in enumerate(members) if member.is_new]
    old = [rank for rank, member in enumerate(members) if not member.is_new]
    if not old:
        donor = max(new, key=lambda rank: (members[rank].agreed, -rank))
        return Agreement(members[donor].agreed, donor, tuple(rank for rank in new if rank != donor))
    agreed = max(members[rank].agreed for rank in old)
    complete = {members[rank].complete for rank in old}
    if len(complete) == 1 and complete.pop()[0] == agreed + 1:
        agreed += 1
    for rank in old:
        if members[rank].agreed != agreed and not (
            members[rank].agreed == agreed - 1 and members[rank].complete[0] == agreed
        ):
            raise CommlibError(f"rank {rank} cannot continue after round {agreed}: {members[rank]}")
    return Agreement(agreed, old[0], tuple(new))
