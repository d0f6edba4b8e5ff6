"""Memory that is kept from plan to plan."""

from __future__ import annotations

import torch

from commlib.engine.buckets.memory import Memory

FLOATS = (torch.float32, torch.device("cpu"))
HALVES = (torch.bfloat16, torch.device("cpu"))


def pointers(tensors: list[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_tensors_of_a_layout_share_a_stretch_do_not_overlap_and_begin_at_cache_lines() -> None:
    taken = Memory().take([(FLOATS, 5), (HALVES, 3), (FLOATS, 0), (FLOATS, 100), (HALVES, 7)])
    assert [tensor.numel() for tensor in taken] == [5, 3, 0, 100, 7]
    assert [tensor.dtype for tensor in taken] == [torch.float32, torch.bfloat16, *2 * [torch.float32], torch.bfloat16]
    assert len(pointers(taken)) == 2
    for value, tensor in enumerate(taken):
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(value)
    assert all((tensor == value).all() for value, tensor in enumerate(taken))


def test_the_next_ones_are_zeros_in_the_same_place() -> None:
    memory = Memory()
    first = memory.take([(FLOATS, 1000), (HALVES, 10)])
    for tensor in first:
        tensor.fill_(1)
    where = pointers(first)
    again = memory.take([(FLOATS, 300), (FLOATS, 400), (FLOATS, 300), (HALVES, 10)])
    assert pointers(again) == where
    assert not any(tensor.any() for tensor in again)


def test_a_stretch_grows_where_it_is_too_small_and_the_others_stay() -> None:
    memory = Memory()
    floats, halves = memory.take([(FLOATS, 10), (HALVES, 10)])
    where = pointers([halves])
    more, same = memory.take([(FLOATS, 1 << 20), (HALVES, 10)])
    assert more.numel() == 1 << 20
    assert more.untyped_storage().data_ptr() != floats.untyped_storage().data_ptr()
    assert not more.any()
    assert pointers([same]) == where
