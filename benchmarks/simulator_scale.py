"""Measure the simulator itself: processor seconds and memory of each algorithm's simulation, by the number of ranks.

python benchmarks/simulator_scale.py --ranks 256,1024,4096 --workload bert-large --per-node 8
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from multiprocessing.connection import Connection

from commlib.algorithms import Algorithm
from commlib.network import presets, workloads
from commlib.network.model import Network
from commlib.simulation.compare import candidates
from commlib.simulation.simulator import simulate
from commlib.simulation.training import Options


def network_of(num_ranks: int, per_node: int) -> Network:
    """Return nodes of the `100gbps` preset, as many as the ranks need."""
    return presets.network("100gbps", nodes=num_ranks // per_node, gpus_per_node=per_node)


def measure(algorithm: Algorithm, network: Network, workload: str, limit_s: int) -> dict[str, object]:
    """Simulate in a separate process; return its processor seconds, memory and result, or the reason of a failure."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_simulate, args=(sender, algorithm, network, workload, limit_s))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return {"error": f"ended by a signal; the limit was {limit_s} s"}
    finally:
        process.join()


def _simulate(sender: Connection, algorithm: Algorithm, network: Network, workload: str, limit_s: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + limit_s, resource.RLIM_INFINITY))
    begin_s = time.process_time()
    try:
        result = simulate(workloads.get(workload), network, presets.device("v100"), algorithm, Options())
        found: dict[str, object] = {"step_s": result.step_s, "memory_bytes": result.memory_bytes}
    except Exception as error:  # a failure is a result of this benchmark
        found = {"error": f"{type(error).__name__}: {error}"}
    used = resource.getrusage(resource.RUSAGE_SELF)
    sender.send({"processor_s": time.process_time() - begin_s, "peak_mb": used.ru_maxrss / 1024, **found})


def main() -> None:
    """Print a line for each algorithm and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", default="256,1024,4096", help="numbers of ranks, with commas")
    parser.add_argument("--per-node", type=int, default=8, help="ranks of a node")
    parser.add_argument("--workload", default="bert-large")
    parser.add_argument("--algorithms", default="all", help="as of commlib compare")
    parser.add_argument("--limit-s", type=int, default=60, help="processor seconds after which a simulation is ended")
    parser.add_argument("--json", action="store_true", help="lines of JSON")
    arguments = parser.parse_args()
    numbers = [int(number) for number in arguments.ranks.split(",")]
    chosen = candidates(arguments.algorithms, several_per_node=arguments.per_node > 1)
    for name, algorithm in chosen.items():
        for num_ranks in numbers:
            network = network_of(num_ranks, arguments.per_node)
            found = measure(algorithm, network, arguments.workload, arguments.limit_s)
            row = {"algorithm": name, "ranks": num_ranks, "workload": arguments.workload, **found}
            print(json.dumps(row) if arguments.json else _line(row), flush=True)


def _line(row: dict[str, object]) -> str:
    what = row["error"] if "error" in row else f"step {row['step_s']:.4f} s"
    spent = f"{row['processor_s']:8.2f} s {row['peak_mb']:8.0f} MB" if "processor_s" in row else " " * 22
    return f"{row['algorithm']:45} {row['ranks']:6} ranks {spent}  {what}"


if __name__ == "__main__":
    main()
