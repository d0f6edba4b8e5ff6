"""An elastic job for tests: a service on a thread, and members whose printed lines the test waits for."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from commlib.elastic.registry import Rules
from commlib.elastic.service import Service
from tests.elastic.member import Start
from tests.waiting import LIMIT_S, eventually

TOKEN = "a secret of the test"
_ROOT = Path(__file__).parents[2]


class Template:
    """The process that members are forked from, one for each host.

    Args:
        hosts: For each host, the beginning of a command line that runs the rest of it there.

    Attributes:
        lines: All lines of all members, each split into words.
        said: The rest of the lines that begin with a name and a word.
        pids: The members' processes, by name.
        news: Notified of each line.
    """

    def __init__(self, hosts: Sequence[Sequence[str]] = ((),)) -> None:
        self.lines: list[list[str]] = []
        self.said: dict[tuple[str, str], list[list[str]]] = collections.defaultdict(list)
        self.pids: dict[str, int] = {}
        self.news = threading.Condition()
        self._processes = [
            subprocess.Popen(
                [*host, sys.executable, "-m", "tests.elastic.member"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=_ROOT,
                # One arena of malloc: each further one keeps the memory that its threads needed at most.
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
            )
            for host in hosts
        ]
        self._reading = [threading.Thread(target=self._read, args=(each,), daemon=True) for each in self._processes]
        for thread in self._reading:
            thread.start()
        with self.news:
            assert self.news.wait_for(lambda: self.lines.count(["ready"]) == len(hosts), LIMIT_S), self

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            words = line.split()
            with self.news:
                self.lines.append(words)
                if len(words) > 1:
                    self.said[words[0], words[1]].append(words[2:])
                if words[1:2] == ["pid"]:
                    self.pids[words[0]] = int(words[2])
                self.news.notify_all()

    def start(self, start: Start, host: int = 0) -> None:
        """Fork a member."""
        stdin = self._processes[host].stdin
        assert stdin is not None
        stdin.write(json.dumps(dataclasses.asdict(start)) + "\n")
        stdin.flush()
        self.wait(f"{start.name} pid")

    def wait(self, beginning: str) -> None:
        """Wait for a line that begins with these words."""
        words = beginning.split()
        failure = [words[0], "failed"]
        num_read = 0

        def is_known() -> bool:
            nonlocal num_read
            new, num_read = self.lines[num_read:], len(self.lines)
            return any(line[: len(words)] == words or line[:2] == failure for line in new)

        with self.news:
            if not self.news.wait_for(is_known, LIMIT_S):
                self._dump_stacks()
            assert any(line[: len(words)] == words for line in self.lines), f"no line {beginning!r} in:\n{self}"

    def _dump_stacks(self) -> None:
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
        self.news.wait_for(lambda: False, 1.0)

    def clear(self) -> None:
        """Kill all members and their children, and forget what they said."""
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        assert eventually(lambda: not any(map(_is_running, self.pids.values())))
        self.pids.clear()
        self.lines.clear()
        self.said.clear()

    def close(self) -> None:
        """End the processes."""
        self.clear()
        for process, thread in zip(self._processes, self._reading, strict=True):
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.wait(LIMIT_S)
            thread.join(LIMIT_S)
            process.stdout.close()

    def __str__(self) -> str:
        return "\n".join(" ".join(line) for line in self.lines)


class Job:
    """A service, and members that the test starts, stops and kills.

    Args:
        template: The process that members are forked from.
        journal: The service's journal.
        rules: The service's rules.
        host: The host of the service.
        enter: Called on the threads of the service before it makes sockets.

    Attributes:
        address: (host, port) of the service.
    """

    def __init__(self, template: Template, journal: Path, rules: Rules, host: str, enter: Callable[[], None]) -> None:
        self._template, self._journal, self._rules = template, journal, rules
        self.address, self._enter = (host, 0), enter
        self.serve()

    def serve(self, token: str = TOKEN, journal: Path | None = None) -> None:
        """Start the service, again on its port if it was stopped. With another token and journal, a strange one."""
        made: queue.SimpleQueue[Service] = queue.SimpleQueue()

        def serve() -> None:
            self._enter()
            service = Service(*self.address, token.encode(), journal or self._journal, self._rules)
            made.put(service)
            service.run()

        self._serving = threading.Thread(target=serve, daemon=True)
        self._serving.start()
        self._service = made.get(timeout=LIMIT_S)
        self.address = self._service.address

    def stop_serving(self) -> None:
        """End the service."""
        self._service.stop()
        self._serving.join(LIMIT_S)

    def start(self, *names: str, host: int = 0, **options: Any) -> None:
        """Start members on a host, which get ids in this order. For the options see `Start`."""
        for name in names:
            self._template.start(Start(name, "{}:{}".format(*self.address), TOKEN, **options), host)
            self.wait(f"{name} joined")

    def wait(self, *beginnings: str) -> None:
        """Wait for lines that begin with these words."""
        for beginning in beginnings:
            self._template.wait(beginning)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until what the members have said fulfils a condition."""
        with self._template.news:
            assert self._template.news.wait_for(condition, LIMIT_S), self

    def said(self, name: str, word: str) -> list[list[str]]:
        """Return what a member has said: the rest of its lines with this word."""
        return list(self._template.said[name, word])

    def rounds(self, name: str) -> dict[int, tuple[int, str]]:
        """Return the number of ranks in each round of a member, and a digest of its weights and momenta after it."""
        return {int(number): (int(world), bits) for number, world, bits, *_ in self.said(name, "round")}

    def names(self) -> list[str]:
        """Return the names of all members that were started."""
        return list(self._template.pids)

    def pid(self, name: str) -> int:
        """Return the process of a member."""
        return self._template.pids[name]

    @property
    def view_number(self) -> int:
        """The number of the service's newest view; 0 without one."""
        view = self._service.registry.view
        return 0 if view is None else view.number

    def story(self) -> str:
        """Return the last lines of all members, but for those of rounds, and the service's view."""
        lines = [" ".join(line) for line in self._template.lines if line[1:2] != ["round"]]
        return "\n".join([*lines[-200:], str(self._service.registry.view)])

    def signal(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to a member."""
        os.kill(self.pid(name), number)

    def __repr__(self) -> str:
        return str(self._template)


@contextlib.contextmanager
def running(
    template: Template,
    journal: Path,
    rules: Rules = Rules(is_fresh=True),  # noqa: B008
    host: str = "127.0.0.1",
    enter: Callable[[], None] = lambda: None,
) -> Iterator[Job]:
    """Run a job for the duration of a block."""
    job = Job(template, journal, rules, host, enter)
    try:
        yield job
    finally:
        template.clear()
        job.stop_serving()


def _is_running(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
