"""The service's decisions, without sockets and clocks: events in, messages out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.elastic.registry import SUSPICION_S, Registry, Rules, Stage, smallest_cover
from commlib.elastic.views import (
    Claim,
    Join,
    Joining,
    Leave,
    NewView,
    Ready,
    Refused,
    Settled,
    Suspect,
    Welcome,
)

BEAT_S, GRACE_S = 10.0, 5.0


class Job:
    """A registry, the messages it has sent to each connection, and its journal. Connections are numbers."""

    def __init__(self, view=None, epoch="e0", *, fresh=True, least=1, target=0):
        self.now_s = 0.0
        self.sent = {}
        self.journal = []
        self.registry = Registry(
            epoch,
            view,
            Rules(fresh, least, target, GRACE_S),
            now_s=0.0,
            journal=self.journal.append,
            send=self._send,
        )

    def _send(self, connection, message):
        if isinstance(message, NewView) and self.journal:
            assert message.view == self.journal[-1], "it is on disk before anybody hears of it"
        self.sent.setdefault(connection, []).append(message)

    def join(self, connection, name="", **more):
        join = Join(name, f"host{connection}", "", more.pop("min_members", 1), BEAT_S, **more)
        return self.registry.handle(connection, join, self.now_s)

    def say(self, connection, message):
        return self.registry.handle(connection, message, self.now_s)

    def last(self, connection, kind=NewView):
        return next((m for m in reversed(self.sent.get(connection, [])) if isinstance(m, kind)), None)

    def settle(self):
        """All members of the newest view have connected to each other."""
        for connection, record in list(self.registry.records.items()):
            if record.stage is Stage.MEMBER:
                self.say(connection, Settled(self.registry.view.number))

    def grow(self, *connections):
        """These join, receive the state and enter."""
        for connection in connections:
            self.join(connection)
        if self.registry.view is not None:
            for connection in connections:
                record = self.registry.records[connection]
                if record.stage is not Stage.MEMBER:
                    self.settle()
                    self.say(connection, Ready(self.registry.view.number))
        self.settle()

    def pass_time(self, seconds, *heard):
        self.now_s += seconds
        for connection in heard:
            self.registry.hear(connection, self.now_s)
        return self.registry.tick(self.now_s)

    @property
    def ids(self):
        return self.registry.view.ids


def job_of(count, **options):
    job = Job(least=count, **options)
    job.grow(*range(count))
    assert job.ids == tuple(range(count))
    return job


def test_a_job_begins_when_enough_members_have_come():
    job = Job(least=3)
    job.join(10)
    job.join(11)
    assert job.registry.view is None
    job.join(12)
    assert (job.registry.view.number, job.ids) == (1, (0, 1, 2))
    assert [job.last(c, Welcome).id for c in (10, 11, 12)] == [0, 1, 2]
    assert {job.last(c).view for c in (10, 11, 12)} == {job.registry.view}
    assert job.journal == [job.registry.view]


def test_members_may_ask_for_more_than_the_service_does():
    job = Job()
    job.join(0, min_members=2)
    assert job.registry.view is None
    job.join(1)
    assert job.last(0).min_members == 2


def test_the_end_of_a_connection_shrinks_the_view_at_once():
    job = job_of(4)
    job.registry.end(2, "ended", job.now_s)
    assert job.ids == (0, 1, 3)
    assert job.last(0).reason == "member-2 ended"
    assert job.last(2).view.number == 1, "it hears of nothing that came after its end"


def test_a_joining_member_enters_once_it_is_in_step_and_all_others_are_connected():
    job = job_of(2)
    job.join(2)
    assert job.last(2, Joining) == job.last(0, Joining)
    ((member, donor),) = job.last(2, Joining).joining
    assert (member.id, donor.id) == (2, 0)
    assert job.ids == (0, 1), "it does not have the state yet"
    job.say(2, Ready(0))
    assert job.ids == (0, 1), "of an older view"
    job.say(2, Ready(1))
    assert job.ids == (0, 1, 2)
    job.join(3)
    job.say(3, Ready(2))
    assert job.ids == (0, 1, 2), "the view before is still being connected"
    for connection in range(3):
        job.say(connection, Settled(2))
    assert job.ids == (0, 1, 2, 3)


def test_a_joining_member_whose_donor_ends_gets_another_and_begins_again():
    job = job_of(2)
    job.join(2)
    job.registry.end(0, "ended", job.now_s)
    ((_, donor),) = job.last(2, Joining).joining
    assert donor.id == 1
    job.settle()
    job.say(2, Ready(1))
    assert job.ids == (1,), "in step with the view before"
    job.say(2, Ready(2))
    assert job.ids == (1, 2)


def test_one_that_is_ready_when_the_view_shrinks_begins_again():
    job = job_of(3)
    job.registry.records[0].settled = 0
    job.join(3)
    job.say(3, Ready(1))
    assert job.registry.records[3].stage is Stage.READY
    job.registry.end(2, "ended", job.now_s)
    assert job.registry.records[3].stage is Stage.JOINING


def test_several_join_at_once_from_several_donors():
    job = job_of(3)
    for connection in (3, 4, 5):
        job.join(connection)
    assert [(member.id, donor.id) for member, donor in job.last(0, Joining).joining] == [(3, 0), (4, 1), (5, 2)]
    job.registry.records[0].settled = 0
    for connection in (3, 4, 5):
        job.say(connection, Ready(1))
    job.say(0, Settled(1))
    assert (job.registry.view.number, job.ids) == (2, (0, 1, 2, 3, 4, 5))


def test_standby_enters_below_the_target_only():
    job = Job(least=2, target=2)
    job.grow(0, 1)
    job.join(2, standby=True)
    assert job.registry.records[2].stage is Stage.STANDBY
    assert job.last(2, Joining) is None
    job.registry.end(1, "ended", job.now_s)
    assert job.registry.records[2].stage is Stage.JOINING
    job.settle()
    job.say(2, Ready(2))
    assert job.ids == (0, 2)


def test_one_that_leaves_is_not_waited_for():
    job = job_of(3)
    assert not job.say(1, Leave())
    assert job.ids == (0, 2)
    assert job.last(0).reason == "member-1 left"


def test_silence_excludes_after_the_members_own_limit():
    job = job_of(4)
    assert job.pass_time(BEAT_S - 1, 0, 1, 2) == []
    assert job.pass_time(1) == [3]
    assert job.ids == (0, 1, 2)
    assert job.last(0).reason == "member-3 was silent"


def test_when_most_are_silent_the_service_itself_is_cut_off_and_waits():
    job = job_of(4)
    assert job.pass_time(BEAT_S + 1, 0) == []
    assert job.ids == (0, 1, 2, 3)
    assert job.pass_time(1, 0, 1, 2, 3) == []
    assert job.ids == (0, 1, 2, 3)
    assert job.pass_time(3 * BEAT_S, 0) == [1, 2, 3]
    assert job.ids == (0,)


def test_the_service_sleeps_while_it_waits_for_silent_members():
    """The next time is in the future whenever nothing is due, or the service would use a core."""
    job = job_of(4)
    for _ in range(2):
        job.pass_time(BEAT_S + 1, 0)
        assert job.ids == (0, 1, 2, 3)
        assert job.registry.due_s(job.now_s) > job.now_s
    job.pass_time(BEAT_S + 1, 0)
    assert job.ids == (0,)
    lost = job_of(1, fresh=True)
    lost.registry._rules = Rules(is_fresh=False)
    lost.registry.end(0, "ended", lost.now_s)
    lost.pass_time(100 * GRACE_S)
    assert lost.registry.due_s(lost.now_s) is None


def test_the_last_member_is_never_removed_and_may_return():
    job = job_of(2)
    job.registry.end(0, "ended", job.now_s)
    job.registry.end(1, "ended", job.now_s)
    assert job.ids == (1,)
    job.now_s += 1
    assert job.join(5, "member-1", claim=Claim(1, 0, job.registry.view))
    assert job.last(5).view.ids == (1,)
    assert job.pass_time(GRACE_S, 5) == []
    assert job.ids == (1,)


def test_when_nobody_returns_new_members_begin_only_if_the_job_may_begin():
    """The old members may train without the service."""
    old = job_of(1)
    job = Job(old.registry.view, "e1", fresh=False)
    job.join(2)
    job.pass_time(100 * GRACE_S, 2)
    assert (job.registry.view.number, job.ids) == (1, (0,))


def test_when_the_last_process_was_started_again_nobody_trains_and_new_members_begin():
    old = job_of(2)
    job = Job(old.registry.view, "e1", fresh=False)
    job.join(2, "member-1")
    assert job.ids == (0,), "the other one may train"
    job.join(3, "member-0")
    assert (job.registry.view.number, job.ids) == (3, (0, 1))
    assert {member.generation for member in job.registry.view.members} == {1}


def test_when_nobody_returns_to_a_job_that_may_begin_new_members_do():
    job = job_of(2)
    job.registry.end(0, "ended", job.now_s)
    job.registry.end(1, "ended", job.now_s)
    job.join(2)
    job.join(3)
    assert job.ids == (1,)
    job.pass_time(GRACE_S, 2, 3)
    assert (job.registry.view.number, job.ids) == (3, (2, 3))


def test_a_name_keeps_its_id_and_counts_generations():
    job = Job(least=2)
    job.join(0, "a")
    job.join(1, "b")
    assert not job.join(2, "a")
    assert job.last(2, Refused).reason == "the name 'a' is in use"
    job.registry.end(0, "ended", job.now_s)
    job.join(3, "a")
    welcome = job.last(3, Welcome)
    assert (welcome.id, welcome.generation) == (0, 1)


# --- broken pairs -----------------------------------------------------------------------------------------------------


def test_a_member_that_several_cannot_reach_is_excluded_after_a_moment():
    job = job_of(4)
    for connection in (0, 1, 3):
        job.say(connection, Suspect(1, (2,)))
    assert job.pass_time(SUSPICION_S / 2) == []
    assert job.ids == (0, 1, 2, 3)
    job.pass_time(SUSPICION_S)
    assert job.ids == (0, 1, 3)
    assert job.last(2).view == job.registry.view, "it learns that it was excluded"
    assert 2 not in job.registry.records


def test_of_one_broken_pair_the_younger_is_excluded():
    job = job_of(4)
    job.say(0, Suspect(1, (3,)))
    job.say(3, Suspect(1, (0,)))
    job.pass_time(SUSPICION_S)
    assert job.ids == (0, 1, 2)


def test_suspicions_of_an_older_view_and_of_strangers_are_ignored():
    job = job_of(3)
    job.registry.end(2, "ended", job.now_s)
    job.say(0, Suspect(1, (1,)))
    job.say(0, Suspect(2, (0, 2, 77)))
    job.pass_time(SUSPICION_S)
    assert job.ids == (0, 1)


def test_a_suspect_whose_connection_ends_is_removed_alone():
    job = job_of(4)
    job.say(0, Suspect(1, (3,)))
    job.say(1, Suspect(1, (0,)))  # it saw 0 close the pair
    job.registry.end(3, "ended", job.now_s)
    job.pass_time(SUSPICION_S)
    assert job.ids == (0, 1, 2)


@pytest.mark.parametrize(
    ("pairs", "cover"),
    [
        ([], ()),
        ([(0, 1)], (1,)),
        ([(0, 1), (0, 2), (0, 3)], (0,)),
        ([(0, 2), (0, 3), (1, 2), (1, 3)], (3, 2)),  # two halves: the younger one goes
        ([(0, 1), (2, 3)], (3, 1)),
    ],
)
def test_the_smallest_set_and_of_equal_ones_the_youngest(pairs, cover):
    assert smallest_cover({frozenset(pair) for pair in pairs}) == cover


@given(st.sets(st.frozensets(st.integers(0, 25), min_size=2, max_size=2), max_size=40))
@settings(max_examples=100, deadline=None)
def test_a_cover_leaves_no_broken_pair(pairs):
    chosen = set(smallest_cover(pairs))
    assert all(pair & chosen for pair in pairs)


# --- restarts of the service ------------------------------------------------------------------------------------------


def claims_of(job):
    return {
        r.member.id: Claim(r.member.id, r.member.generation, job.registry.view) for r in job.registry.records.values()
    }


def test_without_a_journal_new_members_alone_begin_nothing():
    job = Job(fresh=False)
    job.join(0)
    job.pass_time(100 * BEAT_S, 0)
    assert job.registry.view is None


def test_with_the_journal_members_return_and_nothing_changes():
    old = job_of(3)
    job = Job(old.registry.view, "e1", fresh=False)
    for member, claim in claims_of(old).items():
        assert job.join(member, f"member-{member}", claim=claim)
        assert job.last(member).view == old.registry.view
    job.pass_time(GRACE_S, 0, 1, 2)
    assert job.journal == []
    job.registry.end(1, "ended", job.now_s)
    assert (job.registry.view.epoch, job.registry.view.number, job.ids) == ("e1", 2, (0, 2))


def test_those_that_do_not_return_are_removed_after_the_grace():
    old = job_of(3)
    job = Job(old.registry.view, "e1", fresh=False)
    claims = claims_of(old)
    for member in (0, 2):
        job.join(member, f"member-{member}", claim=claims[member])
    job.join(7)
    job.say(7, Ready(1))
    assert job.ids == (0, 1, 2), "nobody enters before the others have returned"
    job.pass_time(GRACE_S, 0, 2, 7)
    assert job.ids == (0, 2)
    assert job.last(0).reason == "member-1 did not return"
    assert not job.join(1, "member-1", claim=claims[1])
    assert job.last(1).view == job.registry.view, "excluded"


def test_a_process_that_was_started_again_replaces_the_absent_one():
    old = job_of(2)
    job = Job(old.registry.view, "e1", fresh=False)
    job.join(0, "member-0", claim=claims_of(old)[0])
    job.join(5, "member-1")
    assert (job.ids, job.last(5, Welcome).generation) == ((0,), 1)


def test_without_the_journal_the_majority_of_the_newest_claimed_view_goes_on():
    old = job_of(4)
    stale = claims_of(old)
    old.registry.end(0, "ended", 0.0)
    newest = claims_of(old)
    job = Job(epoch="e1", fresh=False)
    job.join(9)  # a new process that comes first is not the donor of the rest
    job.join(0, "member-0", claim=stale[0])
    job.join(1, "member-1", claim=newest[1])
    assert job.registry.view is None
    job.join(2, "member-2", claim=newest[2])
    assert job.ids == (1, 2, 3)
    assert 0 not in job.last(0).view.ids, "excluded"
    job.pass_time(GRACE_S, 1, 2, 9)
    assert job.ids == (1, 2)


def test_half_of_the_newest_view_is_not_enough():
    old = job_of(4)
    claims = claims_of(old)
    job = Job(epoch="e1", fresh=False)
    for member in (0, 1):
        job.join(member, f"member-{member}", claim=claims[member])
    job.pass_time(GRACE_S, 0, 1)
    assert job.registry.view is None


def test_a_claim_newer_than_the_journal_shows_that_it_is_an_old_copy():
    old = job_of(3)
    stale, stale_claims = old.registry.view, claims_of(old)
    old.registry.end(0, "ended", 0.0)
    newest = claims_of(old)
    job = Job(stale, "e1", fresh=True)
    job.join(9)
    job.join(0, "member-0", claim=stale_claims[0])
    job.join(1, "member-1", claim=newest[1])
    assert job.registry.view is None
    job.join(2, "member-2", claim=newest[2])
    assert (job.registry.view, job.journal) == (newest[2].view, [])
    assert 0 not in job.last(0).view.ids, "excluded"
    job.pass_time(100 * GRACE_S, 1, 2, 9)
    assert job.ids == (1, 2), "and the new member did not begin"


def test_members_of_another_job_are_refused():
    old, other = job_of(2), job_of(2, epoch="e7")
    job = Job(old.registry.view, "e1", fresh=False)
    assert not job.join(0, "member-0", claim=claims_of(other)[0])
    assert job.last(0, Refused).reason == "the service has the journal of another job"


# --- any order of events ----------------------------------------------------------------------------------------------

EVENT = st.tuples(
    st.sampled_from(["join", "standby", "ready", "settled", "suspect", "leave", "end", "time", "hear"]),
    st.integers(0, 7),
    st.integers(0, 7),
)


@given(st.lists(EVENT, max_size=60), st.integers(1, 3), st.integers(0, 4))
@settings(max_examples=300, deadline=None)
def test_whatever_happens_there_is_one_sequence_of_views_of_connected_members(events, least, target):
    job = Job(least=least, target=target)
    for kind, connection, other in events:
        here = job.registry.records
        number = job.registry.view.number if job.registry.view else 0
        match kind:
            case "join" | "standby" if connection not in here:
                job.join(connection, f"m{connection}", standby=kind == "standby")
            case "ready" | "settled" | "suspect" | "leave" if connection in here:
                messages = {"ready": Ready(number), "settled": Settled(number), "leave": Leave()}
                job.say(connection, messages.get(kind) or Suspect(number, (other,)))
            case "end":
                job.registry.end(connection, "ended", job.now_s)
            case "time":
                job.pass_time(other)
            case "hear":
                job.registry.hear(connection, job.now_s)
        if (view := job.registry.view) is None:
            continue
        members = {record.member for record in here.values() if record.stage is Stage.MEMBER}
        assert members <= set(view.members)
        assert members == set(view.members) or not members, "all are connected, or the last ones may return"
        assert view.members == tuple(sorted(view.members))
    numbers = [view.number for view in job.journal]
    assert numbers == list(range(1, len(numbers) + 1))
    assert all(view.members for view in job.journal)
