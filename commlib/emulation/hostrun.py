"""Processes on emulated hosts: start them, collect their output, wait for all, and terminate the rest if one fails."""

from __future__ import annotations

import math
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from commlib.emulation.netns import Namespace
from commlib.errors import PeerFailure, PeerTimeout

_POLL_S = 0.02
_CHECK_S = 0.2
_TERMINATE_S = 3.0
_DRAIN_S = 2.0
_TAIL_LINES = 15

LineHandler = Callable[[int, str], None]


@dataclass(frozen=True)
class HostResult:
    """The result of a process on a host.

    Attributes:
        rank: The host's rank.
        returncode: The exit code; a negative value is the number of the signal that terminated it.
        output: Standard output and standard error, interleaved in the order received.
    """

    rank: int
    returncode: int
    output: str


class HostProcess:
    """One process on one host. Its output is collected while it runs.

    Attributes:
        check: Called while waiting for the process; raises an error if the hosts' network has failed.
    """

    def __init__(
        self,
        rank: int,
        namespace: Namespace,
        hostname: str,
        cmd: Sequence[str],
        env: Mapping[str, str],
        on_line: LineHandler | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank = rank
        self.check = check
        self._lines: list[str] = []
        self._on_line = on_line
        self._popen = subprocess.Popen(
            namespace.wrap(list(cmd), hostname),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches only the caller, which terminates the hosts
        )
        self._reader = threading.Thread(target=self._read, name=f"host-{rank}-output", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        with self._popen.stdout as lines:
            for line in lines:
                self._lines.append(line)
                if self._on_line is not None:
                    self._on_line(self.rank, line.rstrip("\n"))

    @property
    def pid(self) -> int:
        """The process id of the command itself."""
        return self._popen.pid

    @property
    def output(self) -> str:
        """The output so far."""
        return "".join(self._lines)

    def tail(self) -> str:
        """Return the last lines of output, indented."""
        lines = self.output.splitlines()[-_TAIL_LINES:] or ["(no output)"]
        return "\n".join(f"    {line}" for line in lines)

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._popen.poll()

    def send_signal(self, number: int) -> None:
        """Send a signal to the command itself. No effect after it has exited."""
        self._popen.send_signal(number)

    def wait(self, timeout: float | None = None) -> HostResult:
        """Wait until the process exits.

        Args:
            timeout: Maximum time to wait, in seconds; None for no limit.

        Raises:
            PeerTimeout: If it still runs after `timeout`. It continues to run.
            TransportError: If the hosts' network fails meanwhile. The process continues to run.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not self.has_ended(min(_CHECK_S, max(0.0, deadline - time.monotonic()))):
            self.check()
            if time.monotonic() >= deadline:
                said = f"its last lines:\n{self.tail()}"
                raise PeerTimeout(f"host {self.rank} still runs after {timeout} s (process {self.pid}); {said}")
        self._reader.join(_DRAIN_S)  # a grandchild may hold the pipe open
        return HostResult(self.rank, self._popen.returncode, self.output)

    def has_ended(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds and return whether the process has exited."""
        try:
            self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True


def wait_all(processes: Sequence[HostProcess], timeout: float | None) -> list[HostResult]:
    """Wait until all processes have exited with code 0.

    Raises:
        PeerFailure: As soon as one exits otherwise; the message contains the host's rank, exit code and last lines.
        PeerTimeout: If some still run after `timeout` seconds; the message contains their ranks and last lines.
        TransportError: As soon as the hosts' network fails.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while running := [process for process in processes if process.poll() is None]:
        running[0].check()
        _raise_for_failures(processes)
        is_late = deadline is not None and time.monotonic() > deadline
        if is_late and (late := [process for process in running if process.poll() is None]):
            raise PeerTimeout(_timeout_message(late, len(processes), timeout))
        time.sleep(_POLL_S)
    _raise_for_failures(processes)
    return [process.wait() for process in processes]


def _raise_for_failures(processes: Sequence[HostProcess]) -> None:
    failed = [process for process in processes if process.poll() not in (None, 0)]
    if not failed:
        return
    results = [process.wait() for process in failed]
    what = ", ".join(f"host {result.rank} {_ending(result.returncode)}" for result in results)
    tails = "\n".join(f"  last lines of host {process.rank}:\n{process.tail()}" for process in failed)
    raise PeerFailure(
        f"{what}; the other {len(processes) - len(failed)} of {len(processes)} hosts were terminated\n{tails}"
    )


def _ending(returncode: int) -> str:
    return f"was ended by signal {-returncode}" if returncode < 0 else f"failed with exit code {returncode}"


def _timeout_message(running: Sequence[HostProcess], total: int, timeout: float | None) -> str:
    ranks = ", ".join(str(process.rank) for process in running)
    tails = "\n".join(f"  last lines of host {process.rank}:\n{process.tail()}" for process in running)
    return f"{len(running)} of {total} hosts (rank {ranks}) still ran after {timeout:g} s and were terminated\n{tails}"


def terminate(processes: Sequence[HostProcess], namespaces: Sequence[Namespace]) -> None:
    """Send SIGTERM to `processes`, then SIGKILL to all processes that remain in `namespaces`."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + _TERMINATE_S
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    for namespace in namespaces:
        namespace.kill_all()
    for process in processes:
        process.has_ended(_DRAIN_S)
        process.wait(0)
