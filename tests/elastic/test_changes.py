"""Changes of the view: new members, members that are stopped, cut off or leave, a service that is away."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import commlib
from commlib.algorithms.channels import Weights
from commlib.elastic.registry import Rules
from tests.elastic.job import Job, Template, running
from tests.elastic.test_rounds import REFUSED
from tests.waiting import LIMIT_S

ROUNDS = 7


def same(job: Job, *names: str, last: int = ROUNDS) -> None:
    """Check that members have the same bits after each round that they have in common, up to the last one."""
    found = [job.rounds(name) for name in names]
    for number in set.intersection(*(set(each) for each in found)):
        assert len({each[number] for each in found}) == 1, f"round {number} of\n{job}"
    assert all(max(each) == last for each in found), job


@pytest.mark.parametrize("algorithm", ["allreduce", "topk", "powersgd"])
def test_a_new_member_has_the_weights_of_the_others(template: Template, tmp_path: Path, algorithm: str) -> None:
    """Also their momenta, buffers and learning rate; it contributes from its first round."""
    with running(template, tmp_path / "journal") as job:
        common: dict[str, Any] = {"algorithm": algorithm, "rounds": ROUNDS, "members_at": {"1": 2, "4": 4}}
        job.start("a", "b", seed=1, **common)
        job.wait("a round 3", "b round 3")
        job.start("c", "d", seed=2, **common)
        job.wait(*(f"{name} left" for name in "abcd"))
        same(job, *"abcd")
        assert min(job.rounds("c")) == 4
        assert job.rounds("c")[ROUNDS][0] == 4
        assert len({tuple(job.said(name, "round")[-1]) for name in "abcd"}) == 1


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [("diloco", {"period": 3, "codec": "int4"}), ("streaming_diloco", {"period": 4, "fragments": 2, "delay": 1})],
)
def test_a_new_member_joins_a_round_over_weights(
    template: Template, tmp_path: Path, algorithm: str, options: dict[str, Any]
) -> None:
    """It takes part in the round that the others are in, after one step of its own."""
    with running(template, tmp_path / "journal") as job:
        common: dict[str, Any] = {"algorithm": algorithm, "options": options, "rounds": ROUNDS}
        job.start("a", "b", members_at={"1": 2, "4": 3}, **common)
        job.wait("a round 3", "b round 3")
        job.start("c", seed=2, **common)
        job.wait("a left", "b left", "c left")
        same(job, *"abc")
        assert min(job.rounds("c")) == 4
        assert job.said("a", "round")[-1][3] == job.said("c", "round")[-1][3]  # the learning rate


@pytest.mark.parametrize(("lost", "place"), [("a", "give"), ("a", "send"), ("c", "take")])
def test_a_member_is_lost_while_the_state_is_handed_over(
    template: Template, tmp_path: Path, lost: str, place: str
) -> None:
    """A new member receives the state of another one; without the new one, the others go on."""
    with running(template, tmp_path / "journal") as job:
        common: dict[str, Any] = {"rounds": ROUNDS, "members_at": {"1": 2, "4": 3}}
        job.start("a", trap=(place if lost == "a" else "", 4), **common)
        job.start("b", **common)
        job.wait("a round 3", "b round 3")
        job.start("c", seed=2, trap=(place if lost == "c" else "", 0), rounds=ROUNDS)
        job.wait(f"{lost} at {place}")
        job.signal(lost)
        left = [each for each in "abc" if each != lost]
        job.wait(*(f"{each} left" for each in left))
        same(job, *left)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [name for name in commlib.algorithms.list() if name not in ("auto", *REFUSED)])
def test_a_new_member_with_every_algorithm(template: Template, tmp_path: Path, algorithm: str) -> None:
    """It continues with the bits of the others, so it has received all state that is the same on all ranks."""
    declared = commlib.algorithms.create(algorithm).channel
    options: dict[str, Any] = {"warmup_steps": 1} if declared.warmup_steps else {}
    options |= {"period": 2} if isinstance(declared, Weights) and algorithm != "streaming_diloco" else {}
    options |= {"period": 4, "fragments": 2, "delay": 1} if algorithm == "streaming_diloco" else {}
    with running(template, tmp_path / "journal") as job:
        common: dict[str, Any] = {"algorithm": algorithm, "options": options, "rounds": ROUNDS}
        job.start("a", "b", members_at={"1": 2, "4": 3}, **common)
        job.wait("a round 3", "b round 3")
        job.start("c", seed=2, **common)
        job.wait("a left", "b left", "c left")
        same(job, *"abc")


def test_a_stopped_member_is_excluded(template: Template, tmp_path: Path) -> None:
    """It finds out when it continues; the others have gone on without it."""
    with running(template, tmp_path / "journal") as job:
        common: dict[str, Any] = {"rounds": ROUNDS, "members_at": {"1": 3}}
        job.start("a", "b", **common)
        job.start("c", trap=("backward", 3), heartbeat_s=1.0, **common)
        job.wait("c at backward")
        job.signal("c", signal.SIGSTOP)
        job.wait("a left", "b left")
        same(job, "a", "b")
        job.signal("c", signal.SIGCONT)
        job.signal("c", signal.SIGUSR1)
        job.wait("c failed Excluded")


def test_a_member_that_leaves(template: Template, tmp_path: Path) -> None:
    """It does so in a signal handler, in the middle of a round, which the others repeat."""
    with running(template, tmp_path / "journal") as job:
        common: dict[str, Any] = {"rounds": ROUNDS, "members_at": {"1": 3}}
        job.start("a", "b", **common)
        job.start("c", trap=("backward", 3), leaves_on_sigterm=True, **common)
        job.wait("c at backward")
        job.signal("c", signal.SIGTERM)
        job.wait("a left", "b left")
        same(job, "a", "b")
        assert [world for world, _ in job.rounds("a").values()] == [3, 3, 2, 2, 2, 2, 2]


def test_a_member_on_standby_takes_the_place_of_a_lost_one(template: Template, tmp_path: Path) -> None:
    """It waits in `wrap` while the view has as many members as the service's target."""
    with running(template, tmp_path / "journal", Rules(is_fresh=True, target_members=3)) as job:
        common: dict[str, Any] = {"rounds": ROUNDS, "members_at": {"1": 3, "6": 3}}
        job.start("a", "b", **common)
        job.start("c", trap=("backward", 5), **common)
        job.start("d", seed=1, standby=True, **common)
        job.wait("c at backward")
        assert not job.said("d", "round")
        job.signal("c")
        job.wait("a left", "b left", "d left")
        same(job, "a", "b", "d")
        assert min(job.rounds("d")) in (5, 6)
        assert job.rounds("d")[ROUNDS][0] == 3


