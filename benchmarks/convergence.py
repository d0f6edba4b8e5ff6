"""Compare the loss curves of several systems, step by step, with those of the first.

python benchmarks/convergence.py --ranks 2,3,4 --steps 200 --json out.json
python benchmarks/convergence.py final --help          # losses at the end of training (final_loss.py)

All systems start from the same weights and see the same batches. The curve of a system is the mean loss of all ranks.
DDP with another bucket size sums in another order and so differs from DDP itself: that spread is the reference. Every
ten steps the replicas of all ranks are compared bit by bit.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import final_loss
import harness
import numpy as np
from harness import Place
from models import WORKLOADS
from rich.table import Table
from systems import parse_list

_DEFAULT = "ddp@25,commlib:allreduce,ddp@1,ddp@5,ddp@100"
_EARLY_STEPS = 50


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default=_DEFAULT, help="comma-separated; the first is the reference")
    parser.add_argument("--model", choices=WORKLOADS, default="bytes-gpt")
    parser.add_argument("--ranks", default="2", help="numbers of ranks, comma-separated")
    parser.add_argument("--steps", type=int, default=200)
    harness.add_worker_options(parser, 7200, "one number of ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="file for the results")
    args = parser.parse_args(argv)
    try:
        args.systems = [system.name for system in parse_list(args.systems)]
        args.ranks = [int(ranks) for ranks in args.ranks.split(",")]
    except ValueError as error:
        parser.error(str(error))
    return args


def rows(systems: dict[str, Any], ranks: int, model: str) -> list[dict[str, Any]]:
    """Return one row per system: how far its curve is from the first one's, as the largest relative difference."""
    curves = {name: np.mean(measured["losses"], axis=0) for name, measured in systems.items()}
    reference = next(iter(systems))
    result = []
    for name, measured in systems.items():
        distance = np.abs(curves[name] - curves[reference]) / np.abs(curves[reference])
        row = {
            "system": name,
            "reference": reference,
            "ranks": ranks,
            "model": model,
            "bit_equal": measured["losses"] == systems[reference]["losses"],
            "same_weights": measured["digest"] == systems[reference]["digest"],
            "early_difference": float(distance[:_EARLY_STEPS].max()),
            "difference": float(distance.max()),
            "replicas_identical": measured["identical"],
            "last_loss": float(curves[name][-1]),
            "losses": curves[name].tolist(),
        }
        result.append(row)
    return result


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train everything; returns the content of the result file."""
    keys = ("model", "device", "threads", "seed", "timeout", "steps")
    spec = {key: getattr(args, key) for key in keys}
    result = []
    for ranks in args.ranks:
        task = {**spec, "mode": "losses", "systems": args.systems}
        measured = harness.run_workers(Place(ranks), task, args.steps * len(args.systems))
        result += rows(measured["systems"], ranks, args.model)
    return {"header": {**harness.header(), **spec}, "rows": result}


def table(result: dict[str, Any]) -> Table:
    """Return the rows as a table for the terminal."""
    early = f"steps 1 to {_EARLY_STEPS}"
    columns = ("ranks", "system", "last loss", "bit-equal", early, "all steps", "replicas identical")
    shown = harness.table_of(f"loss curves of {result['rows'][0]['model']}", columns)
    for row in result["rows"]:
        differences = [f"{row[key]:.1e}" for key in ("early_difference", "difference")]
        yes_no = ["yes" if row[key] else "no" for key in ("bit_equal", "replicas_identical")]
        last = f"{row['last_loss']:.6f}"
        shown.add_row(str(row["ranks"]), row["system"], last, yes_no[0], *differences, yes_no[1])
    return shown


def main() -> None:
    if sys.argv[1:2] == ["final"]:
        final_loss.main(sys.argv[2:])
        return
    args = parse_args()
    with harness.ending_on_errors():
        result = measure(args)
    harness.print_table(table(result))
    if args.json:
        harness.write_json(args.json, result)


if __name__ == "__main__":
    main()
