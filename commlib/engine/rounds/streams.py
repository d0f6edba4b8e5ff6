"""The driver of an accelerator: the threads that make tasks ready issue the collectives, onto streams."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any

import torch
from typing_extensions import override

from commlib import locks
from commlib.engine.rounds.driver import Driver
from commlib.engine.rounds.order import Event
from commlib.engine.rounds.task import Round, Task
from commlib.errors import CommlibError


class StreamDriver(Driver):
    """Issues collectives from the calling thread onto streams, for tensors on an accelerator.

    `work.wait()` makes a stream wait, not the host, so a task runs to its end as soon as the order allows. Encoding
    bucket k + 1 on its own stream does not queue behind the collective of bucket k.

    Args:
        device: The accelerator. With a CPU device, streams do nothing and works block, for tests.
        num_streams: Number of streams. Further buckets share them.
    """

    def __init__(self, device: torch.device, num_streams: int = 4) -> None:
        super().__init__()
        self._streams = _Streams(device, num_streams)
        # Backward's thread, the user's thread and one that is notified of peers make tasks ready.
        self._at_work = locks.rlock("stream_driver.at_work")

    @override
    def note_inputs(self, round_: Round) -> None:
        event = self._streams.record()
        for task in round_.tasks:
            task.input_event = event

    @override
    def ready(self, round_: Round, task: int) -> None:
        noted = round_.tasks[task].input_event
        round_.tasks[task].input_event = self._streams.record() if noted is None else noted
        with self._at_work:
            self._handle(round_, Event.READY, task)

    @override
    def wait(self, round_: Round) -> None:
        self._raise_error(round_)
        if not round_.done.is_set():
            raise CommlibError(f"{round_.describe()} never became ready; this is a bug in commlib")
        self._streams.join(range(len(round_.tasks)))

    @override
    def has_arrived(self, round_: Round) -> bool:
        return round_.done.is_set() and self._streams.are_idle(range(len(round_.tasks)))

    @override
    def close(self) -> None:
        self._lanes.clear()

    def _resume(self, task: Task, task_idx: int) -> Event:
        with self._streams.use(task_idx):
            if task.generator is None:
                self._streams.wait_for(task.input_event)
            return super()._resume(task, task_idx)

    def _issue(self, round_: Round, task_idx: int, task: Task, events: deque[tuple[Event, int]]) -> None:
        with self._streams.use(task_idx):
            self._start(round_, task)
        events.append((Event.ARRIVED, task_idx))


class _Streams:
    """High-priority streams and their events. Without an accelerator, the methods do nothing."""

    def __init__(self, device: torch.device, num_streams: int) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._pool = [torch.cuda.Stream(device, priority=-1) for _ in range(num_streams)] if self._is_cuda else []

    def use(self, task_idx: int) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self._pool[task_idx % len(self._pool)]) if self._is_cuda else contextlib.nullcontext()

    def record(self) -> Any:
        return torch.cuda.current_stream(self._device).record_event() if self._is_cuda else None

    def wait_for(self, event: Any) -> None:
        if self._is_cuda:
            torch.cuda.current_stream(self._device).wait_event(event)

    def are_idle(self, tasks: range) -> bool:
        return all(stream.query() for stream in self._pool[: len(tasks)])

    def join(self, tasks: range) -> None:
        if self._is_cuda:
            for stream in self._pool[: len(tasks)]:
                torch.cuda.current_stream(self._device).wait_stream(stream)
