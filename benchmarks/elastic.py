"""Measure how long an elastic job stands still when a member is killed, and what following views costs without kills.

python benchmarks/elastic.py --algorithms allreduce,topk --members 4,8 --kills 30 --json out.json
python benchmarks/elastic.py --static --json out.json        # steps without kills, compared with a static group

Members are forked from one process that has imported everything. Each step sleeps instead of computing, so that several
members fit two cores. After each kill another member joins. The time of a kill is that from the kill to the end of the
next round at the last of the others, less the median duration of an undisturbed round of the same run.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn

import commlib
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
    parser.add_argument("--seed", type=int, default=0)
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
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    commlib.wrap(model, args.algorithm, optimizer=optimizer, process_group=group, bucket_cap_mb=25)
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


class Job:
    """A service and its members."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
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
            members = commlib.elastic.join(self._address, timeout=_LIMIT_S)

            def steps(_: Any) -> Iterator[int]:
                while True:
                    yield members.num_rounds + 1

            train(self._args, members, steps, self._writing)

        pid = forked(run)
        self.ends[pid] = []
        return pid

    def read(self) -> None:
        """Take the ends of rounds that have been written."""
        if not self._selector.select(_LIMIT_S):
            raise TimeoutError(f"no round ended within {_LIMIT_S:g} s")
        *lines, self._left = (self._left + os.read(self._reading, 1 << 16)).split(b"\n")
        for line in lines:
            pid, number, at_s = line.split()
            if int(pid) in self.ends:
                self.ends[int(pid)].append((int(number), float(at_s)))

    def wait(self, count: int) -> None:
        """Wait until every member has ended this many further rounds."""
        before = {pid: len(ends) for pid, ends in self.ends.items()}
        while any(len(ends) < before[pid] + count for pid, ends in self.ends.items()):
            self.read()

    def kill(self, pid: int) -> float:
        """Kill a member; return the seconds until all others have ended another round."""
        del self.ends[pid]
        os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        os.waitpid(pid, 0)
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
    job = Job(args)
    try:
        for _ in range(args.members):
            job.start()
        job.wait(8)
        for _ in range(args.kills):
            rounds_s += job.durations()
            time.sleep(choose.uniform(0, 2 * statistics.median(rounds_s)))
            kills_s.append(job.kill(choose.choice(sorted(job.ends))))
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


def measure_steps(args: argparse.Namespace, count: int = 60) -> dict[str, Any]:
    """Compare the steps of an elastic and a static group, one after the other, twice."""
    medians: dict[str, list[float]] = {"elastic": [], "static": []}
    for _ in range(2):
        job = Job(args)
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
    for algorithm, count in itertools.product(args.algorithms.split(","), args.members.split(",")):
        args.algorithm, args.members = algorithm, int(count)
        rows.append(measure_steps(args) if args.static else measure_kills(args))
        print(json.dumps(rows[-1], indent=1), flush=True)
    if args.json:
        harness.write_json(args.json, {"header": harness.header(), "rows": rows})


if __name__ == "__main__":
    main()
