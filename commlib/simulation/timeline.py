"""One step of a simulation: its spans, and as a trace that Perfetto and Chrome open."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from commlib.simulation.clock import Span
from commlib.simulation.simulator import Result

#: The lanes of a timeline, from above.
LANES = ("compute", "local work", "network")


def last_step(result: Result, rank: int = 0) -> list[Span]:
    """Return what a rank did in the last step that begins and ends within the simulation; times begin with the step.

    Collectives that began before the step or end after it are cut at its ends.
    """
    own = [span for span in result.spans if span.rank == rank]
    starts = sorted(span.start_s for span in own if span.name == "forward")
    end = max((span.end_s for span in own if span.lane == "compute"), default=0.0)
    start = starts[-1] if starts else 0.0
    inside = [span for span in own if span.end_s > start and span.start_s < end]
    return [
        Span(
            span.lane,
            span.name,
            max(span.start_s, start) - start,
            min(span.end_s, end) - start,
            span.bucket,
            span.rank,
            span.nbytes,
        )
        for span in inside
    ]


def chrome_trace(results: Sequence[Result]) -> dict[str, object]:
    """Return a trace in the Trace Event Format: a process for each result, a thread for each lane, times in us."""
    events: list[dict[str, object]] = []
    for pid, result in enumerate(results):
        events.append(_name("process_name", pid, 0, f"{result.algorithm} ({result.network})"))
        events += [_name("thread_name", pid, tid, lane) for tid, lane in enumerate(LANES)]
        for span in last_step(result):
            events.append(
                {
                    "name": span.name if span.bucket < 0 else f"{span.name} of bucket {span.bucket}",
                    "cat": span.lane,
                    "ph": "X",
                    "ts": span.start_s * 1e6,
                    "dur": (span.end_s - span.start_s) * 1e6,
                    "pid": pid,
                    "tid": LANES.index(span.lane),
                    "args": {"bucket": span.bucket, "bytes": span.nbytes, "rank": span.rank},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_trace(results: Sequence[Result], path: Path | str) -> None:
    """Write `chrome_trace` as JSON."""
    Path(path).write_text(json.dumps(chrome_trace(results)))


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, object]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
