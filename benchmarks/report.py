"""Print results of step.py as a Markdown table.

python benchmarks/report.py benchmarks/results/step-*.json              # commlib's systems next to their references
python benchmarks/report.py --relaxed benchmarks/results/relaxed-*.json # all systems, next to their lower bounds
python benchmarks/report.py --sweep benchmarks/results/sweep-*.json     # planned buckets next to the best fixed size
python benchmarks/report.py --spread run1.json run2.json                # medians and ranges over several runs
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

#: Of a packet: Ethernet, IPv4, and TCP with time stamps.
_HEADER_BYTES = 14 + 20 + 32
_SENT = ("MB sent", "counter to formula", "less headers")


def step_rows(result: dict[str, Any]) -> list[str]:
    """Return one line per commlib system of a step benchmark, next to its reference."""
    rows = {row["system"]: row for row in result["rows"]}
    lines = []
    for row in result["rows"]:
        reference = rows.get(row["reference"])
        if not row["system"].startswith("commlib") or reference is None:
            continue
        buckets = ", ".join(f"{nbytes / 2**20:.1f}" for nbytes in row["bucket_bytes"] or ())
        lines.append(
            f"| {row['model']} | {place(row)} | {reference['configuration']} | {1e3 * reference['step_s']:.1f} "
            f"| {1e3 * row['step_s']:.1f} | {row['ratio']:.3f} | {row['ratio_lo']:.3f} to {row['ratio_hi']:.3f} "
            f"| {megabytes(reference)} | {megabytes(row)} | {buckets} |"
        )
    return lines


def place(row: dict[str, Any]) -> str:
    """Return where a row was measured: how many emulated hosts at which rate, or how many ranks on loopback."""
    if not row["rate"]:
        return f"{row['ranks']} ranks, loopback"
    latency = f", {row['latency_us']:g} us" if row.get("latency_us") else ""
    return f"{row['hosts']} hosts, {row['rate']}{latency}"


def megabytes(row: dict[str, Any]) -> str:
    """Return the peak memory in MB, or a dash where it was not measured."""
    return f"{row['peak_bytes'] / 1e6:.1f}" if row.get("peak_bytes") else "-"


def relaxed_rows(result: dict[str, Any]) -> list[str]:
    """Return one line per system but the bounds: its time to the reference's and to its bound's, and its bytes."""
    lines = []
    for row in result["rows"]:
        if row["system"].startswith("bound:"):
            continue
        cells = [
            row["system"],
            f"{1e3 * row['step_s']:.0f}",
            f"{1 / row['ratio']:.2f}",
            f"{row['to_lower_bound']:.2f}" if row.get("to_lower_bound") else "",
            f"{row['wire_bytes'] / 1e6:.1f}",
            *_to_formula([row]),
        ]
        lines.append("| " + " | ".join([row["model"], str(row["rate"]), *cells]) + " |")
    return lines


def sweep_row(result: dict[str, Any]) -> str:
    """Return the line of a sweep of bucket sizes: the planned buckets next to the best of the fixed sizes."""
    first, found = result["rows"][0], result["sweep"]
    best = f"{found['best_fixed'].partition('@')[2]} MiB"
    interval = f"{found['lo']:.3f} to {found['hi']:.3f}"
    return f"| {first['model']} | {place(first)} | {best} | {found['planned_to_best']:.3f} | {interval} |"


def spread_rows(results: Iterable[dict[str, Any]]) -> list[str]:
    """Return one line per system over all its runs: its speed to DDP's, its time to its bound's, and its bytes."""
    runs = defaultdict(list)
    for row in (row for result in results for row in result["rows"]):
        if not row["system"].startswith(("bound:", "ddp(")):
            runs[row["model"], place(row), row["system"].partition("@")[0]].append(row)
    lines = []
    for key, rows in sorted(runs.items()):
        beside_ddp = [row for row in rows if row["reference"].startswith("ddp") and row["system"] != row["reference"]]
        bounds = [row["to_lower_bound"] for row in rows if row.get("to_lower_bound")]
        if not beside_ddp and not bounds:
            continue
        cells = [
            *key,
            *_spread([1 / row["ratio"] for row in beside_ddp]),
            *_spread(bounds),
            f"{median(row['wire_bytes'] for row in rows) / 1e6:.1f}",
            *_to_formula(rows),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _to_formula(rows: Iterable[dict[str, Any]]) -> tuple[str, str]:
    """Return the interface's bytes to the formula's, as they are and less the headers where packets were counted."""
    rows = [row for row in rows if row["reported_wire_bytes"]]
    counted = [row for row in rows if row.get("wire_packets")]
    sent = [row["wire_bytes"] / row["reported_wire_bytes"] - 1 for row in rows]
    carried = [
        (row["wire_bytes"] - _HEADER_BYTES * row["wire_packets"]) / row["reported_wire_bytes"] - 1 for row in counted
    ]
    return f"{median(sent):+.1%}" if sent else "", f"{median(carried):+.1%}" if carried else ""


def _spread(figures: Sequence[float]) -> tuple[str, str]:
    """Return how many figures there are, and their median, least and largest."""
    if not figures:
        return "", ""
    return str(len(figures)), f"{median(figures):.2f} ({min(figures):.2f} to {max(figures):.2f})"


def main() -> None:
    """Print one table over all files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    table = parser.add_mutually_exclusive_group()
    for name in ("relaxed", "sweep", "spread"):
        table.add_argument(f"--{name}", action="store_const", const=name, dest="table", default="")
    parser.add_argument("files", nargs="+", help="results of step.py")
    args = parser.parse_args()
    results = [json.loads(Path(name).read_text()) for name in args.files]
    match args.table:
        case "spread":
            columns = [
                "model",
                "where",
                "system",
                "runs",
                "times faster than DDP",
                "runs",
                "to its lower bound",
                *_SENT,
            ]
            lines = spread_rows(results)
        case "relaxed":
            columns = ["model", "rate", "system", "ms", "times faster", "to its lower bound", *_SENT]
            lines = [line for result in results for line in relaxed_rows(result)]
        case "sweep":
            columns = ["model", "where", "best fixed size", "planned to best", "95 % interval"]
            lines = [sweep_row(result) for result in results]
        case _:
            columns = ["model", "where", "reference", "ms", "commlib ms", "ratio", "95 % interval"]
            columns += ["peak MB", "commlib peak MB", "buckets, MiB"]
            lines = [line for result in results for line in step_rows(result)]
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * 3 + "--:|" * (len(columns) - 3))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
