"""The rounds that the members of a view have, and the last one on which they agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from commlib.errors import CommlibError, ConfigError, TransportError


class OtherModel(TransportError):
    """New members have another model or other options."""


@dataclass
class Progress:
    """The rounds that one member has.

    Attributes:
        agreed: The last round of which it knows that all members had the result.
        complete: The last round of which it has the result, and the number of the view in which that round ran.
        is_new: Whether it has not received the state yet.
        has_initial_state: Whether it was a member when the job began, so that the job may begin with its state.
        model: A digest of its model and options.
        source: The id of the member from which it has received state in the background; -1 without one.
    """

    agreed: int = 0
    complete: tuple[int, int] = (0, 0)
    is_new: bool = True
    has_initial_state: bool = False
    model: str = ""
    source: int = -1

    def follow(self, agreement: Agreement) -> None:
        """Take an agreement: a complete round counts, or it is repeated."""
        if self.is_new:
            return
        self.agreed = max(self.agreed, agreement.agreed)
        if self.complete[0] > agreement.agreed:
            self.complete = (0, 0)

    def enter(self, agreement: Agreement) -> None:
        """Note that this member has the state."""
        self.is_new, self.agreed = False, agreement.agreed

    def as_plain(self) -> dict[str, Any]:
        """Return a plain value, to be sent to the other members."""
        return asdict(self)

    @staticmethod
    def of_plain(value: Mapping[str, Any]) -> Progress:
        """Return the progress that `as_plain` turned into `value`."""
        return Progress(**{**value, "complete": tuple(value["complete"])})


@dataclass(frozen=True)
class NewMember:
    """A member that has not had the state before this view.

    Attributes:
        rank: Its rank.
        donor: The rank whose state it receives.
        has_copy: Whether it has received state from that rank in the background.
    """

    rank: int
    donor: int
    has_copy: bool = False


@dataclass(frozen=True)
class Agreement:
    """The agreement of the members of a view.

    Attributes:
        agreed: The last round whose result all of them have; they continue with the next one.
        new: The new members.
    """

    agreed: int
    new: tuple[NewMember, ...]


def agree(members: Sequence[Progress], ids: Sequence[int], rank: int) -> Agreement:
    """Return the agreement of the members of a view, in rank order. See [Note: agreement] in `engine/session.py`.

    If all members are new, the donor is one that was there when the job began: the first of those with most rounds.

    Args:
        members: The progress that each of them has reported.
        ids: Their ids.
        rank: This member.

    Raises:
        ConfigError: This member's model or an option differs.
        OtherModel: Other new members have. They leave.
        CommlibError: A member has rounds that exclude those of the others.
    """
    new = [each for each, member in enumerate(members) if member.is_new]
    old = [each for each, member in enumerate(members) if not member.is_new]
    givers = old or [each for each in new if members[each].has_initial_state]
    if not givers:
        raise CommlibError(
            "elastic: all members that had the state of the job are gone. Start the job again from a checkpoint: all "
            "members, and the service with --fresh"
        )
    donor = givers[0] if old else max(givers, key=lambda each: (members[each].agreed, -each))
    model = members[donor].model
    if members[rank].model != model:
        raise ConfigError(
            "elastic: this member's model, or an option of commlib.wrap, differs from those of the other members"
        )
    if others := [each for each, member in enumerate(members) if member.model != model]:
        raise OtherModel(f"ranks {others} have another model or other options")
    if not old:
        return Agreement(members[donor].agreed, tuple(NewMember(each, donor) for each in new if each != donor))
    agreed = max(members[each].agreed for each in old)
    complete = {members[each].complete for each in old}
    if len(complete) == 1 and complete.pop()[0] == agreed + 1:
        agreed += 1
    for each in old:
        member = members[each]
        if member.agreed != agreed and (member.agreed, member.complete[0]) != (agreed - 1, agreed):
            raise CommlibError(f"rank {each} cannot continue after round {agreed}: {member}. This is a bug in commlib")
    of_id = {ids[each]: each for each in old}
    sources = [of_id.get(members[each].source) for each in new]
    pairs = zip(new, sources, strict=True)
    return Agreement(agreed, tuple(NewMember(r, donor) if s is None else NewMember(r, s, True) for r, s in pairs))
