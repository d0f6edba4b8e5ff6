"""Quality of the plans that commlib's trials choose: all candidates timed to the end, and the rule replayed on them.

    python benchmarks/trials.py --ranks 4 --model cnn --json trials-r4-cnn.json    # records, then replays
    python benchmarks/trials.py --replay trials-*.json                             # replays the records

The candidates take turns, up and down, for `--passes` passes. A plan's true time is the median of all its steps on
its slowest rank. Then the rule (`commlib.engine.planning.trials.Trials`) runs on these steps once from each visit on,
as if training had begun there. The result compares the chosen plan with the best.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import harness
import torch.distributed as dist
from models import WORKLOADS
from rich.table import Table

from commlib.engine.planning import search
from commlib.engine.planning.plan import Plan
from commlib.engine.planning.trials import Figure, Trials

_SLOW = 0.01


# --- recording, on each rank -----------------------------------------------------------------------------------------


class Rotation(Trials):
    """Trials in which no plan drops out before the last of `wanted` passes."""

    wanted = 0
    recorded: dict[Plan, list[float]]
    ended: Rotation | None = None

    def end_pass(self, figures: Sequence[Figure]) -> None:
        """Begin the next pass with all plans; after the last one the first plan stays."""
        self._num_passes += 1
        if self._num_passes < self.wanted:
            self._visits = self._there_and_back()
            return
        Rotation.ended = self
        self.recorded = self._steps_s
        self._steps_s = {self.plans[0]: []}


def record(bench: Any) -> dict[str, Any]:
    """Train until all passes are over; returns the plans and every rank's steps."""
    from systems import parse

    Rotation.wanted = bench.spec["passes"]
    search.Trials = Rotation
    racer = bench.racer(parse("commlib:allreduce"))
    while not racer.is_planned():
        racer.step(bench.batches[racer.num_steps % len(bench.batches)])
        bench.progress("recording", 1)
    if Rotation.ended is None:
        raise RuntimeError("there was one plan only, so nothing to try")
    plans = list(Rotation.ended.recorded)
    numels = [parameter.numel() for parameter in racer.model.parameters()]
    steps_s = [[round(step_s, 7) for step_s in own] for own in Rotation.ended.recorded.values()]
    gathered: list[Any] = [None] * bench.world_size
    dist.all_gather_object(gathered, steps_s)
    return {
        "steps_per_visit": Rotation.ended._steps_per_visit,
        "bucket_numels": [[sum(numels[idx] for idx in bucket) for bucket in plan.buckets] for plan in plans],
        "steps_s": gathered,  # [rank][plan][step]
    }


# --- replaying -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The result of one race: its plan's true slowdown against the best plan, and the number of its steps."""

    excess: float
    steps: int


class Recording:
    """All steps of all plans, as the ranks saw them."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.steps_s: list[list[list[float]]] = result["steps_s"]
        self.steps_per_visit: int = result["steps_per_visit"]
        # Only the number of buckets of a plan counts here; `which` distinguishes plans with equal numbers.
        self.plans = [
            Plan(tuple((which, idx) for idx in range(len(numels))), "trial")
            for which, numels in enumerate(result["bucket_numels"])
        ]
        self.num_visits = len(self.steps_s[0][0]) // self.steps_per_visit
        self.true_s = [max(median(rank[which]) for rank in self.steps_s) for which in range(len(self.plans))]

    def replay(self, start: int) -> Outcome:
        """Run one race from visit number `start` of each plan on; after the last visit comes the first."""
        ranks = [Trials(self.plans, self.steps_per_visit) for _ in self.steps_s]
        visits, num_steps, now_s = dict.fromkeys(self.plans, start), 0, 0.0
        while (plan := ranks[0].current) is not None:
            begin = visits[plan] % self.num_visits * self.steps_per_visit
            visits[plan] += 1
            num_steps += 1 + self.steps_per_visit
            for trials, of_plans in zip(ranks, self.steps_s, strict=True):
                trials.step_ended(now_s)
                for step_s in of_plans[self.plans.index(plan)][begin : begin + self.steps_per_visit]:
                    now_s += step_s
                    trials.step_ended(now_s)
            if ranks[0].current is None:
                figures = [max(column) for column in zip(*(trials.figures for trials in ranks), strict=True)]
                for trials in ranks:
                    trials.end_pass(figures)
        left = self.plans.index(ranks[0].plans[0])
        return Outcome(self.true_s[left] / min(self.true_s) - 1, num_steps)


def summarize(result: dict[str, Any]) -> dict[str, Any]:
    """Return the plans' true times relative to the best, and the results of the races from all visits."""
    recording = Recording(result)
    races = [recording.replay(start) for start in range(recording.num_visits)]
    return {
        "best_s": min(recording.true_s),
        "to_best": [true_s / min(recording.true_s) for true_s in recording.true_s],
        "races": len(races),
        "slow": sum(race.excess > _SLOW for race in races),
        "mean_excess": mean(race.excess for race in races),
        "mean_steps": mean(race.steps for race in races),
    }


def print_summary(name: str, result: dict[str, Any]) -> None:
    """Print the table of one recording, and a line on the races."""
    found = summarize(result)
    table = Table("buckets, MiB", "to the best", title=f"{name}: {1e3 * found['best_s']:.1f} ms")
    for numels, to_best in sorted(zip(result["bucket_numels"], found["to_best"], strict=True), key=lambda row: row[1]):
        table.add_row(", ".join(f"{4 * numel / 2**20:.1f}" for numel in numels), f"{to_best:.4f}")
    harness.print_table(table)
    print(
        f"{found['races']} races: {found['slow']} left a plan more than {_SLOW:.0%} slower than the best, on average "
        f"{found['mean_excess']:.2%} slower; {found['mean_steps']:.0f} steps"
    )


def main() -> None:
    """Record or replay, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=WORKLOADS, default="cnn")
    parser.add_argument("--ranks", type=int, default=2, help="processes on loopback")
    parser.add_argument("--passes", type=int, default=40, help="each visits every plan twice")
    parser.add_argument("--threads", type=int, default=1, help="compute threads per rank")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for all the steps together")
    parser.add_argument("--json", help="file for the recording")
    parser.add_argument("--replay", nargs="+", help="recordings, instead of making one")
    args = parser.parse_args()
    if args.replay:
        for name in args.replay:
            print_summary(name, json.loads(pathlib.Path(name).read_text()))
        return
    spec = {key: getattr(args, key) for key in ("model", "threads", "timeout", "passes")}
    spec |= {"mode": "trials", "device": "cpu", "seed": 0}
    with harness.ending_on_errors():
        recorded = harness.run_workers(harness.Place(args.ranks), spec, num_steps=0)
    result = {"header": {**harness.header(), **spec, "ranks": args.ranks}, **recorded}
    if args.json:
        path = pathlib.Path(args.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result))
    print_summary(f"{args.model}, {args.ranks} ranks", result)


if __name__ == "__main__":
    main()
