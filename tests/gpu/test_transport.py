"""The transport on a GPU: Gloo through pinned memory, and the marks of works. Skipped where there is no GPU."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

import commlib
from commlib.transport import nccl
from commlib.transport.base import AllGather, AllReduce, Communicator
from commlib.transport.groups import resolve_group
from commlib.transport.staging import Staging
from commlib.transport.torch_dist import TorchTransport
from tests.multi.common import Mlp, seeded
from tests.multi.pool import on_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(300),
]

DEVICE = torch.device("cuda", 0)


def test_copies_behind_a_busy_stream_hold_what_the_stream_wrote() -> None:
    """The input is written by a kernel that is queued when the request is issued; the output is read by a later one."""
    staging, stream = Staging(DEVICE), torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(stream):
        value = torch.zeros(1 << 20, device=DEVICE)
        torch.cuda._sleep(100_000_000)
        value.add_(3.0)
        staged = staging.stage(AllReduce(value, size=2), 0)
        request: Any = staged.request
        assert request.tensor.is_pinned()
        assert request.tensor.eq(3.0).all()
        request.tensor.mul_(2.0)
        staged.deliver()
        del request, staged
        others = [torch.empty(1 << 20, pin_memory=True).fill_(-1.0) for _ in range(4)]  # not in a buffer that is in use
        assert value.sum().item() == 6.0 * (1 << 20)
        assert len(others) == 4


def test_host_tensors_are_left_as_they_are() -> None:
    own, everyone = torch.ones(2), torch.empty(4)
    staged: Any = Staging(DEVICE).stage(AllGather(everyone, own, size=2), 0)
    assert staged.request.input is own
    assert staged.request.output is everyone


def test_a_mark_is_the_end_of_what_the_stream_was_given() -> None:
    stream = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        mark = nccl._mark(DEVICE)
    assert not mark.query()
    stream.synchronize()
    assert mark.query()


@on_ranks(2)
def test_two_ranks_share_a_device_over_gloo() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    transport = TorchTransport(resolve_group(None), DEVICE, timedelta(seconds=60))
    comm = Communicator(transport.rank, transport.world_size)
    assert transport.gather_objects(comm.rank) == [0, 1]
    value = torch.full((1000,), 1.0 + comm.rank, device=DEVICE)
    transport.issue(comm.all_reduce(value)).wait()
    assert value.tolist() == [3.0] * 1000
    received = torch.zeros(2 * 50_000, device=DEVICE)
    sent = torch.arange(2.0, device=DEVICE).repeat_interleave(50_000) * 10 + comm.rank
    transport.issue(comm.all_to_all(received, sent)).wait()
    assert received.view(2, -1)[:, 0].tolist() == [10.0 * comm.rank, 10.0 * comm.rank + 1]
    transport.close()


@on_ranks(2)
def test_training_two_ranks_on_one_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = seeded(Mlp).to(DEVICE)
    commlib.wrap(model, "allreduce", bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + torch.distributed.get_rank())
        model(torch.randn(4, 8, device=DEVICE)).square().mean().backward()
        optimizer.step()
    own = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).cpu()
    both = [torch.empty_like(own) for _ in range(2)]
    torch.distributed.all_gather(both, own)
    assert torch.equal(*both)
    commlib.unwrap(model)
