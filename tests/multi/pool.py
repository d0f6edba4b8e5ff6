"""A pool of rank processes that is started once per test session, and ranks of their own for tests that break them.

`run_ranks(fn, world_size, *args)` runs a module-level function on pooled ranks, each with a fresh default Gloo group.
`on_ranks(2, 3)` makes a test whose body runs on every rank, once per world size. `start_ranks` and `spawn_ranks` start
processes that a test may kill, stop or interrupt. All are forks of one process that has imported torch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import pickle
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.costs import COSTS, RANK_JOBS
from tests.multi.forker import ASKING, FORKER, ForkedRank, RankError, RankHang, rank_environment
from tests.multi.rank_worker import ForkJob, Job, Outcome, serve

NUM_RANKS = 4
#: With more event loops of Gloo than this, which wake up a hundred times a second, a process is replaced.
_MOST_LOOPS = 6
#: How long hung ranks may take to write their stacks, on a machine that is busy with other tests.
_STACKS_S = 30.0
#: The ends of the stack of a rank's main thread, which is written last: the first frame of a process, or a cut.
_STACK_ENDS = ("in _run_module_as_main\n", "  ...\n")
# When pooled ranks count as hung: far longer than the longest job, as a shared machine may stall for many seconds.
# Their group has the same timeout, so a job that would end only after that timeout is still found.
_HANG_S = 120.0
# How long ranks may go on once one of them has failed: enough to fail in their turn, not to wait out a timeout.
_GRACE_S = 15.0


class PooledRank:
    """One process of the pool and the socket to it."""

    def __init__(self, rank: int, directory: Path) -> None:
        self.rank = rank
        self.stack_path = directory / f"stack-{rank}-{time.monotonic_ns()}.txt"
        ours, theirs = socket.socketpair()
        job = ForkJob(serve.__module__, serve.__qualname__, (str(self.stack_path),), rank_environment(), None)
        self.process = FORKER.fork(job, given=theirs)
        self.connection = Connection(ours.detach())

    def wait_ready(self) -> None:
        """Block until the process serves."""
        if not self.connection.poll(60) or self.connection.recv_bytes() != b"ready":
            raise RankHang(f"pooled rank {self.rank} did not start within 60 s")

    def send(self, job: Job) -> None:
        self.connection.send_bytes(pickle.dumps(tuple(job)))

    def receive(self) -> Outcome:
        """Return the outcome that has arrived; a closed socket means that the process died."""
        try:
            return Outcome(*pickle.loads(self.connection.recv_bytes()))
        except (EOFError, ConnectionError):
            return Outcome("error", f"the process of rank {self.rank} died with exit code {self.process.wait()}")

    def ask_for_stacks(self) -> None:
        """Let the (hung) process write the stacks of all its threads."""
        self.process.send_signal(signal.SIGUSR1)

    def stacks(self) -> str:
        """Return the stacks that the process has written."""
        return self.stack_path.read_text() if self.stack_path.exists() else "(no stack)"

    def kill(self) -> None:
        self.connection.close()
        self.process.end()


class RankPool:
    """Processes that run functions as the ranks of a job; restarted when a job hangs or breaks them.

    `NUM_RANKS` of them from the start; a job with more ranks adds the missing ones, for the rest of the session.
    """

    def __init__(self) -> None:
        self._ranks: list[PooledRank] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._job_ids = itertools.count()
        self._store: Any = None

    def run(self, job: Job) -> list[Any]:
        """Run `job` on ranks `0 .. world_size - 1` and return their results by rank.

        Raises:
            RankError: a rank raised; the message holds rank and traceback of each that did.
            RankHang: a rank was not done after the job's timeout; the pool is restarted for the next job.
        """
        __tracebackhide__ = True
        COSTS.add(RANK_JOBS)
        ranks = self._started(job.world_size)[: job.world_size]
        job = job._replace(store=self._store_of_job())
        try:
            for rank in ranks:
                rank.send(job._replace(rank=rank.rank))
            outcomes = self._gather(ranks, job.timeout_s)
        except BaseException:
            self.kill()
            raise
        self._judge(outcomes, ranks, job)
        return [outcomes[rank].value for rank in range(job.world_size)]

    def _store_of_job(self) -> tuple[int, str]:
        """Return the port of the pool's store, which lives in this process, and a prefix for one job."""
        from torch.distributed import TCPStore

        self._store = self._store or TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self._store.port, f"job-{next(self._job_ids)}"

    def _started(self, num_ranks: int = NUM_RANKS) -> list[PooledRank]:
        self._directory = self._directory or tempfile.TemporaryDirectory(prefix="rank-pool-")
        missing = range(len(self._ranks), max(num_ranks, NUM_RANKS))
        added = [PooledRank(rank, Path(self._directory.name)) for rank in missing]
        self._ranks += added
        for rank in added:
            rank.wait_ready()
        return self._ranks

    @staticmethod
    def _gather(ranks: Sequence[PooledRank], timeout_s: float) -> dict[int, Outcome]:
        """Collect outcomes until all are in or the time is up; after a failure the others get only a short grace."""
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout_s
        while len(outcomes) < len(ranks):
            waiting = {rank.connection: rank for rank in ranks if rank.rank not in outcomes}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                outcomes[rank.rank] = rank.receive()
                if outcomes[rank.rank].kind == "error":
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        return outcomes

    def _judge(self, outcomes: dict[int, Outcome], ranks: Sequence[PooledRank], job: Job) -> None:
        """Raise the error that the outcomes require, if any; break the pool if a rank hangs or died."""
        __tracebackhide__ = True
        failed = {rank: outcome.value for rank, outcome in outcomes.items() if outcome.kind == "error"}
        words = [
            f"--- rank {rank} of {job.world_size} failed in {job.qualname}:\n{text}" for rank, text in failed.items()
        ]
        hung = [rank for rank in ranks if rank.rank not in outcomes]
        for rank in hung:  # all at one moment: stacks half a second apart would tell nothing
            rank.ask_for_stacks()
        deadline = time.monotonic() + _STACKS_S
        while not all(rank.stacks().endswith(_STACK_ENDS) for rank in hung) and time.monotonic() < deadline:
            time.sleep(0.1)
        words += [f"--- rank {rank.rank} hung in {job.qualname}:\n{rank.stacks()}" for rank in hung]
        if hung or any(rank.process.poll() is not None for rank in ranks):
            self.kill()
        if words:
            raise (RankHang if hung and not failed else RankError)("\n".join(["", *words]))
        if any(outcome.num_loops > _MOST_LOOPS for outcome in outcomes.values()):
            self.kill()
        skipped = [outcome.value for outcome in outcomes.values() if outcome.kind == "skip"]
        if skipped:
            pytest.skip(skipped[0])

    def pids(self) -> list[int]:
        """Return the process ids of the ranks, starting them if need be."""
        return [rank.process.pid for rank in self._started()]

    def kill(self) -> None:
        """End all processes at once."""
        for rank in self._ranks:
            rank.kill()
        self._ranks = []

    def close(self) -> None:
        """End the pool and remove its files."""
        self.kill()
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None


