"""The order of a parameter's elements in flat tensors.

[Note: the order of elements] A dense parameter (contiguous, channels-last, transposed) keeps its memory order. Any
other one (a strided slice) uses the order of its indices. Gradients can therefore be views of a bucket with the
parameter's own strides. The order is fixed when the model is wrapped or its parameters are adopted again; all ranks
check then that it is identical. All state that is kept by bucket or by shard has this order: residuals, replicas,
momenta. Data from elsewhere (an optimizer's state, a checkpoint of a model in another memory format) is reordered.
Operations on more than single elements (the matrices of PowerSGD) use indices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

#: A parameter's dimensions from the outermost to the innermost in memory; () for index order.
Order = tuple[int, ...]


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill a contiguous range of memory, each once, in some order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= max(size, 1)
    return True


def order_of(tensor: torch.Tensor) -> Order:
    """Return the order of the tensor's elements in memory; () if it is contiguous or not dense."""
    if tensor.is_contiguous() or not is_dense(tensor):
        return ()
    # The stride of a dimension of size 1 has no meaning. Such dimensions come first, so that equal orders are equal
    # tuples.
    return tuple(
        sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim) if tensor.shape[dim] > 1 else -math.inf)
    )


def strides_in(shape: Sequence[int], order: Order) -> tuple[int, ...]:
    """Return the strides of a dense tensor of the given shape and order."""
    strides, expected = [0] * len(shape), 1
    for dim in reversed(order or range(len(shape))):
        strides[dim] = expected
        expected *= max(shape[dim], 1)
    return tuple(strides)


def flattened(tensor: torch.Tensor, order: Order) -> torch.Tensor:
    """Return the elements of `tensor` in the given order: a view if possible, else a copy.

    Args:
        tensor: A tensor of any shape, strides and dtype.
        order: Order of the result.

    Returns:
        [numel], or [2 numel] real for a complex tensor.
    """
    permuted = tensor.permute(order) if order else tensor
    return (torch.view_as_real(permuted) if permuted.is_complex() else permuted).reshape(-1)


def shaped(values: torch.Tensor, shape: Sequence[int], order: Order) -> torch.Tensor:
    """Return a view of `values` [numel], whose elements have the given order, in the parameter's shape.

    Returns:
        [*shape], or [*shape, 2] if `values` are pairs of real numbers of complex elements.
    """
    is_paired = values.numel() > math.prod(shape)
    pair = (2,) if is_paired else ()
    if not order:
        return values.view(*shape, *pair)
    back = sorted(range(len(order)), key=order.__getitem__)
    return values.view(*(shape[dim] for dim in order), *pair).permute(*back, *([len(order)] if is_paired else []))


def reordered(values: torch.Tensor, shape: Sequence[int], before: Order, after: Order) -> torch.Tensor:
    """Return `values` [numel] of a parameter in the order `after`; `values` itself if the order is the same."""
    if before == after:
        return values
    by_index = shaped(values, shape, before)
    is_paired = by_index.dim() > len(shape)
    dims = after or tuple(range(len(shape)))
    return by_index.permute(*dims, *([len(shape)] if is_paired else [])).reshape(-1)
