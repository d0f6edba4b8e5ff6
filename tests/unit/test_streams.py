"""What only matters on an accelerator, with stand-ins for its streams, events and memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commlib
from commlib.engine.gradients.backward import StreamedBackward
from commlib.engine.gradients.buckets import BucketSet
from commlib.engine.planning import plan as plans
from commlib.engine.planning.plan import Parameter, Plan
from commlib.engine.planning.readiness import DeviceTimer
from commlib.engine.planning.trials import Trials
from commlib.engine.rounds.streams import StreamDriver
from commlib.engine.rounds.task import Round, Task
from commlib.errors import CommlibError, PeerFailure, PeerTimeout
from commlib.replica import replica_of
from commlib.transport.base import AllReduce, Communication, Request
from commlib.tuner import _Watch

CPU = torch.device("cpu")


class Done:
    def wait(self) -> None: ...


class Network:
    """Completes collectives at once; notices when two threads issue at the same time."""

    world_size = 2
    timeout_s = 5.0

    def __init__(self) -> None:
        self.issued: list[float] = []
        self._busy = threading.Lock()

    def issue(self, request: Request) -> Done:
        assert isinstance(request, AllReduce)
        assert self._busy.acquire(blocking=False), "two threads issue at once"
        time.sleep(0.001)
        self.issued.append(request.tensor.item())
        self._busy.release()
        return Done()

    def abort(self) -> None: ...


def task(value: float) -> Task:
    def communicate() -> Communication:
        yield AllReduce(torch.tensor(value), size=2)

    return Task(lambda: str(value), communicate)


class Moments:
    """Streams whose events are the numbers of the moments at which they were recorded."""

    def __init__(self) -> None:
        self.now = 0
        self.waited_for: list[Any] = []

    def record(self) -> int:
        return self.now

    def wait_for(self, event: Any) -> None:
        self.waited_for.append(event)

    def use(self, task_idx: int) -> Any:
        return threading.RLock()

    def join(self, tasks: range) -> None: ...


@pytest.mark.parametrize("is_noted", [True, False])
def test_a_round_that_begins_later_waits_for_what_was_there_when_its_input_was_noted(is_noted: bool) -> None:
    """An asynchronous round begins when the last rank has come: steps that were queued since are not its input."""
    driver, streams, network = StreamDriver(CPU), Moments(), Network()
    driver._streams = streams  # type: ignore[assignment]
    round_ = Round(network, [task(1.0), task(2.0)], window=2)  # type: ignore[arg-type]
    if is_noted:
        driver.note_inputs(round_)
    streams.now = 7
    driver.launch(round_)
    driver.wait(round_)
    assert streams.waited_for == ([0, 0] if is_noted else [7, 7])


def test_several_threads_make_tasks_ready_at_once() -> None:
    """Backward's thread, the user's, and the one that hears of peers."""
    driver, networks = StreamDriver(CPU), [Network() for _ in range(4)]
    rounds = [Round(network, [task(float(v)) for v in range(20)], window=2) for network in networks]  # type: ignore[arg-type]
    for round_ in rounds:
        driver.open(round_)

    def run(start: int) -> None:
        for idx in range(20):
            driver.ready(rounds[(start + idx) % 4], idx)

    threads = [threading.Thread(target=run, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for round_, network in zip(rounds, networks, strict=True):
        driver.wait(round_)
        assert network.issued == [float(value) for value in range(20)]


# --- Gradients on several streams ------------------------------------------------------------------------------------


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.waits_for: list[str] = []

    def wait_stream(self, other: Stream) -> None:
        self.waits_for.append(other.name)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_bucket_waits_for_the_streams_of_all_its_gradients() -> None:
    model = commlib.wrap(nn.Linear(3, 2), commlib.algorithms.DGC(), bucket_cap_mb=1.0)
    engine = replica_of(model).engine
    streams = [Stream("a"), Stream("b")]
    turn = iter([streams[0], streams[1], streams[1]] * 2)  # two gradients, then the gathering
    engine.gradients.backward = StreamedBackward(engine.gradients.reducer, lambda: next(turn))
    engine.adopt(engine.parameters)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
    assert [stream.waits_for for stream in streams] == [[], ["a", "a"]]
    commlib.unwrap(model)


# --- Times and memory ------------------------------------------------------------------------------------------------


class EventTimer(DeviceTimer):
    """Moments that may be compared once the host has waited for the last of them."""

    def __init__(self) -> None:
        self.waits: list[int] = []

    def arrive(self, moment: int) -> None:
        self.waits.append(moment)

    def seconds(self, start: int, end: int) -> float:
        assert self.waits, "the host reads a time that the device has not come to"
        assert end <= self.waits[-1]
        return float(end - start)


def test_trials_wait_for_the_device_only_at_the_end_of_a_visit() -> None:
    timer = EventTimer()
    trials = Trials([Plan(((0,),), "trial"), Plan(((0, 1),), "trial")], 3, timer)
    ended = [trials.step_ended(moment) for moment in range(8)]
    assert ended == [False, False, False, True] * 2
    assert timer.waits == [3, 7]


def test_gradients_that_exist_are_not_on_the_device_twice_while_buckets_change() -> None:
    parameters = [
        Parameter(str(idx), nn.Parameter(torch.zeros(size)), sparse=False) for idx, size in enumerate((5, 70, 9))
    ]
    kept = {}
    for parks in (True, False):
        buckets = BucketSet(parks)
        buckets.follow(parameters)
        buckets.take(*buckets.build(plans.initial(parameters, 1 << 30)))
        for idx, slot in enumerate(buckets.slots):
            slot.param.grad = slot.view.fill_(idx + 1.0)
        memory = buckets._memory
        buckets.take(*buckets.build(plans.by_sizes(parameters, 64)))
        assert len(buckets.buckets) > 1
        for idx, slot in enumerate(buckets.slots):
            assert slot.param.grad is slot.view
            assert (slot.view == idx + 1.0).all()
            slot.param.grad = None
        kept[parks] = buckets._memory is memory
    assert kept == {True: True, False: False}


# --- Failures that no wait shows -------------------------------------------------------------------------------------


def trained() -> tuple[Any, Any]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    commlib.wrap(model, commlib.algorithms.DGC(), optimizer=optimizer, bucket_cap_mb=1.0)
    model(torch.ones(4, 3)).sum().backward()
    return model, optimizer


@pytest.mark.usefixtures("group")
def test_a_failure_that_streams_do_not_show_is_raised_before_the_step_takes_it_for_a_result() -> None:
    model, optimizer = trained()
    before = model.weight.detach().clone()
    transport = replica_of(model).engine.transport
    with mock.patch.object(type(transport), "failure", PeerTimeout("rank 1 is late")):
        with pytest.raises(CommlibError, match="rank 1 is late"):
            optimizer.step()
        with pytest.raises(CommlibError, match="rank 1 is late"):
            model(torch.ones(4, 3)).sum().backward()
    assert torch.equal(model.weight, before)
    commlib.unwrap(model)


@pytest.mark.usefixtures("group")
def test_what_a_watch_reports_from_its_thread_ends_the_communication() -> None:
    model, _ = trained()
    transport: Any = replica_of(model).engine.transport
    thread = threading.Thread(target=transport._tell, args=(PeerFailure("rank 1 ended"),))
    thread.start()
    thread.join()
    with pytest.raises(CommlibError, match="rank 1 ended") as caught:
        model(torch.ones(4, 3))
    assert isinstance(caught.value.__cause__, PeerFailure)
    commlib.unwrap(model)


class Stage:
    """A device with a simulated clock; reading a time before the host has waited for it is an error."""

    def __init__(self) -> None:
        self.now_s = 0.0


class StageTimer(DeviceTimer):
    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.arrived_s = -1.0

    def now(self) -> float:
        return self.stage.now_s

    def arrive(self, moment: float) -> None:
        self.arrived_s = max(self.arrived_s, moment)

    def seconds(self, start: float, end: float) -> float:
        assert max(start, end) <= self.arrived_s, "the host reads a time that the device has not come to"
        return end - start


def test_auto_measures_steps_by_the_devices_moments() -> None:
    """Forward 1 s, backward 2 s, waiting 3 s, optimizer 0.5 s, whatever the host takes to queue them."""
    stage = Stage()
    watch = _Watch(StageTimer(stage))
    waited = None
    for _ in range(4):
        watch.step_begins(waited)
        stage.now_s += 1.0
        watch.forward_ends()
        stage.now_s += 2.0
        waited = (stage.now_s, stage.now_s + 3.0)
        stage.now_s += 3.5
    watch.step_begins(waited)
    assert watch.num_steps == 4
    assert watch.forward_and_rest_s(2.0) == (1.0, 0.5)
    assert not watch.uses_processor, "the thread waits for the device"
    assert watch.window_s(2) == 6.5
