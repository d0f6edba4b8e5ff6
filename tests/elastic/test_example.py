"""The example of an elastic job: members are killed and join, alone and under torchrun, and a job begins again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from commlib.elastic.registry import Rules
from commlib.elastic.service import Service
from tests.waiting import LIMIT_S, eventually

_ROOT = Path(__file__).parents[2]


class Example:
    """A process of the example, and the lines that it has printed."""

    def __init__(self, port: int, *options: str, launcher: tuple[str, ...] = ()) -> None:
        script = [*launcher, "examples/train_elastic.py", "--address", f"127.0.0.1:{port}", *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-u", *script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=_ROOT,
            env=environment,
        )
        self.lines: list[str] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            self.lines.extend(iter(lines.readline, ""))

    def close(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait(LIMIT_S)
        self._reading.join(LIMIT_S)


class Examples:
    """A service, and processes of the example."""

    def __init__(self, journal: Path) -> None:
        self.service = Service("127.0.0.1", 0, b"", journal, Rules(is_fresh=True))
        self.serving = threading.Thread(target=self.service.run, daemon=True)
        self.serving.start()
        self.members: list[Example] = []

    def start(self, *options: str, launcher: tuple[str, ...] = ()) -> Example:
        """Start a member."""
        self.members.append(Example(self.service.address[1], *options, launcher=launcher))
        return self.members[-1]

    def __repr__(self) -> str:
        return "".join(line for member in self.members for line in list(member.lines))

    def wait(self, pattern: str) -> str:
        """Wait until a member has printed this."""
        assert eventually(lambda: re.search(pattern, str(self)) is not None), self
        found = re.search(pattern, str(self))
        assert found is not None
        return found[0]

    def wait_for_ends(self) -> list[int]:
        """Wait until all members have ended; return their exit statuses."""
        assert eventually(lambda: all(each.process.poll() is not None for each in self.members)), self
        return [each.process.returncode for each in self.members]

    def close(self) -> None:
        """End everything."""
        for each in self.members:
            each.close()
        self.service.stop()
        self.serving.join(LIMIT_S)


@pytest.fixture
def examples(tmp_path: Path) -> Iterator[Examples]:
    made = Examples(tmp_path / "journal")
    yield made
    made.close()


def test_the_example(examples: Examples, tmp_path: Path) -> None:
    """A member is killed, training pauses below the least number, a third one joins; a new job continues."""
    options = ("--min-members", "2", "--checkpoint", str(tmp_path / "saved"))
    examples.start(*options, "--epochs", "4")
    second = examples.start(*options, "--epochs", "4")
    examples.wait("epoch 0: 2 members")
    second.close()
    examples.wait(r"view \d of 1 members: .* ended; training pauses below 2 members")
    examples.start(*options, "--epochs", "4")
    assert examples.wait_for_ends() == [0, -9, 0], examples
    accuracy = float(examples.wait(r"epoch 3: 2 members, test accuracy \S+").split()[-1])
    assert accuracy > 0.5, examples  # of ten digits
    again = Examples(tmp_path / "other")
    try:
        again.start(*options, "--epochs", "5")
        again.start(*options, "--epochs", "5")
        assert again.wait_for_ends() == [0, 0], again
        assert "epoch 4: 2 members" in str(again)
        assert "epoch 3" not in str(again)
    finally:
        again.close()


def test_torchrun_starts_a_lost_member_again(examples: Examples) -> None:
    """One agent for each member, which has no connection to the other agents."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1", "--max-restarts", "3")
    options = ("--epochs", "3", "--min-members", "2")
    examples.start(*options)
    agent = examples.start(*options, launcher=torchrun)
    examples.wait("epoch 0: 2 members")
    children = Path(f"/proc/{agent.process.pid}/task/{agent.process.pid}/children")
    os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
    examples.wait(r"view \d of 1 members: .* ended; training pauses below 2 members")
    assert examples.wait_for_ends() == [0, 0], examples
    assert "epoch 2: 2 members" in str(examples)
