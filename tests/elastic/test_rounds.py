"""Rounds that lose a member: the others repeat them, or have their result already, with the same bits."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import commlib
from commlib.algorithms.channels import Weights
from tests.elastic.job import Job, Template, running
from tests.elastic.member import batch, make_model

#: Places of a round before its result, and from its result on. At the first and the last one, nothing is repeated.
BEFORE = ("forward", "backward", "encode", "collective")
AFTER = ("complete", "agreed", "optimizer")
#: The round in which a member is lost, and the number of rounds.
LOST, ROUNDS = 3, 6
#: Algorithms that have no rounds of all ranks, or need nodes.
REFUSED = (
    *("async_averaging", "async_sgd", "decentralized", "gossip", "hierarchical_local_sgd", "hogwild"),
    *("low_precision_decentralized", "noloco", "passive_gossip"),
)
#: Fewer places, for most algorithms.
PLACES = ("forward", "collective", "complete", "optimizer")
FAST = ("allreduce", "bytegrad", "topk", "powersgd", "local_sgd", "diloco", "streaming_diloco")


def lose(job: Job, place: str, **options: Any) -> tuple[int, str]:
    """Kill one of four members at a place of a round; return the last round of the others."""
    common = {"rounds": ROUNDS, "members_at": {"1": 4}, "trap": ("", LOST), **options}
    job.start("a", "b", **common)
    job.start("c", **{**common, "trap": (place, LOST)})
    job.start("d", **common)
    job.wait(f"c at {place}")
    if place in AFTER:
        job.wait(f"a has {LOST}", f"b has {LOST}", f"d has {LOST}")
    job.signal("c")
    job.wait("a left", "b left", "d left")
    found = job.rounds("a")
    for name in "bd":  # members that enter in a round over weights begin after it
        rounds = job.rounds(name)
        assert rounds == {number: found[number] for number in rounds}, job
        assert max(rounds) == ROUNDS
    worlds = [world for world, _ in found.values()]
    num_with_it = LOST if place in AFTER else LOST - 1
    assert worlds[:num_with_it] == [4] * num_with_it
    assert worlds[LOST:] == [3] * (ROUNDS - LOST)
    return found[ROUNDS]


@pytest.mark.parametrize(
    ("algorithm", "options", "places"),
    [
        ("allreduce", {}, BEFORE + AFTER),
        ("bytegrad", {}, PLACES),
        ("topk", {"ratio": 0.1}, PLACES),
        ("powersgd", {"rank": 2}, PLACES),
        ("local_sgd", {"period": 2}, PLACES),
        ("diloco", {"period": 2, "codec": "int4"}, PLACES),
        ("streaming_diloco", {"period": 4, "fragments": 2, "delay": 1}, PLACES),
    ],
)
def test_a_lost_member(
    template: Template, tmp_path: Path, algorithm: str, options: dict[str, Any], places: tuple[str, ...]
) -> None:
    """Wherever it is lost, the bits are those of a loss between rounds."""
    ends: dict[bool, set[str]] = {True: set(), False: set()}
    for place in places:
        with running(template, tmp_path / place) as job:
            ends[place in AFTER].add(lose(job, place, algorithm=algorithm, options=options)[1])
    assert [len(bits) for bits in ends.values()] == [1, 1]
    assert ends[True] != ends[False]


def test_a_member_is_lost_while_another_is_in_backward(template: Template, tmp_path: Path) -> None:
    """The round fails there before the algorithm has begun with all buckets."""
    ends = []
    for trap in (("last gradient", LOST), ("", LOST)):
        with running(template, tmp_path / f"journal {trap[0]}") as job:
            common: dict[str, Any] = {"rounds": ROUNDS, "members_at": {"1": 3}, "algorithm": "powersgd"}
            job.start("a", **{**common, "trap": trap})
            job.start("b", **{**common, "trap": ("collective", LOST)})
            job.start("c", **common)
            job.wait("b at collective", *([f"a at {trap[0]}"] if trap[0] else []))
            job.signal("b")
            job.wait("c log elastic: view 4")
            job.signal("a", signal.SIGUSR1)
            job.wait("a left", "c left")
            assert job.rounds("a") == job.rounds("c")
            assert "repeated_rounds=1" in job.said("a", "left")[0]
            ends.append(job.rounds("a"))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("place", ["collective", "agreed"])
def test_the_mean_is_over_the_remaining_members(template: Template, tmp_path: Path, place: str) -> None:
    """The weights are those of one process that computes the mean of the members' gradients."""
    with running(template, tmp_path / "journal") as job:
        lose(job, place)
        total = float(job.said("a", "round")[-1][4])
    assert total == pytest.approx(_trained(LOST + 1 if place in AFTER else LOST, "abd"), abs=1e-4)


def test_two_members_are_lost_in_one_round(template: Template, tmp_path: Path) -> None:
    """The second one while the others repeat the round without the first one."""
    with running(template, tmp_path / "journal") as job:
        common: dict[str, Any] = {"rounds": ROUNDS, "members_at": {"1": 4}}
        job.start("a", **common)
        job.start("b", "c", **{**common, "trap": ("collective", LOST)})
        job.start("d", **common)
        job.wait("b at collective", "c at collective")
        job.signal("b")
        job.wait("a log elastic: view 5", "d log elastic: view 5")
        job.signal("c")
        job.wait("a left", "d left")
        assert "repeated_rounds=2" in job.said("a", "left")[0]
        assert job.rounds("a") == job.rounds("d")
        total = float(job.said("a", "round")[-1][4])
    assert total == pytest.approx(_trained(LOST, "ad"), abs=1e-4)


def _trained(lost_from: int, remaining: str) -> float:
    """Return the sum of the weights after all rounds, of which those from `lost_from` on have the remaining members."""
    torch.manual_seed(0)
    model = make_model(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    for number in range(1, ROUNDS + 1):
        names = "abcd" if number < lost_from else remaining
        optimizer.zero_grad()
        for name in names:
            inputs, labels = batch(name, number)
            (torch.nn.functional.cross_entropy(model(inputs), labels) / len(names)).backward()
        optimizer.step()
        scheduler.step()
    return sum(float(p.detach().double().sum()) for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [name for name in commlib.algorithms.list() if name not in ("auto", *FAST)])
def test_a_lost_member_with_every_algorithm(template: Template, tmp_path: Path, algorithm: str) -> None:
    """Algorithms without rounds of all ranks are refused."""
    declared = commlib.algorithms.create(algorithm).channel
    if algorithm in REFUSED:
        with running(template, tmp_path / "journal") as job:
            job.start("a", algorithm=algorithm)
            job.wait("a failed ConfigError")
        return
    options = {"warmup_steps": 1} if declared.warmup_steps else {}
    options |= {"period": 2} if isinstance(declared, Weights) else {}
    test_a_lost_member(template, tmp_path, algorithm, options, PLACES)
