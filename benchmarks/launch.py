"""Start the ranks of a benchmark, on this machine or on emulated hosts, and show the error when one fails."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

_POLL_S = 0.05
_GRACE_S = 3.0
_TAIL_CHARS = 3000


class WorkerError(RuntimeError):
    """Some rank failed; the message holds the end of its output."""


def run_local(num_ranks: int, script: pathlib.Path, args: list[str], env: dict[str, str], timeout: float) -> None:
    """Run `script` in `num_ranks` processes that talk over loopback.

    Raises:
        WorkerError: A rank failed, or the timeout passed. All others have been ended then.
    """
    port = _free_port()
    with _termination_as_exit(), tempfile.TemporaryDirectory() as folder:
        outputs = [pathlib.Path(folder) / f"rank{rank}.txt" for rank in range(num_ranks)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, output in enumerate(outputs):
                own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_PORT": port}
                ranks_env = {**os.environ, **_LOOPBACK, **{key: str(value) for key, value in own.items()}, **env}
                with output.open("wb") as sink:
                    command = [sys.executable, str(script), *args]
                    processes.append(subprocess.Popen(command, env=ranks_env, stdout=sink, stderr=subprocess.STDOUT))
            _wait(processes, outputs, timeout)
        finally:
            _end(processes)


def run_emulated(
    hosts: int,
    rate: str | None,
    script: pathlib.Path,
    args: list[str],
    env: dict[str, str],
    timeout: float,
    latency_us: float = 0.0,
) -> str:
    """Run `script` on emulated hosts, one rank each; returns the description of their links.

    Raises:
        WorkerError: A host failed, or the timeout passed.
    """
    from commlib.emulation.cluster import EmulatedCluster
    from commlib.errors import TransportError

    with EmulatedCluster(hosts=hosts, rate=rate, latency_us=latency_us) as cluster:
        try:
            cluster.run([sys.executable, str(script), *args], env=env, timeout=timeout)
        except TransportError as error:
            raise WorkerError(str(error)) from error
        return str(cluster)


@contextlib.contextmanager
def _termination_as_exit() -> Iterator[None]:
    """Make a request to end (SIGTERM) an exception meanwhile, so that no rank outlives this process."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


_LOOPBACK = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait(processes: list[subprocess.Popen[bytes]], outputs: list[pathlib.Path], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            break
        if time.monotonic() > deadline:
            raise WorkerError(f"the benchmark did not end within {timeout:.0f} s (--timeout)\n" + _tails(outputs))
        time.sleep(_POLL_S)
    if any(process.poll() for process in processes):
        _settle(processes)
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        codes = ", ".join(f"rank {rank} ended with code {processes[rank].poll()}" for rank in failed)
        raise WorkerError(f"{codes}\n" + _tails([outputs[rank] for rank in failed]))


def _settle(processes: list[subprocess.Popen[bytes]]) -> None:
    """Give the others a moment: the first to fail is not always the one that started it."""
    deadline = time.monotonic() + _GRACE_S
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _tails(outputs: list[pathlib.Path]) -> str:
    return "\n".join(f"--- {path.stem}\n{path.read_text(errors='replace')[-_TAIL_CHARS:]}" for path in outputs)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
