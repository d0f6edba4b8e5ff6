"""State sent in the background: what arrives, what is sent again, and what happens to strangers."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlib
from commlib.elastic import precopy
from commlib.elastic.precopy import Donor, PreCopy
from commlib.elastic.progress import NewMember
from commlib.elastic.views import Member, View
from commlib.elastic.wire import Wire
from commlib.engine.background import Background
from commlib.hand_over import HandOver
from commlib.replica import replica_of
from commlib.state_copies import Copy, with_tensors, without_tensors
from tests.waiting import LIMIT_S, eventually

TOKEN = b"a secret of the test"
JOINER = (7, 0)
TENSORS = {
    "large": torch.randn(3 * (1 << 18) + 5, dtype=torch.float64),
    "half": torch.randn(33, 5).bfloat16(),
    "complex": torch.randn(7, dtype=torch.complex64),
    "flags": torch.tensor([True, False]),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
}


class Passes:
    """A source that sends these passes, and then nothing more."""

    def __init__(self, *passes: Mapping[str, torch.Tensor] | Exception) -> None:
        self._passes = list(passes)
        self.joiners: list[tuple[int, int]] = []
        self.forgotten = threading.Event()

    def copy_for(self, joiner: tuple[int, int], limit_s: float) -> Mapping[str, torch.Tensor]:
        self.joiners.append(joiner)
        found = self._passes.pop(0) if self._passes else {}
        if isinstance(found, Exception):
            raise found
        return found

    def forget(self, joiner: tuple[int, int]) -> None:
        assert joiner == JOINER
        self.forgotten.set()


@pytest.fixture
def serve() -> Iterator[Callable[..., Member]]:
    """Returns a function that makes a donor of a source, and returns it as a member of a view."""
    donors: list[Donor] = []

    def make(source: Passes, token: bytes = TOKEN) -> Member:
        donors.append(Donor("127.0.0.1", token, LIMIT_S))
        donors[-1].begin(source)
        return Member(len(donors), 0, f"donor-{len(donors)}", "127.0.0.1", donors[-1].port)

    yield make
    for each in donors:
        each.close()


@pytest.fixture
def copy() -> Iterator[tuple[PreCopy, queue.SimpleQueue[int]]]:
    """A joining member, and the numbers of views with which it became ready."""
    ready: queue.SimpleQueue[int] = queue.SimpleQueue()
    made = PreCopy(TOKEN, LIMIT_S, ready.put)
    yield made, ready
    made.close()


def test_all_passes_arrive(serve: Any, copy: Any) -> None:
    source = Passes(TENSORS, {"scalar": torch.tensor(4.0), "new": torch.arange(3)})
    made, ready = copy
    donor = serve(source)
    made.follow(3, JOINER, donor)
    assert ready.get(timeout=LIMIT_S) == 3
    assert (made.donor, made.is_under_way, source.joiners) == (donor, False, [JOINER] * 3)
    expected = {**TENSORS, "scalar": torch.tensor(4.0), "new": torch.arange(3)}
    assert made.tensors.keys() == expected.keys()
    for path, each in expected.items():
        assert made.tensors[path].dtype == each.dtype
        assert torch.equal(made.tensors[path], each)
    made.follow(4, JOINER, donor)  # another view with the same donor
    assert (ready.get(timeout=LIMIT_S), len(source.joiners)) == (4, 3)
    assert not source.forgotten.is_set()
    made.close()  # the member has entered
    assert source.forgotten.wait(LIMIT_S)
    assert made.tensors == {}


def test_the_passes_end_although_the_state_changes_always(serve: Any, copy: Any) -> None:
    source = Passes(*[{"a": torch.ones(1)}] * 100)
    copy[0].follow(1, JOINER, serve(source))
    copy[1].get(timeout=LIMIT_S)
    assert len(source.joiners) == precopy._MOST_PASSES


@pytest.mark.parametrize("kind", ["no step", "wrong token", "no listener", "gone"])
def test_without_a_copy_the_member_enters_all_the_same(serve: Any, copy: Any, kind: str) -> None:
    made, ready = copy
    donor = serve(Passes(TENSORS, TimeoutError("no step")), b"another secret" if kind == "wrong token" else TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = {"no listener": "", "gone": str(unused.getsockname()[1])}.get(kind, donor.data)
    made.follow(2, JOINER, Member(1, 0, "donor", "127.0.0.1", port))
    assert ready.get(timeout=LIMIT_S) == 2
    assert (made.donor, made.tensors) == (None, {})


def test_another_donor_takes_over(serve: Any, copy: Any) -> None:
    """The first one sends a tensor, and then nothing more."""
    stop = threading.Event()

    class Stuck(Passes):
        def copy_for(self, joiner: tuple[int, int], limit_s: float) -> Mapping[str, torch.Tensor]:
            if self.joiners:
                stop.wait(LIMIT_S)
            return super().copy_for(joiner, limit_s)

    made, ready = copy
    first, second = Stuck({"a": torch.zeros(2), "old": torch.zeros(2)}), Passes({"a": torch.ones(2)})
    made.follow(1, JOINER, serve(first))
    assert eventually(lambda: len(first.joiners) == 1)
    donor = serve(second)
    made.follow(2, JOINER, donor)
    assert ready.get(timeout=LIMIT_S) == 2
    assert made.donor == donor
    assert {path: each.tolist() for path, each in made.tensors.items()} == {"a": [1.0, 1.0]}
    stop.set()
    assert first.forgotten.wait(LIMIT_S)


def test_strangers_are_dropped(serve: Any, copy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that say something else at once, those that say nothing after a time; a member is served meanwhile."""
    monkeypatch.setattr(precopy, "_HANDSHAKE_S", 0.2)
    source = Passes(TENSORS)
    donor = serve(source)
    where = ("127.0.0.1", int(donor.data))
    with socket.create_connection(where) as noisy, socket.create_connection(where) as silent:
        noisy.sendall(b"GET / HTTP/1.1\r\n\r\n")
        copy[0].follow(1, JOINER, donor)
        assert copy[1].get(timeout=LIMIT_S) == 1
        for each in (noisy, silent):
            each.settimeout(LIMIT_S)
            assert each.recv(1) == b""
    assert copy[0].donor == donor


