"""An elastic job for tests: a service on a thread, and members whose printed lines the test waits for."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from commlib.elastic.registry import Rules
from commlib.elastic.service import Service
from tests.elastic.member import Start
from tests.waiting import LIMIT_S, eventually

TOKEN = "a secret of the test"
_ROOT = Path(__file__).parents[2]


class Template:
    """The process that members are forked from.

    Attributes:
        lines: All lines of all members, each split into words.
        pids: The members' processes, by name.
        news: Notified of each line.
    """

    def __init__(self) -> None:
        self.lines: list[list[str]] = []
        self.pids: dict[str, int] = {}
        self.news = threading.Condition()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.elastic.member"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=_ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        self.wait("ready")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            words = line.split()
            with self.news:
                self.lines.append(words)
                if words[1:2] == ["pid"]:
                    self.pids[words[0]] = int(words[2])
                self.news.notify_all()

    def start(self, start: Start) -> None:
        """Fork a member."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(dataclasses.asdict(start)) + "\n")
        self._process.stdin.flush()
        self.wait(f"{start.name} pid")

    def wait(self, beginning: str) -> None:
        """Wait for a line that begins with these words."""
        words = beginning.split()
        failure = [words[0], "failed"]
        said = lambda wanted: any(line[: len(wanted)] == wanted for line in self.lines)  # noqa: E731
        with self.news:
            if not self.news.wait_for(lambda: said(words) or said(failure), LIMIT_S):
                self._dump_stacks()
            assert said(words), f"no line {beginning!r} in:\n{self}"

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

    def close(self) -> None:
        """End the process."""
        self.clear()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(LIMIT_S)
        self._reading.join(LIMIT_S)
        self._process.stdout.close()

    def __str__(self) -> str:
        return "\n".join(" ".join(line) for line in self.lines)


class Job:
    """A service, and members that the test starts, stops and kills.

    Args:
        template: The process that members are forked from.
        journal: The service's journal.
        rules: The service's rules.
    """

    def __init__(self, template: Template, journal: Path, rules: Rules) -> None:
        self._template, self._journal, self._rules = template, journal, rules
        self._port = 0
        self.serve()

    def serve(self) -> None:
        """Start the service, again on its port if it was stopped."""
        self._service = Service("127.0.0.1", self._port, TOKEN.encode(), self._journal, self._rules)
        self._port = self._service.address[1]
        self._serving = threading.Thread(target=self._service.run, daemon=True)
        self._serving.start()

    def stop_serving(self) -> None:
        """End the service."""
        self._service.stop()
        self._serving.join(LIMIT_S)

    def start(self, *names: str, **options: Any) -> None:
        """Start members, which get ids in this order. For the options see `Start`."""
        for name in names:
            self._template.start(Start(name, f"127.0.0.1:{self._port}", TOKEN, **options))
            self.wait(f"{name} joined")

    def wait(self, *beginnings: str) -> None:
        """Wait for lines that begin with these words."""
        for beginning in beginnings:
            self._template.wait(beginning)

    def said(self, name: str, word: str) -> list[list[str]]:
        """Return what a member has said: the rest of its lines with this word."""
        return [line[2:] for line in self._template.lines if line[:2] == [name, word]]

    def rounds(self, name: str) -> dict[int, tuple[int, str]]:
        """Return the number of ranks in each round of a member, and a digest of its weights and momenta after it."""
        return {int(number): (int(world), bits) for number, world, bits, *_ in self.said(name, "round")}

    def signal(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to a member."""
        os.kill(self._template.pids[name], number)

    def __repr__(self) -> str:
        return str(self._template)


@contextlib.contextmanager
def running(template: Template, journal: Path, rules: Rules = Rules(is_fresh=True)) -> Iterator[Job]:  # noqa: B008
    """Run a job for the duration of a block."""
    job = Job(template, journal, rules)
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
