"""Members that are killed and join at random moments, many times."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import struct
import threading
import time
from pathlib import Path

import pytest

from commlib.elastic.wire import Wire
from tests.elastic.job import TOKEN, Job, Template, running
from tests.waiting import eventually

_STEP_S = 0.02
#: Works of Gloo whose connection was closed may last as long.
_TIMEOUT_S = 20.0
_SIZE = 5
#: Members that stay alive with the state of the job.
_LEAST = 2


class Crowd:
    """A job whose members are replaced.

    Args:
        job: The job.
        algorithm: The algorithm of the members.
        seed: Of the choices.
        keeps_first: Whether the first member, which gives the state to others, is never killed.
    """

    def __init__(self, job: Job, algorithm: str, seed: int, keeps_first: bool = False) -> None:
        self._job, self._algorithm = job, algorithm
        self._choose = random.Random(seed)
        self._names = (f"m{idx}" for idx in itertools.count())
        self._keeps_first = keeps_first
        self.alive: list[str] = []
        self.num_killed = 0
        self.add(_SIZE)
        self.settle()

    def add(self, count: int) -> None:
        """Start members."""
        names = list(itertools.islice(self._names, count))
        self._job.start(*names, algorithm=self._algorithm, rounds=10**9, sleep_s=_STEP_S, timeout_s=_TIMEOUT_S)
        self.alive += names

    def settle(self) -> None:
        """Wait until all members have made a round together."""
        self._job.wait(*(f"{name} entered" for name in self.alive))
        assert eventually(lambda: all(map(self._is_complete, self.alive))), self._job.story()

    def change(self) -> None:
        """Kill one or two members at a random moment, and start as many, now or when the others have continued."""
        entered = [name for name in self.alive if self._job.said(name, "entered")]
        victims = self._choose.sample(self.alive[self._keeps_first :], self._choose.choice([1, 2]))
        if len(set(entered) - set(victims)) < _LEAST:
            self.settle()
        time.sleep(self._choose.uniform(0, 3 * _STEP_S))
        for name in victims:
            self._job.signal(name)
            self.alive.remove(name)
        self.num_killed += len(victims)
        if self._choose.random() < 0.5:
            self.settle()
        self.add(len(victims))
        if self._choose.random() < 0.5:
            self.settle()

    def _is_complete(self, name: str) -> bool:
        """Whether the last round of a member was one of all members."""
        last = self._job.said(name, "round")[-1:]
        return [world for _, world, *_ in last] == [str(len(self.alive))]

    def check(self) -> None:
        """Check that each round had the same members and results at all of them, and that none is missing."""
        results: dict[int, set[tuple[int, str]]] = {}
        for name in self._job.names():
            rounds = self._job.rounds(name)
            assert list(rounds) == list(range(min(rounds, default=1), max(rounds, default=0) + 1)), f"rounds of {name}"
            assert not self._job.said(name, "failed")
            for number, result in rounds.items():
                results.setdefault(number, set()).add(result)
        assert [number for number, found in results.items() if len(found) > 1] == []
        assert sorted(results) == list(range(1, max(results) + 1))


@pytest.mark.parametrize(
    ("algorithm", "count"),
    [
        ("allreduce", 7),
        *(pytest.param(name, 75, marks=pytest.mark.slow) for name in ("allreduce", "bytegrad", "topk", "powersgd")),
    ],
)
def test_many_members_are_killed_and_join(template: Template, tmp_path: Path, algorithm: str, count: int) -> None:
    """At random moments, one or two at once, in rounds and while members join."""
    with running(template, tmp_path / "journal") as job:
        crowd = Crowd(job, algorithm, seed=count)
        for _ in range(count):
            crowd.change()
        crowd.settle()
        crowd.check()
        assert crowd.num_killed >= count


@pytest.mark.slow
def test_strangers_at_the_service(template: Template, tmp_path: Path) -> None:
    """200 half-open connections, and 10,000 with garbage, recorded or oversized messages, while members change."""
    with running(template, tmp_path / "journal") as job:
        crowd = Crowd(job, "allreduce", seed=1)
        flood = threading.Thread(target=send_garbage, args=(job.address,))
        flood.start()
        while flood.is_alive():
            crowd.change()
        flood.join()
        crowd.settle()
        crowd.check()
        assert crowd.num_killed


def send_garbage(address: tuple[str, int]) -> None:
    """Send what a process without the token can send."""
    source = random.Random(0)
    handshake = Wire("member", TOKEN.encode()).take_bytes_to_send()
    oversized = struct.pack(">BI", 1, 1 << 31) + bytes(65536)
    with contextlib.ExitStack() as half_open:
        for _ in range(200):
            half_open.enter_context(socket.create_connection(address)).sendall(handshake[: source.randrange(36)])
        for idx in range(10_000):
            garbage = source.randbytes(source.randrange(1, 3000))
            with contextlib.suppress(OSError), socket.create_connection(address) as stranger:
                stranger.sendall((garbage, handshake + garbage, handshake + oversized)[idx % 3])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_nothing_is_left_of_many_views(template: Template, tmp_path: Path) -> None:
    """Threads, descriptors and memory after 600 views are those after 10, of a member and of the service."""
    with running(template, tmp_path / "journal") as job:
        crowd = Crowd(job, "topk", seed=0, keeps_first=True)

        def files(pid: int) -> int:
            return len(os.listdir(f"/proc/{pid}/fd"))

        def resources() -> dict[str, int]:
            """Count what a member and the service hold."""
            pid = job.pid("m0")
            threads = len(os.listdir(f"/proc/{pid}/task"))
            return {"threads": threads, "files": files(pid), "KiB": resident_kib(pid), "service": files(os.getpid())}

        while job.view_number < 10:
            crowd.change()
        crowd.settle()
        collect(job)
        few = resources()
        while job.view_number < 600:
            crowd.change()
        crowd.settle()
        crowd.check()
        collect(job)
        limits = {
            name: few[name] + more for name, more in {"threads": 1, "files": 5, "KiB": 8192, "service": 0}.items()
        }
        assert eventually(lambda: all(count <= limits[name] for name, count in resources().items())), (few, resources())


def collect(job: Job) -> None:
    """Let the first member collect the communicators of former views, which end in the background."""
    time.sleep(3)
    job.signal("m0", signal.SIGUSR1)
    time.sleep(3)


def resident_kib(pid: int) -> int:
    """Return the resident memory of a process, without that of files, such as libraries."""
    status = (Path("/proc") / str(pid) / "status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])
