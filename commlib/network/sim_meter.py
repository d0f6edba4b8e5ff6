"""What local work costs: torch operations and codec kernels on meta tensors, counted while they are called.

[Note: the cost of an operation] An operation takes its launch, and the longer of its memory traffic at the copy rate
and its floating-point operations at the rate of matrix products. Traffic is what the operation reads and what it
writes, each once: operands that are overwritten are not read, indexed access counts the elements that the index names,
and views and allocations cost nothing. A codec kernel takes its launch and its traffic at its own fraction of the copy
rate.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from commlib.codecs.registry import by_id
from commlib.kernels import meta
from commlib.network.model import Device

_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
#: Their first operand is overwritten without being read.
_OVERWRITES = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "normal_", "uniform_", "random_"}
#: They touch only the elements of their first operand that an index names.
_INDEXED = {
    *("gather", "index", "index_select", "take", "index_fill_", "index_copy_", "index_add_", "index_put_"),
    *("scatter_", "scatter_add_", "scatter_reduce_", "put_", "masked_fill_"),
}


class Meter(TorchDispatchMode):
    """Adds up the seconds of the operations and kernels that run while it is active, and what they allocate.

    Args:
        device: What the operations run on.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self._launch_s = device.launch_us * 1e-6
        self._s_per_byte = 1e-9 / device.memory_gbytes_s
        self._seconds = 0.0
        self._known: dict[Any, float] = {}  # what operations cost that only change their operands
        self._allocated: list[tuple[StorageWeakRef, int]] = []

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Count within the context; tensors are made on the meta device unless another one is named."""
        with torch.no_grad(), torch.device("meta"), meta.reporting(self._on_kernel), self:
            yield

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the tensors that were made while it was active and are alive."""
        self._allocated = [entry for entry in self._allocated if not entry[0].expired()]
        return sum(nbytes for _, nbytes in self._allocated)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        if not _only_changes(func):
            result = func(*args, **kwargs)
            self._seconds += self._cost(func, args, kwargs, result)
            return result
        # What makes no tensor need not be called again: torch checks the first call of each kind.
        key = (func, *map(_signature, args), *((name, _signature(value)) for name, value in kwargs.items()))
        if key not in self._known:
            result = func(*args, **kwargs)
            cost = self._cost(func, args, kwargs, result)
            if not all(tensor.is_meta for tensor in _all_tensors([args, kwargs])):
                self._seconds += cost
                return result
            self._known[key] = cost
        self._seconds += self._known[key]
        return _changed(func, args, kwargs)

    def _cost(self, func: Any, args: Any, kwargs: Any, result: Any) -> float:
        """Return what one operation costs, and note what it allocates."""
        name = func.overloadpacket.__name__
        mutated = [args[idx] for idx, at in enumerate(_mutated(func)) if at and idx < len(args)]
        written = _tensors([*mutated, kwargs.get("out")])
        if not written:
            written = _tensors(result)
            self._allocated += [(StorageWeakRef(t.untyped_storage()), t.untyped_storage().nbytes()) for t in written]
        if name in _ALLOCATIONS or not written:
            return 0.0
        read = _tensors([args, {key: value for key, value in kwargs.items() if key != "out"}])
        if name in _INDEXED:
            read, written = read[1:], written if not mutated else []
            named = max((t.numel() for t in read), default=0) * args[0].element_size()
            nbytes = 2 * named if mutated else named
        else:
            nbytes = 0
            if name in _OVERWRITES:
                read = _tensors([args[1:]])
        nbytes += sum(map(_nbytes, read)) + sum(map(_nbytes, written))
        seconds = nbytes * self._s_per_byte
        if (formula := flop_registry.get(func.overloadpacket)) is not None:
            flops = formula(*args, **kwargs, out_val=result)
            seconds = max(seconds, flops / self._device.flops_per_s(written[0].dtype))
        return self._launch_s + seconds

    def _on_kernel(self, kernel: meta.Kernel) -> None:
        codec = "sparse" if kernel.codec == meta.SPARSE else by_id[kernel.codec].name
        fraction = self._device.codec_fraction(codec, kernel.name)
        self._seconds += self._launch_s + kernel.nbytes * self._s_per_byte / fraction


@functools.cache
def _mutated(func: Any) -> tuple[bool, ...]:
    """Return, for each positional argument of an operation, whether it is changed."""
    return tuple(bool(a.alias_info and a.alias_info.is_write) for a in func._schema.arguments if not a.kwarg_only)


@functools.cache
def _only_changes(func: Any) -> bool:
    """Return whether an operation returns nothing, or one of its operands, which it has changed."""
    returns = func._schema.returns
    return not returns or (len(returns) == 1 and bool(returns[0].alias_info and returns[0].alias_info.is_write))


def _changed(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what such an operation returns."""
    if not func._schema.returns:
        return None
    return kwargs["out"] if "out" in kwargs else args[_mutated(func).index(True)]


def _signature(value: Any) -> Any:
    """Return what the cost of an operation depends on in one argument."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.is_meta
    if isinstance(value, (list, tuple)):
        return tuple(map(_signature, value))
    return type(value)


def _all_tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors on the meta device in nested arguments; those elsewhere are small, and cost nothing."""
    return [tensor for tensor in _all_tensors(tree) if tensor.is_meta]


def _nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor; those that broadcasting repeats count once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
