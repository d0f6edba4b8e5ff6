"""Time the collectives that commlib's transport issues over Gloo, on emulated hosts with latency.

python benchmarks/latency.py --hosts 4 --rate 1gbit --latencies-us 1000,5000,20000 --json out.json

Connections are warm (`tcp_slow_start_after_idle` is off), no other traffic runs, and all ranks start at the same moment
of their shared clock. A time is from then to the end of the slowest rank, the median of `--reps`. Next to it is the
prediction of the simulator, which is given the time of each verb on these hosts without latency (the smallest and the
two largest sizes, measured first) and the added latency. An all-gather's bytes are those of its result, an
exchange's those that a rank sends, half to each of two neighbours.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from statistics import median
from typing import Any

import harness
import torch
import torch.distributed as dist
from rich.table import Table

from commlib.emulation.cluster import EmulatedCluster
from commlib.emulation.netns import temporary_folder
from commlib.errors import CommlibError
from commlib.network.model import Device, Network
from commlib.simulation.collectives import GLOO, Links
from commlib.simulation.fitting import VerbTimes, fitted
from commlib.transport.base import Communicator, Request
from commlib.transport.torch_dist import TorchTransport

VERBS = ("all_reduce", "all_gather", "all_to_all", "broadcast", "exchange")
SIZES = (4, *(4**power << 10 for power in range(3, 8)))
_NO_DEVICE = Device("free", memory_gbytes_s=1e6, tflops={"fp32": 1e6})
_WARM_UP = 2
_TIMEOUT_S = 600.0
_MARGIN_S = 0.01


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4, help="emulated hosts, one rank each")
    parser.add_argument("--rate", default="1gbit", help="rate of the links, or none")
    parser.add_argument("--latencies-us", default="1000,5000,20000", help="nonzero one-way latencies, comma-separated")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes, comma-separated")
    parser.add_argument("--reps", type=int, default=7, help="timed collectives of each kind and size")
    parser.add_argument("--json", help="file for the results")
    args = parser.parse_args(argv)
    try:
        args.latencies = [float(word) for word in args.latencies_us.split(",")]
        args.sizes = [int(word) for word in args.sizes.split(",")]
    except ValueError as error:
        parser.error(str(error))
    if len(set(args.sizes)) < 2:
        parser.error(f"--sizes: expected two or more, got {args.sizes}")
    return args


def make_request(comm: Communicator, verb: str, nbytes: int) -> Request:
    """Return a request of about `nbytes`, at least one fp32 for each rank that gets its own."""
    size = comm.world_size
    own = max(1, nbytes // 4 // size)
    whole = torch.zeros(max(1, nbytes // 4) if verb in ("all_reduce", "broadcast") else own * size)
    match verb:
        case "all_reduce":
            return comm.all_reduce(whole)
        case "all_gather":
            return comm.all_gather(whole, torch.zeros(own))
        case "all_to_all":
            return comm.all_to_all(whole, torch.zeros_like(whole))
        case "broadcast":
            return comm.broadcast(whole)
    peers = sorted({(comm.rank + 1) % size, (comm.rank - 1) % size})
    numel = max(1, nbytes // 4 // len(peers))
    return comm.exchange(*([(peer, torch.zeros(numel)) for peer in peers] for _ in range(2)))


class Simulator:
    """Predicts the times of collectives from their times without latency.

    Args:
        hosts: The number of hosts.
        rows: Measurements without latency.
    """

    def __init__(self, hosts: int, rows: list[dict[str, Any]]) -> None:
        self._hosts = hosts
        times = {}
        for verb in VERBS:
            seconds = {row["bytes"]: row["seconds"] for row in rows if row["verb"] == verb}
            small, (part, whole) = min(seconds), sorted(seconds)[-2:]
            rise_s = (seconds[whole] - seconds[part]) / (whole - part) * whole
            fixed_s = min(max(0.0, seconds[whole] - rise_s), seconds[small], seconds[whole] / 2)
            requests = (self._request(verb, nbytes) for nbytes in (small, whole))
            times[verb] = VerbTimes(next(requests), seconds[small], next(requests), seconds[whole], fixed_s)
        self._network, found = fitted(Network("emulated", nodes=hosts), GLOO, times)
        # The minimum is the scheduling of processes: no latency, and nothing that could hide one.
        own_us = {verb: min(row["seconds"] for row in rows if row["verb"] == verb) * 1e6 for verb in VERBS}
        self._profile = replace(found, hidden_of={}, op_us_of=own_us)

    def _request(self, verb: str, nbytes: int) -> Request:
        return make_request(Communicator(0, self._hosts), verb, nbytes)

    def predict(self, verb: str, nbytes: int, latency_us: float) -> float:
        """Return the seconds of a collective where so much latency is added."""
        network = replace(self._network, latency_us=latency_us)
        cost = Links(network, self._profile, _NO_DEVICE).cost(self._request(verb, nbytes))
        return self._profile.op_us_of[verb] * 1e-6 + cost.seconds


# --- on the hosts -----------------------------------------------------------------------------------------------------


class _Rank:
    """Times collectives on all ranks at once."""

    def __init__(self, transport: TorchTransport, reps: int) -> None:
        self._transport = transport
        self._reps = reps
        self._gather_s = 0.0
        self._gather_s = 2 * max(self.seconds(lambda: transport.gather_objects(None)))

    def seconds(self, run: Callable[[], object]) -> list[float]:
        """Return the times of `reps` runs until the slowest rank has ended, after some untimed runs."""
        found = []
        for repetition in range(_WARM_UP + self._reps):
            start_s = max(self._transport.gather_objects(time.monotonic())) + self._gather_s + _MARGIN_S
            time.sleep(max(0.0, start_s - time.monotonic()))
            run()
            end_s = time.monotonic()
            if repetition >= _WARM_UP:
                found.append(end_s - start_s)
        return list(map(max, zip(*self._transport.gather_objects(found), strict=True)))


def work(spec: dict[str, Any]) -> None:
    """Run one rank; rank 0 writes the results."""
    torch.set_num_threads(1)
    # Of this host: connections stay warm between two measurements, however long a round trip is.
    pathlib.Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").write_text("0")
    dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_S))
    world = dist.group.WORLD
    assert world is not None
    transport = TorchTransport(world, torch.device("cpu"), timedelta(seconds=_TIMEOUT_S))
    comm = Communicator(transport.rank, transport.world_size)
    rank = _Rank(transport, spec["reps"])
    for verb in VERBS:  # connections are made, and their windows opened
        transport.complete(make_request(comm, verb, max(spec["sizes"])), "warming up")
    rows = [("barrier", 0, rank.seconds(dist.barrier))]
    for verb in VERBS:
        for nbytes in spec["sizes"]:
            request = make_request(comm, verb, nbytes)
            times_s = rank.seconds(lambda request=request: transport.complete(request, "measuring"))
            rows.append((verb, nbytes, times_s))
    if transport.rank == 0:
        names = ("verb", "bytes", "times_s")
        found = [{**dict(zip(names, row, strict=True)), "seconds": median(row[2])} for row in rows]
        pathlib.Path(spec["result"]).write_text(json.dumps(found))
    transport.gather_objects(None)
    transport.close()
    dist.destroy_process_group()


# --- the driver -------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, latency_us: float) -> tuple[str, list[dict[str, Any]]]:
    """Return the links in words, and the rows at one latency."""
    rate = None if args.rate == "none" else args.rate
    with EmulatedCluster(args.hosts, rate, latency_us=latency_us) as cluster, temporary_folder() as folder:
        result = pathlib.Path(folder) / "result.json"
        spec = {
            "sizes": args.sizes,
            "reps": args.reps,
            "result": str(result),
        }
        command = [sys.executable, __file__, "--worker", json.dumps(spec)]
        cluster.run(command, env={"OMP_NUM_THREADS": "1"}, timeout=_TIMEOUT_S * 3)
        own = {"hosts": args.hosts, "rate": args.rate, "latency_us": latency_us, "rtt_s": cluster.latency_s}
        return str(cluster), [{**own, **row} for row in json.loads(result.read_text())]


def table(rows: list[dict[str, Any]], links: str) -> Table:
    """Return the rows at one latency as a table for the terminal."""
    columns = ("collective", "bytes", "ms", "least", "most", "simulated ms", "error")
    shown = harness.table_of(links, columns, texts=("collective",))
    for row in rows:
        times = (row["seconds"], min(row["times_s"]), max(row["times_s"]))
        said = row["predicted_s"]
        told = ["", ""] if said is None else [f"{said * 1e3:.2f}", f"{said / row['seconds'] - 1:+.0%}"]
        shown.add_row(row["verb"], f"{row['bytes']:,}", *(f"{each * 1e3:.2f}" for each in times), *told)
    return shown


def summary(rows: list[dict[str, Any]]) -> Table:
    """Return the simulator's errors by latency, of all sizes but the smallest, as a table for the terminal."""
    shown = harness.table_of("errors of the simulator", ("one way", "median", "worst", "of"))
    smallest = min(row["bytes"] for row in rows if row["verb"] in VERBS)
    said = [row for row in rows if row["predicted_s"] is not None and row["bytes"] > smallest]
    for latency_us in dict.fromkeys(row["latency_us"] for row in said):
        errors = {
            f"{row['verb']} of {row['bytes']:,}": abs(row["predicted_s"] / row["seconds"] - 1)
            for row in said
            if row["latency_us"] == latency_us
        }
        worst = max(errors, key=lambda name: errors[name])
        shown.add_row(f"{latency_us:g} us", f"{median(errors.values()):.0%}", f"{errors[worst]:.0%}", worst)
    return shown


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        work(json.loads(sys.argv[2]))
        return
    args = parse_args()
    rows, links, simulator = [], {}, None
    for latency_us in [0.0, *(each for each in args.latencies if each)]:
        try:
            links[latency_us], found = measure(args, latency_us)
        except CommlibError as error:
            sys.exit(f"error: {error}")
        simulator = simulator or Simulator(args.hosts, found)
        for row in found:
            is_said = latency_us > 0 and row["verb"] in VERBS
            row["predicted_s"] = simulator.predict(row["verb"], row["bytes"], latency_us) if is_said else None
        harness.print_table(table(found, links[latency_us]))
        rows += found
    harness.print_table(summary(rows))
    if args.json:
        harness.write_json(args.json, {"header": {**harness.header(), "links": links}, "rows": rows})


if __name__ == "__main__":
    main()
