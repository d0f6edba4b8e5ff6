"""State that joining members receive in the background, while the others train."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import commlib
from commlib.algorithms.channels import Weights
from tests.elastic.job import Job, Template, running
from tests.elastic.test_rounds import REFUSED
from tests.waiting import LIMIT_S

#: A job that lasts until the test ends it: a new member may take any time to start.
ENDLESS: dict[str, Any] = {"rounds": 10**9, "sleep_s": 0.002, "patience_s": LIMIT_S}
#: The algorithms with local steps that elastic groups accept, and further options.
LOCAL = [
    name
    for name in commlib.algorithms.list()
    if name not in REFUSED and isinstance(commlib.algorithms.create(name).channel, Weights)
]
OPTIONS: dict[str, dict[str, Any]] = {
    "diloco": {"codec": "int4"},
    "streaming_diloco": {"fragments": 2, "delay": 1},
    "post_local_sgd": {"warmup_steps": 1},
}
FAST = ("diloco", "streaming_diloco", "local_sgd")


def agree(job: Job, *names: str) -> None:
    """Wait until members have made some rounds together, and check that they have the same bits after each."""
    job.wait(*(f"{name} entered" for name in names))
    common = lambda: set.intersection(*(set(job.rounds(name)) for name in names))  # noqa: E731
    together = lambda: [each for each in common() if job.rounds(names[0])[each][0] == len(names)]  # noqa: E731
    job.until(lambda: len(together()) >= 3)
    for number in common():
        assert len({job.rounds(name)[number] for name in names}) == 1, f"round {number} of\n{job}"


def received(job: Job, name: str) -> tuple[int, int]:
    """Return how many bytes of state a member has received in the background, and while the others waited."""
    (line,) = (words for words in job.said(name, "log") if words[1] == "received")
    found = re.search(r"received (\d+) bytes of state in the background, and (\d+) while", " ".join(line))
    assert found
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("name", [pytest.param(e, marks=[] if e in FAST else pytest.mark.slow) for e in LOCAL])
def test_a_member_joins_a_period_of_local_steps(template: Template, tmp_path: Path, name: str) -> None:
    """Its state arrives in the background: the optimizer's always, the rest unless a round ends before it enters."""
    options = {"period": 20, **OPTIONS.get(name, {})}
    with running(template, tmp_path / "journal") as job:
        common: dict[str, Any] = {"algorithm": name, "options": options, **ENDLESS}
        job.start("a", "b", members_at={"1": 2}, **common)
        job.wait("a round 1", "b round 1")
        job.start("c", seed=2, **common)
        agree(job, *"abc")
        assert received(job, "c")[0] >= 4 * (32 * 64 + 64 * 10)  # at least the momenta of the matrices


def test_frozen_parameters_arrive_in_the_background(template: Template, tmp_path: Path) -> None:
    with running(template, tmp_path / "journal") as job:
        common: dict[str, Any] = {"freezes": True, **ENDLESS}
        job.start("a", "b", members_at={"1": 2, "4": 3}, **common)
        job.wait("a round 1", "b round 1")
        job.start("c", seed=2, **common)
        agree(job, *"abc")
        assert received(job, "c")[0] == 4 * (64 * 32 + 64)


@pytest.mark.parametrize("lost", ["a", "c"])
def test_a_member_is_lost_while_the_state_is_sent_in_the_background(
    template: Template, tmp_path: Path, lost: str
) -> None:
    """The joining member receives the state of another one; without it, the others go on."""
    with running(template, tmp_path / "journal") as job:
        common: dict[str, Any] = {"algorithm": "diloco", "options": {"period": 20}, **ENDLESS}
        job.start("a", trap=("copy", 1), members_at={"1": 2}, **common)
        job.start("b", members_at={"1": 2}, **common)
        job.wait("a round 1", "b round 1")
        job.start("c", seed=2, **common)
        job.wait("a at copy")
        job.signal(lost)
        agree(job, *(each for each in "abc" if each != lost))
