"""Asynchronous rounds on ranks of different speed. Each rank has its own schedule and clock.

[Note: asynchronous rounds] A rank joins the next round at the first step end at which its schedule starts one. The
round begins when the last rank has joined and takes as long as on idle links. A rank takes the result at its first step
end after that. The cost of a round to the concurrent computation (the copy, local work, processor time of the
collectives) is the cost on ranks of equal speed. It is charged when a rank starts a round.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from commlib.algorithms.channels import Channel, Weights
from commlib.engine.rounds.schedule import Schedule, StepCounter


@dataclass
class _Rank:
    counter: StepCounter
    schedule: Schedule
    now_s: float
    num_steps: int = 0
    num_rounds: int = 0  # rounds that it has joined
    ends_s: list[float] = field(default_factory=list)  # end of each of its steps


@dataclass(frozen=True)
class Outcome:
    """Timing of the ranks.

    Attributes:
        ends_s: [world_size, num_steps] End of each step.
        rounds_per_step: Completed rounds per step of a rank.
    """

    ends_s: np.ndarray
    rounds_per_step: float


def run(channel: Channel, steps_s: np.ndarray, round_s: float, overhead_s: np.ndarray) -> Outcome:
    """Run the steps of all ranks in the order of time.

    Args:
        channel: Channel of an asynchronous algorithm.
        steps_s: [world_size, num_steps] Seconds of computation in each step.
        round_s: Seconds of a round from the moment at which the last rank has joined.
        overhead_s: [world_size] Seconds that a round costs the computation of each rank.
    """
    world_size, num_steps = steps_s.shape
    assert isinstance(channel, Weights)
    ranks = [_rank(channel, float(steps_s[rank, 0])) for rank in range(world_size)]
    num_come: list[int] = []
    ends_s: list[float] = []  # of the rounds that all ranks have joined
    queue = [(rank.now_s, idx) for idx, rank in enumerate(ranks)]
    heapq.heapify(queue)
    while queue:
        now_s, idx = heapq.heappop(queue)
        rank = ranks[idx]
        own = rank.num_rounds - 1
        rank.counter.end_step()
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
    """Return a rank after its warm-up."""
    counter = StepCounter(channel)
    counter.step = channel.warmup_steps
    return _Rank(counter, Schedule(channel, counter), now_s)
