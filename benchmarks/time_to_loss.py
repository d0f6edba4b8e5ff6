"""From losses at the end of budgets: the steps, rounds, bytes and time of each system to DDP's loss.

python benchmarks/time_to_loss.py --losses final.json --model digits --optimizer sgd --steps 300 --within 0.01
python benchmarks/time_to_loss.py headline-*.json --losses final.json --model digits --optimizer sgd --steps 300

DDP's loss is that of all-reduce after `--steps` steps, mean over seeds. Each system needs the smallest number of steps,
among the budgets that it was trained for, after which its own loss is at most `--within` above. With files of step
times, its time is that number times its measured step; a system missing in a step file is shown with the shorter step
without communication.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np
from rich.table import Table
from systems import parse

_REFERENCE = "commlib:allreduce"
#: Options that affect only the first steps.
_BEGINNING = ("warmup_steps", "ratio_warmup_steps")
_RATE = re.compile(r",?\blr=[^,)]*")


def identity(name: str) -> str:
    """Return the name of a system in all files: without bucket sizes and warm-up."""
    system = parse(name)
    if system.kind == "ddp" and not system.variant:
        return _REFERENCE
    label = f"{system.kind}:{system.variant}" if system.variant else system.kind
    rate = [] if system.lr is None else [f"lr={system.lr:g}"]
    kind = [] if system.optimizer is None else [f"optimizer={system.optimizer}"]
    options = ",".join([*(f"{key}={value}" for key, value in system.options if key not in _BEGINNING), *kind, *rate])
    return f"{label}({options})" if options else label


@dataclass(frozen=True)
class Needed:
    """The cost of a system to reach DDP's loss.

    Attributes:
        steps: Optimizer steps; None: more than the largest budget that it was trained for.
        largest: That budget.
        changes: Its loss by budget, relative to DDP's, mean over seeds.
        seeds: The number of seeds trained with the budget of `steps` (or else the largest).
        rounds: Communications within these steps; None if not in the rows.
        sent_bytes: Bytes sent per rank in them, by the formulas of `commlib.stats`; None if not in the rows.
    """

    steps: int | None
    largest: int
    changes: dict[int, float]
    seeds: int
    rounds: float | None
    sent_bytes: float | None


def needed_to_loss(rows: Sequence[dict[str, Any]], steps: int, within: float) -> dict[str, Needed]:
    """Return the cost of each system to reach DDP's loss.

    Args:
        rows: Rows of `convergence.py final`: one model and optimizer.
        steps: DDP's budget.
        within: How far a loss may be above DDP's, relative.
    """
    by_system: dict[str, dict[int, dict[int, dict[str, Any]]]] = {}
    for row in rows:
        by_system.setdefault(identity(row["system"]), {}).setdefault(row["steps"], {})[row["seed"]] = row
    target = {seed: row["loss"] for seed, row in by_system[_REFERENCE][steps].items()}
    found = {}
    for system, budgets in by_system.items():
        shared = {budget: [row for seed, row in own.items() if seed in target] for budget, own in budgets.items()}
        changes = {
            budget: float(np.mean([row["loss"] / target[row["seed"]] - 1 for row in own]))
            for budget, own in sorted(shared.items())
            if own
        }
        if not changes:  # no seed in common
            continue
        enough = min((budget for budget, change in changes.items() if change <= within), default=None)
        largest = max(changes)
        own = shared[largest if enough is None else enough]
        communicated = [_communicated(row) for row in own]
        rounds, sent_bytes = (
            None if None in column else float(np.mean(column)) for column in zip(*communicated, strict=True)
        )
        found[system] = Needed(enough, largest, changes, len(own), rounds, sent_bytes)
    return found


def _communicated(row: dict[str, Any]) -> tuple[float | None, float | None]:
    """Return the rounds and the bytes of a row; older ones have the bytes of a round in every step, or nothing."""
    if row.get("rounds") is not None:
        return row["rounds"], row["sent_bytes"]
    return (row["steps"], row["wire_bytes"] * row["steps"]) if row.get("wire_bytes") else (None, None)


def summary(step_rows: Iterable[dict[str, Any]], needed: dict[str, Needed]) -> list[dict[str, Any]]:
    """Return one line per system: its step, its steps, and its time to DDP's."""
    times: dict[str, float] = {}
    for row in step_rows:  # of DDP's configurations the fastest counts
        name = identity(row["system"])
        times[name] = min(row["step_s"], times.get(name, row["step_s"]))
    reference_steps = needed[_REFERENCE].steps
    assert reference_steps is not None
    whole_s = times[_REFERENCE] * reference_steps
    lines = []
    for system, own in needed.items():
        timed = times.get(identity(_RATE.sub("", system)))  # a step takes as long at any learning rate
        step_s = times["none"] if timed is None else timed
        line = {
            "system": system,
            "is_measured": timed is not None,
            "step_s": step_s,
            "needed": own,
            "speed_up": None if own.steps is None else whole_s / (step_s * own.steps),
        }
        lines.append(line)
    return sorted(lines, key=lambda line: -(line["speed_up"] or 0))


