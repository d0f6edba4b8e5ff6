"""One step of a simulation: its spans, and a trace for Perfetto and Chrome."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from commlib.simulation.clock import Span
from commlib.simulation.simulator import Result

#: The lanes of a timeline, from top to bottom.
LANES = ("compute", "local work", "network")


def last_step(result: Result, rank: int = 0) -> list[Span]:
    """Return a rank's spans in the last step that lies within the simulation, with times relative to its start.

    Collectives that began before the step or end after it are clipped to the step.
    """
    own, bounds_s = _steps(result, rank)
    return _cut(own, bounds_s[-2], bounds_s[-1])


def longest_step(result: Result, rank: int = 0) -> tuple[int, list[Span]]:
    """Return the index of the longest measured step (`Result.steps_s`, from 0), and a rank's spans in it.

    The last of equally long steps is used. The spans are clipped as in `last_step`.
    """
    own, bounds_s = _steps(result, rank)
    steps = list(itertools.pairwise(bounds_s))[-len(result.steps_s) :]
    lengths_ns = [round((end_s - start_s) * 1e9) for start_s, end_s in steps]
    place = max(range(len(steps)), key=lambda idx: (lengths_ns[idx], idx))
    return place, _cut(own, *steps[place])


def _steps(result: Result, rank: int) -> tuple[list[Span], list[float]]:
    """Return a rank's spans, and the start of each step followed by the end of the last one."""
    own = [span for span in result.spans if span.rank == rank]
    starts_s = sorted(span.start_s for span in own if span.name == "forward") or [0.0]
    return own, [*starts_s, max((span.end_s for span in own if span.lane == "compute"), default=0.0)]


def _cut(spans: Sequence[Span], start_s: float, end_s: float) -> list[Span]:
    return [
        dataclasses.replace(span, start_s=max(span.start_s, start_s) - start_s, end_s=min(span.end_s, end_s) - start_s)
        for span in spans
        if span.end_s > start_s and span.start_s < end_s
    ]


def chrome_trace(results: Sequence[Result]) -> dict[str, object]:
    """Return a trace in the Trace Event Format: one process per result, one thread per track, times in us."""
    events: list[dict[str, object]] = []
    for pid, result in enumerate(results):
        spans = _on_tracks(last_step(result))
        tracks = list(dict.fromkeys([*LANES, *sorted(track for track, _ in spans)]))
        events.append(_name("process_name", pid, 0, f"{result.algorithm} ({result.network})"))
        events += [_name("thread_name", pid, tid, track) for tid, track in enumerate(tracks)]
        for track, span in spans:
            events.append(
                {
                    "name": span.name if span.bucket < 0 else f"{span.name} of bucket {span.bucket}",
                    "cat": span.lane,
                    "ph": "X",
                    "ts": _ns(span.start_s) / 1e3,
                    "dur": (_ns(span.end_s) - _ns(span.start_s)) / 1e3,
                    "pid": pid,
                    "tid": tracks.index(track),
                    "args": {"bucket": span.bucket, "bytes": span.nbytes, "rank": span.rank},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _on_tracks(spans: Sequence[Span]) -> list[tuple[str, Span]]:
    """Return each span with the name of its track: its lane, or a further one if it overlaps with spans there.

    Perfetto drops a span that overlaps with another span of its track.
    """
    ends_ns: dict[str, int] = {}
    found = []
    for span in sorted(spans, key=lambda span: span.start_s):
        names = itertools.chain([span.lane], (f"{span.lane} {idx}" for idx in itertools.count(2)))
        track = next(name for name in names if ends_ns.get(name, 0) <= _ns(span.start_s))
        ends_ns[track] = _ns(span.end_s)
        found.append((track, span))
    return found


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, object]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
