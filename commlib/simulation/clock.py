"""The third driver: runs the same rounds in the same order as a CPU thread or CUDA streams, on a virtual clock.

[Note: virtual time] Times are vectors with one clock per role ([Note: roles] in `roles.py`), which is a single clock if
all ranks do the same, or with one clock per rank. Events are handled in the order of their mean time over the clocks.
If ranks differ, this mean also determines the order of a rank's local work.

On each rank, communication runs concurrently with computation. Communication does one piece of local work (a resumed
generator) at a time, in the order in which the pieces become ready. Local work slows the computation down while both
last (`Load`). So do the collectives on processors that execute them.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from typing_extensions import override

from commlib.engine.rounds.driver import Driver
from commlib.engine.rounds.order import Event
from commlib.engine.rounds.task import Round, Task
from commlib.errors import CommlibError
from commlib.network.model import Device
from commlib.simulation.collectives import Links
from commlib.simulation.meter import Meter
from commlib.simulation.roles import Roles
from commlib.transport.base import Request, Transport


@dataclass(frozen=True, slots=True)
class Span:
    """A time span of an activity.

    Attributes:
        lane: "compute", "local work" or "network".
        name: "forward", "backward", "optimizer", "wait", "rounds at the step's end", "work", or a verb.
        start_s: Seconds since the start of the simulation.
        end_s: Seconds since the start of the simulation.
        bucket: Index of the bucket, or -1.
        rank: The rank.
        nbytes: Bytes that the rank sends.
    """

    lane: str
    name: str
    start_s: float
    end_s: float
    bucket: int = -1
    rank: int = 0
    nbytes: float = 0.0


@dataclass
class Load:
    """Slows the computation down between `start_s` and `end_s`: it loses `share` seconds per second."""

    start_s: np.ndarray
    end_s: np.ndarray
    share: float


@dataclass
class _RoundTimes:
    """The times of a round: the next collective's turn, the end so far, and when tasks were ready and made requests."""

    turn_s: Any = -np.inf
    end_s: Any = -np.inf
    ready_s: dict[int, np.ndarray] = field(default_factory=dict)
    asked_s: dict[int, np.ndarray] = field(default_factory=dict)


