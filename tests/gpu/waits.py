"""Finds synchronizations of the host with the device, by torch's debug mode and in a trace of the driver's calls."""

from __future__ import annotations

import contextlib
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_REGION = "commlib region"
#: Calls of the runtime that wait for the device, in addition to all with "Synchronize" in their names.
_WAITS = ("cudaMemcpy", "cudaMemset", "cudaFree", "cudaFreeHost")


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """An error for whatever torch makes the host wait for the device with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode does not find everything: the trace does
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def trace_of(run: Callable[[], object]) -> list[dict[str, Any]]:
    """Return the events of a trace of `run`, in the order in which they begin."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as profiler, record_function(_REGION):
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return sorted((each for each in events if each.get("ph") == "X"), key=lambda each: each["ts"])


def calls_within(events: list[dict[str, Any]]) -> list[str]:
    """Return the names of the runtime's and the driver's calls, of all threads, while the region ran."""
    region = next(each for each in events if each["name"] == _REGION and "gpu" not in each.get("cat", ""))
    begin, end = region["ts"], region["ts"] + region["dur"]
    return [
        each["name"]
        for each in events
        if each.get("cat") in ("cuda_runtime", "cuda_driver") and begin <= each["ts"] <= end
    ]


def waits_of(run: Callable[[], object]) -> list[str]:
    """Return the calls in `run` that make the host wait for the device.

    Raises:
        AssertionError: The trace has no launch of a kernel, so it shows nothing.
    """
    calls = calls_within(trace_of(run))
    assert any("Launch" in name for name in calls), f"no launch is in the trace, of {len(calls)} calls"
    return [name for name in calls if "Synchronize" in name or name in _WAITS]
