"""The drivers over a transport that only records: order, errors, and no thread left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from commlib.engine.rounds.driver import Driver
from commlib.engine.rounds.streams import StreamDriver
from commlib.engine.rounds.task import Round, Task
from commlib.engine.rounds.threads import ThreadDriver
from commlib.errors import ConfigError, PeerTimeout, TransportError
from commlib.transport.base import AllReduce, Communication, Request
from tests.waiting import LIMIT_S


class Done:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def wait(self) -> None:
        if self.error is not None:
            raise self.error

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        callback()


class Recorder:
    """A transport whose collectives complete at once; the one numbered `fails` fails."""

    world_size = 2
    timeout_s = 5.0

    def __init__(self, fails: int | None = None) -> None:
        self.issued: list[float] = []
        self.fails = fails
        self.aborted = False

    def issue(self, request: Request) -> Done:
        assert isinstance(request, AllReduce)
        self.issued.append(request.tensor.item())
        return Done(RuntimeError("lost") if self.fails == len(self.issued) else None)

    def diagnose(self, error: BaseException, what: str) -> Exception:
        return TransportError(f"{what}: {error}")

    def abort(self) -> None:
        self.aborted = True


def task(name: str, *collectives: float, error: Exception | None = None) -> Task:
    def communicate() -> Communication:
        for value in collectives:
            yield AllReduce(torch.tensor(value), size=2)
        if error is not None:
            raise error

    return Task(lambda: name, communicate)


@pytest.fixture(params=["thread", "streams"])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    made = ThreadDriver() if request.param == "thread" else StreamDriver(torch.device("cpu"))
    yield made
    made.close()
    assert not [t for t in threading.enumerate() if t.name == "commlib-comm"]


def run(driver: Driver, transport: Any, tasks: list[Task], ready: list[int], window: int = 2) -> None:
    round_ = Round(transport, tasks, window)
    driver.open(round_)
    for idx in ready:
        driver.ready(round_, idx)
    driver.wait(round_)


@pytest.mark.parametrize("ready", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_collectives_are_issued_in_the_static_order(driver: Driver, ready: list[int]) -> None:
    transport = Recorder()
    run(driver, transport, [task("a", 1.0, 1.5), task("b", 2.0, 2.5), task("c", 3.0)], ready)
    assert transport.issued == [1.0, 2.0, 1.5, 3.0, 2.5]


def test_rounds_of_one_communicator_follow_each_other(driver: Driver) -> None:
    transport: Any = Recorder()
    first, second = Round(transport, [task("a", 1.0)], 2), Round(transport, [task("b", 2.0)], 2)
    driver.open(first)
    driver.open(second)
    driver.ready(second, 0)
    driver.ready(first, 0)
    driver.wait(first)
    driver.wait(second)
    assert transport.issued == [1.0, 2.0]


def test_a_failed_collective_names_its_verb_and_bucket(driver: Driver) -> None:
    transport = Recorder(fails=2)
    with pytest.raises(TransportError, match="all_reduce of b: lost"):
        run(driver, transport, [task("a", 1.0), task("b", 2.0)], [0, 1])
    assert transport.aborted


def test_an_algorithms_own_error_is_raised_as_it_is(driver: Driver) -> None:
    transport = Recorder()
    with pytest.raises(ZeroDivisionError, match="own"):
        run(driver, transport, [task("a", 1.0, error=ZeroDivisionError("own"))], [0])
    assert transport.aborted, "the peers must not wait"


@pytest.mark.parametrize(
    ("begin", "message"),
    [(lambda: None, "communicate of a returned None"), (lambda: iter([3.0]), "communicate of a yielded float")],
)
def test_what_is_no_generator_of_requests_is_named(driver: Driver, begin: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(driver, Recorder(), [Task(lambda: "a", begin)], [0])


def test_an_empty_round_is_over(driver: Driver) -> None:
    run(driver, Recorder(), [], [])


def test_a_prompt_task_is_issued_by_the_thread_that_makes_it_ready_in_the_static_order() -> None:
    made, threads = ThreadDriver(), []

    class Named(Recorder):
        def issue(self, request: Request) -> Done:
            threads.append(threading.current_thread())
            return super().issue(request)

    transport: Any = Named()
    tasks = [Task(each.describe, each.begin, is_prompt=True) for each in (task("a", 1.0), task("b", 2.0))]
    round_ = Round(transport, tasks, 2)
    made.open(round_)
    made.ready(round_, 1)
    assert transport.issued == [], "b waits for its turn"
    made.ready(round_, 0)
    assert transport.issued == [1.0, 2.0], "no other thread was needed"
    assert threads == [threading.current_thread()] * 2
    made.wait(round_)
    made.close()


def test_a_cancelled_round_is_not_kept_and_does_not_hold_up_the_next_one(driver: Driver) -> None:
    transport: Any = Recorder()
    first = Round(transport, [task("a", 1.0)], 2)
    driver.open(first)
    driver.cancel(first, RuntimeError("given up"))
    assert not driver._lanes
    run(driver, transport, [task("b", 2.0)], [0])
    assert transport.issued == [2.0]


class Later(Recorder):
    """A transport whose collectives complete when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.callbacks: list[Callable[[], None]] = []
        self.asked = threading.Semaphore(0)

    def issue(self, request: Request) -> Any:
        super().issue(request)
        work, transport = Done(), self

        def keep(callback: Callable[[], None]) -> None:
            transport.callbacks.append(callback)
            transport.asked.release()

        work.add_done_callback = keep  # type: ignore[method-assign]
        return work


