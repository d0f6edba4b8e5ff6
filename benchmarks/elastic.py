"""Measure how long an elastic job stands still when a member is killed, and what following views costs without kills.

python benchmarks/elastic.py --algorithms allreduce,topk --members 4,8 --kills 30 --json out.json
python benchmarks/elastic.py --static --json out.json        # steps without kills, compared with a static group
python benchmarks/elastic.py --losses digits --steps 300 --seeds 0,1,2 --json out.json    # the loss with kills
python benchmarks/elastic.py --joins 3 --algorithms diloco --period 100 --mb 64 --json out.json    # joins

Members are forked from one process that has imported everything. Each step sleeps instead of computing, so that several
members fit two cores. After each kill another member joins. The time of a kill is that from the kill to the end of the
next round at the last of the others, less the median duration of an undisturbed round of the same run.

With `--joins`, members join one after the other, and the longest step of the others meanwhile is compared with their
median step: with the state in the background, and without that. The optimizer is AdamW.

With `--losses`, members train a model of the other benchmarks on its data, once undisturbed and once with a kill and a
join every `--every` rounds, from the same weights. Rank r draws the batch (seed, round, r) in both runs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from models import WORKLOADS
from torch import nn
from worker import schedule

import commlib
from commlib.elastic.precopy import PreCopy
from commlib.kernels import native

_LIMIT_S = 120.0


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", default="allreduce", help="comma-separated")
    parser.add_argument("--members", default="4", help="numbers of members, comma-separated")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--mb", type=float, default=8.0, help="size of the gradients, in MB")
    parser.add_argument("--compute-ms", type=float, default=100.0, help="duration of the sleep in each step")
    parser.add_argument("--static", action="store_true", help="compare steps with those of a static group instead")
    parser.add_argument("--joins", type=int, default=0, help="measure this many joins instead")
    parser.add_argument("--period", type=int, help="period of an algorithm with local steps, with --joins")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--losses", metavar="MODEL", choices=sorted(WORKLOADS), help="compare losses on this model")
    parser.add_argument("--steps", type=int, default=300, help="rounds of each run, with --losses")
    parser.add_argument("--every", type=int, default=50, help="rounds between two kills, with --losses")
    parser.add_argument("--seeds", default="0,1,2", help="with --losses, comma-separated")
    parser.add_argument("--json", help="file for the results")
    return parser.parse_args(argv)


def make_model(num_bytes: float) -> nn.Module:
    """Return a model whose gradients have about this size."""
    width = int((num_bytes / 4 / 8) ** 0.5)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8)))


def train(args: argparse.Namespace, group: Any, steps: Any, out: int) -> None:
    """Make steps, and write the number and the end of each to a pipe."""
    torch.manual_seed(0)
    model = make_model(args.mb * 1e6)
    make = torch.optim.AdamW if args.joins else torch.optim.SGD
    optimizer = make(model.parameters(), lr=1e-3)
    algorithm = commlib.algorithms.create(args.algorithm)
    if args.period:
        algorithm = type(algorithm)(period=args.period)  # type: ignore[call-arg]
    commlib.wrap(model, algorithm, optimizer=optimizer, process_group=group, bucket_cap_mb=25)
    inputs = torch.randn(1, model[0].in_features)
    for step in steps(group):
        time.sleep(args.compute_ms / 1000)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        os.write(out, f"{os.getpid()} {step} {time.monotonic()}\n".encode())


def forked(run: Any) -> int:
    """Run a function in a forked process; return its pid."""
    if (pid := os.fork()) == 0:
        try:
            run()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return pid


def sleep_and_train(args: argparse.Namespace, members: Any, out: int) -> None:
    """Make steps without end."""

    def steps(_: Any) -> Iterator[int]:
        while True:
            yield members.num_rounds + 1

    train(args, members, steps, out)


def learn(args: argparse.Namespace, members: Any, out: int) -> None:
    """Train a model for `args.steps` rounds, the last one when `args.may_end` exists; write its loss on unseen data."""
    workload = WORKLOADS[args.losses]()
    assert workload.validation is not None
    model = workload.new_model(args.seed, torch.device("cpu"))
    optimizer = workload.make_optimizer(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    commlib.wrap(model, args.algorithm, optimizer=optimizer, process_group=members)
    while (number := members.num_rounds + 1) <= args.steps:
        while number in (1, args.steps) and not is_complete(args, members, number):
            time.sleep(0.01)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * schedule(number - 1, args.steps)
        time.sleep(args.compute_ms / 1000)
        inputs, target = workload.draw((args.seed, number, members.rank))
        optimizer.zero_grad()
        workload.loss(model(inputs), target).backward()
        optimizer.step()
        os.write(out, f"{os.getpid()} {number} {time.monotonic()}\n".encode())
    model.eval()
    with torch.no_grad():
        losses = [workload.loss(model(inputs), target).item() for inputs, target in workload.validation()]
    os.write(out, f"{os.getpid()} loss {statistics.mean(losses)}\n".encode())
    members.close()


def is_complete(args: argparse.Namespace, members: Any, number: int) -> bool:
    """Whether all members are there for the first round, and after all kills and joins for the last one."""
    count = 0 if members.view is None else len(members.view.ids)
    return count == args.members and (number == 1 or os.path.exists(args.may_end))


class Job:
    """A service and its members.

    Args:
        args: The arguments of the command.
        run: Trains one member: called with `args`, the members, and a pipe for the numbers and the ends of its rounds.

    Attributes:
        ends: The numbers and the ends of the rounds of each member that was not killed, by its process.
        losses: The final losses.
    """

    def __init__(self, args: argparse.Namespace, run: Callable[[argparse.Namespace, Any, int], None]) -> None:
        self._args, self._run = args, run
        self.losses: dict[int, float] = {}
        self.ends: dict[int, list[tuple[int, float]]] = {}
        self._folder = tempfile.TemporaryDirectory()
        command = ["rendezvous", "--fresh", "--port", "0", "--journal", str(Path(self._folder.name) / "journal")]
        self._service = subprocess.Popen(
            [sys.executable, "-m", "commlib", *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._service.stdout is not None
        self._address = self._service.stdout.readline().split(": ")[1]
        self._reading, self._writing = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._reading, selectors.EVENT_READ)
        self._left = b""

    def start(self) -> int:
        """Start a member; return its pid."""

        def run() -> None:
            self._run(self._args, commlib.elastic.join(self._address, timeout=_LIMIT_S), self._writing)

        pid = forked(run)
        self.ends[pid] = []
        return pid

    def read(self) -> None:
        """Take the ends of rounds that have been written."""
        if not self._selector.select(_LIMIT_S):
            raise TimeoutError(f"no round ended within {_LIMIT_S:g} s")
        *lines, self._left = (self._left + os.read(self._reading, 1 << 16)).split(b"\n")
        for line in lines:
            pid, what, value = line.split()
            if what == b"loss":
                self.losses[int(pid)] = float(value)
            elif int(pid) in self.ends:
                self.ends[int(pid)].append((int(what), float(value)))

    def wait(self, count: int) -> None:
        """Wait until every member has ended this many further rounds."""
        before = {pid: len(ends) for pid, ends in self.ends.items()}
        while any(len(ends) < before[pid] + count for pid, ends in self.ends.items()):
            self.read()

    def wait_for(self, number: int) -> None:
        """Wait until a member has ended this round."""
        while not any(ends and ends[-1][0] >= number for ends in self.ends.values()):
            self.read()

    def kill(self, pid: int) -> float:
        """Kill a member; return when, in seconds of the monotonic clock."""
        del self.ends[pid]
        os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        os.waitpid(pid, 0)
        return killed_s

    def kill_and_wait(self, pid: int) -> float:
        """Kill a member; return the seconds until all others have ended another round."""
        killed_s = self.kill(pid)
        while not all(ends and ends[-1][1] > killed_s for ends in self.ends.values()):
            self.read()
        first = [next(at_s for _, at_s in ends if at_s > killed_s) for ends in self.ends.values()]
        return max(first) - killed_s

    def durations(self) -> list[float]:
        """Return the durations of the last rounds of all members."""
        return [b[1] - a[1] for ends in self.ends.values() for a, b in zip(ends[-6:], ends[-5:], strict=False)]

    def close(self) -> None:
        """End everything."""
        for pid in self.ends:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        self._service.terminate()
        self._service.communicate()
        self._folder.cleanup()


def measure_kills(args: argparse.Namespace) -> dict[str, Any]:
    """Kill members at random moments."""
    choose, kills_s, rounds_s = random.Random(args.seed), [], []
    job = Job(args, sleep_and_train)
    try:
        for _ in range(args.members):
            job.start()
        job.wait(8)
        for _ in range(args.kills):
            rounds_s += job.durations()
            time.sleep(choose.uniform(0, 2 * statistics.median(rounds_s)))
            kills_s.append(job.kill_and_wait(choose.choice(sorted(job.ends))))
            job.start()
            job.wait(8)
    finally:
        job.close()
    round_s = statistics.median(rounds_s)
    extra_s = sorted(each - round_s for each in kills_s)
    return {
        "algorithm": args.algorithm,
        "members": args.members,
        "mb": args.mb,
        "kills": args.kills,
        "round_s": round_s,
        "median_extra_s": statistics.median(extra_s),
        "p95_extra_s": extra_s[min(len(extra_s) - 1, int(0.95 * len(extra_s)))],
        "longest_extra_s": extra_s[-1],
    }


def measure_joins(args: argparse.Namespace) -> dict[str, Any]:
    """Let members join, with the state in the background and without."""
    return {
        "algorithm": args.algorithm,
        "members": args.members,
        "mb": args.mb,
        "period": args.period,
        "compute_ms": args.compute_ms,
        "joins": args.joins,
        "in_background": longest_steps(args),
        "while_others_wait": longest_steps(args, in_background=False),
    }


def longest_steps(args: argparse.Namespace, in_background: bool = True) -> dict[str, Any]:
    """Let members join one after the other; return the longest step of the others during each join, in seconds."""
    job, longest_s, joins_s, steps_s = Job(args, sleep_and_train), [], [], []

    def omit(*_: Any) -> None:
        pass

    before = PreCopy._receive
    try:
        if not in_background:
            PreCopy._receive = omit  # type: ignore[method-assign]
        for _ in range(args.members):
            job.start()
        job.wait(8)
        marks = {pid: len(ends) for pid, ends in job.ends.items()}
        job.wait(2 * (args.period or 8))
        undisturbed_s = max(b[1] - a[1] for pid, e in job.ends.items() for a, b in itertools.pairwise(e[marks[pid] :]))
        for _ in range(args.joins):
            others = dict(job.ends)
            marks = {pid: len(ends) for pid, ends in others.items()}
            began_s = time.monotonic()
            new = job.start()
            while not job.ends[new]:
                job.read()
            joins_s.append(job.ends[new][0][1] - began_s)
            until = {pid: len(ends) + 1 for pid, ends in others.items()}  # the step in which it takes part
            while any(len(ends) < until[pid] for pid, ends in others.items()):
                job.read()
            during = [b[1] - a[1] for pid, e in others.items() for a, b in itertools.pairwise(e[marks[pid] - 1 :])]
            longest_s.append(max(during))
            steps_s += during
            job.kill(new)
            job.wait(8)
    finally:
        job.close()
        PreCopy._receive = before  # type: ignore[method-assign]
    return {
        "step_s": statistics.median(steps_s),
        "longest_undisturbed_step_s": undisturbed_s,
        "longest_step_s": longest_s,
        "join_s": joins_s,
    }


def measure_losses(args: argparse.Namespace) -> dict[str, Any]:
    """Compare the loss with that of an undisturbed run of the same seed."""
    undisturbed, _ = final_loss(args, with_kills=False)
    disturbed, num_kills = final_loss(args, with_kills=True)
    return {
        "model": args.losses,
        "algorithm": args.algorithm,
        "members": args.members,
        "steps": args.steps,
        "seed": args.seed,
        "kills": num_kills,
        "compute_ms": args.compute_ms,
        "undisturbed_loss": undisturbed,
        "disturbed_loss": disturbed,
        "gap_percent": 100 * (disturbed / undisturbed - 1),
    }


def final_loss(args: argparse.Namespace, with_kills: bool) -> tuple[float, int]:
    """Train once; return the loss, which is the same at all members, and the number of kills."""
    choose, dues = random.Random(args.seed), list(range(args.every, args.steps, args.every)) if with_kills else []
    with tempfile.TemporaryDirectory() as folder:
        args.may_end = f"{folder}/may end"
        job = Job(args, learn)
        try:
            for _ in range(args.members):
                job.start()
            for due in dues:
                job.wait_for(due)
                time.sleep(choose.uniform(0, 2 * statistics.median(job.durations())))
                job.kill(choose.choice(sorted(job.ends)))
                job.start()
            Path(args.may_end).touch()
            while len(job.losses) < len(job.ends):
                job.read()
        finally:
            job.close()
    (loss,) = set(job.losses.values())
    return loss, len(dues)


def measure_steps(args: argparse.Namespace, count: int = 60) -> dict[str, Any]:
    """Compare the steps of an elastic and a static group, one after the other, twice."""
    medians: dict[str, list[float]] = {"elastic": [], "static": []}
    for _ in range(2):
        job = Job(args, sleep_and_train)
        try:
            for _ in range(args.members):
                job.start()
            job.wait(count + 10)
            medians["elastic"].append(statistics.median(steps_of(job.ends, count)))
        finally:
            job.close()
        medians["static"].append(static_step_s(args, count))
    ratios = [a / b for a, b in zip(medians["elastic"], medians["static"], strict=True)]
    return {"algorithm": args.algorithm, "members": args.members, "mb": args.mb, **medians, "ratios": ratios}


def steps_of(ends: dict[int, list[tuple[int, float]]], count: int) -> list[float]:
    return [b[1] - a[1] for each in ends.values() for a, b in zip(each[-count - 1 : -1], each[-count:], strict=True)]


def static_step_s(args: argparse.Namespace, count: int) -> float:
    """Return the median step of a static group."""
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory() as folder:

        def run(rank: int) -> None:
            store = dist.FileStore(f"{folder}/store", args.members)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=args.members)
            train(args, None, lambda _: range(count + 10), writing)

        pids = [forked(lambda rank=rank: run(rank)) for rank in range(args.members)]
        for pid in pids:
            os.waitpid(pid, 0)
    os.close(writing)
    ends: dict[int, list[tuple[int, float]]] = {pid: [] for pid in pids}
    with os.fdopen(reading) as lines:
        for line in lines:
            pid, number, at_s = line.split()
            ends[int(pid)].append((int(number), float(at_s)))
    return statistics.median(steps_of(ends, count))


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # imports much on first use
    native.load()
    rows = []
    measure = measure_losses if args.losses else measure_steps if args.static else measure_kills
    measure = measure_joins if args.joins else measure
    seeds = args.seeds.split(",") if args.losses else [args.seed]
    for algorithm, count, seed in itertools.product(args.algorithms.split(","), args.members.split(","), seeds):
        args.algorithm, args.members, args.seed = algorithm, int(count), int(seed)
        rows.append(measure(args))
        print(json.dumps(rows[-1], indent=1), flush=True)
    if args.json:
        harness.write_json(args.json, {"header": harness.header(), "rows": rows})


if __name__ == "__main__":
    main()
