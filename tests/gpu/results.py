"""Results of a check on a GPU: one JSON line each, appended as they come, so that a run that is cut off keeps its own.

The processes of a check find the file in an environment variable; elsewhere, nothing is written.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FILE_VARIABLE = "COMMLIB_GPU_RESULTS"
PART_VARIABLE = "COMMLIB_GPU_PART"
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


def add(name: str, outcome: str, **facts: Any) -> None:
    """Append one result, in a single write.

    Args:
        name: The check or measurement.
        outcome: PASSED, FAILED or SKIPPED.
        facts: Figures and texts that JSON can hold.
    """
    path = os.environ.get(FILE_VARIABLE)
    if path:
        line = {"part": os.environ.get(PART_VARIABLE, "-"), "name": name, "outcome": outcome, **facts}
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, json.dumps(line).encode() + b"\n")
        finally:
            os.close(handle)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the results so far; a line that was cut off is left out."""
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
