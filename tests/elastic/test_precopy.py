"""State that joining members receive in the background, while the others train."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.job import Job, Template, running
from tests.elastic.test_changes import same

ROUNDS = 30
LOCAL: dict[str, tuple[str, dict[str, Any]]] = {
    "diloco": ("diloco", {"period": 20, "codec": "int4"}),
    "streaming_diloco": ("streaming_diloco", {"period": 20, "fragments": 2, "delay": 1}),
    "local_sgd": ("local_sgd", {"period": 20}),
}


def received(job: Job, name: str) -> tuple[int, int]:
    """Return how many bytes of state a member has received in the background, and while the others waited."""
    (line,) = (words for words in job.said(name, "log") if words[1] == "received")
    found = re.search(r"received (\d+) bytes of state in the background, and (\d+) while", " ".join(line))
    assert found
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("name", LOCAL)
def test_a_member_joins_a_period_of_local_steps(template: Template, tmp_path: Path, name: str) -> None:
    """All of its state arrives in the background, unless rounds have changed it meanwhile."""
    algorithm, options = LOCAL[name]
    with running(template, tmp_path / "journal") as job:
        common: dict[str, Any] = {"algorithm": algorithm, "options": options, "rounds": ROUNDS, "sleep_s": 0.002}
        job.start("a", "b", members_at={"1": 2}, **common)
        job.wait("a round 1", "b round 1")
        job.start("c", seed=2, **common)
        job.wait("a left", "b left", "c left")
        same(job, *"abc", last=ROUNDS)
        in_background, waited = received(job, "c")
        assert in_background > 2 * 4 * 64 * 32
        assert waited < in_background


def test_frozen_parameters_arrive_in_the_background(template: Template, tmp_path: Path) -> None:
    with running(template, tmp_path / "journal") as job:
        common: dict[str, Any] = {"rounds": ROUNDS, "freezes": True}
        job.start("a", "b", members_at={"1": 2, "4": 3}, **common)
        job.wait("a round 1", "b round 1")
        job.start("c", seed=2, **common)
        job.wait("a left", "b left", "c left")
        same(job, *"abc", last=ROUNDS)
        assert received(job, "c")[0] == 4 * (64 * 32 + 64)


@pytest.mark.parametrize("lost", ["a", "c"])
def test_a_member_is_lost_while_the_state_is_sent_in_the_background(
    template: Template, tmp_path: Path, lost: str
) -> None:
    """The joining member receives the state of another one; without it, the others go on."""
    algorithm, options = LOCAL["diloco"]
    with running(template, tmp_path / "journal") as job:
        common: dict[str, Any] = {"algorithm": algorithm, "options": options, "rounds": ROUNDS, "sleep_s": 0.002}
        job.start("a", trap=("copy", 1), members_at={"1": 2}, **common)
        job.start("b", members_at={"1": 2}, **common)
        job.wait("a round 1", "b round 1")
        job.start("c", seed=2, **common)
        job.wait("a at copy")
        job.signal(lost)
        left = [each for each in "abc" if each != lost]
        job.wait(*(f"{each} left" for each in left))
        same(job, *left, last=ROUNDS)
