"""Samplers of elastic jobs: which member draws which batch, however members come and go."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from commlib.elastic import Loader, Sampler
from commlib.elastic.positions import Draw, Positions
from commlib.errors import ConfigError


class Alone:
    """Members of which nobody else has come."""

    is_ready = False

    def __init__(self) -> None:
        self.samplers: list[Sampler] = []

    def add_sampler(self, sampler: Sampler) -> None:
        self.samplers.append(sampler)

    def refuse_if_ready(self, what: str) -> None:
        if self.is_ready:
            raise ConfigError(what)


def make(size: int, batch_size: int, **options: Any) -> Sampler:
    return Sampler(range(size), batch_size, Alone(), **options)  # type: ignore[arg-type]


class Group:
    """Members that draw in rounds, as `ElasticTransport` and `HandOver` let them agree.

    Attributes:
        members: The positions of those that are in the view, in rank order.
        counted: The draws of rounds that count, in order.
        num_killed: The number of lost members.
    """

    def __init__(self, size: int, per_epoch: int, draws_per_round: int = 1) -> None:
        self.per_epoch, self.draws_per_round = per_epoch, draws_per_round
        self.members = [Positions(per_epoch) for _ in range(size)]
        self.counted: list[Draw] = []
        self.num_killed = 0
        self.drawn: dict[Positions, list[Draw]] = {}
        self.enter(new=range(1, size))

    def enter(self, new: Any = ()) -> None:
        old = [each for rank, each in enumerate(self.members) if rank not in new]
        base, epoch = max(each.end for each in old), max(each.last_epoch for each in old)
        for rank, each in enumerate(self.members):
            each.admit(base, epoch, rank, len(self.members), new)

    def agree(self, ranks: Any = None) -> None:
        base = max(each.end for each in self.members)
        for rank, each in enumerate(self.members):
            if ranks is None or rank in ranks:
                each.agree(base, rank, len(self.members))

    def draw(self) -> None:
        self.drawn = {each: [each.take() for _ in range(self.draws_per_round)] for each in self.members}

    def round(self, joining: int = 0, killed: tuple[int, ...] = (), agreed: tuple[int, ...] | None = None) -> None:
        """Make a round. `agreed`: the round counts, and only these ranks have left the agreement before the kill."""
        self.draw()
        if joining:
            new = range(len(self.members), len(self.members) + joining)
            self.members += [Positions(self.per_epoch) for _ in new]
            self.enter(new)
            for rank in new:
                self.drawn[self.members[rank]] = [self.members[rank].take() for _ in range(self.draws_per_round)]
        if agreed is not None:
            self.agree(agreed)
        dead = [self.members[rank] for rank in killed]
        self.members = [each for each in self.members if each not in dead]
        self.num_killed += len(dead)
        for each, draws in self.drawn.items():
            if each not in dead or agreed is not None:
                self.counted += draws
        if agreed is not None:  # the next view is entered with the next round, after its draws
            self.draw()
            self.counted += [draw for draws in self.drawn.values() for draw in draws]
        if killed:
            self.enter()
        self.agree()


def test_all_batches_once_without_changes() -> None:
    group = Group(4, per_epoch=8)
    for _ in range(6):
        group.round()
    assert sorted(each.position for each in group.counted) == list(range(24))
    assert [each.epoch for each in group.counted] == [0] * 8 + [1] * 8 + [2] * 8


def test_an_epoch_ends_with_the_same_draw_of_all() -> None:
    """With 7 batches and 4 members, the last draw of rank 3 is a batch of the next epoch."""
    group = Group(4, per_epoch=7)
    for _ in range(7):
        group.round()
    assert sorted(each.position for each in group.counted) == list(range(28))
    epochs = [each.epoch for each in group.counted]
    assert [epochs[idx : idx + 4] for idx in range(0, 28, 4)] == [[e] * 4 for e in (0, 0, 1, 1, 2, 2, 3)]


def test_more_members_than_batches() -> None:
    group = Group(5, per_epoch=2)
    for _ in range(4):
        group.round()
    assert sorted(each.position for each in group.counted) == list(range(20))


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("draws_per_round", [1, 3])
def test_no_batch_is_drawn_twice(seed: int, draws_per_round: int) -> None:
    """Also if members are lost after some of the others have left the agreement. A loss leaves out one batch. With
    several draws per round, a new member leaves out some of those that the others have drawn before it came."""
    choose = random.Random(seed)
    group = Group(choose.randint(1, 4), per_epoch=choose.choice([2, 7, 30]), draws_per_round=draws_per_round)
    for _ in range(40):
        size = len(group.members)
        match choose.choice(["none", "none", "join", "kill", "late kill"]):
            case "join" if size < 6:
                group.round(joining=choose.randint(1, 2))
            case "kill" if size > 1:
                group.round(killed=tuple(choose.sample(range(size), choose.randint(1, size - 1))))
            case "late kill" if size > 1:
                have_agreed = tuple(choose.sample(range(size), choose.randint(1, size)))
                group.round(killed=(choose.randrange(size),), agreed=have_agreed)
            case _:
                group.round()
    counted = [each.position for each in group.counted]
    assert len(set(counted)) == len(counted)
    assert max(counted) < group.members[0].end
    if draws_per_round == 1:
        assert group.members[0].end - len(counted) <= group.num_killed


def test_a_new_member_has_the_epoch_of_the_others() -> None:
    """It enters in the last round of an epoch, and makes one draw in it."""
    group = Group(2, per_epoch=4)
    group.round()
    assert group.members[0].next.epoch == 0
    group.round(joining=1)
    assert [each.epoch for each in group.counted] == [0] * 5
    assert [each.next.epoch for each in group.members] == [1] * 3


def test_indices_of_an_epoch() -> None:
    sampler = make(10, 4)
    first, second = list(sampler), list(sampler)
    assert sorted(itertools.chain(*first)) == list(range(10)) == sorted(itertools.chain(*second))
    assert [len(each) for each in first] == [4, 4, 2]
    assert first != second
    assert sampler.epoch == 2
    assert first == list(make(10, 4))
    assert first != list(make(10, 4, seed=1))
    assert list(make(10, 4, shuffle=False, drop_last=True)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(sampler) == 3
    assert len(make(10, 4, drop_last=True)) == 2


def test_it_continues_from_a_checkpoint() -> None:
    sampler, whole = make(10, 2), list(make(10, 2))
    batches = iter(sampler)
    assert [next(batches), next(batches)] == whole[:2]
    other = make(10, 2)
    other.load_state_dict(sampler.state_dict())
    assert list(other) == whole[2:]
    with pytest.raises(ConfigError, match="the state has batch_size 2, expected 5"):
        make(10, 5).load_state_dict(sampler.state_dict())


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}])
def test_batches_that_workers_have_drawn_in_advance_are_dropped(workers: dict[str, Any]) -> None:
    """After every change, a loader continues exactly where live draws would."""
    size = 48
    sampler, live = make(size, 2), make(size, 2)
    loader = Loader(DataLoader(TensorDataset(torch.arange(size)), batch_sampler=sampler, **workers))
    changes = {3: (8, 1, 4), 4: (12, 0, 3), 6: (18, 1, 2), 20: (64, 0, 5)}  # (base, rank, world size) after a draw
    found, expected = [], []
    for drawn, batches in ((found, loader), (expected, live)):
        positions = (sampler if drawn is found else live).positions
        number = 0
        for epoch in range(4):
            assert positions.next.epoch == epoch
            for batch in batches:
                drawn.append((epoch, (batch[0] if drawn is found else torch.tensor(batch)).tolist()))
                number += 1
                if number in changes:
                    positions.agree(*changes[number])
                elif number % 2:
                    positions.agree(positions.end, positions._rank, positions._world_size)
    assert found == expected
    assert len(found) > 20


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size: expected a positive integer, got 0"):
        make(10, 0)
    with pytest.raises(ConfigError, match="3 samples are no batch of 4"):
        make(3, 4, drop_last=True)
    dataset = TensorDataset(torch.arange(4))
    with pytest.raises(ConfigError, match="expected a DataLoader"):
        Loader(DataLoader(dataset, batch_size=2))
    with pytest.raises(ConfigError, match="in_order=False"):
        Loader(DataLoader(dataset, batch_sampler=make(4, 2), num_workers=1, in_order=False))
    members = Alone()
    sampler = Sampler(range(4), 2, members)  # type: ignore[arg-type]
    members.is_ready = True
    with pytest.raises(ConfigError, match=r"Sampler\.load_state_dict"):
        sampler.load_state_dict(sampler.state_dict())
