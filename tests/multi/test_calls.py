"""The cost of a round in Python: calls on the communication thread, and checks of arguments."""

from __future__ import annotations

import collections
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import commlib
from commlib.algorithms import CompressionPolicy, TopK
from tests.multi.pool import on_ranks

_PACKAGE = str(Path(commlib.__file__).parent)
#: Per round of two top-k buckets. The mean over ten rounds is 180; the order of events between threads adds a few.
_MOST_CALLS = 190
_NUM_STEPS = 10


class Calls:
    """Counts the calls of the package's functions on communication threads, by file, while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self.by_file: collections.Counter[str] = collections.Counter()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if self.is_on and event == "call" and file.startswith(_PACKAGE):
            self.by_file[Path(file).name] += 1


@on_ranks(2)
def test_the_communication_thread_makes_few_calls_and_checks_no_argument() -> None:
    calls = Calls()
    threading.setprofile(calls)  # of threads that start from here on
    try:
        model: Any = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(2)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        commlib.wrap(model, TopK(compress=CompressionPolicy()), optimizer=optimizer, bucket_cap_mb=0.1)
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    assert sys.getprofile() is None, "this thread's own calls are not counted"
    for step in range(3 + _NUM_STEPS):
        if step == 3:
            dist.barrier()
            calls.is_on = True
        optimizer.zero_grad()
        model(torch.ones(8, 256)).sum().backward()
        optimizer.step()
    calls.is_on = False
    assert len(commlib.stats(model).buckets) == 2
    per_round = {file: count / _NUM_STEPS for file, count in calls.by_file.most_common()}
    assert per_round.get("driver.py", 0) > 10, f"the thread was not seen: {per_round}"
    assert "checks.py" not in per_round, per_round
    assert sum(per_round.values()) <= _MOST_CALLS, per_round
