"""A rank that dies, stops, stalls or fails: every other rank is told what, where and whom, in time, and can exit."""

from __future__ import annotations

import json
import re
import signal
from typing import Any

import pytest

from tests.multi import fault_scripts
from tests.multi.fault_scripts import TIMEOUT_S, VICTIM
from tests.multi.pool import RankExit, spawn_ranks, start_ranks

# Beyond the timeout: noticing, telling the others, and a loaded machine.
SLACK_S = 5.0
NAMES_VICTIM = rf"rank {VICTIM} (was|has|did|ended)\b"


def reports(rank: RankExit, event: str) -> list[dict[str, Any]]:
    lines = [line.partition("REPORT ")[2] for line in rank.output.splitlines() if "REPORT " in line]
    return [facts for facts in map(json.loads, lines) if facts["event"] == event]


def assert_told(rank: RankExit, *, kinds: tuple[str, ...], within_s: float, words: tuple[str, ...]) -> None:
    """Check that this rank raised one of `kinds` in time, with `words` (patterns), and ended with the traceback."""
    found = reports(rank, "error")
    assert found, f"rank {rank.rank} (exit code {rank.returncode}) raised no error of ours:\n{rank.output}"
    assert found[0]["kind"] in kinds, found[0]
    assert found[0]["waited_s"] < within_s, found[0]
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
    "die": (("PeerFailure",), -signal.SIGKILL),
    "fail": (("PeerFailure", "PeerTimeout"), 1),
    "stop": (("PeerTimeout",), None),
    "stall": (("PeerTimeout",), None),
}


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
        ("stop", 3, "ef_quantized"),
        ("die", 3, "bytegrad, exchanged"),
        ("fail", 3, "bytegrad, exchanged"),
        ("stop", 3, "ef_quantized, exchanged"),
        ("fail", 2, "topk"),
        ("stall", 2, "powersgd"),
    ],
)
def test_a_fault_in_the_middle_of_backward(kind: str, world_size: int, algorithm: str) -> None:
    kinds, victim_code = FAULTS[kind]
    others = [rank for rank in range(world_size) if rank != VICTIM]
    with start_ranks(fault_scripts.train_into_trap, world_size, kind, algorithm) as ranks:
        for exit_ in ranks.wait(40, others):
            words = ("reduce|all_to_all|all_gather", "bucket", r"layers\.", NAMES_VICTIM)
            assert_told(exit_, kinds=kinds, within_s=TIMEOUT_S + SLACK_S, words=words)
            assert reports(exit_, "trained")[0]["buckets"] > 1
            assert_told_again(exit_)
        if victim_code is not None:
            (victim,) = ranks.wait(20, [VICTIM])
            assert victim.returncode == victim_code, victim.output
            assert kind != "fail" or "RuntimeError: the user's own error" in victim.output


@pytest.mark.parametrize(
    ("kind", "algorithm"), [("die", "diloco"), ("fail", "local_sgd"), ("stop", "diloco"), ("die", "local_sgd")]
)
def test_a_fault_at_a_round_over_weights(kind: str, algorithm: str) -> None:
    kinds, victim_code = FAULTS[kind]
    with start_ranks(fault_scripts.train_into_trap_at_a_round, 3, kind, algorithm) as ranks:
        for exit_ in ranks.wait(40, [0, 2]):
            words = ("reduce", "bucket", r"layers\.", NAMES_VICTIM)
            assert_told(exit_, kinds=kinds, within_s=TIMEOUT_S + SLACK_S, words=words)
            assert reports(exit_, "trained")[0]["rounds"] == 2
            assert_told_again(exit_)
        if victim_code is not None:
            (victim,) = ranks.wait(20, [VICTIM])
            assert victim.returncode == victim_code, victim.output


def test_a_rank_that_leaves_the_loop_early() -> None:
    with start_ranks(fault_scripts.skip_backward_on_one_rank, 2) as ranks:
        (other,) = ranks.wait(40, [1 - VICTIM])
        words = ("reduce", "bucket", r"layers\.", NAMES_VICTIM)
        assert_told(other, kinds=("PeerTimeout",), within_s=TIMEOUT_S + SLACK_S, words=words)


def test_a_slow_rank_within_the_timeout_is_no_error() -> None:
    for exit_ in spawn_ranks(fault_scripts.wait_in_forward, 2):
        assert exit_.returncode == 0, exit_.output
        assert reports(exit_, "done")


def test_a_parameter_added_on_one_rank() -> None:
    exits = spawn_ranks(fault_scripts.add_parameter_on_one_rank, 2)
    assert_told(exits[VICTIM], kinds=("ConfigError",), within_s=TIMEOUT_S, words=(r"late\.weight",))
    other = exits[1 - VICTIM]
    kinds = ("ConfigError", "PeerFailure", "PeerTimeout")
    assert_told(other, kinds=kinds, within_s=TIMEOUT_S + SLACK_S, words=(NAMES_VICTIM,))


def test_wrap_on_one_rank_only() -> None:
    with start_ranks(fault_scripts.wrap_on_one_rank_only, 2) as ranks:
        (other,) = ranks.wait(40, [1 - VICTIM])
        words = ("wrap|set-up", NAMES_VICTIM, f"did not come within {TIMEOUT_S:g} s")
        assert_told(other, kinds=("PeerTimeout",), within_s=TIMEOUT_S + SLACK_S, words=words)
