"""Print results of step.py as a Markdown table: `python benchmarks/report.py benchmarks/results/step-*.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def step_rows(result: dict[str, Any]) -> list[str]:
    """Return one line per commlib system of a step benchmark, beside its reference."""
    rows = {row["system"]: row for row in result["rows"]}
    lines = []
    for row in result["rows"]:
        reference = rows.get(row["reference"])
        if not row["system"].startswith("commlib") or reference is None:
            continue
        where = f"{row['hosts']} hosts, {row['rate']}" if row["rate"] else f"{row['ranks']} ranks, loopback"
        buckets = ", ".join(f"{nbytes / 2**20:.1f}" for nbytes in row["bucket_bytes"] or ())
        lines.append(
            f"| {row['model']} | {where} | {reference['configuration']} | {1e3 * reference['step_s']:.1f} "
            f"| {1e3 * row['step_s']:.1f} | {row['ratio']:.3f} | {row['ratio_lo']:.3f} to {row['ratio_hi']:.3f} "
            f"| {megabytes(reference)} | {megabytes(row)} | {buckets} |"
        )
    return lines


def megabytes(row: dict[str, Any]) -> str:
    """Return the peak memory in MB, or a dash where it was not measured."""
    return f"{row['peak_bytes'] / 1e6:.1f}" if row.get("peak_bytes") else "-"


def main() -> None:
    """Print one table over all files."""
    columns = ["model", "where", "reference", "ms", "commlib ms", "ratio", "95 % interval"]
    print("| " + " | ".join([*columns, "peak MB", "commlib peak MB", "buckets, MiB"]) + " |")
    print("|---|---|---|--:|--:|--:|---|--:|--:|---|")
    for name in sys.argv[1:]:
        for line in step_rows(json.loads(Path(name).read_text())):
            print(line)


if __name__ == "__main__":
    main()
