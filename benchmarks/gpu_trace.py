"""Where the parts of a training step lie on the device (computing, encoding, the wire, decoding), by a trace."""

from __future__ import annotations

import gzip
import json
import pathlib
import re
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_DECODES = ("decode", "sum_sparse", "add_sparse")
_DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


def part_of(name: str, category: str) -> str:
    """Return to which part of a step an event on the device belongs."""
    if name.startswith("commlib_"):
        return "decode" if any(word in name for word in _DECODES) else "encode"
    if "nccl" in name.lower():
        return "wire"
    return "compute" if category == "kernel" else "copy"


def file_name(system: str) -> str:
    """Return a system's name as a part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", system).strip("-")


def trace_step(step: Callable[[], object], path: pathlib.Path | None) -> dict[str, Any]:
    """Run a step under the profiler; return each part's milliseconds and span, and keep the trace at `path`."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as profiler:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        made = pathlib.Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(made))
        data = made.read_bytes()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(path, "wb", compresslevel=6) as file:
            file.write(data)
    return summary(json.loads(data)["traceEvents"])


def summary(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return for each part "busy ms, from ms to ms" (after the step's first event on the device), and the hidden time.

    `hidden_ms` is the time in which encode, wire, decode or copy overlaps with computation.
    """
    found = [each for each in events if each.get("cat") in _DEVICE_CATEGORIES and each.get("ph") == "X"]
    if not found:
        return {"device_events": 0}
    first = min(each["ts"] for each in found)
    spans: dict[str, list[tuple[float, float]]] = {}
    for each in found:
        begin = each["ts"] - first
        spans.setdefault(part_of(each["name"], each["cat"]), []).append((begin, begin + each["dur"]))
    result: dict[str, Any] = {"device_events": len(found)}
    for part, pieces in sorted(spans.items()):
        merged = _merged(pieces)
        result[f"{part}_ms"] = round(_length(merged) / 1e3, 3)
        result[f"{part}_from_to_ms"] = [round(merged[0][0] / 1e3, 3), round(merged[-1][1] / 1e3, 3)]
    others = _merged([piece for part, pieces in spans.items() if part != "compute" for piece in pieces])
    computing = _merged(spans.get("compute", []))
    both = _length(others) + _length(computing) - _length(_merged([*others, *computing]))
    return {**result, "hidden_ms": round(both / 1e3, 3)}


def _merged(pieces: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(pieces):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _length(pieces: Sequence[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in pieces)
