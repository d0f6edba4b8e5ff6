"""The cost of a slow or stopped rank for the others: throughput of asynchronous algorithms and of no communication.

    python benchmarks/straggler.py --fault slow --json slow.json     # one rank makes steps 3 times as long
    python benchmarks/straggler.py --fault stop --json stop.json     # one rank is stopped for 5 s
    python benchmarks/straggler.py slow.json stop.json --plot straggler.png    # measures nothing: prints, draws

A step is a real forward, backward and optimizer step, and a sleep between the first two that represents an
accelerator's work: without it, ranks that share cores would be slowed by each other's computation and not by the
straggler. Background work of the algorithms runs on the cores meanwhile, as it would next to an accelerator.

All systems run in turns in the same processes. A turn lasts a fixed time; throughput is the sum over the ranks of the
steps that each has made by the time of its last step. All-reduce, whose ranks must end together, makes a fixed number
of steps.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time
from typing import Any

import launch
import torch
import torch.distributed as dist
from torch import nn

SYSTEMS = ("none", "allreduce", "async_averaging", "passive_gossip", "async_sgd", "hogwild")
NUM_RANKS = 4
STRAGGLER = NUM_RANKS - 1
SLOWNESS = 3.0
STOP_S = 5.0
_TITLES = {"slow": f"one of 4 ranks {SLOWNESS:g} times slower", "stop": f"one of 4 ranks stopped for {STOP_S:g} s"}


# --- one rank --------------------------------------------------------------------------------------------------------


class Trainer:
    """One rank's steps with one system, from wrapping to unwrapping."""

    def __init__(self, system: str, spec: dict[str, Any], rank: int) -> None:
        import models

        workload = models.WORKLOADS[spec["model"]]()
        self.model: nn.Module = workload.new_model(0, torch.device("cpu"))
        self.optimizer = workload.make_optimizer(self.model)
        self.batch, self.loss = workload.draw((0, 0, rank)), workload.loss
        self.sleep_s = spec["sleep_s"]
        self.system = system
        if system != "none":
            import commlib

            options = {"period": spec["period"]} if system in ("async_averaging", "passive_gossip") else {}
            algorithm = commlib.algorithms.get(system)(**options)
            commlib.wrap(self.model, algorithm, optimizer=self.optimizer, bucket_cap_mb=25, broadcast_buffers=False)

    def step(self) -> None:
        """Make one step."""
        inputs, targets = self.batch
        output = self.model(inputs)
        time.sleep(self.sleep_s)
        self.loss(output, targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        """Unwrap the model."""
        if self.system != "none":
            import commlib

            commlib.unwrap(self.model)


def take_turn(system: str, spec: dict[str, Any], rank: int) -> dict[str, float]:
    """Return this rank's steps and the seconds that they took."""
    trainer = Trainer(system, spec, rank)
    began = time.perf_counter()
    for _ in range(spec["warm_up"]):
        trainer.step()
    dist.barrier()
    if spec["fault"] == "slow" and rank == STRAGGLER:
        busy_s = max(0.0, (time.perf_counter() - began) / spec["warm_up"] - trainer.sleep_s)
        trainer.sleep_s += (SLOWNESS - 1) * (trainer.sleep_s + min(busy_s, spec["busy_s"]))
    began, steps = time.perf_counter(), 0
    has_stopped = spec["fault"] != "stop" or rank != STRAGGLER
    while steps < spec["steps"] if system == "allreduce" else time.perf_counter() - began < spec["seconds"]:
        if not has_stopped and time.perf_counter() - began > spec["seconds"] / 4:
            has_stopped = True
            stop(STOP_S)
        trainer.step()
        steps += 1
    took_s = time.perf_counter() - began
    dist.barrier()
    trainer.close()
    dist.barrier()
    return {"steps": steps, "seconds": took_s}


def stop(seconds: float) -> None:
    """Stop this process, with all its threads, for some seconds."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def work(spec: dict[str, Any]) -> None:
    """Run all turns as one rank; rank 0 writes the result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, rows = dist.get_rank(), []
    for repetition in range(spec["repetitions"]):
        for system in spec["systems"]:
            print(f"turn of {system}", flush=True)  # shown where a turn fails
            mine = take_turn(system, spec, rank)
            everyone: list[Any] = [None] * NUM_RANKS
            dist.all_gather_object(everyone, mine)
            rates = [each["steps"] / each["seconds"] for each in everyone]
            rows.append({"system": system, "repetition": repetition, "steps_per_s": sum(rates), "by_rank": rates})
            if system == "none":
                # All-reduce goes at the straggler's pace.
                spec["steps"] = max(5, int(min(rates) * spec["seconds"]))
                spec["busy_s"] = max(0.0, 1 / max(rates) - spec["sleep_s"])
    if rank == 0:
        pathlib.Path(spec["result"]).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


# --- the driver ------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the ranks and return the result."""
    import harness

    spec: dict[str, Any] = {
        "fault": args.fault,
        "model": args.model,
        "sleep_s": args.sleep,
        "seconds": args.seconds,
        "repetitions": args.repetitions,
        "period": args.period,
        "systems": args.systems,
        "warm_up": 3,
        "steps": 5,
        "busy_s": 0.05,
    }
    with tempfile.TemporaryDirectory() as folder:
        spec["result"] = str(pathlib.Path(folder) / "result.json")
        path = pathlib.Path(folder) / "spec.json"
        path.write_text(json.dumps(spec))
        script = pathlib.Path(__file__).resolve()
        launch.run_local(NUM_RANKS, script, ["--work", str(path)], {"OMP_NUM_THREADS": "1"}, args.timeout)
        rows = json.loads(pathlib.Path(spec.pop("result")).read_text())
    return {**harness.header(), **spec, "ranks": NUM_RANKS, "rows": rows}


def summarize(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row per system: the median throughput, and its ratio to no communication by repetition."""
    rates = {
        system: [row["steps_per_s"] for row in result["rows"] if row["system"] == system]
        for system in result["systems"]
    }
    found = []
    for system, own in rates.items():
        ratios = [mine / bare for mine, bare in zip(own, rates["none"], strict=True)]
        found.append(
            {
                "system": system,
                "steps_per_s": sorted(own)[len(own) // 2],
                "ratio": sorted(ratios)[len(ratios) // 2],
                "ratio_lo": min(ratios),
                "ratio_hi": max(ratios),
            }
        )
    return found


def print_summary(result: dict[str, Any]) -> None:
    """Print the table of one result."""
    import harness
    from rich.table import Table

    table = Table("system", "steps/s, 4 ranks", "ratio to none", "lowest", "highest", title=_TITLES[result["fault"]])
    for row in summarize(result):
        numbers = (f"{row[key]:.3f}" for key in ("ratio", "ratio_lo", "ratio_hi"))
        table.add_row(row["system"], f"{row['steps_per_s']:.2f}", *numbers)
    harness.print_table(table)


def plot(path: str, results: list[dict[str, Any]]) -> None:
    """Draw the ratios of all results side by side."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(5 * len(results), 3.6), sharey=True, squeeze=False)
    for axis, result in zip(axes[0], results, strict=True):
        rows = [row for row in summarize(result) if row["system"] != "none"]
        middle = [row["ratio"] for row in rows]
        spread = [[row["ratio"] - row["ratio_lo"] for row in rows], [row["ratio_hi"] - row["ratio"] for row in rows]]
        colors = ["tab:gray" if row["system"] == "allreduce" else "tab:blue" for row in rows]
        axis.bar([row["system"] for row in rows], middle, yerr=spread, capsize=3, color=colors)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.axhline(0.9, color="black", linewidth=0.8, linestyle=":")
        axis.set_title(_TITLES[result["fault"]])
        axis.tick_params(axis="x", rotation=30)
    axes[0][0].set_ylabel("throughput, no communication = 1")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print and save; or print and plot saved results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", help="result files to show; nothing is measured")
    parser.add_argument("--fault", choices=("slow", "stop"), default="slow")
    parser.add_argument("--model", default="cnn", help="a workload of models.py")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--sleep", type=float, default=0.25, help="seconds that a step sleeps")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a turn")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--period", type=int, default=4, help="steps between the rounds of those that have a period")
    parser.add_argument("--timeout", type=float, default=900.0)
    parser.add_argument("--json", help="file for the result")
    parser.add_argument("--plot", help="file for a picture of the result files given")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(json.loads(pathlib.Path(args.work).read_text()))
    elif args.results:
        results = [json.loads(pathlib.Path(path).read_text()) for path in args.results]
        for result in results:
            print_summary(result)
        if args.plot:
            plot(args.plot, results)
    else:
        if args.systems[0] != "none":
            parser.error("--systems: the first must be 'none', to which the others are compared")
        result = measure(args)
        print_summary(result)
        if args.json:
            import harness

            harness.write_json(args.json, result)


if __name__ == "__main__":
    main()