class VirtualDriver(Driver):
    """Runs rounds on virtual clocks.

    Args:
        links: Executes the collectives.
        meter: Measures the cost of local work.
        device: The device of each rank.
        pace: [num_clocks] Factor on the device's times for local work.
        traced: Ranks whose spans are recorded.
        roles: The ranks whose work the meter counts. Each has a clock, unless every rank of the group has its own.

    Attributes:
        now_s: [num_clocks] Current time of the computation.
        waited_s: [num_clocks] Total time of waiting for rounds.
        adapter_bytes: Total bytes that have left a node.
        spans: Spans of the traced ranks.
        inputs_after: If set, a task that is marked as ready starts when this round has ended.
    """

    _current: Round  # the round that advances

    def __init__(
        self, links: Links, meter: Meter, device: Device, pace: np.ndarray, traced: tuple[int, ...], roles: Roles
    ) -> None:
        super().__init__()
        self._links = links
        self._meter = meter
        self._device = device
        self._pace = pace
        is_of_ranks = len(pace) > len(roles.ranks)
        self._role_of_clock = roles.of_rank if is_of_ranks else np.arange(len(pace))
        self._traced = {rank: rank if is_of_ranks else int(roles.of_rank[rank]) for rank in traced}
        self.now_s = np.zeros_like(pace)
        self.waited_s = np.zeros_like(pace)
        self.adapter_bytes = 0.0
        self.inputs_after: Round | None = None
        self.spans: list[Span] = []
        self._worker_free_s = np.zeros_like(pace)
        self._followers: dict[Round, list[tuple[Round, int]]] = {}  # tasks that wait for a round
        self._heap: list[tuple[float, int, np.ndarray, Round, Event, int]] = []
        self._count = itertools.count()
        self._at_s: dict[tuple[int, int], np.ndarray] = {}  # of the current event, by round and task
        self._times: dict[int, _RoundTimes] = {}
        self._last_end_s: dict[int, Any] = {}  # end of the last round of each communicator
        self._loads: list[Load] = []
        self._until_s: np.ndarray | None = None  # end of the current computation

    # --- the computation ----------------------------------------------------------------------------------------------

    def compute(self, seconds: np.ndarray, name: str) -> None:
        """Compute for `seconds` [num_clocks], extended by the cost of concurrent communication."""
        begin_s = self.now_s
        self._until_s = begin_s + seconds
        for load in self._loads:
            self._slow_down(load)
        while self._heap and self._heap[0][0] <= self._until_s.mean():
            self._handle_next()
        self.now_s, self._until_s = self._until_s, None
        self._loads = [load for load in self._loads if (load.end_s > self.now_s).any()]
        self._note("compute", name, begin_s, self.now_s)

    def flush(self, name: str) -> None:
        """Advance the computation by the time that the meter has counted."""
        seconds = self._meter.take()
        if seconds.any():
            self.compute(seconds[self._role_of_clock] * self._pace, name)

    def _slow_down(self, load: Load) -> None:
        """Move the end of the current computation by the time that it loses to a load."""
        assert self._until_s is not None
        start_s = np.maximum(load.start_s, self.now_s)
        whole = self._until_s + load.share * np.maximum(0.0, load.end_s - start_s)
        # If the load outlasts the computation, its end t satisfies t - share * (t - start) = until.
        part = (self._until_s - load.share * start_s) / max(1.0 - load.share, 1e-9)
        self._until_s = np.where(start_s < self._until_s, np.minimum(whole, part), self._until_s)

    def _add_load(self, start_s: np.ndarray, end_s: np.ndarray, share: float) -> None:
        if share > 0:
            self._loads.append(Load(start_s, end_s, share))
            if self._until_s is not None:
                self._slow_down(self._loads[-1])

    # --- the driver interface -----------------------------------------------------------------------------------------

    @override
    def ready(self, round_: Round, task: int) -> None:
        self.flush("gather")
        first = self.inputs_after
        if first is not None and not first.done.is_set():
            self._followers.setdefault(first, []).append((round_, task))
        else:
            self._start_task(round_, task, self.now_s if first is None else self._of(first).end_s)

    @override
    def wait(self, round_: Round) -> None:
        self.flush("gather")
        while not round_.done.is_set():
            if not self._heap:
                raise CommlibError(f"{round_.describe()} never became ready; this is a defect of commlib")
            self._handle_next()
        if round_.error is not None:
            raise round_.error
        begin_s, self.now_s = self.now_s, np.maximum(self.now_s, self._of(round_).end_s)
        self.waited_s = self.waited_s + (self.now_s - begin_s)
        del self._times[id(round_)]
        self._note("compute", "wait", begin_s, self.now_s)

    def _start_task(self, round_: Round, task: int, at_s: np.ndarray) -> None:
        self._of(round_).ready_s[task] = at_s = np.maximum(at_s, self.now_s)
        self._push(at_s, round_, Event.READY, task)

    @override
    def has_arrived(self, round_: Round) -> bool:
        self.flush("gather")
        while self._heap and self._heap[0][0] <= self.now_s.mean():
            self._handle_next()
        return round_.done.is_set() and bool((self._of(round_).end_s <= self.now_s).all())

    def end_of(self, round_: Round) -> np.ndarray:
        """Return the end of a round that has arrived and was not waited for."""
        return self._of(round_).end_s

    @override
    def close(self) -> None:
        self._lanes.clear()

    # --- events -------------------------------------------------------------------------------------------------------

    def _push(self, at_s: np.ndarray, round_: Round, event: Event, task: int) -> None:
        heapq.heappush(self._heap, (float(at_s.mean()), next(self._count), at_s, round_, event, task))

    def _handle_next(self) -> None:
        _, _, at_s, round_, event, task = heapq.heappop(self._heap)
        self._at_s[id(round_), task] = at_s
        self._handle(round_, event, task)

    def _of(self, round_: Round) -> _RoundTimes:
        return self._times.setdefault(id(round_), _RoundTimes())

    @override
    def _advance(self, round_: Round, event: Event, task_idx: int) -> None:
        self._current = round_
        super()._advance(round_, event, task_idx)
        if round_.order.complete:
            self._last_end_s[id(round_.transport)] = end_s = self._of(round_).end_s
            for follower, task in self._followers.pop(round_, ()):
                self._start_task(follower, task, end_s)

    @override
    def _resume(self, task: Task, task_idx: int) -> Event:
        round_, times = self._current, self._of(self._current)
        was_awaited = round_.order.waits_for == task_idx
        at_s = self._at_s.pop((id(round_), task_idx))
        at_s = np.maximum(at_s, self._last_end_s.get(id(round_.transport), -np.inf))  # rounds run in sequence
        event = super()._resume(task, task_idx)
        end_s = self._work(at_s, self._meter.take(), task_idx)
        times.asked_s[task_idx] = end_s
        if event is Event.FINISHED:
            times.end_s = np.maximum(times.end_s, end_s)
            if was_awaited and self._device.shares_compute:
                times.turn_s = np.maximum(times.turn_s, end_s)
        return event

    def _work(self, at_s: np.ndarray, seconds: np.ndarray, task_idx: int) -> np.ndarray:
        """Do local work (seconds [num_roles]) when the worker is free. Return the end time."""
        if not seconds.any():
            return at_s
        start_s = np.maximum(at_s, self._worker_free_s)
        alone, both = self._rates()
        computes = np.zeros_like(start_s, dtype=bool) if self._until_s is None else start_s < self._until_s
        end_s = start_s + seconds[self._role_of_clock] * self._pace / np.where(computes, both, alone)
        self._worker_free_s = end_s
        self._add_load(start_s, end_s, self._share_of_work())
        self._note("local work", "work", start_s, end_s, task_idx)
        return end_s

    def _rates(self) -> tuple[float, float]:
        """Return the rate of local work alone, and with concurrent computation."""
        if not self._device.shares_compute:
            return 1.0, 1.0
        return min(1.0, self._device.share), min(1.0, self._device.share / 2)

    def _share_of_work(self) -> float:
        if not self._device.shares_compute:
            return self._device.contention
        alone, both = self._rates()
        return 1.0 - both / alone

    @override
    def _issue(self, round_: Round, task_idx: int, task: Task, events: deque[tuple[Event, int]]) -> None:
        request = task.request
        assert request is not None
        times = self._of(round_)
        # On a processor, the thread issues after the previous work. The host of an accelerator runs ahead, and only the
        # collective waits for the work.
        issued_s = (times.asked_s if self._device.shares_compute else times.ready_s)[task_idx]
        times.turn_s = np.maximum(times.turn_s, issued_s)
        start_s = end_s = np.maximum(times.turn_s, times.asked_s[task_idx])
        round_.transport.issue(request)
        if request.size > 1 and not request.is_empty():
            start_s, end_s = self._carry(round_.transport, request, start_s)
            self._note("network", request.verb, start_s, end_s, task_idx, request.wire_bytes())
        self._push(end_s, round_, Event.ARRIVED, task_idx)

    def _carry(self, transport: Transport, request: Request, at_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        cost = self._links.cost(request)
        start_s, end_s = self._links.carry(id(transport), request, at_s)
        self.adapter_bytes += cost.adapter_bytes
        if self._links.blocks_worker:
            self._worker_free_s = np.maximum(self._worker_free_s, end_s)
        if cost.cpu_s:
            alone, _ = self._rates()
            lost_s = max(0.0, cost.cpu_s - (self._device.share - alone) * cost.seconds) / alone
            self._add_load(start_s, end_s, min(lost_s / cost.seconds, 0.95))
        return start_s, end_s

    def _note(
        self, lane: str, name: str, start_s: np.ndarray, end_s: np.ndarray, bucket: int = -1, nbytes: float = 0.0
    ) -> None:
        for rank, clock in self._traced.items():
            if end_s[clock] > start_s[clock]:
                self.spans.append(Span(lane, name, float(start_s[clock]), float(end_s[clock]), bucket, rank, nbytes))
