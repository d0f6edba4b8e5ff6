"""Every driver meets the requirements of rounds: the order of collectives, errors, and complete cleanup."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from commlib.engine.rounds.driver import Driver
from commlib.engine.rounds.streams import StreamDriver
from commlib.engine.rounds.task import Round, Task
from commlib.engine.rounds.threads import ThreadDriver
from commlib.errors import TransportError
from commlib.network.presets import device, network
from commlib.simulation.clock import VirtualDriver
from commlib.simulation.collectives import NCCL, Links
from commlib.simulation.meter import Meter
from commlib.simulation.roles import Roles
from commlib.transport.base import AllReduce, Communication, Request
from commlib.transport.simulated import SimulatedTransport


class Arrived:
    """A collective that has completed, or failed."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def wait(self) -> None:
        if self._error is not None:
            raise self._error

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        callback()


class Recorder(SimulatedTransport):
    """Records issued collectives; number `fails`, from 1, fails: at once, or when it is waited for."""

    def __init__(self, fails: int = 0, at_once: bool = False) -> None:
        super().__init__(0, 2)
        self.timeout_s = 5.0
        self.issued: list[float] = []
        self.num_aborts = 0
        self._fails, self._at_once = fails, at_once

    def issue(self, request: Request) -> Any:
        assert isinstance(request, AllReduce)
        self.issued.append(request.tensor.item())
        is_bad = len(self.issued) == self._fails
        if is_bad and self._at_once:
            raise RuntimeError("lost")
        return Arrived(RuntimeError("lost") if is_bad else None)

    def diagnose(self, error: BaseException, what: str) -> Exception:
        return TransportError(f"{what}: {error}")

    def abort(self) -> None:
        self.num_aborts += 1


def virtual() -> Driver:
    """Make the simulator's driver, for two identical ranks."""
    own = device("v100")
    links = Links(network("10gbps", nodes=2, gpus_per_node=1), NCCL, own)
    return VirtualDriver(links, Meter(own), own, np.ones(1), (), Roles.one(2))


MAKERS: dict[str, Callable[[], Driver]] = {
    "thread": ThreadDriver,
    "streams": lambda: StreamDriver(torch.device("cpu")),
    "virtual": virtual,
}


@pytest.fixture(params=MAKERS)
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    made = MAKERS[request.param]()
    yield made
    assert not made._lanes, "rounds were left behind"
    made.close()
    made.close()


def task(name: str, *collectives: float, error: Exception | None = None, **kind: bool) -> Task:
    """Make a task that asks for collectives, and then ends, or raises."""

    def communicate() -> Communication:
        for value in collectives:
            yield AllReduce(torch.tensor(value), size=2)
        if error is not None:
            raise error

    return Task(lambda: name, communicate, **kind)


def tasks(**kind: bool) -> list[Task]:
    """Make tasks of different numbers of collectives."""
    return [task("a", 1.0, 1.5, **kind), task("b", 2.0, **kind), task("c", 3.0, 3.5, 3.75, **kind), task("d", **kind)]


def run(driver: Driver, transport: Any, of_round: list[Task], ready: Any, window: int = 2) -> Round:
    round_ = Round(transport, of_round, window)
    driver.open(round_)
    for idx in ready:
        driver.ready(round_, idx)
    driver.wait(round_)
    return round_


@pytest.mark.parametrize("is_prompt", [False, True], ids=["queued", "prompt"])
@pytest.mark.parametrize("window", [1, 2, 3, 1 << 30])
def test_the_order_of_collectives_is_the_plans_whatever_is_ready_first(
    driver: Driver, window: int, is_prompt: bool
) -> None:
    orders = []
    for ready in itertools.permutations(range(4)):
        transport = Recorder()
        round_ = run(driver, transport, tasks(is_prompt=is_prompt), ready, window)
        assert round_.order.complete
        assert round_.error is None
        orders.append(transport.issued)
    assert sorted(orders[0]) == [1.0, 1.5, 2.0, 3.0, 3.5, 3.75]
    assert all(order == orders[0] for order in orders), "the order depends on which bucket was ready first"


@pytest.mark.parametrize("window", [1, 2, 3])
def test_drivers_issue_in_the_same_order(window: int) -> None:
    orders = []
    for make in MAKERS.values():
        made, transport = make(), Recorder()
        run(made, transport, tasks(), [2, 0, 3, 1], window)
        orders.append(transport.issued)
        made.close()
    assert orders[0] == orders[1] == orders[2]


