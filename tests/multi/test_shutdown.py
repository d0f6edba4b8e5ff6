"""However a training script ends, it ends: at once, with the right exit code, no thread left and nothing on stderr.

A shutdown that waits for one of the scripts' timeouts is a hang for these tests, as those are far longer; one that
waits for its own warns on stderr.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.multi import fault_scripts
from tests.multi.fault_scripts import HANG_S
from tests.multi.pool import RankExit, spawn_ranks, start_ranks

QUIET = ["just-end", "destroy", "unwrap-destroy", "destroy-unwrap", "destroy-use", "forward-pending", "accumulated"]


def report(rank: RankExit, event: str) -> dict[str, Any]:
    (line,) = [line for line in rank.output.splitlines() if f'"event": "{event}"' in line]
    return json.loads(line.partition("REPORT ")[2])


@pytest.mark.parametrize(
    ("script", "way"),
    [
        *((fault_scripts.shut_down, way) for way in QUIET),
        *((fault_scripts.shut_down_in_flight, way) for way in QUIET[:4]),
    ],
)
def test_a_quiet_end(script: Callable[[str], None], way: str) -> None:
    for exit_ in spawn_ranks(script, 2, way, timeout=HANG_S):
        assert exit_.returncode == 0, exit_.output
        lines = [line for line in exit_.output.splitlines() if not line.startswith("REPORT ")]
        assert lines == [], exit_.output
        if way in ("unwrap-destroy", "destroy-unwrap"):
            facts = report(exit_, "end")
            assert facts["after"] == facts["before"], facts


@pytest.mark.parametrize("way", ["wrapped", "unwrapped"])
def test_a_destroyed_group_leaves_no_threads(way: str) -> None:
    for exit_ in spawn_ranks(fault_scripts.destroy_the_group, 2, way, timeout=HANG_S):
        assert exit_.returncode == 0, exit_.output
        facts = report(exit_, "destroyed")
        assert (facts["trained"], facts["left"]) == (4, 2 if way == "wrapped" else 0), facts


def test_what_needs_a_destroyed_group_says_so() -> None:
    for exit_ in spawn_ranks(fault_scripts.ask_a_destroyed_group, 4, timeout=HANG_S):
        assert exit_.returncode == 0, exit_.output
        join, nodes = report(exit_, "join"), report(exit_, "nodes")
        assert (join["kind"], nodes["kind"]) == ("ConfigError", "TransportError")
        for error in (join, nodes):
            assert "the process group of the model has been destroyed" in error["message"], error


LOUD = {
    "sys-exit": (3, ""),
    "exception": (1, 'KeyError: "the user\'s own error"'),
    "exception-in-backward": (1, "ZeroDivisionError: in backward"),
}


@pytest.mark.parametrize(
    ("script", "way"),
    [
        *((fault_scripts.shut_down, way) for way in LOUD),
        *((fault_scripts.shut_down_in_flight, way) for way in ("sys-exit", "exception")),
    ],
)
def test_an_end_by_exception_or_exit(script: Callable[[str], None], way: str) -> None:
    code, words = LOUD[way]
    for exit_ in spawn_ranks(script, 2, way, timeout=HANG_S):
        assert exit_.returncode == code, exit_.output
        assert words in exit_.output, exit_.output
        assert "Exception ignored" not in exit_.output, exit_.output
        assert exit_.output.count("Traceback") == (1 if words else 0), exit_.output


@pytest.mark.parametrize("ranks_hit", [(0, 1), (1,)], ids=["all-ranks", "one-rank"])
def test_a_keyboard_interrupt(ranks_hit: tuple[int, ...]) -> None:
    """The ranks hit end with KeyboardInterrupt; a rank left behind gets a clear error, and all exit."""
    with start_ranks(fault_scripts.shut_down, 2, "interrupt") as ranks:
        for rank in (0, 1):
            ranks.wait_for(rank, "training")
        for rank in ranks_hit:
            ranks.signal(rank, signal.SIGINT)
        for exit_ in ranks.wait(HANG_S):
            assert exit_.returncode in (1, 130, -signal.SIGINT), exit_.output
            allowed = (
                "KeyboardInterrupt" if exit_.rank in ranks_hit and len(ranks_hit) == 1 else "(KeyboardInterrupt|Peer)"
            )
            assert_matches(allowed, exit_.output)


def assert_matches(pattern: str, text: str) -> None:
    assert re.search(pattern, text), f"{pattern!r} is not in:\n{text}"
