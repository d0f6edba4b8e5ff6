"""The order of elements: orders, views by index, and pieces of state that move from one order to another."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from commlib.optim import FrozenVarianceAdam
from commlib.optim.groups import Groups
from commlib.primitives.order import flattened, is_dense, order_of, reordered, shaped, strides_in
from commlib.primitives.parts import Part, cut, paste

SHAPE = (2, 3, 4)
ORDERS = list(itertools.permutations(range(3)))


def numbered(order: tuple[int, ...], is_complex: bool = False) -> torch.Tensor:
    """Return different numbers, stored in an order."""
    values = torch.arange(math.prod(SHAPE), dtype=torch.float32).view(SHAPE)
    if is_complex:
        values = torch.complex(values, -values - 1)
    back = [order.index(dim) for dim in range(3)]
    return values.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as they lie in memory."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat


@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("dims", ORDERS, ids=str)
def test_an_order_is_that_of_memory(dims: tuple[int, ...], is_complex: bool) -> None:
    tensor = numbered(dims, is_complex)
    order = order_of(tensor)
    assert order == (() if dims == (0, 1, 2) else dims)
    assert strides_in(SHAPE, order) == tensor.stride()
    assert torch.equal(flattened(tensor, order), memory_of(tensor))
    by_index = shaped(memory_of(tensor), SHAPE, order)
    assert torch.equal(by_index, torch.view_as_real(tensor) if is_complex else tensor)
    assert by_index.data_ptr() == tensor.data_ptr() or is_complex


@pytest.mark.parametrize("after", ORDERS, ids=str)
@pytest.mark.parametrize("before", ORDERS, ids=str)
def test_values_move_from_one_order_to_another(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    for is_complex in (False, True):
        source, target = numbered(before, is_complex), numbered(after, is_complex)
        moved = reordered(memory_of(source), SHAPE, order_of(source), order_of(target))
        assert torch.equal(moved, memory_of(target))


def test_what_has_no_order_of_its_own_goes_by_indices() -> None:
    assert order_of(torch.zeros(4, 6)[:, ::2]) == ()
    assert order_of(torch.zeros(1, 3).expand(4, 3)) == ()
    assert order_of(torch.zeros(())) == order_of(torch.zeros(0, 3)) == order_of(torch.zeros(3, 0).t()) == ()
    assert not is_dense(torch.zeros(4, 6)[:, ::2])
    assert is_dense(torch.zeros(4, 6).t())


def test_a_dimension_of_one_element_has_no_place() -> None:
    one_channel = torch.zeros(4, 1, 3, 3).to(memory_format=torch.channels_last)
    assert order_of(one_channel) == ()
    orders = {order_of(torch.zeros(4, 3, 1).as_strided((4, 3, 1), (1, 4, last))) for last in (1, 4, 12, 99)}
    assert len(orders) == 1, orders


@pytest.mark.parametrize("after", ORDERS, ids=str)
@pytest.mark.parametrize("before", ORDERS, ids=str)
def test_a_stretch_of_a_bucket_keeps_its_elements_in_another_order(
    before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    source, target = numbered(before), numbered(after)
    parts = [Part("first", (2,), 0, 2, 0), Part("p", SHAPE, 2, 24, 2, order_of(source))]
    bucket = torch.cat([torch.tensor([-1.0, -2.0]), memory_of(source)])
    for first, last in ((0, 26), (1, 9), (5, 17), (14, 26)):
        pieces = cut(bucket[first:last], first, parts)
        into = torch.zeros(26)
        paste(pieces, into, [parts[0], Part("p", SHAPE, 2, 24, 2, order_of(target))])
        kept = set(bucket[max(first, 2) : last].tolist())
        assert torch.equal(into[:2], bucket[:2] * (torch.arange(2) >= first))
        expected = memory_of(target).clone().apply_(lambda value, kept=kept: value if value in kept else 0.0)
        assert torch.equal(into[2:], expected)


def test_a_group_is_found_after_groups_were_replaced_or_added() -> None:
    first, second, third = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    optimizer = FrozenVarianceAdam([{"params": [first]}, {"params": [second], "lr": 0.5}])
    groups = Groups(optimizer)
    assert groups.find(second) is optimizer.param_groups[1]
    assert groups.find(third) is None
    optimizer.add_param_group({"params": [third]})
    assert groups.find(third) is optimizer.param_groups[2]
    optimizer.load_state_dict(optimizer.state_dict())
    for parameter, group in zip((first, second, third), optimizer.param_groups, strict=True):
        assert groups.find(parameter) is group
    del optimizer.param_groups[0]
    assert groups.find(first) is None
    assert groups.find(third) is optimizer.param_groups[1]
