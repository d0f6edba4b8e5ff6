"""Compare the times of the codec kernels with memcpy and with other implementations, all in the same run.

python benchmarks/kernels.py --sizes 4KiB,1MiB,64MiB,1GiB --threads 1,2 --json out.json --plot out.png
python benchmarks/kernels.py --device cuda --elements 100e6,16e6,1e6 --peer-size 1GiB --json out.json

Each kernel's time is compared with the time that memcpy needs for as many bytes as the kernel must move (`limit`):
reads and writes counted once each, as if every tensor passed through the core exactly once. The kernels of a codec,
memcpy and a non-temporal copy take turns, in rotating order, on preallocated buffers, and each turn begins with an
untimed call that warms the cache; a figure is the median. A sum and an addition by torch show the gain of simple
operations from more threads. The crossover of a codec is the
bandwidth below which encoding, sending and decoding take less time than sending fp32. On a GPU (--device cuda) a time
is the device's own, between two events. Calls are queued while the device sleeps, so that it never waits for the host;
the host's time to queue a call is measured separately (gpu_timing.py).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
import time
import traceback
from typing import Any

import gpu_timing
import harness
import numpy as np
import torch
from intervals import rotation
from kernel_cases import ROTATION, Kernel, Tensors, copies, kernels_of, new_tensors, peers_of, shared_by_threads
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from commlib import codecs
from commlib.kernels import native

_UNITS = {"B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_LEAST_S = 2e-4  # a shorter call is repeated until it takes that long
_LEAST_REPS = 3
_NAMES = [*codecs.by_name, ROTATION]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="4KiB,64KiB,1MiB,16MiB,64MiB", help="bytes of the fp32 tensor")
    parser.add_argument("--elements", help="elements of the fp32 tensor, as 1e6,16e6; in the place of --sizes")
    parser.add_argument("--threads", default="1", help="numbers of threads, comma-separated")
    parser.add_argument("--codecs", help=f"names, comma-separated, {ROTATION} among them; all by default")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--reps", type=int, default=15, help="timed calls of each kernel")
    parser.add_argument("--seconds", type=float, default=20, help="a codec's turns end after that, but not before 3")
    parser.add_argument("--total-seconds", type=float, default=float("inf"), help="no codec is begun after that")
    parser.add_argument(
        "--peer-size", default="64MiB", help="other libraries are measured up to this size; 0B for none"
    )
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--plot", help="file for the plot of the fraction of the limit by size (PNG)")
    parser.add_argument(
        "--merge", nargs="+", metavar="JSON", help="measure nothing: join these results of earlier runs"
    )
    args = parser.parse_args(argv)
    try:
        args.sizes = [parse_bytes(size) for size in args.sizes.split(",")]
        if args.elements:
            args.sizes = [4 * int(float(count)) for count in args.elements.split(",")]
        args.peer_size = parse_bytes(args.peer_size)
        args.threads = [int(threads) for threads in args.threads.split(",")]
        args.codecs = args.codecs.split(",") if args.codecs else _NAMES
        unknown = sorted(set(args.codecs) - set(_NAMES))
        if unknown:
            raise ValueError(f"--codecs: expected some of {', '.join(_NAMES)}, got {', '.join(unknown)}")
    except ValueError as error:
        parser.error(str(error))
    return args


def parse_bytes(text: str) -> int:
    match = re.fullmatch(r"([\d.]+)\s*([KMG]i?B|B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise ValueError(f"size {text!r}: expected for example 64KiB, 1MiB, 1GiB")
    unit = (match[2] or "B").upper()
    return int(float(match[1]) * _UNITS[unit if "I" in unit or unit == "B" else unit[0] + "IB"])


def measure(made: list[Kernel], reps: int, seconds: float) -> list[float]:
    """Return the median seconds of each kernel on the CPU; they take turns."""
    calls = []
    for kernel in made:
        kernel.run()
        start = time.perf_counter()
        kernel.run()
        calls.append(max(1, int(_LEAST_S / max(time.perf_counter() - start, 1e-9))))
    spent: list[list[float]] = [[] for _ in made]
    begin = time.perf_counter()
    for repetition in range(reps):
        if repetition >= _LEAST_REPS and time.perf_counter() - begin > seconds:
            break
        for place in rotation(len(made), repetition):
            made[place].run()  # not timed: warms the cache after the others
            start = time.perf_counter()
            for _ in range(calls[place]):
                made[place].run()
            spent[place].append((time.perf_counter() - start) / calls[place])
    return [float(np.median(values)) for values in spent]


def rows_of(made: list[Kernel], medians: list[float], numel: int, device: str, threads: int) -> list[dict[str, Any]]:
    """Return one row per kernel of this library, its peers in it; the first kernel is memcpy."""
    copy_s = medians[0]
    result = []
    for kernel, median_s in zip(made, medians, strict=True):
        if kernel.peer_of is not None:
            continue
        peers = {
            other.name: other_s
            for other, other_s in zip(made, medians, strict=True)
            if other.peer_of == (kernel.name, kernel.codec)
        }
        limit_s = copy_s * kernel.bytes_moved / made[0].bytes_moved
        row = {"kernel": kernel.name, "codec": kernel.codec, "device": device}
        row |= {"isa": native.isa() if device == "cpu" else device, "threads": threads, "dtype": "float32"}
        row |= {"numel": numel, "bytes_moved": kernel.bytes_moved, "payload_bytes": kernel.payload_bytes}
        row |= {"median_s": median_s, "memcpy_median_s": copy_s, "to_memcpy": median_s / copy_s}
        row |= {"gb_per_s": kernel.bytes_moved / median_s / 1e9, "limit_s": limit_s}
        result.append({**row, "fraction_of_limit": limit_s / median_s, "peers_s": peers})
    return result


def noted(rows: list[dict[str, Any]], made: list[Kernel], host_s: list[float]) -> list[dict[str, Any]]:
    """Add the host's time for a call, if measured, and report each row to a check on a GPU."""
    host = {(kernel.name, kernel.codec): seconds for kernel, seconds in zip(made, host_s, strict=False)}
    for row in rows:
        if host:
            row["host_s"] = host[row["kernel"], row["codec"]]
        facts = {"ms": row["median_s"] * 1e3, "gb_per_s": row["gb_per_s"], "of_copy": row["fraction_of_limit"]}
        facts |= {f"{name} ms": seconds * 1e3 for name, seconds in row["peers_s"].items()}
        facts |= {"host_us": row["host_s"] * 1e6} if host else {}
        goal = gpu_timing.goal_of(row["kernel"], row["codec"]) if row["numel"] >= gpu_timing.LARGE else None
        if goal is not None:
            facts |= {"goal": goal, "is": "met" if row["fraction_of_limit"] >= goal else "MISSED"}
        name = f"{row['codec']} {row['kernel']}, {row['numel'] / 1e6:g} M"
        harness.note(name, shown=goal is not None or row["codec"] == "-", **facts)
    return rows


