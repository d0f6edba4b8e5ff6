"""Time training steps of several systems against each other.

python benchmarks/step.py --systems ddp,commlib:allreduce --ranks 2 --model bytes-gpt --json out.json

All systems live in the same processes and take turns, a few steps each, in rotating order; the ratio to the first
system is taken block by block, so that drifts of the machine cancel. Peak memory is measured in new processes for each
system. benchmarks/README.md explains the numbers, systems.py lists the systems.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import harness
import numpy as np
from harness import Place
from intervals import Ratio, paired_ratio, ratio_to_best
from models import WORKLOADS
from rich.table import Table
from systems import block_of, ddp_configurations, parse, parse_list
from worker import search_steps

_SWEEP_MB = ("0.5", "1", "2", "4", "8", "16", "32", "64")
_PLANNED = "commlib:allreduce"
#: Blocks of 64 KiB and more are mapped and given back one by one, so that resident memory is live memory.
_MEMORY_ENV = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", help="comma-separated; the first is the reference (default: see --sweep, --ranks)")
    parser.add_argument("--model", choices=WORKLOADS, default="bytes-gpt")
    parser.add_argument("--ranks", type=int, default=2, help="processes on loopback; 1 measures the engine's overhead")
    parser.add_argument("--hosts", type=int, help="emulated hosts, one rank each, instead of --ranks")
    parser.add_argument("--rate", help="rate of the emulated links, for example 200mbit or 1gbit")
    parser.add_argument("--latency-us", type=float, default=0.0, help="one-way latency added between emulated hosts")
    parser.add_argument(
        "--network", help="for a shrunk- model instead of --rate: the network of `commlib compare` to equal"
    )
    parser.add_argument("--sweep", action="store_true", help="planned buckets against fixed sizes of 0.5 to 64 MiB")
    parser.add_argument(
        "--ddp-all", action="store_true", help="replace ddp by all its configurations, measured in full"
    )
    parser.add_argument("--reps", type=int, default=20, help="timed blocks of each system")
    parser.add_argument("--block", type=int, default=3, help="timed steps in a block; whole periods where that is more")
    parser.add_argument("--warmup", type=int, default=6, help="first steps of each system, not timed")
    parser.add_argument("--memory-runs", type=int, default=3, help="memory measurements; their median counts")
    parser.add_argument("--memory-steps", type=int, default=6, help="steps of the memory measurement; 0 leaves it out")
    harness.add_worker_options(parser, 3600, "all the steps together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="file for the results")
    args = parser.parse_args(argv)
    if (args.rate or args.network or args.latency_us) and not args.hosts:
        parser.error("--rate, --network and --latency-us shape emulated links: give --hosts too")
    if args.network:
        args.rate = _equivalent_rate(parser, args)
    try:
        args.systems = _systems(args)
        args.num_steps = _num_steps(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def _equivalent_rate(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    prefix, _, name = args.model.partition("-")
    if prefix != "shrunk":
        parser.error(f"--network: expected a shrunk- model with it, got {args.model}")
    from shrunk import equivalent_rate  # lazily: other models do without commlib

    from commlib.errors import ConfigError

    try:
        return f"{equivalent_rate(name, args.network, args.hosts) / 1e6:.1f}mbit"
    except ConfigError as error:
        parser.error(str(error))


def _systems(args: argparse.Namespace) -> list[str]:
    """Return the names of all systems to measure, the reference first."""
    if args.sweep:
        planned = args.systems or _PLANNED
        return [planned, *(f"{planned}@{cap}" for cap in _SWEEP_MB)]
    default = f"none,{_PLANNED}" if args.ranks == 1 and not args.hosts else f"ddp,{_PLANNED}"
    names = [system.name for system in parse_list(args.systems or default)]
    if not args.ddp_all:
        return names
    return [*(system.name for system in ddp_configurations()), *(name for name in names if name != "ddp")]


def _num_steps(args: argparse.Namespace) -> int:
    """Return how many steps the workers take."""
    systems = list(map(parse, args.systems))
    searched = search_steps(args.warmup, args.block) if any(system.is_open for system in systems) else 0
    return searched + sum(args.warmup + args.reps * (block_of(system, args.block) + 1) for system in systems)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all systems; returns the content of the result file."""
    place = _place(args)
    keys = ("model", "device", "threads", "seed", "timeout", "block", "warmup", "reps", "memory_steps")
    spec = {key: getattr(args, key) for key in keys}
    timed = harness.run_workers(place, {**spec, "mode": "time", "systems": args.systems}, args.num_steps)
    memory = _memory(args, place, spec, timed)
    return {
        "header": {**harness.header(), "links": timed["links"], **spec},
        "ddp_search_s": timed["ddp_search"],
        "sweep": _sweep_summary(timed["systems"]) if args.sweep else None,
        "rows": rows(timed["systems"], memory, place, args.model, args.ddp_all),
    }


def _place(args: argparse.Namespace) -> Place:
    return Place(args.hosts or args.ranks, bool(args.hosts), args.rate, args.latency_us)


