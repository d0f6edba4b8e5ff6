"""From losses at the end of budgets and from step times: how long each system takes to the loss that DDP reaches.

python benchmarks/time_to_loss.py headline-*.json --losses final.json --model digits --optimizer sgd --steps 300

DDP's loss is that of all-reduce after `--steps` steps, mean over seeds. Each system needs the smallest number of steps,
among the budgets that it was trained for, after which its own loss is at most `--within` above. Its time is that number
times its measured step. A system that a step file lacks is shown with the step without communication, which is less.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np
from rich.table import Table
from systems import parse

_REFERENCE = "commlib:allreduce"
#: What says how to begin, not what a step is.
_BEGINNING = ("warmup_steps", "ratio_warmup_steps")
_RATE = re.compile(r",?lr=[^,)]*")


def identity(name: str) -> str:
    """Return what a system is called in all files: without bucket sizes and warm-up."""
    system = parse(name)
    if system.kind == "ddp" and not system.variant:
        return _REFERENCE
    label = f"{system.kind}:{system.variant}" if system.variant else system.kind
    rate = [] if system.lr is None else [f"lr={system.lr:g}"]
    options = ",".join([*(f"{key}={value}" for key, value in system.options if key not in _BEGINNING), *rate])
    return f"{label}({options})" if options else label


def steps_to_loss(rows: Sequence[dict[str, Any]], steps: int, within: float) -> dict[str, tuple[int | None, float]]:
    """Return for each system the steps that it needs (None: more than it was trained for), and its loss after `steps`.

    Args:
        rows: Of `convergence.py final`: one model and optimizer.
        steps: DDP's budget.
        within: How far a loss may be above DDP's, relative.
    """
    losses: dict[str, dict[int, dict[int, float]]] = {}
    for row in rows:
        losses.setdefault(identity(row["system"]), {}).setdefault(row["steps"], {})[row["seed"]] = row["loss"]
    target = losses[_REFERENCE][steps]
    found = {}
    for system, budgets in losses.items():
        change = {
            budget: float(np.mean([loss / target[seed] - 1 for seed, loss in by_seed.items() if seed in target]))
            for budget, by_seed in budgets.items()
        }
        enough = [budget for budget, value in change.items() if value <= within]
        found[system] = (min(enough, default=None), change.get(steps, float("nan")))
    return found


def summary(step_rows: Iterable[dict[str, Any]], needed: dict[str, tuple[int | None, float]]) -> list[dict[str, Any]]:
    """Return one line per system: its step, its steps, and its time to DDP's."""
    times: dict[str, float] = {}
    for row in step_rows:  # of DDP's configurations the fastest counts
        name = identity(row["system"])
        times[name] = min(row["step_s"], times.get(name, row["step_s"]))
    reference_steps, _ = needed[_REFERENCE]
    assert reference_steps is not None
    whole_s = times[_REFERENCE] * reference_steps
    lines = []
    for system, (steps, change) in needed.items():
        timed = times.get(identity(_RATE.sub("", system)))  # a step takes as long at any learning rate
        step_s = times["none"] if timed is None else timed
        line = {
            "system": system,
            "is_measured": timed is not None,
            "step_s": step_s,
            "steps": steps,
            "change": change,
            "speed_up": None if steps is None else whole_s / (step_s * steps),
        }
        lines.append(line)
    return sorted(lines, key=lambda line: -(line["speed_up"] or 0))


def table(title: str, lines: Sequence[dict[str, Any]], steps: int) -> Table:
    """Return the lines as a table for the terminal."""
    shown = Table(title=title, title_justify="left")
    for column in (
        "system",
        "step ms",
        f"loss after {steps}, to DDP's",
        "steps to DDP's loss",
        "times faster than DDP",
    ):
        shown.add_column(column, justify="left" if column == "system" else "right")
    for line in lines:
        bound = "" if line["is_measured"] else "> "
        faster = "" if line["speed_up"] is None else f"{'< ' if bound else ''}{line['speed_up']:.2f}"
        needed = "more than tried" if line["steps"] is None else str(line["steps"])
        shown.add_row(line["system"], f"{bound}{line['step_s'] * 1e3:.0f}", f"{line['change']:+.1%}", needed, faster)
    return shown


def main() -> None:
    """Print a table for each file of step times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step_files", nargs="+", help="results of step.py, with the systems none and ddp")
    parser.add_argument("--losses", required=True, nargs="+", help="results of convergence.py final")
    parser.add_argument("--model", required=True, help="the trained one, as in the losses")
    parser.add_argument("--optimizer", required=True)
    parser.add_argument("--steps", type=int, required=True, help="DDP's budget")
    parser.add_argument("--within", type=float, default=0.005)
    args = parser.parse_args()
    rows = [row for name in args.losses for row in json.loads(Path(name).read_text())["rows"]]
    own = [row for row in rows if (row["model"], row["optimizer"]) == (args.model, args.optimizer)]
    needed = steps_to_loss(own, args.steps, args.within)
    for name in args.step_files:
        result = json.loads(Path(name).read_text())
        row = result["rows"][0]
        title = f"{row['model']}, {row['hosts']} hosts at {row['rate']}; losses of {args.model}, {args.optimizer}"
        harness.print_table(table(title, summary(result["rows"], needed), args.steps))


if __name__ == "__main__":
    main()
