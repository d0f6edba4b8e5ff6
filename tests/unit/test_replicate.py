"""Broadcast and mean of many tensors, the generators driven by hand, without a network."""

from __future__ import annotations

import gc

import pytest
import torch

from commlib.primitives import replicate
from commlib.primitives.replicate import broadcast_all, mean_all
from commlib.transport.base import Communication, Communicator


def tensors_of(seed: int, dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    """Return tensors of each dtype: empty, of no dimension, transposed, channels-last, and 40 small ones."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(0,), (), (3, 5), (2, 3, 4, 5), *[(7,)] * 40]
    found = []
    for dtype in dtypes:
        made = [(torch.randn(shape, generator=generator) * 3).to(dtype) for shape in shapes]
        made[2], made[3] = made[2].t(), made[3].contiguous(memory_format=torch.channels_last)
        found += made
    return found


def requests(communications: list[Communication]) -> list[torch.Tensor]:
    """Return the tensor of each rank's next request, or nothing at the end."""
    found = [next(communication, None) for communication in communications]
    assert all(request is None for request in found) or None not in found
    return [request.tensor for request in found if request is not None]


@pytest.fixture(params=[64 << 20, 200], ids=["one_chunk", "many_chunks"])
def _chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicate, "_CHUNK_BYTES", request.param)


@pytest.mark.usefixtures("_chunk")
def test_a_broadcast_copies_every_bit() -> None:
    dtypes = [torch.float32, torch.bool, torch.int64, torch.float16, torch.complex64, torch.float64, torch.uint8]
    by_rank = [tensors_of(rank, dtypes) for rank in range(2)]
    pointers = [tensor.data_ptr() for tensor in by_rank[1]]
    communications = [broadcast_all(own, Communicator(rank, 2)) for rank, own in enumerate(by_rank)]
    while sent := requests(communications):
        sent[1].copy_(sent[0])
    assert all(torch.equal(a, b) for a, b in zip(*by_rank, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(by_rank[0], tensors_of(0, dtypes), strict=True))
    assert [tensor.data_ptr() for tensor in by_rank[1]] == pointers


@pytest.mark.usefixtures("_chunk")
def test_a_mean_is_that_of_the_ranks() -> None:
    dtypes = [torch.float32, torch.complex64, torch.float64]
    by_rank = [tensors_of(rank, dtypes) for rank in range(2)]
    expected = [(a + b) / 2 for a, b in zip(*by_rank, strict=True)]
    communications = [mean_all(own, Communicator(rank, 2)) for rank, own in enumerate(by_rank)]
    while sent := requests(communications):
        assert not sent[0].is_complex()
        total = sent[0] + sent[1]
        for tensor in sent:
            tensor.copy_(total)
    for own in by_rank:
        assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))


def test_a_leaf_that_requires_a_gradient_is_written() -> None:
    by_rank = [[torch.nn.Parameter(torch.full((3,), float(rank)))] for rank in range(2)]
    communications = [broadcast_all(own, Communicator(rank, 2)) for rank, own in enumerate(by_rank)]
    while sent := requests(communications):
        sent[1].copy_(sent[0])
    assert by_rank[1][0].tolist() == [0.0, 0.0, 0.0]
    assert by_rank[1][0].requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_autograd_sees_that_a_tensor_was_written(dtype: torch.dtype) -> None:
    weight = torch.ones(3, dtype=dtype, requires_grad=True)
    buffer = torch.full((3,), 2.0, dtype=dtype)
    product = (weight * buffer).abs().sum()
    communication = broadcast_all([buffer], Communicator(1, 2))
    next(communication)
    assert list(communication) == []
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_tensors_of_inference_mode_are_written_in_it() -> None:
    with torch.inference_mode():
        own = [torch.zeros(3)]
        communication = broadcast_all(own, Communicator(1, 2))
        next(communication).tensor.fill_(0).view(torch.float32).add_(5.0)
        assert list(communication) == []
    assert own[0].tolist() == [5.0, 5.0, 5.0]


def test_a_thousand_tensors_do_not_make_a_thousand_more() -> None:
    own = [torch.zeros(4, dtype=torch.complex64) for _ in range(1000)]  # which torch copies, not the extension
    communication = broadcast_all(own, Communicator(0, 2))
    before = num_tensors()
    next(communication)
    assert num_tensors() - before < 50
    communication.close()


def num_tensors() -> int:
    gc.collect()
    return sum(type(found) is torch.Tensor for found in gc.get_objects())