@pytest.mark.parametrize("ready", [[0, 1, 2], [2, 1, 0]])
def test_an_error_in_a_generator_ends_the_round_with_that_error(driver: Driver, ready: list[int]) -> None:
    transport, error = Recorder(), ZeroDivisionError("own")
    of_round = [task("a", 1.0), task("b", 2.0, error=error), task("c", 3.0)]
    with pytest.raises(ZeroDivisionError) as caught:
        run(driver, transport, of_round, ready)
    assert caught.value is error
    assert transport.num_aborts == 1, "the peers must not wait"
    assert not driver._lanes


@pytest.mark.parametrize("driver", ["thread", "streams"], indirect=True)  # in a simulation none fails
@pytest.mark.parametrize("at_once", [False, True], ids=["waited-for", "at-once"])
@pytest.mark.parametrize("fails", [1, 2, 3])
def test_a_failed_collective_ends_the_round_and_is_named(driver: Driver, fails: int, at_once: bool) -> None:
    transport = Recorder(fails, at_once)
    with pytest.raises(TransportError, match="all_reduce of [abc].*: lost"):
        run(driver, transport, [task("a", 1.0), task("b", 2.0), task("c", 3.0)], range(3))
    assert transport.num_aborts == 1
    assert not driver._lanes


def test_two_rounds_of_one_transport_follow_each_other(driver: Driver) -> None:
    transport = Recorder()
    first, second = Round(transport, [task("a", 1.0), task("b", 2.0, 2.5)], 2), Round(transport, [task("c", 3.0)], 2)
    driver.open(first)
    driver.open(second)
    for round_, idx in ((second, 0), (first, 1), (first, 0)):
        driver.ready(round_, idx)
    driver.wait(first)
    driver.wait(second)
    assert transport.issued == [1.0, 2.0, 2.5, 3.0]
    run(driver, transport, [task("d", 4.0)], [0])
    assert transport.issued[-1] == 4.0


def test_rounds_of_two_transports_do_not_wait_for_each_other(driver: Driver) -> None:
    slow, fast = Recorder(), Recorder()
    waiting = Round(slow, [task("a", 1.0)], 2)
    driver.open(waiting)
    run(driver, fast, [task("b", 2.0)], [0])
    assert (slow.issued, fast.issued) == ([], [2.0])
    driver.ready(waiting, 0)
    driver.wait(waiting)
    assert slow.issued == [1.0]


@pytest.mark.parametrize("num_ready", [0, 1])
def test_cancel_leaves_nothing_behind(driver: Driver, num_ready: int) -> None:
    transport, error = Recorder(), RuntimeError("given up")
    round_ = Round(transport, [task("a", 1.0, 1.5), task("b", 2.0)], 1)
    driver.open(round_)
    for idx in range(1, 1 + num_ready):  # the second, for which the first must come before
        driver.ready(round_, idx)
    driver.cancel(round_, error)
    driver.cancel(round_, RuntimeError("again"))
    assert transport.num_aborts == 1
    with pytest.raises(RuntimeError, match="given up"):
        driver.wait(round_)
    run(driver, Recorder(), [task("c", 3.0)], [0])
    assert transport.issued == []


def test_discard_leaves_nothing_behind(driver: Driver) -> None:
    transport = Recorder()
    forgotten = Round(transport, [task("a", 1.0)], 2)
    driver.open(forgotten)
    driver.discard(forgotten)
    assert transport.num_aborts == 0
    run(driver, transport, [task("b", 2.0)], [0])
    assert transport.issued == [2.0]


def test_nothing_keeps_a_round_that_is_over(driver: Driver) -> None:
    references = []
    for bad in (False, True):
        of_round = [task("a", 1.0), task("b", 2.0, error=ZeroDivisionError("own") if bad else None)]
        round_ = Round(Recorder(), of_round, 2)
        references.append(weakref.ref(round_))
        driver.open(round_)
        driver.ready(round_, 0)
        driver.ready(round_, 1)
        try:
            driver.wait(round_)
        except ZeroDivisionError as error:
            error.__traceback__ = None
        del round_, of_round
    run(driver, Recorder(), [task("c", 3.0)], [0])  # the last event that the thread has seen is of this one
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_an_empty_round_is_over(driver: Driver) -> None:
    round_ = run(driver, Recorder(), [], [])
    assert driver.has_arrived(round_)
