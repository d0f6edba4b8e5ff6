"""Slow copies from and to a device: sent, answered and received values are the same as without a device.

The "device" is host memory. A copy from it takes the current values, as a stream does, and writes them into the buffer
only when its event is waited for. A copy to it is in order with later operations; a change of its buffer before the
wait for the event is detected.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from commlib.algorithms.families import transfers
from commlib.algorithms.families.published import Packing, Published, TensorBuffer
from commlib.algorithms.families.shard_client import (
    PULL,
    PUSH_FOR_CHANGE,
    CodedWire,
    GradientShard,
    Shard,
    UpdateShard,
    WholeWire,
)
from commlib.algorithms.families.shard_server import Rule, ShardServer, cut, shards
from commlib.algorithms.passive_gossip import _Fetch
from commlib.codecs import Int8
from commlib.transport.mailbox import Message
from tests.waiting import LIMIT_S, eventually


class Device:
    """Copies under way."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []
        self.waited_on: list[threading.Thread] = []

    def host_buffer(self, nbytes: int, is_pinned: bool) -> torch.Tensor:
        assert is_pinned
        self.buffers.append(torch.full((nbytes,), 0xEE, dtype=torch.uint8))
        return self.buffers[-1]

    def is_host(self, tensor: torch.Tensor) -> bool:
        own = tensor.untyped_storage().data_ptr()
        return any(own == each.untyped_storage().data_ptr() for each in self.buffers)

    def copy(self, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> Any:
        assert to
        assert self.is_host(to[0]) != self.is_host(source[0]), "one side is the host's"
        return (_FromDevice if self.is_host(to[0]) else _ToDevice)(self, to, source)

    def copy_beside_servers(self, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> Any:
        """As `copy`; a server's own copies, between two of the host, are made at once."""
        if to and self.is_host(to[0]) == self.is_host(source[0]):
            torch._foreach_copy_(list(to), list(source))
            return None
        return self.copy(to, source)


class _FromDevice:
    def __init__(self, device: Device, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
        self._device = device
        self._under_way = [(t, s.detach().clone()) for t, s in zip(to, source, strict=True)]
        self._lock = threading.Lock()

    def synchronize(self) -> None:
        self._device.waited_on.append(threading.current_thread())
        with self._lock:
            while self._under_way:
                to, value = self._under_way.pop()
                to.copy_(value)


class _ToDevice:
    def __init__(self, device: Device, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
        self._device = device
        self._read = [(s, s.detach().clone()) for s in source]
        torch._foreach_copy_(list(to), list(source))

    def synchronize(self) -> None:
        self._device.waited_on.append(threading.current_thread())
        assert all(torch.equal(s, then) for s, then in self._read), "changed while the device was reading it"
        self._read.clear()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(transfers, "are_remote", lambda tensors: True)
    monkeypatch.setattr(transfers, "host_buffer", made.host_buffer)
    monkeypatch.setattr(transfers, "copy", made.copy)
    return made


class Line:
    """The thread of a mailbox that asks a server."""

    def __init__(self, server: ShardServer) -> None:
        self._server = server
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.errors: list[BaseException] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def ask(self, owner: int, message: Any, on_reply: Callable[[Message], None], into: Any) -> None:
        self._jobs.put((message, on_reply, into))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                message, on_reply, into = job
                message = message if isinstance(message, Message) else message()
                if message.kind != PULL:
                    payload = bytearray(message.payload)
                    self._server.push(0, message.number, self._server.unpack(payload), message.num_terms)
                whole = message.kind != PUSH_FOR_CHANGE
                answer = self._server.reply(0).payload if whole else self._server.change(0).numpy().data
                into[:] = answer
                on_reply(Message(message.kind, self._server.version))
            except BaseException as error:
                self.errors.append(error)
                on_reply(Message(0, 0))

    def close(self) -> None:
        self._jobs.put(None)
        self.thread.join(LIMIT_S)


def train(kind: type[Shard], codec: Int8 | None, dtype: torch.dtype) -> list[torch.Tensor]:
    """Train one shard against its own server for some steps, with several between a push and its answer."""
    generator = torch.Generator().manual_seed(5)
    parameters = [torch.nn.Parameter(torch.randn(40, generator=generator).to(dtype)) for _ in range(2)]
    (pieces,) = shards([40, 40], 1)
    weights = [parameter.data for parameter in parameters]
    optimizer = torch.optim.SGD(parameters, lr=0.1) if kind is GradientShard else None
    server = ShardServer(pieces, parameters, optimizer, 1, Rule(1.0, 100, False), codec)
    own = cut(weights, pieces)
    shard = kind(0, pieces, weights, 0.0, WholeWire(own) if codec is None else CodedWire(own, codec))
    line = Line(server)
    for step in range(24):
        gradients = [torch.randn(40, generator=generator).to(dtype) for _ in range(2)]
        shard.before_step(weights, gradients)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.sub_(gradient, alpha=0.1)
        if step % 4 == 3 and shard.is_under_way:
            assert shard.has_arrived.wait(LIMIT_S)
            assert not line.errors, line.errors
            shard.take_over(weights)
        if step % 4 == 1 and not shard.is_under_way:
            shard.push(weights, line.ask)
    if shard.is_under_way:
        assert shard.has_arrived.wait(LIMIT_S)
        shard.take_over(weights)
    shard.pull(line.ask)
    assert shard.has_arrived.wait(LIMIT_S)
    assert not line.errors, line.errors
    shard.overwrite(weights)
    line.close()
    return [weight.clone() for weight in weights]


CASES = [
    (UpdateShard, None, torch.float32),
    (UpdateShard, None, torch.bfloat16),
    (UpdateShard, Int8(), torch.bfloat16),
    (GradientShard, None, torch.float32),
    (GradientShard, Int8(), torch.float32),
]


@pytest.mark.parametrize(("kind", "codec", "dtype"), CASES)
def test_a_shard_of_a_device_is_trained_as_one_of_the_host(
    kind: type[Shard], codec: Int8 | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(kind, codec, dtype)
    made = Device()
    with monkeypatch.context() as patch:
        patch.setattr(transfers, "are_remote", lambda tensors: True)
        patch.setattr(transfers, "host_buffer", lambda nbytes, is_pinned: made.host_buffer(nbytes, True))
        patch.setattr(transfers, "copy", made.copy_beside_servers)
        remote = train(kind, codec, dtype)
    assert all(map(torch.equal, plain, remote))
    assert made.waited_on
    assert threading.current_thread() not in made.waited_on, "no step waits for a copy"


def test_readers_of_a_published_copy_wait_for_it_and_the_publisher_does_not(device: Device) -> None:
    tensors = [torch.full((4,), 1.0)]
    published = Published(tensors, depth=2)
    tensors[0].fill_(2.0)
    published.publish(tensors, 1)
    tensors[0].fill_(3.0)
    assert not device.waited_on
    with published.holding(lambda copies: copies[-1]) as latest:
        assert latest is not None
        assert latest.tensors[0].tolist() == [2.0] * 4
        assert bytes(latest.payload) == torch.full((4,), 2.0).numpy().tobytes()


def test_a_buffer_that_a_device_reads_is_not_changed_before(device: Device) -> None:
    received, target = TensorBuffer(Packing([torch.zeros(3)])), torch.zeros(3)
    received.tensors[0].fill_(1.0)
    received.copy_to([target])
    received.tensors[0].fill_(2.0)
    with pytest.raises(AssertionError, match="while the device was reading"):
        received.wait()


def test_a_gossips_question_waits_for_the_copies_of_the_answer_before(device: Device) -> None:
    parameter = torch.nn.Parameter(torch.full((4,), 1.0))
    published = Published([parameter.data])
    fetch, asked = _Fetch(published), []
    for number, partners in ((0, 3.0), (1, 7.0)):
        before = parameter.data.clone()
        fetch.start(1, Message(1, number), lambda *question: asked.append(question))
        assert not [thread for thread in device.waited_on if thread is threading.current_thread()]
        line = threading.Thread(target=lambda: asked.append(asked.pop()[1]()))  # makes the question
        into = asked[-1][3]
        line.start()
        line.join(LIMIT_S)
        assert asked.pop() == Message(1, number)
        into[:] = torch.full((4,), partners).numpy().tobytes()  # were it still read, `_ToDevice` would find out
        answering = threading.Thread(target=lambda: fetch._on_reply(Message(1, number)))  # noqa: B023 (joined)
        answering.start()
        answering.join(LIMIT_S)
        fetch.take([parameter], 0.5)
        fetch.drop()
        own = 1.0  # the published value
        assert torch.equal(parameter.data, before + 0.5 * (partners - own))
    assert len(device.waited_on) >= 3


@pytest.fixture(autouse=True)
def no_threads_stay() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert eventually(lambda: threading.active_count() <= before)
