"""Train every algorithm to the end of a fixed budget, over several seeds, and compare with fp32 all-reduce.

python benchmarks/convergence.py final --model bytes-1m --optimizer adamw --json out.json --plot out.png

Only the loss on unseen data counts. Every row is one system, model, optimizer and seed. Rows that are already in the
file are kept, so an interrupted run can be continued, and one file can hold several models and optimizers.
`--render` makes the table and the plot from the existing rows.

With `--budgets 1,1.25,1.5,2,3`, all-reduce is trained for `--steps`, and every other system for these multiples of it,
in increasing order, until it has reached all-reduce's loss. `time_to_loss.py --losses out.json` prints the cost.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import harness
import numpy as np
from harness import Place
from rich.table import Table
from systems import parse_list

_REFERENCE = "commlib:allreduce@1"
_EVERY_OPTIMIZER = [
    _REFERENCE,
    "commlib:bytegrad@1",
    "commlib:qsgd(bits=4)@1",
    "commlib:ef_quantized@1",
    "commlib:signsgd@1",
    "commlib:topk@1",
    "commlib:randomk(ratio=0.05)@1",
    "commlib:powersgd@1",
]
#: DGC is SGD with momentum, 1-bit Adam and QAdam are Adam. Settings are tuned as in the papers: the vote has signSGD's
#: learning rate, DGC's ratio falls during the first fifth of the steps, 1-bit Adam's variance is frozen after a fifth.
DEFAULT_SYSTEMS = {
    "sgd": [
        *_EVERY_OPTIMIZER,
        "commlib:signsgd(feedback=False,lr=1e-4)@1",
        "commlib:dgc(ratio=0.01,ratio_warmup_steps={fifth})@1",
    ],
    "adamw": [
        *_EVERY_OPTIMIZER,
        "commlib:signsgd(feedback=False)@1",
        "commlib:onebit_adam(warmup_steps={fifth})@1",
        "commlib:qadam(warmup_steps={fifth})@1",
    ],
}
_PLACE = ("model", "optimizer", "ranks", "steps")
_KEYS = ("system", "seed", *_PLACE)


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="convergence.py final", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", help="comma-separated; compared with commlib:allreduce (default: every algorithm)")
    models = ("bytes-1m", "bytes-2m", "bytes-1m-b16", "bytes-tiny", "digits")
    parser.add_argument("--model", choices=models, default="bytes-1m")
    parser.add_argument("--optimizer", choices=DEFAULT_SYSTEMS, default="adamw")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    parser.add_argument("--budgets", default="1", help="times --steps, until all-reduce's loss is reached")
    parser.add_argument("--within", type=float, default=0.005, help="how far above it counts as reached")
    harness.add_worker_options(parser, 3600, "one seed")
    parser.add_argument("--json", required=True, help="file for the results; rows in it are not measured again")
    parser.add_argument("--plot", help="PNG of all the rows in the file")
    parser.add_argument("--render", action="store_true", help="train nothing, show the rows in the file")
    args = parser.parse_args(argv)
    try:
        names = [system.name for system in parse_list(args.systems)] if args.systems else None
        args.systems = names or [name.format(fifth=args.steps // 5) for name in DEFAULT_SYSTEMS[args.optimizer]]
        args.seeds = [int(seed) for seed in args.seeds.split(",")]
        args.budgets = sorted(float(budget) for budget in args.budgets.split(","))
    except ValueError as error:
        parser.error(str(error))
    if args.budgets != [1.0]:  # its loss is the target of all others
        args.systems = [_REFERENCE, *(system for system in args.systems if system != _REFERENCE)]
    return args


def load(path: str) -> dict[str, Any]:
    """Return the results so far."""
    file = pathlib.Path(path)
    return json.loads(file.read_text()) if file.exists() else {"headers": [], "rows": []}


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the key that identifies a measurement."""
    return tuple(row[key] for key in _KEYS)