def crossovers(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return, per codec, the Gbit/s below which it pays: at the largest size and most threads that were measured."""
    found = {}
    for codec in dict.fromkeys(row["codec"] for row in rows if row["payload_bytes"]):
        own = [row for row in rows if row["codec"] == codec]
        most = max((row["numel"], row["threads"]) for row in own)
        at = {row["kernel"]: row for row in own if (row["numel"], row["threads"]) == most}
        spent_s = at["encode"]["median_s"] + at["decode"]["median_s"]
        found[codec] = (4 * most[0] - at["encode"]["payload_bytes"]) * 8 / spent_s / 1e9
    return found


def table(rows: list[dict[str, Any]]) -> Table:
    columns = ("codec", "kernel", "MiB", "threads", "ms", "GB/s", "to memcpy", "of limit", "peers, ms")
    shown = harness.table_of(f"codec kernels, {rows[0]['isa']}", columns, texts=("codec", "kernel", "peers, ms"))
    for row in rows:
        peers = ", ".join(f"{name} {seconds * 1e3:.3g}" for name, seconds in row["peers_s"].items())
        mib, ms = f"{row['numel'] * 4 / 2**20:g}", f"{row['median_s'] * 1e3:.3g}"
        ratios = f"{row['to_memcpy']:.2f}", f"{row['fraction_of_limit']:.2f}"
        rate = f"{row['gb_per_s']:.1f}"
        shown.add_row(row["codec"], row["kernel"], mib, str(row["threads"]), ms, rate, *ratios, peers)
    return shown


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Draw the fraction of the limit by size, one panel per kernel, for the fewest threads."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    threads = min(row["threads"] for row in rows)
    rows = [row for row in rows if row["threads"] == threads and row["codec"] != "-"]
    names = list(dict.fromkeys(row["kernel"] for row in rows))
    drawn = list(dict.fromkeys(row["codec"] for row in rows))
    styles = {codec: (plt.get_cmap("tab20")(idx % 20), "os^vDP"[idx % 6]) for idx, codec in enumerate(drawn)}
    columns = (len(names) + 1) // 2
    figure, axes = plt.subplots(2, columns, figsize=(3.6 * columns + 2, 8), sharex=True, sharey=True, squeeze=False)
    for axis, name in zip(axes.flat, names, strict=False):
        for codec in drawn:
            line = sorted(
                (4 * row["numel"], row["fraction_of_limit"])
                for row in rows
                if (row["kernel"], row["codec"]) == (name, codec)
            )
            if line:
                color, marker = styles[codec]
                axis.plot(*zip(*line, strict=True), marker=marker, color=color, markersize=4)
        axis.set(title=name, xscale="log", ylim=(0, 1.6))
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.tick_params(labelbottom=True)
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    handles = [plt.Line2D([], [], color=styles[codec][0], marker=styles[codec][1], label=codec) for codec in drawn]
    figure.legend(handles=handles, loc="center right", fontsize=9)
    figure.supxlabel("bytes of the fp32 tensor", y=0.01)
    figure.supylabel(f"fraction of the limit at memcpy's rate, {threads} thread(s)", x=0.005)
    figure.tight_layout(rect=(0.03, 0.02, 1 - 1.4 / (3.6 * columns + 2), 1))
    figure.savefig(path, dpi=110)
    harness.console.print(f"written to {path}")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all that is asked for; return its rows."""
    columns = (TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    is_cuda, begin = args.device.startswith("cuda"), time.perf_counter()
    rows: list[dict[str, Any]] = []
    hidden = not harness.console.is_terminal
    with Progress(*columns, console=harness.console, transient=True, disable=hidden) as progress:
        task = progress.add_task("", total=len(args.sizes) * len(args.threads) * len(args.codecs))
        for nbytes in args.sizes:
            tensors = new_tensors(nbytes // 4, args.device)
            for name in args.codecs:
                if time.perf_counter() - begin > args.total_seconds:
                    harness.console.print(f"no time for {name} of {nbytes / 2**20:g} MiB (--total-seconds)")
                    continue
                for threads in args.threads:
                    torch.set_num_threads(threads)
                    progress.update(task, description=f"{nbytes / 2**20:g} MiB, {threads} threads, {name}")
                    try:
                        rows += rows_of_codec(name, tensors, args, threads)
                    except Exception as error:
                        if not is_cuda:
                            raise
                        traceback.print_exc()  # where time on a device is short, the others are measured all the same
                        harness.note(f"{name}, {nbytes / 4e6:g} M", has_failed=True, text=f"{error!r}"[:2000])
                    progress.advance(task)
                tensors.residual.zero_()
                tensors.out.zero_()
            if is_cuda:
                save(rows, args)
    return rows


def rows_of_codec(name: str, tensors: Tensors, args: argparse.Namespace, threads: int) -> list[dict[str, Any]]:
    """Measure a codec's kernels and their peers; return a row for each kernel."""
    numel, host_s = tensors.x.numel(), []
    peers = peers_of(name, tensors) if 4 * numel <= args.peer_size else []
    made = [*copies(tensors), *kernels_of(name, tensors), *shared_by_threads(tensors), *peers]
    if args.device.startswith("cuda"):
        medians, host_s = gpu_timing.measure(made, args.reps, args.seconds)
    else:
        medians = measure(made, args.reps, args.seconds)
    return noted(rows_of(made, medians, numel, args.device, threads), made, host_s)


def save(rows: list[dict[str, Any]], args: argparse.Namespace, header: dict[str, Any] | None = None) -> None:
    """Write the measurements so far, if requested."""
    if args.json:
        header = harness.header() if header is None else header
        harness.write_json(args.json, {"header": header, "crossover_gbit_s": crossovers(rows), "rows": rows})


def main() -> None:
    args = parse_args()
    if args.merge:
        results = [json.loads(pathlib.Path(path).read_text()) for path in args.merge]
        rows = [row for result in results for row in result["rows"]]
        header = {**results[0]["header"], "command": [result["header"]["command"] for result in results]}
    else:
        rows, header = run(args), harness.header()
    if not rows:
        sys.exit("nothing was measured")
    harness.print_table(table(rows))
    found = crossovers(rows)
    print("pays for itself below, Gbit/s: " + ", ".join(f"{name} {rate:.1f}" for name, rate in found.items()))
    save(rows, args, header)
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
