"""The agreement of the members of a view on the last round that counts."""

from __future__ import annotations

import dataclasses
import random

import pytest

from commlib.elastic.progress import NewMember, OtherModel, Progress, agree
from commlib.errors import CommlibError, ConfigError


def old(agreed: int, complete: int, view: int = 1) -> Progress:
    return Progress(agreed, (complete, view), is_new=False)


def test_a_round_that_some_member_used_counts():
    assert agree([old(4, 5), old(5, 5), old(4, 5)], range(3), 0).agreed == 5


def test_a_round_that_all_members_have_counts():
    assert agree([old(4, 5), old(4, 5)], range(2), 0).agreed == 5


def test_a_round_that_a_member_lacks_is_repeated():
    assert agree([old(4, 5), old(4, 4)], range(2), 0).agreed == 4


def test_results_of_different_views_do_not_count():
    """The members of each had other inputs."""
    assert agree([old(4, 5, view=1), old(4, 5, view=2)], range(2), 0).agreed == 4


def test_a_member_that_is_too_far_behind_is_an_error():
    with pytest.raises(CommlibError, match="rank 1 cannot continue after round 5"):
        agree([old(5, 5), old(3, 4)], range(2), 0)


def test_new_members_receive_the_state_of_the_first_old_one():
    found = agree([Progress(), old(4, 4), Progress(), old(4, 4)], range(4), 0)
    assert (found.agreed, found.new) == (4, (NewMember(0, 1), NewMember(2, 1)))


def test_at_the_beginning_the_member_with_most_rounds_gives_its_state():
    members = [Progress(has_initial_state=True), Progress(agreed=7, has_initial_state=True), Progress(agreed=9)]
    found = agree(members, range(len(members)), 0)
    assert (found.agreed, found.new) == (7, (NewMember(0, 1), NewMember(2, 1)))


def test_without_the_state_nobody_begins():
    with pytest.raises(CommlibError, match="all members that had the state of the job are gone"):
        agree([Progress(), Progress(agreed=3)], range(2), 0)


def test_other_models_are_refused():
    members = [dataclasses.replace(old(4, 4), model="one"), Progress(model="other")]
    with pytest.raises(ConfigError, match="differs"):
        agree(members, range(len(members)), 1)
    with pytest.raises(OtherModel, match=r"ranks \[1\]"):
        agree(members, range(len(members)), 0)


def test_a_new_member_stays_with_the_donor_of_its_copy():
    """If that is still a member which has the state."""
    copied = [Progress(source=8), Progress(source=9), Progress(source=3)]
    found = agree([old(4, 4), copied[0], old(4, 4), copied[1], copied[2]], [5, 6, 8, 9, 10], 0)
    assert found.new == (NewMember(1, 2, has_copy=True), NewMember(3, 0), NewMember(4, 0))


def test_an_agreement_is_followed():
    behind, ahead = old(4, 5), old(4, 5)
    behind.follow(agree([behind, old(4, 4)], range(2), 0))
    assert (behind.agreed, behind.complete) == (4, (0, 0))
    ahead.follow(agree([ahead, old(5, 5)], range(2), 0))
    assert (ahead.agreed, ahead.complete) == (5, (5, 1))


@pytest.mark.parametrize("seeds", [range(first, first + 100) for first in range(0, 300, 100)])
def test_there_is_one_history(seeds):
    """Members run rounds, fail at any point, and change views: whatever two of them use of a round is the same.

    The value of a round is the view in which it ran. A member uses it once it has left the agreement, which it can only
    when all members of its view have entered it. A member that is excluded may have used it, too.
    """
    for seed in seeds:
        run_views(random.Random(seed))


def run_views(choose):
    members = {name: old(0, 0) for name in range(4)}
    used: dict[int, int] = {}  # by round: the view whose result was used
    for view in range(1, 12):
        # The members of this view run rounds until one of them is lost: each is stopped at any of the points.
        number = max(member.agreed for member in members.values())
        for member in members.values():
            assert member.agreed == number
        while True:
            number += 1
            have_result = [name for name in members if choose.random() < 0.9]
            for name in have_result:
                members[name].complete = (number, view)
            if len(have_result) < len(members):
                break
            have_left = [name for name in members if choose.random() < 0.8]
            for name in have_left:
                members[name].agreed = number
                assert used.setdefault(number, view) == view
            if len(have_left) < len(members):
                break
        if len(members) > 1:
            members.pop(choose.choice(sorted(members)))
        received = [Progress.of_plain(member.as_plain()) for member in members.values()]
        agreement = agree(received, sorted(members), 0)
        for member in members.values():
            if agreement.agreed > member.agreed:
                ran_in = member.complete[1]
                assert used.setdefault(agreement.agreed, ran_in) == ran_in
            member.follow(agreement)
