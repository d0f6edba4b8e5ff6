"""Results of a check on a GPU: one small archive, and a table."""

from __future__ import annotations

import shlex
import sys
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu import results
from tests.gpu.machine import ROOT

RESULTS, ARCHIVE = "results.jsonl", "gpu_check.tar.gz"
MOST_BYTES = 8 << 20
_MOST_LOG_BYTES = 2 << 20
_MOST_CHARS, _MOST_LINES = 160, 10
_KNOWN = {"part", "name", "outcome", "seconds", "text", "shown"}


def shortened(argv: Sequence[str]) -> str:
    """Return a command as one would type it in the checkout."""
    return shlex.join(argv).replace(f"{ROOT}/", "").replace(shlex.quote(sys.executable), "python")


def archive(out: Path, made: Path) -> list[str]:
    """Pack results, logs and other output of the parts into one file of at most MOST_BYTES; return the omitted files.

    Logs are cut at their beginning; if the files do not fit, the largest is omitted first.
    """
    for log in out.glob("*.log"):
        data = log.read_bytes()
        if len(data) > _MOST_LOG_BYTES:
            log.write_bytes(data[-_MOST_LOG_BYTES:])
    packed = sorted([*out.glob("*.log"), *made.rglob("*")], key=lambda path: path.stat().st_size)
    packed = [out / RESULTS, *(path for path in packed if path.is_file())]
    left_out: list[str] = []
    while True:
        target = out / f"{ARCHIVE}.new"
        with tarfile.open(target, "w:gz") as tar:
            for path in packed:
                if path.exists():
                    tar.add(path, arcname=path.name)
        if target.stat().st_size <= MOST_BYTES or len(packed) == 1:
            target.replace(out / ARCHIVE)
            return left_out
        left_out.append(packed.pop().name)


def table(found: Iterable[Mapping[str, Any]], seconds: Mapping[str, float]) -> str:
    """Return the figures by part, then failures and skips, then one line for each part."""
    rows = list(found)
    names = list(dict.fromkeys([*seconds, *(row["part"] for row in rows)]))
    lines: list[str] = []
    for name in names:
        figures = [row for row in rows if row["part"] == name and row["outcome"] == results.PASSED and _figures(row)]
        lines += [f"\n-- {name}"] * bool(figures) + [f"  {row['name']}: {_figures(row)}" for row in figures]
    lines.append("\n-- failed or skipped")
    for name in names:
        lines += _shortcomings([row for row in rows if row["part"] == name])
    lines.append(f"\n{'part':10}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}")
    for name in names:
        outcomes = [row["outcome"] for row in rows if row["part"] == name]
        counts = [outcomes.count(each) for each in (results.PASSED, results.FAILED, results.SKIPPED)]
        lines.append(f"{name:10}{counts[0]:>8}{counts[1]:>8}{counts[2]:>9}{seconds.get(name, 0):>9.0f}")
    return "\n".join(lines)


def _shortcomings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line on failures and skips in a part, failures first, with the first ones of each."""
    lines = []
    for outcome in (results.FAILED, results.SKIPPED):
        found = [row for row in rows if row["outcome"] == outcome]
        for row in found[:_MOST_LINES]:
            text = _first_line(row)
            lines.append(f"  {outcome:8}{row['part']}: {row['name']}{text and f': {text}'}")
        if len(found) > _MOST_LINES:
            lines.append(f"  {outcome:8}{found[0]['part']}: {len(found) - _MOST_LINES} more, in {RESULTS}")
    return lines


def _figures(row: Mapping[str, Any]) -> str:
    if not row.get("shown", True):
        return ""
    return ", ".join(f"{key} {_shown(value)}" for key, value in row.items() if key not in _KNOWN)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return " ".join(map(_shown, value)) if isinstance(value, list) else str(value)


def _first_line(row: Mapping[str, Any]) -> str:
    """Return the most informative line: of a traceback, the last one that names the error."""
    lines = [line.strip() for line in str(row.get("text", "")).splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("E  ")] or lines[-1:]
    return errors[0].removeprefix("E").strip()[:_MOST_CHARS] if errors else ""
