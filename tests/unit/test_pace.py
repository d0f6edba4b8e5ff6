"""Means over the last steps, in whole cycles of an algorithm."""

from __future__ import annotations

from unittest import mock

import pytest

from commlib.engine import pace
from commlib.engine.pace import Means, Pace


def after(cycle: int, steps: int, bytes_at: dict[int, float], waits_at: dict[int, float] | None = None) -> Means:
    """Return the means after steps of 2 seconds each; bytes and waits are given by step, from 1 on."""
    found = Pace(cycle)
    sent = waited = 0.0
    for step in range(1, steps + 1):
        sent += bytes_at.get(step, 0.0)
        waited += (waits_at or {}).get(step, 0.0)
        with mock.patch.object(pace, "time", mock.Mock(perf_counter=mock.Mock(return_value=2.0 * step))):
            found.note(sent, waited)
    return found.means()


def test_there_is_no_mean_before_two_steps() -> None:
    assert after(1, 0, {}) == Means()
    assert after(1, 1, {1: 5.0}) == Means()


def test_the_mean_is_of_what_came_since_the_first_step() -> None:
    assert after(1, 5, {1: 100.0, 3: 8.0}, {5: 4.0}) == Means(4, 2.0, 2.0, 1.0)


@pytest.mark.parametrize("steps", [5, 6, 7, 8])
def test_the_mean_is_of_whole_cycles(steps: int) -> None:
    every_fourth = dict.fromkeys(range(4, 100, 4), 40.0)
    assert after(4, steps, every_fourth).bytes == 10.0


def test_old_steps_are_forgotten() -> None:
    assert after(1, 500, {2: 1e9}).bytes == 0.0
    assert after(1, 500, {499: 64.0}) == Means(64, 1.0, 2.0, 0.0)


def test_a_long_cycle_is_kept_whole() -> None:
    every = dict.fromkeys(range(500, 2001, 500), 500.0)
    assert after(500, 2000, every) == Means(500, 1.0, 2.0, 0.0)
