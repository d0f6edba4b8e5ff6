"""One training step as torch's profiler sees it, by the names that commlib gives its parts.

    python benchmarks/profile_step.py                                    # two emulated hosts at 1 Gbit/s; needs root
    python benchmarks/profile_step.py --rate none --algorithm topk --plot step.png --trace step.json
    python benchmarks/profile_step.py --from mine.json --plot step.png --trace step.json     # a trace of your own

Rank 0's trace opens in Perfetto and Chrome; the picture is drawn from it. Collectives that run at the same time get
tracks of their own, because Perfetto drops events of a track that overlap.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import tempfile
from typing import Any

import launch
import torch
import torch.distributed as dist
from models import WORKLOADS
from torch.profiler import ProfilerActivity, profile

import commlib

PREFIX = "commlib: "
_WARM_UP_STEPS = 4
#: The events drawn in each lane: commlib's own, and those of torch that show the phases of the step.
_COMPUTATION = {"forward", "backward", "optimizer"}
_LANES = ("training thread", "local work", "wire")
_COLOURS = {
    "forward": "#b8c4d6", "backward": "#8fa3c0", "optimizer": "#d6cdb8", "gather": "#4c72b0", "wait": "#f4f4f4",
    "encode": "#55a868", "decode": "#8172b2", "wire": "#dd8452",
}  # fmt: skip


def main() -> None:
    """Record, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(WORKLOADS), default="bytes-1m")
    parser.add_argument("--algorithm", default="bytegrad", help="a registered name")
    parser.add_argument("--bucket-cap-mb", type=float, default=1.0, help="size of a bucket in MiB")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="of the emulated links; none: ranks on loopback")
    parser.add_argument("--plot", type=pathlib.Path, default=pathlib.Path("profile-step.png"))
    parser.add_argument("--trace", type=pathlib.Path, help="where rank 0's trace goes")
    parser.add_argument("--from", type=pathlib.Path, dest="recorded", help="draw this trace instead of recording one")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds")
    options = parser.parse_args()
    if options.recorded is not None:
        trace, title = json.loads(options.recorded.read_text()), options.recorded.name
    else:
        where = "loopback" if options.rate == "none" else f"{options.ranks} hosts at {options.rate}"
        trace, title = recorded(options), f"One step of {options.model} with {options.algorithm}, {where}: rank 0"
    spans = spans_of(trace)
    draw(spans, title, options.plot)
    print(f"{len(spans)} spans in {options.plot}")
    if options.trace is not None:
        separate_collectives(trace)
        options.trace.write_text(json.dumps(trace))