@pytest.mark.parametrize("first", ["x", [1, 2, 3], {"kind": "Join"}])
def test_a_member_that_does_not_introduce_itself_is_dropped(serve: Any, first: Any) -> None:
    source = Passes(TENSORS)
    with socket.create_connection(("127.0.0.1", int(serve(source).data))) as own:
        connection = precopy._Connection(own, Wire("member", TOKEN))
        connection.open()
        own.settimeout(LIMIT_S)
        connection.send(first)
        with pytest.raises(ConnectionError):
            connection.receive()
    assert source.joiners == []


def test_the_rate_is_halved(serve: Any, copy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The donor pauses after each acknowledgement for as long as it took to come."""
    paused: list[float] = []
    times = iter(range(100))
    clock = type("Clock", (), {"monotonic": lambda: float(next(times)), "sleep": paused.append})
    monkeypatch.setattr(precopy, "time", clock)
    monkeypatch.setattr(precopy, "_ACKNOWLEDGED_BYTES", 1 << 20)
    copy[0].follow(1, JOINER, serve(Passes({"a": torch.zeros(3 << 20, dtype=torch.uint8)})))
    assert copy[1].get(timeout=LIMIT_S) == 1
    assert paused == [1.0, 1.0, 1.0]  # the clock advances by 1 with each reading


# --- what a member lacks ----------------------------------------------------------------------------------------------


def state(**changes: Any) -> dict[str, torch.Tensor]:
    found = {
        "/'model'/'weight'": torch.ones(2),
        "/'optimizers'/0/'state'/0/'exp_avg'": torch.ones(2),
        "/'algorithm'/'anchor'": torch.ones(2),
    }
    return {**found, **{path: found[path] + 1 for path in found if any(name in path for name in changes)}}


def test_without_local_steps_all_changed_bits_are_missing() -> None:
    before = Copy(state(), 3, False)
    assert before.missing(Copy(state(), 3, False)) == []
    assert len(before.missing(Copy(state(weight=1, exp_avg=1, anchor=1), 3, False))) == 3
    assert len(Copy({}, 0, False).missing(before)) == 3


def test_in_a_period_of_local_steps_only_shared_state_is_compared() -> None:
    before, now = Copy(state(), 3, True), state(weight=1, exp_avg=1)
    assert before.missing(Copy(now, 3, True)) == []
    assert before.missing(Copy(now, 4, True)) == ["/'model'/'weight'"]
    assert before.missing(Copy(state(anchor=1), 3, True)) == ["/'algorithm'/'anchor'"]
    assert len(before.missing(Copy(now, 3, False))) == 2  # a warm-up with averaged gradients
    assert len(Copy(state(), 3, False).missing(Copy(now, 3, True))) == 2


def test_bits_shapes_and_dtypes_are_compared() -> None:
    before = Copy({"/'a'": torch.tensor([0.0, float("nan")])}, 1, False)
    same = lambda each: before.missing(Copy({"/'a'": each}, 1, False)) == []  # noqa: E731
    assert same(torch.tensor([0.0, float("nan")]))
    assert not same(torch.tensor([-0.0, float("nan")]))
    assert not same(torch.tensor([[0.0, float("nan")]]))
    assert not same(torch.tensor([0.0, float("nan")]).half())


def test_nested_state_is_put_together_again() -> None:
    nested = {"a": [torch.ones(2), (1, {3: torch.zeros(1), "3": torch.ones(1)})], "a/b": torch.ones(1), "c": {}}
    tensors: dict[str, torch.Tensor] = {}
    again = with_tensors(without_tensors(nested, tensors), tensors)
    assert len(tensors) == 4
    assert str(again) == str(nested)


# --- what a donor sends -----------------------------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Donors:
    """The state of a job that trains in this process, with the requests of a joining member.

    Args:
        algorithm: The algorithm.
        frozen: Whether the first layer is frozen.
        shared: Objects of the user.
    """

    def __init__(self, algorithm: Any, frozen: bool = False, **shared: Any) -> None:
        self.model: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        self.model[0].requires_grad_(not frozen)
        self.optimizer = torch.optim.Adam([each for each in self.model.parameters() if each.requires_grad])
        commlib.wrap(self.model, algorithm, optimizer=self.optimizer)
        members: Any = SimpleNamespace(shared=shared, samplers=[])
        self.state = HandOver(replica_of(self.model), members)
        self.step()

    def step(self) -> None:
        self.model(torch.ones(1, 2)).square().sum().backward()
        self.optimizer.step()

    def copy(self) -> set[str]:
        """Return the first keys on the paths of the copies that a joining member receives, while this rank trains."""
        made = Background("copies", lambda: self._take())
        while made._thread.is_alive():
            self.step()
        made.join()
        return {path.split("/")[1].strip("'") for path in self.found}

    def _take(self) -> None:
        self.found = self.state.copy_for(JOINER, LIMIT_S)


@pytest.mark.usefixtures("alone")
def test_a_donor_in_a_period_of_local_steps_sends_its_state_once() -> None:
    donor = Donors(commlib.algorithms.DiLoCo(period=1000))
    assert donor.copy() == {"model", "optimizers", "algorithm"}
    assert donor.copy() == set()
    replica_of(donor.model).engine.session.num_rounds += 1
    assert donor.copy() == {"model"}  # the anchors are the same, because a rank alone exchanges nothing
    donor.state.forget(JOINER)
    assert donor.copy() == {"model", "optimizers", "algorithm"}


@pytest.mark.usefixtures("alone")
def test_a_donor_of_gradients_sends_frozen_parameters() -> None:
    donor = Donors("allreduce", frozen=True)
    assert donor.copy() == {"model"}
    assert len(donor.found) == 2
    assert donor.copy() == set()
    with torch.no_grad():
        donor.model[0].bias.zero_()
    donor.copy()
    assert list(donor.found) == ["/'model'/'0.bias'"]


@pytest.mark.usefixtures("alone")
def test_an_error_while_the_state_is_copied_does_not_end_the_training() -> None:
    def fail() -> Any:
        raise ValueError("no state")

    donor = Donors("local_sgd", shared=SimpleNamespace(state_dict=fail))
    with pytest.raises(ValueError, match="no state"):
        donor.copy()
    donor.step()


@pytest.mark.usefixtures("alone")
def test_a_donor_that_makes_no_steps_sends_nothing() -> None:
    donor = Donors("local_sgd")
    donor.state._stepped_s = None  # it has not begun
    with pytest.raises(TimeoutError, match="no step within 0.0 s"):
        donor.state.copy_for(JOINER, LIMIT_S)
    read: list[int] = []
    donor.state._state = lambda: read.append(1) or {}  # type: ignore[method-assign]
    donor.step()  # the request is over
    assert donor.state._requests.empty()
    assert not read


@pytest.mark.usefixtures("alone")
def test_a_copy_counts_only_for_a_member_that_has_received_it() -> None:
    donor = Donors(commlib.algorithms.DiLoCo(period=1000))
    donor.copy()
    member = Member(*JOINER, "new", "127.0.0.1")
    view = View("job", "epoch", 3, 1, (member,))
    tensors = dict(donor.found)
    assert donor.state._missing(NewMember(0, 1, has_copy=True), view, tensors) == []
    assert donor.state._missing(NewMember(0, 1, has_copy=False), view, tensors) == list(tensors)
