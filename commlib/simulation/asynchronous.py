"""Rounds that no step waits for, where ranks differ: each rank has a schedule and a clock of its own.

[Note: asynchronous rounds] A rank comes to the next round at the first step end at which its schedule starts one; the
round begins when the last rank has come, lasts as long as it does on idle links, and a rank takes its result at its
first step end after that. What a round costs the computation beside it (the copy, local work, processor time of the
collectives) is what it costs where all ranks are alike; it is charged when a rank starts a round.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from commlib.algorithms.channels import Channel, Weights
from commlib.engine.rounds.schedule import Progress, Schedule


@dataclass
class _Rank:
    progress: Progress
    schedule: Schedule
    now_s: float
    num_steps: int = 0
    num_rounds: int = 0  # that it has come to
    ends_s: list[float] = field(default_factory=list)  # of its steps


@dataclass(frozen=True)
class Outcome:
    """What the ranks did.

    Attributes:
        ends_s: [world_size, num_steps] When each step ended.
        rounds_per_step: Rounds that were completed, per step of a rank.
    """

    ends_s: np.ndarray
    rounds_per_step: float


def run(channel: Channel, steps_s: np.ndarray, round_s: float, overhead_s: np.ndarray) -> Outcome:
    """Run every rank's steps, in the order of time.

    Args:
        channel: Of an asynchronous algorithm.
        steps_s: [world_size, num_steps] What the computation of each step takes.
        round_s: What a round takes from the moment at which the last rank has come.
        overhead_s: [world_size] What a round costs the computation of each rank.
    """
    world_size, num_steps = steps_s.shape
    assert isinstance(channel, Weights)
    ranks = [_rank(channel, float(steps_s[rank, 0])) for rank in range(world_size)]
    num_come: list[int] = []
    ends_s: list[float] = []  # of rounds that all ranks have come to
    queue = [(rank.now_s, idx) for idx, rank in enumerate(ranks)]
    heapq.heapify(queue)
    while queue:
        now_s, idx = heapq.heappop(queue)
        rank = ranks[idx]
        own = rank.num_rounds - 1
        rank.progress.end_step()
        due = rank.schedule.end_step(0 <= own < len(ends_s) and ends_s[own] <= now_s)
        if due.start:
            if rank.num_rounds == len(num_come):
                num_come.append(0)
            num_come[rank.num_rounds] += 1
            if num_come[rank.num_rounds] == world_size:
                ends_s.append(now_s + round_s)
            rank.num_rounds += 1
            now_s += overhead_s[idx]
        rank.ends_s.append(now_s)
        rank.num_steps += 1
        if rank.num_steps < num_steps:
            heapq.heappush(queue, (now_s + float(steps_s[idx, rank.num_steps]), idx))
    ends = np.array([rank.ends_s for rank in ranks])
    num_done = sum(end_s <= float(ends.max()) for end_s in ends_s)
    return Outcome(ends, num_done / num_steps)


def _rank(channel: Weights, now_s: float) -> _Rank:
    """Return a rank whose warm-up is over."""
    progress = Progress(channel)
    progress.step = channel.warmup_steps
    return _Rank(progress, Schedule(channel, progress), now_s)
