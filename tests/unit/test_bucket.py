"""The flat buffer and its views."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from commlib.engine.buckets.bucket import Bucket, flat_numel, layout_key
from commlib.engine.buckets.slot import Slot
from commlib.errors import ConfigError


def bucket_of(*tensors: torch.Tensor, num_flags: int = 0) -> Bucket:
    slots = [Slot(f"p{idx}", nn.Parameter(tensor)) for idx, tensor in enumerate(tensors)]
    dtype, device = layout_key(slots[0].param)
    return Bucket(0, slots, torch.zeros(flat_numel(slots) + num_flags, dtype=dtype, device=device))


def set_gradients(bucket: Bucket) -> list[torch.Tensor]:
    torch.manual_seed(0)
    for slot in bucket.slots:
        slot.param.grad = torch.randn_like(slot.param)
    return [slot.param.grad.clone() for slot in bucket.slots]  # pyright: ignore[reportOptionalMemberAccess]


SHAPES = {
    "plain": lambda: [torch.ones(3, 4), torch.ones(()), torch.ones(7)],
    "empty": lambda: [torch.ones(0, 3), torch.ones(5)],
    "channels-last": lambda: [torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.ones(3)],
    "transposed": lambda: [torch.ones(4, 6).t(), torch.ones(3)],
    "strided": lambda: [torch.ones(8, 8)[::2, ::2], torch.ones(3)],
    "complex": lambda: [torch.ones(3), torch.ones(5, dtype=torch.complex64), torch.ones(2, 2, dtype=torch.complex64)],
    "bfloat16": lambda: [torch.ones(9, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)],
    "float64": lambda: [torch.ones(9, dtype=torch.float64)],
}


@pytest.mark.parametrize("kind", list(SHAPES))
@pytest.mark.parametrize("divisor", [1.0, 2.0, 3.0])
def test_gradients_become_views_and_keep_their_values(kind: str, divisor: float) -> None:
    bucket = bucket_of(*SHAPES[kind]())
    before = set_gradients(bucket)
    bucket.gather(divisor)
    for slot, gradient in zip(bucket.slots, before, strict=True):
        assert slot.param.grad is slot.view
        torch.testing.assert_close(slot.view, gradient / divisor)
    if bucket.flat.numel():
        bucket.flat.fill_(5.0)
        expected = 5.0 + 5.0j if kind == "complex" else 5.0
        assert bucket.slots[-1].param.grad is not None
        assert (bucket.slots[-1].param.grad == expected).all()


@pytest.mark.parametrize("kind", list(SHAPES))
def test_gradients_that_are_views_already_are_divided_in_place(kind: str) -> None:
    bucket = bucket_of(*SHAPES[kind]())
    before = set_gradients(bucket)
    bucket.gather(1.0)
    bucket.start_backward(1.0)
    bucket.gather(4.0)
    for slot, gradient in zip(bucket.slots, before, strict=True):
        torch.testing.assert_close(slot.view, gradient / 4.0)


def test_some_in_place_some_new_some_missing() -> None:
    bucket = bucket_of(torch.ones(3), torch.ones(2), torch.ones(4), num_flags=3)
    set_gradients(bucket)
    bucket.gather(1.0)
    first = bucket.slots[0].view.clone()
    bucket.slots[1].param.grad = torch.full((2,), 6.0)
    bucket.slots[2].param.grad = None
    bucket.flags.fill_(1.0)
    bucket.start_backward(1.0)
    bucket.gather(2.0)
    assert torch.equal(bucket.slots[0].view, first / 2)
    assert torch.equal(bucket.slots[1].view, torch.full((2,), 3.0))
    assert torch.equal(bucket.slots[2].view, torch.zeros(4))
    assert [slot.had_gradient for slot in bucket.slots] == [True, True, False]
    assert bucket.slots[2].param.grad is None
    assert torch.equal(bucket.flags, torch.ones(3)), "flags are not divided"
    bucket.finish([True, True, False])
    assert bucket.slots[2].param.grad is None
    bucket.start_backward(1.0)
    bucket.gather(1.0)
    bucket.finish([True, True, True])
    assert bucket.slots[2].param.grad is bucket.slots[2].view


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_with_a_graph_stays_the_same_tensor() -> None:
    bucket = bucket_of(torch.ones(3))
    param = bucket.slots[0].param
    (param**3).sum().backward(create_graph=True)
    gradient = param.grad
    assert gradient is not None
    bucket.gather(2.0)
    bucket.finish([True])
    assert param.grad is gradient
    assert gradient.requires_grad
    assert torch.equal(gradient.detach(), torch.full((3,), 1.5))
    param.grad = None  # breaks the cycle of parameter and graph


def test_a_sparse_gradient_is_an_error_that_says_what_to_do() -> None:
    bucket = bucket_of(torch.ones(4, 2))
    bucket.slots[0].param.grad = torch.sparse_coo_tensor([[1]], [[1.0, 1.0]], (4, 2), check_invariants=True)
    with pytest.raises(ConfigError, match=r"'p0' is sparse.*ignored_parameters"):
        bucket.gather(1.0)


def test_weights_are_loaded_and_stored() -> None:
    bucket = bucket_of(torch.arange(3.0), torch.arange(4.0))
    bucket.load([slot.param.data for slot in bucket.slots])
    assert bucket.flat.tolist() == [0, 1, 2, 0, 1, 2, 3]
    bucket.flat.mul_(2)
    bucket.store([slot.param.data for slot in bucket.slots])
    assert bucket.slots[1].param.tolist() == [0, 2, 4, 6]


def test_complex_and_real_parameters_share_a_bucket() -> None:
    assert layout_key(torch.ones(1, dtype=torch.complex64)) == layout_key(torch.ones(1))
    assert layout_key(torch.ones(1)) != layout_key(torch.ones(1, dtype=torch.float64))


def test_segments_placed_early_are_divided_once() -> None:
    bucket = bucket_of(*[torch.ones(200_000) for _ in range(3)])
    assert len(bucket.segments) == 3
    before = set_gradients(bucket)
    bucket.start_backward(4.0)
    bucket.segments[1].place()
    bucket.gather(4.0)
    for slot, gradient in zip(bucket.slots, before, strict=True):
        assert torch.equal(slot.view, gradient / 4.0)


def test_segments_placed_undivided_are_divided_when_the_bucket_leaves() -> None:
    bucket = bucket_of(*[torch.ones(200_000) for _ in range(2)])
    before = set_gradients(bucket)
    bucket.start_backward(1.0)
    bucket.segments[0].place()
    bucket.slots[0].view.add_(1.0)  # the gradient grows after it was placed
    bucket.gather(3.0)
    assert torch.equal(bucket.slots[0].view, (before[0] + 1.0) * (1 / 3))
    assert torch.equal(bucket.slots[1].view, before[1] * (1 / 3))


def test_small_parameters_share_a_segment() -> None:
    bucket = bucket_of(*[torch.ones(1000) for _ in range(1000)])
    assert len(bucket.segments) == 8
    assert [slot for segment in bucket.segments for slot in segment.slots] == bucket.slots