POOL = RankPool()


def run_ranks(
    fn: Callable[..., Any],
    world_size: int = 2,
    *args: Any,
    timeout: float = _HANG_S,
    kwargs: dict[str, Any] | None = None,
) -> list[Any]:
    """Run the module-level function `fn(*args, **kwargs)` on every rank of a fresh default group.

    Args:
        fn: found by module and qualified name on the other side, so it must not be a closure.
        world_size: Best 1 to `NUM_RANKS`; see `RankPool`.
        timeout: seconds; also the timeout of the process group.

    Returns:
        The results (pickled on the way) by rank.
    """
    __tracebackhide__ = True
    job = Job(fn.__module__, fn.__qualname__, args, kwargs or {}, 0, world_size, (0, ""), timeout)
    return POOL.run(job)


def on_ranks(
    *world_sizes: int, slow: Sequence[int] = (), timeout: float = _HANG_S
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a test of a function that is to run on every rank, once per world size; those of `slow` are slow tests.

    The body finds its rank through `torch.distributed`; parametrised arguments reach it as keywords. It must be at
    module level.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(body)
        def test(world_size: int, **kwargs: Any) -> None:
            __tracebackhide__ = True
            try:
                run_ranks(body, world_size, timeout=timeout, kwargs=kwargs)
            except RankError:
                POOL.kill()  # leftovers of the failed test in the ranks must not fail the next one
                raise

        own = list(inspect.signature(body).parameters.values())
        world = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = inspect.Signature([*own, world])  # type: ignore[attr-defined]
        test.rank_body = body  # type: ignore[attr-defined]
        sizes = [pytest.param(n, id=f"{n}ranks") for n in world_sizes]
        sizes += [pytest.param(n, id=f"{n}ranks", marks=pytest.mark.slow) for n in slow]
        return pytest.mark.parametrize("world_size", sizes)(test)

    return decorate


class RankExit(NamedTuple):
    """The end of a separate process: exit code (negative: signal) and output."""

    rank: int
    returncode: int
    output: str


class RankProcesses:
    """Separate processes, one per rank, that a test may signal and wait for."""

    def __init__(self, fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], store_port: int) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        self._logs = [Path(self._directory.name) / f"rank-{rank}.log" for rank in range(world_size)]
        own = {"WORLD_SIZE": str(world_size), "STORE_PORT": str(store_port)}
        self.processes: list[ForkedRank] = []
        for rank, log in enumerate(self._logs):
            log.touch()
            environment = rank_environment(RANK=str(rank), **own, **ASKING)
            job = ForkJob(fn.__module__, fn.__qualname__, args, environment, str(log))
            self.processes.append(FORKER.fork(job))

    def output(self, rank: int) -> str:
        """Return what `rank` has written so far."""
        return self._logs[rank].read_text(errors="replace")

    def wait_for(self, rank: int, text: str, timeout: float = 90.0) -> None:
        """Block until `rank` has written `text`."""
        deadline = time.monotonic() + timeout
        while text not in self.output(rank):
            if time.monotonic() > deadline or self.processes[rank].poll() is not None:
                raise RankError(f"rank {rank} never wrote {text!r}; it wrote:\n{self.output(rank)}")
            time.sleep(0.02)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to `rank`."""
        self.processes[rank].send_signal(number)

    def wait(self, timeout: float, ranks: Sequence[int] | None = None) -> list[RankExit]:
        """Wait for the given ranks (all by default) to exit by themselves.

        Raises:
            RankHang: a rank was still there after `timeout` seconds; the message holds stacks and output.
        """
        chosen = range(len(self.processes)) if ranks is None else ranks
        deadline = time.monotonic() + timeout
        while running := [rank for rank in chosen if self.processes[rank].poll() is None]:
            if time.monotonic() > deadline:
                raise RankHang(self._hang_report(running, timeout))
            time.sleep(0.02)
        return [RankExit(rank, self.processes[rank].returncode, self.output(rank)) for rank in chosen]

    def _hang_report(self, ranks: Sequence[int], timeout: float) -> str:
        for rank in ranks:
            self.signal(rank, signal.SIGUSR1)
        time.sleep(0.5)
        logs = [f"--- rank {rank}:\n{self.output(rank)}" for rank in range(len(self.processes))]
        return "\n".join([f"ranks {list(ranks)} did not exit within {timeout} s", *logs])

    def close(self) -> None:
        """Kill the remaining processes and remove the logs."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._directory.cleanup()


@contextlib.contextmanager
def start_ranks(fn: Callable[..., Any], world_size: int, *args: Any) -> Iterator[RankProcesses]:
    """Start one process per rank that runs `fn(*args)`; those that remain at the end of the block are killed.

    `fn` calls `rank_worker.default_group_from_env()` itself. The store lives in the test process, as torchrun's does
    in its agent, so that no rank's death takes it away.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, world_size, True, wait_for_workers=False)
    ranks = RankProcesses(fn, world_size, args, store.port)
    try:
        yield ranks
    finally:
        ranks.close()
        del store


def spawn_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 90.0) -> list[RankExit]:
    """Run `fn(*args)` in a process of its own per rank until all have exited; returns exit codes and output."""
    with start_ranks(fn, world_size, *args) as ranks:
        return ranks.wait(timeout)
