"""Write the index of all result files, with every run that was kept: also those that no table of the docs shows.

python benchmarks/runs.py    # writes benchmarks/results/README.md
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from report import megabytes, place

RESULTS = Path(__file__).resolve().parent / "results"

_INTRODUCTION = """# Every run that was kept

Written by `python benchmarks/runs.py` from the files in this folder; what they mean is in
[docs/benchmarks.md](../../docs/benchmarks.md), how they were measured in [benchmarks/README.md](../README.md).
`results` holds the latest run of a command, `results/repeats` the others. Commands, versions and all blocks are in
the files. Processors are named with their family and model where those were noted: AMD EPYC 25/1 is Zen 3, 25/17 Zen 4,
26/2 Zen 5.
"""
_STEP_COLUMNS = ("system", "date", "processor", "ms", "reference", "ratio", "95 % interval", "to its bound", "peak MB")
_KERNEL_COLUMNS = ("codec, kernel", "date", "processor", "ms", "to memcpy", "to the byte model")
#: The kernels that have targets. All others are in the files.
_KERNELS = (
    *(("int8", kernel) for kernel in ("encode", "decode", "encode + feedback", "decode-sum-encode")),
    *(("onebit", "encode + feedback"), ("int4", "encode"), ("topk", "encode + feedback"), ("uint8_minmax", "encode")),
)
_SIZES = {16 << 20: "64 MiB", 256 << 20: "1 GiB"}

#: A heading, and the cells of one of the lines under it.
Line = tuple[str, tuple[str, ...]]


def index(folder: Path) -> str:
    """Return the index of a folder of result files as Markdown."""
    steps, kernels, others = [], [], []
    for path in sorted(folder.rglob("*.json")):
        run = json.loads(path.read_text())
        link = f"[{path.stem}]({path.relative_to(folder).as_posix()})"
        found_steps, found_kernels = list(_steps(run)), list(_kernels(run))
        steps += [(heading, (*cells, link)) for heading, cells in found_steps]
        kernels += [(heading, (*cells, link)) for heading, cells in found_kernels]
        if not found_steps and not found_kernels:
            others.append((link, ", ".join(sorted({header["date"][:10] for header in _headers(run)}))))
    return "\n".join(
        [
            _INTRODUCTION,
            "## Training steps\n",
            *_tables(steps, (*_STEP_COLUMNS, "file")),
            "## Kernels, one thread\n",
            *_tables(kernels, (*_KERNEL_COLUMNS, "file")),
            "## Losses, curves, stragglers, simulations\n",
            _table(others, ("file", "date")),
        ]
    )


def _headers(run: Any) -> list[dict[str, Any]]:
    """Return the headers of a result file: one, one per command that filled it, or none."""
    if isinstance(run, list):
        return []
    return run.get("headers") or [run.get("header") or run]


def _steps(run: Any) -> Iterator[Line]:
    """Yield the systems of a run but the bounds; of a sweep the plan, the first row, but not each fixed size."""
    if not _has_rows_with(run, "step_s"):
        return
    sweep = run.get("sweep")
    configurations = {row["system"]: row["configuration"] for row in run["rows"]}
    for row in run["rows"][:1] if sweep else run["rows"]:
        if row["system"].startswith("bound:"):
            continue
        time = ("", "", "", "")
        if len(row["blocks_s"]) > 1:  # a single one is there for the memory measured beside it
            time = (f"{1e3 * row['step_s']:.1f}", *_ratio(row, configurations, sweep))
        bound = row.get("to_lower_bound")
        cells = (f"{bound:.2f}" if bound else "", megabytes(row))
        yield f"{row['model']}, {place(row)}", (f"`{row['system']}`", *_origin(run), *time, *cells)


def _ratio(row: dict[str, Any], configurations: dict[str, str], sweep: dict[str, Any] | None) -> tuple[str, str, str]:
    """Return what the row is compared with, the ratio and its interval."""
    if sweep:
        reference, numbers = sweep["best_fixed"], (sweep["planned_to_best"], sweep["lo"], sweep["hi"])
    else:
        reference, numbers = row["reference"], (row["ratio"], row["ratio_lo"], row["ratio_hi"])
    if reference == row["system"]:
        return "", "", ""
    ratio, low, high = numbers
    return f"`{configurations.get(reference, reference)}`", f"{ratio:.3f}", f"{low:.3f} to {high:.3f}"


def _kernels(run: Any) -> Iterator[Line]:
    if not _has_rows_with(run, "to_memcpy"):
        return
    for row in run["rows"]:
        size = _SIZES.get(row["numel"])
        if size and row["threads"] == 1 and (row["codec"], row["kernel"]) in _KERNELS:
            numbers = (1e3 * row["median_s"], row["to_memcpy"], 1 / row["fraction_of_limit"])
            yield size, (f"`{row['codec']}`, {row['kernel']}", *_origin(run), *(f"{number:.2f}" for number in numbers))


def _has_rows_with(run: Any, key: str) -> bool:
    return isinstance(run, dict) and bool(run.get("rows")) and key in run["rows"][0]


def _origin(run: dict[str, Any]) -> tuple[str, str]:
    """Return the day and the processor, with its family and model where they were noted."""
    header = run["header"]
    return header["date"][:10], header["cpu"].replace(" (family ", ", ").replace(", model ", "/").rstrip(")")


def _tables(lines: Sequence[Line], columns: Sequence[str]) -> Iterator[str]:
    """Yield a table under each heading, its lines in the order of the first cells, so that runs of one thing meet."""
    for heading in sorted({heading for heading, _ in lines}):
        yield f"### {heading}\n"
        yield _table(sorted(cells for at, cells in lines if at == heading), columns)


def _table(lines: Sequence[Sequence[str]], columns: Sequence[str]) -> str:
    rows = (columns, ["---"] * len(columns), *lines)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows) + "\n"


if __name__ == "__main__":
    (RESULTS / "README.md").write_text(index(RESULTS))
