"""Wait until a host stops sending, so that a background round does not affect the next measurement."""

from __future__ import annotations

import time
from pathlib import Path

_SILENCE_BYTES = 10_000  # in 0.1 s; tolerates acknowledgements


def await_silence() -> None:
    """Wait until this host stops sending, for at most 10 s."""
    before, deadline = -1, time.monotonic() + 10
    while (now := _sent_bytes()) > before + _SILENCE_BYTES and time.monotonic() < deadline:
        before = now
        time.sleep(0.1)


def _sent_bytes() -> int:
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[8]) for line in lines)