def single(name: str, value: float, threads: list[threading.Thread], error: Exception | None = None) -> Task:
    def communicate() -> Communication:
        yield AllReduce(torch.tensor(value), size=2)
        threads.append(threading.current_thread())
        if error is not None:
            raise error

    return Task(lambda: name, communicate, is_prompt=True, is_single=True)


def test_single_collectives_are_finished_by_the_thread_that_waits() -> None:
    made, transport, threads = ThreadDriver(), Later(), []
    many = [single(f"{idx}", float(idx), threads) for idx in range(20)]
    round_ = Round(transport, many, 1 << 30)  # type: ignore[arg-type]
    made.open(round_)
    for idx in range(20):
        made.ready(round_, idx)
    assert transport.issued == [float(idx) for idx in range(20)], "nothing waits for an earlier one to end"
    assert not transport.callbacks, "and nothing is to be called while backward runs"

    def complete() -> None:
        for _ in range(20):
            assert transport.asked.acquire(timeout=LIMIT_S)
        for callback in reversed(transport.callbacks):
            callback()

    completing = threading.Thread(target=complete)
    completing.start()
    made.wait(round_)
    completing.join()
    assert threads == [threading.current_thread()] * 20
    made.close()


def test_a_round_of_single_and_other_tasks_ends_for_the_waiting_thread_whichever_is_last() -> None:
    for other_last in (False, True):
        made, transport, threads = ThreadDriver(), Later(), []
        round_ = Round(transport, [single("a", 1.0, threads), task("b", 2.0, 2.5)], 2)  # type: ignore[arg-type]
        made.open(round_)
        made.ready(round_, 1)
        made.ready(round_, 0)

        def complete(transport: Later, other_last: bool) -> None:
            assert transport.asked.acquire(timeout=LIMIT_S)
            assert transport.asked.acquire(timeout=LIMIT_S)
            for callback in list(transport.callbacks)[:: 1 if other_last else -1]:
                callback()
            if transport.asked.acquire(timeout=LIMIT_S):  # the second collective of b
                transport.callbacks[-1]()

        completing = threading.Thread(target=complete, args=(transport, other_last))
        completing.start()
        made.wait(round_)
        completing.join()
        assert sorted(transport.issued) == [1.0, 2.0, 2.5]
        made.close()


def test_an_error_after_a_single_collective_and_one_of_it_are_raised_where_it_is_awaited() -> None:
    made = ThreadDriver()
    for transport, tasks, expected in (
        (Recorder(), [single("a", 1.0, [], ZeroDivisionError("own"))], ZeroDivisionError),
        (Recorder(fails=1), [single("a", 1.0, [])], TransportError),
    ):
        with pytest.raises(expected):
            run(made, transport, tasks, [0])
        assert transport.aborted
        assert not made._lanes
    made.close()


def test_a_single_collective_that_never_ends_is_named_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commlib.engine.rounds.threads._GRACE_S", 0.0)
    made, transport = ThreadDriver(), Later()
    transport.timeout_s = 0.2
    with pytest.raises(PeerTimeout, match="a did not complete within"):
        run(made, transport, [single("a", 1.0, [])], [0])
    assert transport.aborted
    made.close()