def measure(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Train the missing systems and seeds, one after the other, and write the file after each."""
    known = {key_of(row): row for row in result["rows"]}
    has_begun = False
    for seed in args.seeds:
        target = -math.inf  # the loss to reach; without budgets there is one run of each
        for system in args.systems:
            for budget in [1.0] if system == _REFERENCE else args.budgets:
                steps = round(budget * args.steps)
                place = {"model": args.model, "optimizer": args.optimizer, "ranks": args.ranks, "steps": steps}
                job = {**place, "seed": seed, "system": system}
                if key_of(job) not in known:
                    if not has_begun:
                        result["headers"].append(harness.header())
                    has_begun = True
                    known[key_of(job)] = row = {**job, **_train(args, job)}
                    result["rows"].append(row)
                    harness.write_json(args.json, result)
                loss = known[key_of(job)]["loss"]
                if system == _REFERENCE:
                    target = loss * (1 + args.within)
                if loss <= target:
                    break


def _train(args: argparse.Namespace, job: dict[str, Any]) -> dict[str, Any]:
    """Train one system with one seed; return the measurements."""
    settings = {key: getattr(args, key) for key in ("device", "threads", "timeout")}
    spec = {**job, **settings, "mode": "final", "systems": [job["system"]]}
    return harness.run_workers(Place(args.ranks), spec, job["steps"])["systems"][job["system"]]


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one line per (model, optimizer, ranks, steps) and system: means over seeds, relative to the reference.

    Losses are compared seed by seed, since a seed determines the initial weights and the data. `change` is the mean of
    (loss / reference - 1), `change_sd` its standard deviation over seeds. `spread` is that of the reference's own loss.
    """
    lines = []
    for place in dict.fromkeys(map(_place, rows)):
        own = [row for row in rows if _place(row) == place]
        systems = list(dict.fromkeys(row["system"] for row in own))
        losses = {s: {row["seed"]: row["loss"] for row in own if row["system"] == s} for s in systems}
        reference = losses.get(next((s for s in systems if s.startswith("commlib:allreduce")), ""), {})
        for system in systems:
            shared = sorted(losses[system].keys() & reference.keys())
            changes = [losses[system][seed] / reference[seed] - 1 for seed in shared]
            accuracies = [row["accuracy"] for row in own if row["system"] == system]
            line = {
                **dict(zip(_PLACE, place, strict=True)),
                "system": system,
                "seeds": len(shared if reference else losses[system]),
                "loss": float(np.mean(list(losses[system].values()))),
                "accuracy": float(np.mean(accuracies)),
                "change": _mean(changes),
                "change_sd": _deviation(changes),
                "spread": _deviation(list(reference.values())) / _mean(list(reference.values())),
                "identical": all(row["identical"] for row in own if row["system"] == system),
            }
            lines.append(line)
    return lines


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def _deviation(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")


def tables(lines: Sequence[dict[str, Any]]) -> Iterator[Table]:
    """Return the summary as tables for the terminal, one per place."""
    for place in dict.fromkeys(map(_place, lines)):
        own = [line for line in lines if _place(line) == place]
        spread = own[0]["spread"]
        title = f"{_title(place)}: loss on unseen data"
        title += "" if math.isnan(spread) else f"; all-reduce over seeds ± {spread:.2%}"
        columns = ("system", "seeds", "loss", "to all-reduce", "accuracy", "replicas identical")
        shown = harness.table_of(title, columns)
        for line in own:
            change = "-" if math.isnan(line["change"]) else f"{line['change']:+.2%}"
            change += "" if math.isnan(line["change_sd"]) else f" ± {line['change_sd']:.2%}"
            cells = [str(line["seeds"]), f"{line['loss']:.4f}", change, f"{line['accuracy']:.2%}"]
            shown.add_row(line["system"], *cells, "yes" if line["identical"] else "no")
        yield shown


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in _PLACE)


def _title(place: tuple[Any, ...]) -> str:
    model, optimizer, ranks, steps = place
    return f"{model}, {optimizer}, {ranks} ranks, {steps} steps"


def plot(lines: Sequence[dict[str, Any]], path: str) -> None:
    """Draw the losses relative to all-reduce, one panel per place, the reference's own spread shaded."""
    import matplotlib.pyplot as plt  # lazily: an extra

    places = list(dict.fromkeys(map(_place, lines)))
    figure, axes = plt.subplots(1, len(places), figsize=(6.4 * len(places), 6), squeeze=False, layout="constrained")
    for axis, place in zip(axes[0], places, strict=True):
        own = [line for line in lines if _place(line) == place][::-1]
        labels = [line["system"].removeprefix("commlib:").partition("@")[0] for line in own]
        spread = 100 * own[0]["spread"]
        axis.axvspan(-spread, spread, color="0.88", label="all-reduce over seeds (sd)")
        axis.axvline(0, color="0.4", linewidth=0.8)
        changes, errors = ([100 * line[key] for line in own] for key in ("change", "change_sd"))
        axis.errorbar(changes, range(len(own)), xerr=errors, fmt="o", capsize=3)
        axis.set_yticks(range(len(own)), labels)
        axis.set_xscale("symlog", linthresh=1)
        axis.set_title(_title(place), fontsize="medium")
    figure.supxlabel("loss to all-reduce's, % (linear to 1 %)", fontsize="medium")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper right", fontsize="small")
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    args = parse_args(argv)
    result = load(args.json)
    if not args.render:
        with harness.ending_on_errors():
            measure(args, result)
    if not result["rows"]:
        sys.exit(f"error: {args.json} holds no rows")
    lines = summary(result["rows"])
    for shown in tables(lines):
        harness.print_table(shown)
    if args.plot:
        plot(lines, args.plot)
