"""A rank that dies, stops, stalls or fails: every other rank reports the fault, its place and the rank, and can exit.

Where a rank ends, the timeout exceeds the time after which a test considers a rank hung: waiting for it is a failure.
"""

from __future__ import annotations

import json
import re
import signal
from typing import Any

import pytest

from tests.multi import fault_scripts
from tests.multi.fault_scripts import HANG_S, SHORT_S, VICTIM
from tests.multi.pool import RankExit, spawn_ranks, start_ranks

NAMES_VICTIM = rf"rank {VICTIM} (was|has|did|ended)\b"


def reports(rank: RankExit, event: str) -> list[dict[str, Any]]:
    lines = [line.partition("REPORT ")[2] for line in rank.output.splitlines() if "REPORT " in line]
    return [facts for facts in map(json.loads, lines) if facts["event"] == event]


def assert_told(rank: RankExit, *, kind: str, words: tuple[str, ...]) -> None:
    """Check that this rank raised an error of that kind, with `words` (patterns), and ended with the traceback."""
    found = reports(rank, "error")
    assert found, f"rank {rank.rank} (exit code {rank.returncode}) raised no error of ours:\n{rank.output}"
    assert found[0]["kind"] == kind, found[0]
    for word in words:
        assert re.search(word, found[0]["message"].lower()), f"{word!r} is not in the message: {found[0]['message']}"
    assert found[0]["ranks"] == ([VICTIM] if NAMES_VICTIM in words else []), found[0]
    assert rank.returncode == 1, f"exit code {rank.returncode}:\n{rank.output}"


def assert_told_again(rank: RankExit) -> None:
    """Check that a further step raised an error of the kind and ranks of the first."""
    (later,), (error,) = reports(rank, "later"), reports(rank, "error")
    assert "earlier error" in later["message"]
    assert (later["kind"], later["ranks"]) == (error["kind"], error["ranks"])


FAULTS = {
    "die": ("PeerFailure", -signal.SIGKILL),
    "fail": ("PeerFailure", 1),
    "stop": ("PeerTimeout", None),
    "stall": ("PeerTimeout", None),
}


@pytest.mark.thin
@pytest.mark.parametrize(
    ("kind", "world_size", "algorithm"),
    [
        ("die", 2, "allreduce"),
        ("die", 3, "allreduce"),
        ("fail", 2, "allreduce"),
        ("fail", 3, "allreduce"),
        ("stop", 3, "allreduce"),
        ("stall", 2, "allreduce"),
        ("die", 3, "bytegrad"),
        pytest.param("stop", 3, "ef_quantized", marks=pytest.mark.slow),
        ("die", 3, "bytegrad, exchanged"),
        ("fail", 3, "bytegrad, exchanged"),
        ("stop", 3, "ef_quantized, exchanged"),
        ("fail", 2, "topk"),
        pytest.param("stall", 2, "powersgd", marks=pytest.mark.slow),
    ],
)
def test_a_fault_in_the_middle_of_backward(kind: str, world_size: int, algorithm: str) -> None:
    error, victim_code = FAULTS[kind]
    others = [rank for rank in range(world_size) if rank != VICTIM]
    with start_ranks(fault_scripts.train_into_trap, world_size, kind, algorithm) as ranks:
        for exit_ in ranks.wait(HANG_S, others):
            words = ("reduce|all_to_all|all_gather", "bucket", r"layers\.", NAMES_VICTIM)
            assert_told(exit_, kind=error, words=words)
            assert reports(exit_, "trained")[0]["buckets"] > 1
            assert_told_again(exit_)
        if victim_code is not None:
            (victim,) = ranks.wait(HANG_S, [VICTIM])
            assert victim.returncode == victim_code, victim.output
            assert kind != "fail" or "RuntimeError: the user's own error" in victim.output


@pytest.mark.parametrize(
    ("kind", "algorithm"), [("die", "diloco"), ("fail", "local_sgd"), ("stop", "diloco"), ("die", "local_sgd")]
)
def test_a_fault_at_a_round_over_weights(kind: str, algorithm: str) -> None:
    error_kind, victim_code = FAULTS[kind]
    with start_ranks(fault_scripts.train_into_trap_at_a_round, 3, kind, algorithm) as ranks:
        for exit_ in ranks.wait(HANG_S, [0, 2]):
            words = ("reduce", "bucket", r"layers\.", NAMES_VICTIM)
            assert_told(exit_, kind=error_kind, words=words)
            assert reports(exit_, "trained")[0]["rounds"] == 2
            assert_told_again(exit_)
        if victim_code is not None:
            (victim,) = ranks.wait(HANG_S, [VICTIM])
            assert victim.returncode == victim_code, victim.output


def test_a_rank_that_leaves_the_loop_early() -> None:
    with start_ranks(fault_scripts.skip_backward_on_one_rank, 2) as ranks:
        (other,) = ranks.wait(HANG_S, [1 - VICTIM])
        words = ("reduce", "bucket", r"layers\.", NAMES_VICTIM)
        assert_told(other, kind="PeerTimeout", words=words)


def test_a_slow_rank_within_the_timeout_is_no_error() -> None:
    for exit_ in spawn_ranks(fault_scripts.wait_in_forward, 2, timeout=HANG_S):
        assert exit_.returncode == 0, exit_.output
        assert reports(exit_, "done")


def test_a_parameter_added_on_one_rank() -> None:
    exits = spawn_ranks(fault_scripts.add_parameter_on_one_rank, 2, timeout=HANG_S)
    assert_told(exits[VICTIM], kind="ConfigError", words=(r"late\.weight",))
    assert_told(exits[1 - VICTIM], kind="PeerFailure", words=(NAMES_VICTIM,))


def test_wrap_on_one_rank_only() -> None:
    with start_ranks(fault_scripts.wrap_on_one_rank_only, 2) as ranks:
        (other,) = ranks.wait(HANG_S, [1 - VICTIM])
        words = ("wrap|set-up", NAMES_VICTIM, f"did not arrive within {SHORT_S:g} s")
        assert_told(other, kind="PeerTimeout", words=words)