@pytest.mark.parametrize("is_replaced", [False, True])
def test_the_service_is_away(template: Template, tmp_path: Path, is_replaced: bool) -> None:
    """Members train without it, also if a process without the token takes its place. After a loss they wait for it."""
    with running(template, tmp_path / "journal") as job:
        common: dict[str, Any] = {"rounds": ROUNDS, "members_at": {"1": 3}}
        job.start("a", "b", **common)
        job.start("c", trap=("collective", 5), **common)
        job.wait("a round 2")
        job.stop_serving()
        if is_replaced:
            job.serve("another secret", tmp_path / "another journal")
            job.wait("a log elastic: the process at")
        job.wait("c at collective")
        if is_replaced:
            job.stop_serving()
        job.signal("c")
        job.serve()
        job.wait("a left", "b left")
        same(job, "a", "b")
        assert [world for world, _ in job.rounds("a").values()] == [3, 3, 3, 3, 2, 2, 2]


def test_the_service_stays_away(template: Template, tmp_path: Path) -> None:
    with running(template, tmp_path / "journal") as job:
        common: dict[str, Any] = {"rounds": ROUNDS, "members_at": {"1": 2}, "timeout_s": 2.0}
        job.start("a", **common)
        job.start("b", trap=("collective", 3), **common)
        job.wait("b at collective")
        job.stop_serving()
        job.signal("b")
        job.wait("a failed StoreLost")
        job.serve()


def test_a_member_with_another_model_is_refused(template: Template, tmp_path: Path) -> None:
    with running(template, tmp_path / "journal") as job:
        common: dict[str, Any] = {"rounds": ROUNDS, "members_at": {"1": 2, "4": 3}}
        job.start("a", "b", **common)
        job.wait("a round 3", "b round 3")
        job.start("c", width=32)
        job.wait("c failed ConfigError", "a left", "b left")
        same(job, "a", "b")


def test_a_member_that_shares_other_objects_is_refused(template: Template, tmp_path: Path) -> None:
    with running(template, tmp_path / "journal") as job:
        job.start("a", rounds=ROUNDS, members_at={"4": 2})
        job.wait("a round 3")
        job.start("b", shares_scheduler=False)
        job.wait("b failed ConfigError", "a left")


def test_nobody_has_the_state(template: Template, tmp_path: Path) -> None:
    """A new member that is left alone before it has received the state does not begin anew."""
    with running(template, tmp_path / "journal") as job:
        job.start("a", trap=("give", 4), members_at={"4": 2})
        job.wait("a round 3")
        job.start("b")
        job.wait("a at give")
        job.signal("a")
        job.wait("b failed CommlibError elastic: all members that had the state")


def test_training_pauses_below_min_members(template: Template, tmp_path: Path) -> None:
    with running(template, tmp_path / "journal") as job:
        common: dict[str, Any] = {"rounds": ROUNDS, "min_members": 2}
        job.start("a", **common)
        job.start("b", trap=("collective", 3), **common)
        job.wait("b at collective")
        job.signal("b")
        job.wait("a log elastic: view 2 of 1 members:")
        job.start("c", **common)
        job.wait("a left", "c left")
        same(job, "a", "c")
        assert {worlds for worlds, _ in job.rounds("a").values()} == {2}


@pytest.mark.parametrize("mode", ["close", "exit"])
def test_no_thread_of_a_member_is_left_at_the_exit(tmp_path: Path, mode: str) -> None:
    """Else the interpreter's end could abort the process, in a thread that connects a view."""
    command = [sys.executable, "-m", "tests.elastic.ends", mode, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == ["connecting", *["left: []"] * (2 if mode == "close" else 1)], done.stderr