def recorded(options: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, and return rank 0's trace."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "trace.json"
        args = [options.model, options.algorithm, str(options.bucket_cap_mb), str(path)]
        script = pathlib.Path(__file__).resolve()
        if options.rate == "none":
            launch.run_local(options.ranks, script, args, {}, options.timeout)
        else:
            launch.run_emulated(options.ranks, options.rate, script, args, {}, options.timeout)
        return json.loads(path.read_text())


def record(model: str, algorithm: str, bucket_cap_mb: str, trace: str) -> None:
    """Train on this rank, and write the trace of one step on rank 0."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    workload = WORKLOADS[model]()
    net = workload.new_model(0, torch.device("cpu"))
    optimizer = workload.make_optimizer(net)
    net = commlib.wrap(net, algorithm, optimizer=optimizer, bucket_cap_mb=float(bucket_cap_mb))

    def step(number: int) -> None:
        inputs, target = workload.draw((0, number, dist.get_rank()))
        with torch.profiler.record_function("forward"):
            loss = workload.loss(net(inputs), target)
        with torch.profiler.record_function("backward"):
            loss.backward()
        with torch.profiler.record_function("optimizer"):
            optimizer.step()
            optimizer.zero_grad()

    for number in range(_WARM_UP_STEPS):
        step(number)
    # On a CPU communication has a thread of its own, which the profiler leaves out unless it is told to record all.
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread) as profiler:
        step(_WARM_UP_STEPS)
    if dist.get_rank() == 0:
        profiler.export_chrome_trace(trace)
    commlib.unwrap(net)
    dist.destroy_process_group()


def spans_of(trace: dict[str, Any]) -> list[tuple[str, str, str, float, float]]:
    """Return the named events of a trace, ordered by start: (lane, kind, label, start in ms, milliseconds)."""
    found = []
    for event in trace["traceEvents"]:
        lane = lane_of(event)
        if lane is None:
            continue
        kind, _, what = str(event["name"]).removeprefix(PREFIX).partition(": ")
        if lane == _LANES[2]:
            what, kind = f"{kind} {what}", "wire"
        found.append((lane, kind, what, float(event["ts"]) / 1e3, float(event["dur"]) / 1e3))
    if all(kind in _COMPUTATION for _, kind, *_ in found):
        raise SystemExit(f"the trace has no events named {PREFIX!r}...: it was recorded without a wrapped model")
    start_ms = min(span[3] for span in found)
    return sorted(((*span[:3], span[3] - start_ms, span[4]) for span in found), key=lambda span: span[3])


def lane_of(event: dict[str, Any]) -> str | None:
    """Return the lane of an event of a trace; None if it is neither commlib's nor a phase of the step."""
    name = str(event.get("name", ""))
    if event.get("ph") != "X" or not (name in _COMPUTATION or name.startswith(PREFIX)):
        return None
    kind = name.removeprefix(PREFIX).partition(": ")[0]
    if kind in (*_COMPUTATION, "gather", "wait"):
        return _LANES[0]
    return _LANES[1] if kind in ("encode", "decode") else _LANES[2]


def separate_collectives(trace: dict[str, Any]) -> None:
    """Move the collectives to tracks "wire 0", "wire 1", ..., such that those of a track do not overlap. In place."""
    ends: list[float] = []
    collectives = [event for event in trace["traceEvents"] if lane_of(event) == _LANES[2]]
    for event in sorted(collectives, key=lambda event: event["ts"]):
        row = first_free(ends, event["ts"])
        ends[row : row + 1] = [event["ts"] + event["dur"]]
        event["tid"] = f"{_LANES[2]} {row}"


def first_free(ends: list[float], start: float) -> int:
    """Return the first row that has ended at `start`, or the index of a new one."""
    return next((idx for idx, end in enumerate(ends) if end <= start), len(ends))


def draw(spans: list[tuple[str, str, str, float, float]], title: str, path: pathlib.Path) -> None:
    """Draw the lanes; collectives that overlap lie in rows of their own."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    row_ends: list[float] = []
    for lane, kind, label, start_ms, duration_ms in spans:
        row = _LANES.index(lane) * 1.0
        if kind == "wire":
            place = first_free(row_ends, start_ms)
            row_ends[place : place + 1] = [start_ms + duration_ms]
            row += 0.55 * place
        height = 0.8 if kind in _COMPUTATION else 0.45
        ax.barh(
            row, duration_ms, left=start_ms, height=height, color=_COLOURS[kind], edgecolor="#808080", linewidth=0.3,
            zorder=2 if kind in _COMPUTATION else 3,
        )  # fmt: skip
        if kind == "wire":
            number = label.partition("bucket ")[2].split()[:1]
            name = number[0] if number else "flags" if "flags" in label else ""
            ax.text(start_ms + duration_ms / 2, row, name, ha="center", va="center", fontsize=6, zorder=4)
    for kind, colour in _COLOURS.items():
        ax.barh(0, 0, color=colour, edgecolor="#808080", linewidth=0.3, label=kind)
    ax.set_yticks([0, 1, 2 + 0.55 * (len(row_ends) - 1) / 2], _LANES)
    ax.invert_yaxis()
    ax.set(xlabel="ms", title=title)
    ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=130, bbox_inches="tight")


if __name__ == "__main__":
    if "RANK" in os.environ:
        import sys

        record(*sys.argv[1:])
    else:
        main()