def table_of_needs(title: str, needed: dict[str, Needed], steps: int) -> Table:
    """Return steps, rounds and bytes as a table for the terminal, those with the fewest bytes first."""
    columns = ("system", "seeds", f"loss after {steps}", "steps", "rounds", "MB sent", "of DDP's bytes")
    shown = harness.table_of(title, columns)
    whole = needed[_REFERENCE].sent_bytes
    for system, own in sorted(needed.items(), key=_by_bytes):
        budget = _steps_needed(own)
        if own.steps is None:
            budget += f" ({own.changes[own.largest]:+.1%})"
        rounds = "" if own.rounds is None else f"{own.rounds:.0f}"
        sent = "" if own.sent_bytes is None else f"{own.sent_bytes / 1e6:.2f}"
        share = f"{own.sent_bytes / whole:.2%}" if own.sent_bytes is not None and whole else ""
        shown.add_row(system, str(own.seeds), _change_after(own, steps), budget, rounds, sent, share)
    return shown


def _by_bytes(item: tuple[str, Needed]) -> tuple[bool, bool, float]:
    own = item[1]
    return own.steps is None, own.sent_bytes is None, own.sent_bytes or 0.0


def _steps_needed(own: Needed) -> str:
    return f"> {own.largest}" if own.steps is None else str(own.steps)


def _change_after(own: Needed, steps: int) -> str:
    return f"{own.changes[steps]:+.1%}" if steps in own.changes else ""


def table(title: str, lines: Sequence[dict[str, Any]], steps: int) -> Table:
    """Return the lines as a table for the terminal."""
    loss = f"loss after {steps}, to DDP's"
    shown = harness.table_of(title, ("system", "step ms", loss, "steps to DDP's loss", "times faster than DDP"))
    for line in lines:
        bound = "" if line["is_measured"] else "> "
        faster = "" if line["speed_up"] is None else f"{'< ' if bound else ''}{line['speed_up']:.2f}"
        cells = [f"{bound}{line['step_s'] * 1e3:.0f}", _change_after(line["needed"], steps)]
        shown.add_row(line["system"], *cells, _steps_needed(line["needed"]), faster)
    return shown


def main() -> None:
    """Print the costs; with files of step times, a table for each of them instead."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step_files", nargs="*", help="results of step.py, with the systems none and ddp")
    parser.add_argument("--losses", required=True, nargs="+", help="results of convergence.py final")
    parser.add_argument("--model", required=True, help="the trained one, as in the losses")
    parser.add_argument("--optimizer", required=True)
    parser.add_argument("--steps", type=int, required=True, help="DDP's budget")
    parser.add_argument("--within", type=float, default=0.005)
    args = parser.parse_args()
    rows = [row for name in args.losses for row in json.loads(Path(name).read_text())["rows"]]
    own = [row for row in rows if (row["model"], row["optimizer"]) == (args.model, args.optimizer)]
    if not any(identity(row["system"]) == _REFERENCE and row["steps"] == args.steps for row in own):
        parser.error(f"{' '.join(args.losses)}: no all-reduce of {args.model}, {args.optimizer}, {args.steps} steps")
    needed = needed_to_loss(own, args.steps, args.within)
    if not args.step_files:
        title = (
            f"{args.model}, {args.optimizer}: to all-reduce's loss after {args.steps} steps, within {args.within:.1%}"
        )
        harness.print_table(table_of_needs(title, needed, args.steps))
    for name in args.step_files:
        result = json.loads(Path(name).read_text())
        row = result["rows"][0]
        title = f"{row['model']}, {row['hosts']} hosts at {row['rate']}; losses of {args.model}, {args.optimizer}"
        harness.print_table(table(title, summary(result["rows"], needed), args.steps))


if __name__ == "__main__":
    main()
