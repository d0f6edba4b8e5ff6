"""The service's decisions: who is in the newest view. No sockets and no clock: events in, messages out.

[Note: registry] A connection is in one of these states:

    standby     joined with `standby`, and the view has enough members
    joining     receives the state of the view from the member that is its donor
    ready       in step with the view; enters the next one
    member      in the newest view

A view changes when a member's connection ends, is silent or leaves, when pairs of members cannot reach each other, and
when a joining member is ready. A change that removes members happens at once; one that adds members waits until all
members of the newest view have connected to each other. Every view is in the journal before any member hears of it.

The first view. Without a journal the service does not know whether an earlier run of the job still trains. Unless it
was told that the job is `fresh`, it therefore waits for members that claim a view, and continues the newest claimed one
when more than half of its members have come. New members wait meanwhile.

After a restart the members of the journalled view have `grace_s` to return; those that do not are removed. A member
that claims a newer view of the same job shows that the journal is an old copy: the claims then decide, as without a
journal.

The last member is never removed, since it may train without the service. New members begin with the state that they
have loaded once its process was started again under its name, or after `grace_s` if the job is `fresh`. When most
members are silent at once, the service itself is cut off, and it waits `CUT_OFF` times as long.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Generic, TypeVar

from commlib.elastic.views import (
    Claim,
    Join,
    Joining,
    Leave,
    Member,
    Message,
    NewView,
    Put,
    Ready,
    Refused,
    Settled,
    Suspect,
    View,
    Welcome,
)

#: The messages that members send.
FROM_MEMBERS = (Join, Ready, Settled, Suspect, Put, Leave)

#: How long the service waits for the end of a suspected member's connection before it excludes anybody, in seconds.
SUSPICION_S = 0.5
#: The largest number of members in broken pairs for which the smallest set to exclude is searched exhaustively.
_EXHAUSTIVE = 16
#: How many times longer the service waits for silent members if most of them are silent.
CUT_OFF = 3

#: What identifies a connection for the caller.
C = TypeVar("C", bound=Hashable)


class Stage(Enum):
    """The state of a connection; see [Note: registry]."""

    STANDBY = "standby"
    JOINING = "joining"
    READY = "ready"
    MEMBER = "member"


@dataclass
class Record:
    """A connection that has joined."""

    member: Member
    stage: Stage
    min_members: int
    heartbeat_s: float
    heard_s: float
    settled: int = 0
    donor: Member | None = None  # while it is joining


@dataclass(frozen=True)
class Rules:
    """The options of a service.

    Attributes:
        is_fresh: Whether new members may begin with their own state if no member of an earlier view claims one.
        min_members: The number of members below which nobody trains; members may ask for more.
        target_members: Members on standby enter below this number; 0: never.
        grace_s: How long members of the newest view may take to return, in seconds.
    """

    is_fresh: bool = False
    min_members: int = 1
    target_members: int = 0
    grace_s: float = 10.0


@dataclass
class _Suspicion:
    since_s: float
    pairs: set[frozenset[int]] = field(default_factory=set)


class Registry(Generic[C]):
    """The newest view of one job, and the connections of its members.

    Args:
        epoch: Random text of this run of the service.
        view: The newest journalled view; None without one.
        rules: The options.
        now_s: The current time.
        journal: Called with each new view, which must be on disk when it returns.
        send: Called with a connection and a message.

    Attributes:
        view: The newest view; None before the first one.
        records: The connections that have joined.
    """

    def __init__(
        self,
        epoch: str,
        view: View | None,
        rules: Rules,
        now_s: float,
        journal: Callable[[View], None],
        send: Callable[[C, Message], None],
    ) -> None:
        self.view = view
        self.records: dict[C, Record] = {}
        self._epoch, self._rules = epoch, rules
        self._journal, self._send = journal, send
        self._generations: dict[str, tuple[int, int]] = {}
        self._claims: dict[C, Claim] = {}
        self._absent: set[int] = set()  # members of the view that are not connected but may return
        self._return_by_s = now_s + rules.grace_s
        self._suspicion: _Suspicion | None = None
        self._puts: dict[str, Put] = {}  # of the view
        self._is_over = False  # no member of the view remains, and none can return
        if view is not None:
            self._remember(view)
            self._absent = set(view.ids)

    # --- events -----------------------------------------------------------------------------------------------------

    def handle(self, connection: C, message: Message, now_s: float) -> bool:
        """Process a message; return whether the connection stays open."""
        record = self.records.get(connection)
        match message:
            case Join() if record is None:
                return self._join(connection, message, now_s)
            case _ if record is None:
                self._send(connection, Refused("the first message must be Join"))
                return False
            case Ready() if record.stage is Stage.JOINING and self.view and message.number == self.view.number:
                record.stage = Stage.READY
                self._admit()
            case Settled() if record.stage is Stage.MEMBER:
                record.settled = message.number
                self._admit()
            case Put() if record.stage is Stage.MEMBER and self.view and message.number == self.view.number:
                self._puts[message.key] = message
                self._relay(message, connection)
            case Suspect() if record.stage is Stage.MEMBER and self.view and message.number == self.view.number:
                self._suspect(record.member.id, message.ids, now_s)
            case Leave():
                self.end(connection, "left", now_s)
                return False
            case _:
                pass  # stale: it was sent before the sender received the newest view
        return True

    def hear(self, connection: C, now_s: float) -> None:
        """Note that bytes have arrived, heartbeats included."""
        if record := self.records.get(connection):
            record.heard_s = now_s

    def end(self, connection: C, why: str, now_s: float) -> None:
        """Process the end of a connection; `why` follows the member's name in the log."""
        self._claims.pop(connection, None)
        record = self.records.pop(connection, None)
        if record is None:
            return
        if record.stage is Stage.MEMBER:
            self._remove({record.member.id}, f"{record.member.name} {why}", now_s)
        else:
            self._tell_joining()

    def tick(self, now_s: float) -> list[C]:
        """Process all that is due; return the connections that have become silent, which the caller closes."""
        if self.view is not None and self._absent and now_s >= self._return_by_s:
            if len(self._absent) < len(self.view.ids):
                names = ", ".join(member.name for member in self.view.members if member.id in self._absent)
                self._remove(self._absent, f"{names} did not return", now_s)
            elif self._rules.is_fresh:
                self._absent, self._is_over = set(), True
                self._admit()
        if self._suspicion is not None and now_s >= self._suspicion.since_s + SUSPICION_S:
            pairs, self._suspicion = self._suspicion.pairs, None
            if excluded := smallest_cover(pairs):
                names = ", ".join(record.member.name for record in self._members() if record.member.id in excluded)
                self._remove(set(excluded), f"{names} cannot reach other members", now_s)
            elif self.view is not None:
                self._make_view(list(self.view.members), "a connection between members broke")
        silent = self._silent(now_s)
        for connection in silent:
            self.end(connection, "was silent", now_s)
        return silent

    def _silent(self, now_s: float) -> list[C]:
        """Return the connections from which nothing was heard for too long."""
        members = list(self._members())
        quiet = [each for each in members if now_s >= each.heard_s + each.heartbeat_s / 2]
        patience = CUT_OFF if 2 * len(quiet) > len(members) else 1
        return [
            connection
            for connection, record in self.records.items()
            if now_s >= record.heard_s + record.heartbeat_s * (patience if record.stage is Stage.MEMBER else 1)
        ]

    def due_s(self, now_s: float) -> float | None:
        """Return when `tick` may have something to do; None if only events matter."""
        limits = [(record.heard_s, record.heartbeat_s) for record in self.records.values()]
        times = [at_s + limit_s * (1 if at_s + limit_s > now_s else CUT_OFF) for at_s, limit_s in limits]
        times += [self._return_by_s] if self._absent and self._return_by_s > now_s else []
        if self._suspicion is not None:
            times.append(self._suspicion.since_s + SUSPICION_S)
        return min(times, default=None)

    # --- joins ------------------------------------------------------------------------------------------------------

    def _join(self, connection: C, join: Join, now_s: float) -> bool:
        if join.claim is not None:
            return self._return(connection, join, join.claim, now_s)
        name = join.name or self._free_name()
        if any(record.member.name == name for record in self.records.values()):
            self._send(connection, Refused(f"the name {name!r} is in use"))
            return False
        if self.view is not None and any(m.name == name and m.id in self._absent for m in self.view.members):
            if len(self.view.ids) == 1:
                self._absent, self._is_over = set(), True
            else:
                self._remove({m.id for m in self.view.members if m.name == name}, f"{name} was started again", now_s)
        member_id, generation = self._generations.get(name, (self._next_id(), -1))
        self._generations[name] = member_id, generation + 1
        member = Member(member_id, generation + 1, name, join.address, join.data)
        stage = Stage.STANDBY if join.standby else Stage.JOINING
        self.records[connection] = Record(member, stage, join.min_members, join.heartbeat_s, now_s)
        self._send(connection, Welcome(member.id, member.generation, name))
        self._admit()
        return True

    def _return(self, connection: C, join: Join, claim: Claim, now_s: float) -> bool:
        """Take back a member that trained before the service was started again, or the last member of a view."""
        if self.view is not None and claim.view.job != self.view.job:
            self._send(connection, Refused("the service has the journal of another job"))
            return False
        self._claims[connection] = claim
        if self.view is not None and claim.view.number > self.view.number and self.view.epoch != self._epoch:
            self.view, self._absent, self._rules = None, set(), replace(self._rules, is_fresh=False)
        if self.view is None:
            self._welcome(connection, join, claim, now_s)
            self._continue_claimed(now_s)
            return True
        mine = next((m for m in self.view.members if m.id == claim.id and m.generation == claim.generation), None)
        if mine is None or claim.id not in self._absent:
            self._send(connection, NewView(self.view, self._least(), "you were excluded"))
            return False
        self._absent.discard(claim.id)
        self._welcome(connection, join, claim, now_s)
        self._send(connection, NewView(self.view, self._least(), "the service was started again"))
        for message in self._puts.values():
            self._send(connection, message)
        self._admit()
        return True

    def _welcome(self, connection: C, join: Join, claim: Claim, now_s: float) -> None:
        member = Member(claim.id, claim.generation, join.name, join.address, join.data)
        settled = claim.view.number
        self.records[connection] = Record(member, Stage.MEMBER, join.min_members, join.heartbeat_s, now_s, settled)
        self._send(connection, Welcome(claim.id, claim.generation, join.name))

    def _continue_claimed(self, now_s: float) -> None:
        """Continue the newest claimed view if more than half of its members claim it."""
        newest = max((claim.view for claim in self._claims.values()), key=lambda view: view.number)
        here = {claim.id: c for c, claim in self._claims.items() if claim.view == newest and claim.id in newest.ids}
        if 2 * len(here) <= len(newest.ids):
            return
        self.view = newest
        self._remember(newest)
        self._absent = set(newest.ids) - here.keys()
        self._return_by_s = now_s + self._rules.grace_s
        for connection in [c for c in self._claims if c not in here.values()]:
            self._send(connection, NewView(newest, self._least(), "you were excluded"))
            self.records.pop(connection)
        for connection in here.values():
            self._send(connection, NewView(newest, self._least(), "the service was started again"))
        self._admit()

    def _admit(self) -> None:
        """Make a view with the members that are ready, unless the newest one is still being connected."""
        self._activate_standby()
        if self.view is None or self._is_over:
            found = [record for record in self.records.values() if record.stage is Stage.JOINING]
            if (self._rules.is_fresh or self._is_over) and found and len(found) >= self._least():
                self._make_view([record.member for record in found], "the job begins", begins=True)
            return
        if any(record.settled < self.view.number for record in self._members()) or self._absent:
            self._tell_joining()
            return
        if ready := [record.member for record in self.records.values() if record.stage is Stage.READY]:
            names = ", ".join(member.name for member in ready)
            self._make_view([*self.view.members, *ready], f"{names} joined")
        else:
            self._tell_joining()

    def _activate_standby(self) -> None:
        """Let members on standby join while the view has fewer members than the target."""
        entering = [r for r in self.records.values() if r.stage in (Stage.JOINING, Stage.READY)]
        present = len(self.view.ids) if self.view else 0
        waiting = sorted((r for r in self.records.values() if r.stage is Stage.STANDBY), key=lambda r: r.member)
        for record in waiting[: max(0, self._rules.target_members - present - len(entering))]:
            record.stage = Stage.JOINING

    def _tell_joining(self) -> None:
        """Send the joining members and their donors to all members of the view and to the joining ones."""
        if self.view is None:
            return
        members = [record.member for record in self._members()]
        joining = [r for r in self.records.values() if r.stage is Stage.JOINING]
        if not members:
            return
        for record in joining:
            if record.donor not in members:  # it keeps its donor while that is there
                record.donor = members[record.member.id % len(members)]
        message = Joining(self.view.number, tuple((r.member, r.donor) for r in joining if r.donor is not None))
        for connection, record in self.records.items():
            if record.stage is Stage.MEMBER or record in joining:
                self._send(connection, message)

    def _relay(self, message: Put, source: C) -> None:
        for connection, record in self.records.items():
            if record.stage is Stage.MEMBER and connection != source:
                self._send(connection, message)

    # --- views ------------------------------------------------------------------------------------------------------

    def _members(self) -> Iterator[Record]:
        return (record for record in self.records.values() if record.stage is Stage.MEMBER)

    def _least(self) -> int:
        return max([self._rules.min_members, *(record.min_members for record in self.records.values())])

    def _make_view(self, members: list[Member], reason: str, begins: bool = False) -> None:
        job, number = (self.view.job, self.view.number + 1) if self.view else (self._epoch, 1)
        began = number if begins or self.view is None else self.view.began
        view = View(job, self._epoch, number, began, tuple(sorted(members)))
        self._journal(view)
        self._claims.clear()
        self._puts.clear()
        self.view, self._suspicion, self._is_over = view, None, False
        ids = set(self.view.ids)
        for connection, record in list(self.records.items()):
            was_inside = record.stage is Stage.MEMBER
            if record.member.id in ids:
                record.stage = Stage.MEMBER
            if was_inside or record.member.id in ids:
                self._send(connection, NewView(self.view, self._least(), reason))
            if was_inside and record.member.id not in ids:
                del self.records[connection]
            elif record.stage is Stage.READY:  # in step with the view before
                record.stage = Stage.JOINING
        self._activate_standby()
        self._tell_joining()

    def _remove(self, ids: set[int], reason: str, now_s: float) -> None:
        if self.view is None:
            return
        left = [member for member in self.view.members if member.id not in ids]
        if not left:
            self._absent, self._return_by_s = set(self.view.ids), now_s + self._rules.grace_s
        elif len(left) < len(self.view.members):
            self._absent -= ids
            self._make_view(left, reason)

    def _suspect(self, own: int, ids: tuple[int, ...], now_s: float) -> None:
        assert self.view is not None
        pairs = {frozenset((own, other)) for other in ids if other != own and other in self.view.ids}
        if ids and not pairs:
            return
        if self._suspicion is None:
            self._suspicion = _Suspicion(now_s)
        self._suspicion.pairs |= pairs

    def _remember(self, view: View) -> None:
        for member in view.members:
            self._generations[member.name] = member.id, member.generation

    def _next_id(self) -> int:
        return max((member_id for member_id, _ in self._generations.values()), default=-1) + 1

    def _free_name(self) -> str:
        return next(
            name for idx in itertools.count(self._next_id()) if (name := f"member-{idx}") not in self._generations
        )


def smallest_cover(pairs: set[frozenset[int]]) -> tuple[int, ...]:
    """Return the smallest set of members without which no broken pair remains; of equal sizes, the youngest.

    Beyond `_EXHAUSTIVE` members in broken pairs, the member of most pairs is taken repeatedly, which may be one more
    than necessary for each.
    """
    found = sorted({member for pair in pairs for member in pair}, reverse=True)
    if len(found) <= _EXHAUSTIVE:
        for size in range(len(found) + 1):
            for chosen in itertools.combinations(found, size):
                if all(pair & set(chosen) for pair in pairs):
                    return chosen
    chosen, left = [], set(pairs)
    while left:
        worst = max(found, key=lambda member: (sum(member in pair for pair in left), member))
        chosen.append(worst)
        left = {pair for pair in left if worst not in pair}
    return tuple(chosen)
