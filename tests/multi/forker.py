"""The process that all ranks are forked from: it has imported torch, which takes seconds."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path

from tests.costs import COSTS, PROCESSES
from tests.multi.rank_worker import ForkJob

ROOT = Path(__file__).resolve().parents[2]
# How long a terminated process may take to write its last output.
_LAST_WORDS_S = 2.0


class RankError(AssertionError):
    """A function failed on at least one rank; the message holds every failing rank's traceback."""


class RankHang(AssertionError):
    """Ranks did not finish in time; the message holds their stacks."""


def rank_environment(**extra: str) -> dict[str, str]:
    """Return the environment of a rank process: one thread, loopback only."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    fixed = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **fixed, **extra}


#: For ranks whose output is looked at: torch says so there where a peer has no name.
ASKING = {"RES_OPTIONS": "timeout:1 attempts:5"}


def _start_worker() -> tuple[subprocess.Popen[bytes], Connection]:
    """Start the process of `rank_worker`, and return it with the connection to it."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "tests.multi.rank_worker", str(theirs.fileno())]
        process = subprocess.Popen(
            command, cwd=ROOT, env=rank_environment(), pass_fds=[theirs.fileno()], start_new_session=True
        )
    return process, Connection(ours.detach())


class ForkedRank:
    """A process that the forker made: what `subprocess.Popen` is to a process of one's own."""

    def __init__(self, forker: Forker, pid: int) -> None:
        self._forker = forker
        self.pid = pid

    @property
    def returncode(self) -> int | None:
        """The exit code once it is known (negative: signal)."""
        return self._forker.exit_codes.get(self.pid)

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        self._forker.receive_exits()
        return self.returncode

    def wait(self) -> int:
        """Wait for the end and return the exit code."""
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """End the process: at once, or where it handles SIGTERM, as where coverage is measured, a moment later."""
        self.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _LAST_WORDS_S
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        self.kill()
        self.wait()


class Forker:
    """The process that ranks of their own are forked from, started at the first of them.

    Attributes:
        exit_codes: By process id, of those that have ended.
    """

    def __init__(self) -> None:
        self.exit_codes: dict[int, int] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def fork(self, job: ForkJob, given: socket.socket | None = None) -> ForkedRank:
        """Start a process that runs `job`; it is given the socket, if there is one, which is closed here."""
        connection = self._started()
        if given is None:  # those of the pool have one, and are few
            COSTS.add(PROCESSES)
        connection.send_bytes(pickle.dumps((tuple(job), given is not None)))
        if given is not None:
            with given:
                send_handle(connection, given.fileno(), 0)
        while True:
            pid = self._receive(connection)
            if pid is not None:
                return ForkedRank(self, pid)

    def receive_exits(self) -> None:
        """Note the exit codes that have arrived."""
        connection = self._started()
        while connection.poll():
            self._receive(connection)

    def _started(self) -> Connection:
        if self._connection is None:
            self._process, self._connection = _start_worker()
            self._connection.send_bytes(pickle.dumps(sys.path))
        return self._connection

    def _receive(self, connection: Connection) -> int | None:
        """Take one message: the id of a process that was started, or, which is noted, of one that has ended."""
        try:
            pid, exit_code = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            assert self._process is not None
            raise RankError(f"the process that forks ranks died with exit code {self._process.wait()}") from None
        if exit_code is None:
            self.exit_codes.pop(pid, None)  # of an earlier process of that id
            return pid
        self.exit_codes[pid] = exit_code
        return None

    def close(self) -> None:
        """End the process, and with it every rank that is left."""
        if self._process is not None and self._connection is not None:
            self._connection.close()
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LAST_WORDS_S)
            self._process.kill()
            self._process.wait()
        self._process = self._connection = None


FORKER = Forker()
