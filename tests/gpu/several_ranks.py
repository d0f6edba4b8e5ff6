"""Several ranks on one device: every algorithm against its run on the CPU, a resume, a close, and a killed rank.

python -m tests.gpu.several_ranks --ranks 2 --device cuda --seconds 40

NCCL refuses two ranks of one host on one device. Here each rank declares a separate host (NCCL_HOSTID) and
communicates over loopback. Whether NCCL accepts this is a result; if it refuses, the ranks start again with Gloo. The
algorithms run one after the other until the time is over, families first.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.gpu import results

#: Exit status of ranks whose backend does not work, and the line that they print if it does.
REFUSED, WORKS = 5, "the backend works"
#: Printed by rank 0 for a failed check.
FAILED = "failed on this or another rank:"
#: Ranks that share a device take turns on it, so the fewer times NCCL's kernels wait for each other the better.
FEW_KERNELS = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_RAS_ENABLE": "0"}
_POLL_S = 0.05
_MOMENT_S = 8.0  # for the others, once a rank has failed
_END_S = 3.0
_BAD_WORDS = ("terminate called", "Segmentation fault", "Fatal Python error")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--backend", choices=("nccl", "gloo"), help="nccl, then gloo, on CUDA by default")
    parser.add_argument("--remember", type=Path, help="file that keeps the backend that worked, for the next run")
    parser.add_argument("--seconds", type=float, default=40, help="for everything")
    parser.add_argument("--algorithms", help="names, comma-separated; all by default")
    args = parser.parse_args(argv)
    if args.device == "cpu":
        args.backend = "gloo"
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    deadline = time.monotonic() + args.seconds
    if args.backend is None and args.remember is not None and args.remember.exists():
        args.backend = args.remember.read_text()
    for backend in [args.backend] if args.backend else ["nccl", "gloo"]:
        code = run(args, backend, deadline)
        if code != REFUSED:
            if args.remember is not None:
                args.remember.write_text(backend)
            return code
    return 1


def run(args: argparse.Namespace, backend: str, deadline: float) -> int:
    """Run the ranks with a backend; return 0, 1 where something failed, or REFUSED."""
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(args.ranks)]
        port = _free_port()
        processes = [_start(args, backend, rank, port, log, deadline) for rank, log in enumerate(logs)]
        try:
            _await(processes, deadline)
        finally:
            codes = [process.poll() for process in processes]
            for process in processes:
                process.kill()
                process.wait()
        texts = [log.read_text(errors="replace") for log in logs]
    for rank, text in enumerate(texts):
        print(f"---- {backend}, rank {rank} of {args.ranks}, exit code {codes[rank]}\n{text[-20_000:]}", flush=True)
    return _judge(args, backend, codes, texts)


def _start(
    args: argparse.Namespace, backend: str, rank: int, port: int, log: Path, deadline: float
) -> subprocess.Popen[bytes]:
    env = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(args.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_HOSTID": f"commlib-rank-{rank}",
        **FEW_KERNELS,
        "NCCL_DEBUG": "WARN",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    command = [sys.executable, "-m", "tests.gpu.one_rank", "--device", args.device, "--backend", backend]
    command += ["--until", str(deadline)]
    command += ["--algorithms", args.algorithms] if args.algorithms else []
    with log.open("wb") as sink:
        return subprocess.Popen(command, env=env, stdout=sink, stderr=subprocess.STDOUT)


def _await(processes: list[subprocess.Popen[bytes]], deadline: float) -> None:
    """Wait for all ranks, or for the deadline, or until a first failure has had a moment to show elsewhere."""
    limit = deadline + _END_S
    while any(process.poll() is None for process in processes) and time.monotonic() < limit:
        if any(process.poll() not in (None, 0, -9) for process in processes):
            limit = min(limit, time.monotonic() + _MOMENT_S)
        time.sleep(_POLL_S)


def _judge(args: argparse.Namespace, backend: str, codes: list[int | None], texts: list[str]) -> int:
    name = f"{args.ranks} ranks on {args.device}, {backend}"
    if backend == "nccl" and args.ranks > 1 and WORKS not in texts[0]:  # it refused, or did not answer
        said = [line for text in texts for line in text.splitlines() if "NCCL" in line and "INFO" not in line]
        results.add(f"{name}: refused", results.SKIPPED, text="\n".join(said[-3:]) or f"exit codes {codes}")
        return REFUSED
    expected = [0] * args.ranks
    if args.ranks > 1:
        expected[-1] = -9  # which kills itself in the end
    bad = [word for word in _BAD_WORDS for text in texts if word in text]
    is_well = codes == expected and not bad
    facts = {} if is_well else {"text": f"exit codes {codes}, expected {expected} {' '.join(bad)}"}
    results.add(f"{name}: exit", results.PASSED if is_well else results.FAILED, **facts)
    return 0 if is_well and FAILED not in texts[0] else 1


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