def _memory(args: argparse.Namespace, place: Place, spec: dict[str, Any], timed: dict[str, Any]) -> dict[str, float]:
    """Measure the peak memory of each system in fresh processes. Links do not matter to it, so they are not shaped."""
    if not args.memory_steps or not args.memory_runs:
        return {}
    peaks = {}
    for name, measured in timed["systems"].items():
        one = {**spec, "mode": "memory", "systems": [measured["configuration"]]}
        runs = [
            harness.run_workers(Place(place.ranks), one, args.memory_steps, _MEMORY_ENV)["peak_bytes"]
            for _ in range(args.memory_runs)
        ]
        peaks[name] = statistics.median(runs)
    return peaks


def rows(
    systems: dict[str, Any], memory: dict[str, float], place: Place, model: str, to_best_ddp: bool
) -> list[dict[str, Any]]:
    """Return one row per system, as described in benchmarks/README.md."""
    times = {name: measured["blocks_s"] for name, measured in systems.items()}
    bare_s = float(np.median(times["none"])) if "none" in times else None
    result = []
    for name, measured in systems.items():
        reference, ratio = _ratio(name, times, to_best_ddp)
        step_s = float(np.median(times[name]))
        row = {
            "system": name,
            "algorithm": name.partition(":")[2].partition("@")[0].partition("(")[0] or None,
            "configuration": measured["configuration"],
            "hosts": place.ranks if place.emulated else 1,
            "ranks": place.ranks,
            "rate": place.rate,
            "latency_us": place.latency_us,
            "model": model,
            "step_s": step_s,
            "reference": reference,
            "ratio": ratio.median,
            "ratio_lo": ratio.lo,
            "ratio_hi": ratio.hi,
            "exposed_s": None if bare_s is None else step_s - bare_s,
            "wire_bytes": float(np.median(measured["wire_bytes"])),
            "wire_packets": float(np.median(measured["wire_packets"])),
            **_to_lower_bound(name, times),
            "peak_bytes": memory.get(name),
        }
        result.append({**row, **_details(measured)})
    return result


def _to_lower_bound(name: str, times: dict[str, list[float]]) -> dict[str, float | None]:
    """Compare an algorithm with the bound that was measured with it: the best, where there are several bucket sizes."""
    own = parse(name)
    bounds = [other for other in map(parse, times) if other.kind == "bound"]
    blocks = {b.name: times[b.name] for b in bounds if (b.variant, b.options) == (own.variant, own.options)}
    if own.kind != "commlib" or not blocks:
        return {"lower_bound_s": None, "to_lower_bound": None}
    best, ratio = ratio_to_best(times[name], blocks)
    return {"lower_bound_s": float(np.median(blocks[best])), "to_lower_bound": ratio.median}


def _details(measured: dict[str, Any]) -> dict[str, Any]:
    reported = measured["exposed_s"]
    keys = ("reported_wire_bytes", "plan", "plan_cost", "bucket_bytes", "loss", "blocks_s")
    details = {key: measured.get(key) for key in keys}
    return {"reported_exposed_s": float(np.median(reported)) if reported else None, **details}


def _ratio(name: str, times: dict[str, list[float]], to_best_ddp: bool) -> tuple[str, Ratio]:
    """Compare with the first system, or with the best DDP configuration."""
    if to_best_ddp:
        candidates = {system.name: times[system.name] for system in ddp_configurations()}
        return ratio_to_best(times[name], candidates)
    reference = next(iter(times))
    return reference, paired_ratio(times[name], times[reference])


def _sweep_summary(systems: dict[str, Any]) -> dict[str, Any]:
    """Compare the planned buckets with the best of the fixed sizes."""
    times = {name: measured["blocks_s"] for name, measured in systems.items()}
    planned, *fixed = times
    best, ratio = ratio_to_best(times[planned], {name: times[name] for name in fixed})
    return {"best_fixed": best, "planned_to_best": ratio.median, "lo": ratio.lo, "hi": ratio.hi}


def table(result: dict[str, Any], place: str) -> Table:
    """Return the rows as a table for the terminal."""
    columns = ("system", "step ms", "ratio", "95 % interval", "exposed ms", "wire MB/step", "peak MB")
    shown = harness.table_of(f"{result['rows'][0]['model']}, {place}", columns)
    for row in result["rows"]:
        interval = f"{row['ratio_lo']:.3f} to {row['ratio_hi']:.3f}"
        values = (row["exposed_s"], 1e3), (row["wire_bytes"], 1e-6), (row["peak_bytes"], 1e-6)
        cells = ["-" if value is None else f"{value * scale:.1f}" for value, scale in values]
        shown.add_row(row["system"], f"{row['step_s'] * 1e3:.1f}", f"{row['ratio']:.3f}", interval, *cells)
        if row["configuration"] != row["system"]:
            shown.caption = f"{row['system']} ran as {row['configuration']}, the best of {len(ddp_configurations())}"
    return shown


def main() -> None:
    args = parse_args()
    place = _place(args)
    with harness.ending_on_errors():
        result = measure(args)
    harness.print_table(table(result, str(place)))
    if result["sweep"]:
        print(
            "planned to best fixed ({best_fixed}): {planned_to_best:.3f} ({lo:.3f} to {hi:.3f})".format(
                **result["sweep"]
            )
        )
    if args.json:
        harness.write_json(args.json, result)


if __name__ == "__main__":
    main()
