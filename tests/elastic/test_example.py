"""The example of an elastic job: a member is killed, training pauses below the least number, and a third one joins."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

from commlib.elastic.registry import Rules
from commlib.elastic.service import Service
from tests.waiting import LIMIT_S, eventually

_ROOT = Path(__file__).parents[2]


class Example:
    """A process of the example, and the lines that it has printed."""

    def __init__(self, port: int) -> None:
        script = ["examples/train_elastic.py", "--address", f"127.0.0.1:{port}", "--min-members", "2", "--steps", "60"]
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


def test_the_example(tmp_path: Path) -> None:
    service = Service("127.0.0.1", 0, b"", tmp_path / "journal", Rules(is_fresh=True))
    serving = threading.Thread(target=service.run, daemon=True)
    serving.start()
    port = service.address[1]
    members = [Example(port), Example(port)]
    printed = lambda: "".join(line for member in members for line in member.lines)  # noqa: E731

    def await_line(pattern: str) -> None:
        assert eventually(lambda: re.search(pattern, printed()) is not None), printed()

    try:
        await_line("step 0: 2 members")
        members[1].close()
        await_line(r"view \d of 1 members: .* ended")
        members.append(Example(port))
        assert eventually(lambda: all(each.process.poll() is not None for each in members)), printed()
    finally:
        for each in members:
            each.close()
        service.stop()
        serving.join(LIMIT_S)
    assert [each.process.returncode for each in members] == [0, -9, 0], printed()
    found = re.search(r"test accuracy (\S+)", printed())
    assert found is not None, printed()
    assert float(found[1]) > 0.3, printed()  # ten digits, after few steps
