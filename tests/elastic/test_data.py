"""What each member trains on, and checkpoints of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.elastic.job import Job, Template, running

ROUNDS = 8


def drawn(job: Job, names: str) -> dict[int, dict[str, tuple[int, list[int]]]]:
    """Return the epoch and the indices of each member's batch, by the number of the round."""
    found: dict[int, dict[str, tuple[int, list[int]]]] = {}
    for name in names:
        for number, epoch, *indices in job.said(name, "drew"):
            found.setdefault(int(number), {})[name] = (int(epoch), list(map(int, indices)))
    return found


@pytest.mark.parametrize(("place", "number"), [("forward", 4), ("collective", 4), ("agreed", 4)])
def test_no_sample_is_drawn_twice(template: Template, tmp_path: Path, place: str, number: int) -> None:
    """Two members join and one is lost. Only its batch of one round is left out, though workers draw in advance."""
    samples = 38  # 19 batches: 2 + 2 + 2 + 4 + 3 + 3 + 3 in the rounds of the first epoch
    with running(template, tmp_path / "journal") as job:
        common: dict[str, Any] = {"rounds": ROUNDS, "samples": samples}
        job.start("a", members_at={"1": 2, "4": 4}, **common)
        job.start("b", members_at={"1": 2, "4": 4}, trap=(place, number), **common)
        job.wait("a round 3", "b round 3")
        job.start("c", "d", **common)
        job.wait(f"b at {place}")
        job.signal("b")
        job.wait("a left", "c left", "d left")
        found = drawn(job, "abcd")
        counts = place == "agreed"
        if not counts:
            del found[number]["b"]
        assert [sorted(each) for each in found.values()] == [
            *[["a", "b"]] * 3,
            ["a", *(["b"] if counts else []), "c", "d"],
            *[["a", "c", "d"]] * 4,
        ]
        of_rounds = [list(each.values()) for each in found.values()]
        assert [{epoch for epoch, _ in each} for each in of_rounds] == [{0}] * 7 + [{1}]
        indices = [idx for each in of_rounds for _, those in each for idx in those]
        assert len(indices) == 2 * (21 + counts)
        first = indices[: 2 * (15 + counts)]  # of six rounds; the last draw of an epoch may be of the next one
        assert len(set(first)) == len(first)


def test_a_child_of_a_lost_member_survives_it(template: Template, tmp_path: Path) -> None:
    """Workers of a DataLoader live some seconds longer; the others notice the loss at once."""
    with running(template, tmp_path / "journal") as job:
        job.start("a", rounds=ROUNDS, members_at={"1": 2})
        job.start("b", rounds=ROUNDS, members_at={"1": 2}, trap=("collective", 4), forks_child=True)
        job.wait("b at collective")
        job.signal("b")
        job.wait("a left")
        assert [world for world, _ in job.rounds("a").values()] == [2, 2, 2, 1, 1, 1, 1, 1]
        stats = dict(each.split("=") for each in job.said("a", "left")[0])
        assert stats["repeated_rounds"] == "1"
        job.wait(f"a log elastic: view {stats['view']} of 1 members: b ended; repeats round 4, after")


@pytest.mark.parametrize("algorithm", ["topk", "powersgd", "diloco"])
def test_a_job_continues_from_a_checkpoint(template: Template, tmp_path: Path, algorithm: str) -> None:
    """With three members instead of two, also if only one of them has it. They continue at the round and the sample."""
    path = str(tmp_path / "job.pt")
    common: dict[str, Any] = {"algorithm": algorithm, "samples": 200, "sleep_s": 0.0}
    common["options"] = {"period": 2} if algorithm == "diloco" else {}
    with running(template, tmp_path / "first") as job:
        job.start("a", rounds=3, members_at={"1": 2}, checkpoint=path, **common)
        job.start("b", rounds=3, members_at={"1": 2}, **common)
        job.wait("a left", "b left")
        before = drawn(job, "ab")
        last = job.said("a", "round")[-1]
    with running(template, tmp_path / "second") as job:
        common |= {"rounds": 5, "min_members": 3}
        job.start("c", seed=2, **common)
        job.start("d", seed=3, checkpoint=path, **common)
        job.start("e", seed=4, **common)
        job.wait(*(f"{each} entered 3" for each in "cde"), *(f"{each} left" for each in "cde"))
        rounds = [job.rounds(each) for each in "cde"]
        assert rounds[0] == rounds[1] == rounds[2]
        assert list(rounds[0]) == [4, 5]
        assert float(job.said("c", "round")[0][3]) < float(last[3])  # the learning rate
        batches = [own for found in (before, drawn(job, "cde")) for each in found.values() for own in each.values()]
        indices = [idx for _, those in batches for idx in those]
        assert len(set(indices)) == len(indices)


def test_a_checkpoint_of_another_algorithm_is_refused(template: Template, tmp_path: Path) -> None:
    path = str(tmp_path / "job.pt")
    with running(template, tmp_path / "first") as job:
        job.start("a", rounds=1, checkpoint=path)
        job.wait("a left")
    with running(template, tmp_path / "second") as job:
        job.start("b", algorithm="topk", checkpoint=path)
        job.wait("b failed ConfigError the checkpoint of an elastic job has the algorithm 'allreduce', expected 'topk'")
