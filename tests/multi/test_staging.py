"""Gloo under tensors that it cannot reach: every verb through host buffers, over real ranks.

The "device" is host memory here: a tensor counts as the device's unless it is one of the buffers. What needs a GPU is
in tests/gpu/test_transport.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch

import commlib
from commlib.errors import CommlibError
from commlib.transport import torch_dist
from commlib.transport.base import Communicator, Request
from commlib.transport.groups import resolve_group
from commlib.transport.staging import Staging
from commlib.transport.torch_dist import TorchTransport
from tests.multi.common import Mlp, mlp_loss, seeded, sgd
from tests.multi.pool import on_ranks


class Spy(Staging):
    """Staging of a device that is host memory; knows its buffers, and in which state their copies are."""

    made: list[Spy] = []  # noqa: RUF012

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.buffers: list[torch.Tensor] = []
        self.num_waits = 0
        Spy.made.append(self)

    def is_staged(self, tensor: torch.Tensor) -> bool:
        return not self.owns(tensor)

    def buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        made = torch.full(tensor.shape, 77, dtype=tensor.dtype)
        self.buffers.append(made)
        return made

    def finish_copies(self) -> None:
        self.num_waits += 1

    def owns(self, tensor: torch.Tensor) -> bool:
        return any(tensor is each for each in self.buffers)


@contextmanager
def staged() -> Iterator[tuple[TorchTransport, Communicator, Spy]]:
    """A transport whose backend is given nothing but buffers."""
    Spy.made.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_dist, "staging_of", Spy)
        transport = TorchTransport(resolve_group(None), torch.device("cpu"), timedelta(seconds=60))
        (spy,) = Spy.made
        issue = transport._issue

        def checked(connection: Any, request: Request) -> Any:
            assert all(spy.owns(tensor) for tensor in tensors_of(request)), request
            return issue(connection, request)

        patch.setattr(transport, "_issue", checked)
        yield transport, Communicator(transport.rank, transport.world_size), spy
        transport.close()


def tensors_of(request: Any) -> list[torch.Tensor]:
    several = [tensor for name in ("sends", "receives") for _, tensor in getattr(request, name, ())]
    return [getattr(request, name) for name in ("tensor", "input", "output") if hasattr(request, name)] + several


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]


@on_ranks(2, 3)
def test_all_reduce_of_every_dtype_and_op() -> None:
    with staged() as (transport, comm, spy):
        for dtype, op in itertools.product(DTYPES, ("sum", "max")):
            value = torch.arange(6, dtype=dtype).reshape(2, 3) + comm.rank
            work = transport.issue(comm.all_reduce(value, op))
            ranks = range(comm.world_size)
            expected = torch.stack([torch.arange(6, dtype=dtype).reshape(2, 3) + rank for rank in ranks])
            assert torch.equal(value, expected[comm.rank]), "nothing is written before the wait"
            work.wait()
            assert torch.equal(value, expected.sum(0).to(dtype) if op == "sum" else expected.amax(0)), (dtype, op)
        assert spy.num_waits == 2 * len(DTYPES) + 2, "the host waits for the copies of each; two tell sizes and values"


@on_ranks(2, 3)
def test_gathering_exchanging_and_copying() -> None:
    with staged() as (transport, comm, _):
        size, rank = comm.world_size, comm.rank
        gathered = torch.zeros(2 * size)
        transport.issue(comm.all_gather(gathered, torch.full((2,), float(rank)))).wait()
        assert gathered.tolist() == [float(r) for r in range(size) for _ in range(2)]
        for numel in (3, 40_000):  # Gloo's own, and one by sends and receives
            received = torch.zeros(size * numel)
            chunks = torch.arange(size).repeat_interleave(numel) * 10.0 + rank
            transport.issue(comm.all_to_all(received, chunks)).wait()
            assert torch.equal(received, torch.arange(size).repeat_interleave(numel) + 10.0 * rank)
        copied = torch.full((5,), rank, dtype=torch.uint8)
        transport.issue(comm.broadcast(copied, 1)).wait()
        assert copied.tolist() == [1] * 5
        after, before = (rank + 1) % size, (rank - 1) % size
        first, second = torch.zeros(4), torch.zeros(0)
        sends = [(after, torch.full((4,), float(rank))), (after, torch.zeros(0))]
        transport.issue(comm.exchange(sends, [(before, first), (before, second)])).wait()
        assert first.tolist() == [float(before)] * 4


@on_ranks(2)
def test_only_what_is_needed_is_copied() -> None:
    with staged() as (transport, comm, spy):
        spy.num_waits = 0
        spy.buffers.clear()
        value = torch.full((4,), float(comm.rank))
        transport.issue(comm.broadcast(value, 0)).wait()
        assert spy.num_waits == (1 if comm.rank == 0 else 0), "a receiver has no input"
        assert value.tolist() == [0.0] * 4


@on_ranks(2)
def test_inputs_are_the_callers_again_once_a_request_is_issued() -> None:
    with staged() as (transport, comm, _):
        own, gathered = torch.full((3,), float(comm.rank)), torch.zeros(6)
        work = transport.issue(comm.all_gather(gathered, own))
        own.fill_(9.0)
        work.wait()
        assert gathered.tolist() == [0.0] * 3 + [1.0] * 3


@on_ranks(2)
def test_training_through_buffers_is_training_without_them() -> None:
    def train() -> list[torch.Tensor]:
        model = seeded(Mlp)
        commlib.wrap(model, "bytegrad", bucket_cap_mb=1)
        optimizer = sgd(model)
        for step in range(3):
            optimizer.zero_grad()
            mlp_loss(model, step).backward()
            optimizer.step()
        commlib.unwrap(model)
        return [parameter.detach().clone() for parameter in model.parameters()]

    plain = train()
    Spy.made.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_dist, "staging_of", Spy)
        through_buffers = train()
    assert Spy.made
    assert Spy.made[0].num_waits > 3
    assert all(map(torch.equal, plain, through_buffers))


@on_ranks(2)
def test_a_peer_that_leaves_is_named_and_outputs_stay_as_they_were() -> None:
    with staged() as (transport, comm, _):
        if comm.rank == 1:
            transport.close()
            return
        value = torch.ones(3)
        with pytest.raises(CommlibError, match="rank 1 left"):
            transport.complete(comm.all_reduce(value), "the sum")
        assert value.tolist() == [1.0] * 3


def test_a_device_other_than_the_host_is_staged() -> None:
    assert torch_dist.staging_of(torch.device("cpu")) is None
    made = torch_dist.staging_of(torch.device("cuda", 0))
    assert isinstance(made, Staging)
    assert made.is_staged(torch.empty(2, device="meta"))
    assert not made.is_staged(torch.empty(2))
