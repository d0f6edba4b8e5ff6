"""Cost of local work: counts torch operations and codec kernels that run on meta tensors.

[Note: the cost of an operation] An operation costs its launch plus the longer of its memory traffic at the copy rate
and its floating-point operations at the rate of matrix products. Traffic counts each operand that is read and each that
is written once. Overwritten operands are not read, indexed access counts the elements named by the index, and views and
allocations are free. A codec kernel costs its launch plus its traffic at its own fraction of the copy rate.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from commlib.codecs.registry import by_id
from commlib.kernels import meta
from commlib.network.model import Device

_CPU, _META = torch.device("cpu"), torch.device("meta")
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
#: Operations that overwrite their first operand without reading it.
_OVERWRITES = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "normal_", "uniform_", "random_"}
#: Operations that access only the elements of their first operand named by an index.
_INDEXED = {
    *("gather", "index", "index_select", "take", "index_fill_", "index_copy_", "index_add_", "index_put_"),
    *("scatter_", "scatter_add_", "scatter_reduce_", "put_", "masked_fill_"),
}


class Meter(TorchDispatchMode):
    """Sums the seconds of operations and kernels that run while it is active, and the memory that they allocate.

    Args:
        device: The device that the operations run on.
        num_roles: Number of ranks whose work is counted separately (`counting_for`). Other work counts for all ranks.
    """

    def __init__(self, device: Device, num_roles: int = 1) -> None:
        super().__init__()
        self._role: int | None = None
        self._device = device
        self._launch_s = device.launch_us * 1e-6
        self._s_per_byte = 1e-9 / device.memory_gbytes_s
        self._seconds = np.zeros(num_roles)
        self._repeated: dict[Hashable, float] = {}
        self._allocated: list[tuple[StorageWeakRef, int, int | None]] = []  # with the role

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, so torch need not import its compiler and query it at every call."""
        return False

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Count within the context.

        Tensors created on the CPU are created on the meta device instead, unless a generator or a list provides values.
        """
        with torch.no_grad(), meta.reporting(self._on_kernel), meta.repeating(self._repeat), self:
            yield

    @contextlib.contextmanager
    def counting_for(self, role: int) -> Iterator[None]:
        """Count for a single rank within the context."""
        self._role = role
        try:
            yield
        finally:
            self._role = None

    def seconds(self) -> np.ndarray:
        """Return the seconds [num_roles] since the last `take`."""
        return self._seconds.copy()

    def take(self) -> np.ndarray:
        """Return the seconds [num_roles] since the last call."""
        seconds, self._seconds = self._seconds, np.zeros_like(self._seconds)
        return seconds

    def count(self, nbytes: int) -> None:
        """Count a memory pass that reads and writes `nbytes` in total."""
        if nbytes:
            self.add(self._launch_s + nbytes * self._s_per_byte)

    def add(self, seconds: float) -> None:
        """Count seconds of local work."""
        if self._role is None:
            self._seconds += seconds
        else:
            self._seconds[self._role] += seconds

    def _repeat(self, key: Hashable, work: Callable[[], object], times: int) -> None:
        """Run the work of a key if it has not run before, and count it `times` times."""
        if key not in self._repeated:
            before, self._seconds = self._seconds, np.zeros_like(self._seconds)
            work()
            self._repeated[key] = float(self._seconds.max())
            self._seconds = before
        self.add(times * self._repeated[key])

    @property
    def allocated_bytes(self) -> int:
        """Bytes of live tensors that were created while it was active, on the rank with the most."""
        self._allocated = [entry for entry in self._allocated if not entry[0].expired()]
        of_all = sum(nbytes for _, nbytes, role in self._allocated if role is None)
        of_roles = [0] * len(self._seconds)
        for _, nbytes, role in self._allocated:
            if role is not None:
                of_roles[role] += nbytes
        return of_all + max(of_roles)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        if kwargs and _makes(func) and kwargs.get("device") in (None, _CPU):
            # The context `torch.device("meta")` has the same effect, but costs microseconds at every call into torch.
            kwargs = {**kwargs, "device": _META}
        key = (func, *map(_signature, args), *((name, _signature(value)) for name, value in kwargs.items()))
        known = _known.get(key)
        if known is None:
            result = func(*args, **kwargs)
            known = _Operation(*_traffic(func, args, kwargs, result), _maker_of(func, result))
            if known.make is not None and all(t.is_meta for t in _all_tensors([args, kwargs, result])):
                _remember(key, known)
        else:
            assert known.make is not None
            result = known.make(args, kwargs)
        self.add(self._seconds_of(known))
        if not _changes(func):
            self._note(result)
        return result

    def _seconds_of(self, operation: _Operation) -> float:
        if not operation.nbytes:
            return 0.0
        arithmetic_s = operation.flops / self._device.flops_per_s(operation.dtype) if operation.flops else 0.0
        return self._launch_s + max(operation.nbytes * self._s_per_byte, arithmetic_s)

    def _note(self, made: Any) -> None:
        """Record newly created tensors."""
        for tensor in _tensors(made):
            storage = tensor.untyped_storage()
            self._allocated.append((StorageWeakRef(storage), storage.nbytes(), self._role))

    def _on_kernel(self, kernel: meta.Kernel) -> None:
        codec = "sparse" if kernel.codec == meta.SPARSE else by_id[kernel.codec].name
        fraction = self._device.codec_fraction(codec, kernel.name)
        self.add(self._launch_s + kernel.nbytes * self._s_per_byte / fraction)


@dataclass(frozen=True, slots=True)
class _Operation:
    """The traffic and the arithmetic of an operation for given operand shapes, independent of the device.

    `make` creates its result from its operands; None if only torch can.
    """

    nbytes: int
    flops: int
    dtype: torch.dtype
    make: Callable[[Any, Any], Any] | None


#: Cache of operations: torch's own rules for meta tensors take a tenth of a millisecond or more.
_known: dict[Any, _Operation] = {}
_MOST_KNOWN = 100_000


def _remember(key: Any, operation: _Operation) -> None:
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known[key] = operation


def _traffic(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[int, int, torch.dtype]:
    """Return the bytes that an operation moves, its floating-point operations and their dtype."""
    name = func.overloadpacket.__name__
    mutated = [args[idx] for idx, at in enumerate(_mutated(func)) if at and idx < len(args)]
    written = _tensors([*mutated, kwargs.get("out")]) or _tensors(result)
    if name in _ALLOCATIONS or not written:
        return 0, 0, torch.float32
    read = _tensors([args, {key: value for key, value in kwargs.items() if key != "out"}])
    nbytes = 0
    if name in _INDEXED:
        read, written = read[1:], [] if mutated else written
        named = max((tensor.numel() for tensor in read), default=0) * args[0].element_size()
        nbytes = 2 * named if mutated else named
    elif name in _OVERWRITES:
        read = _tensors([args[1:]])
    nbytes += sum(map(_nbytes, [*read, *written]))
    formula = flop_registry.get(func.overloadpacket)
    flops = formula(*args, **kwargs, out_val=result) if formula is not None else 0
    return nbytes, flops, next((tensor.dtype for tensor in _tensors(result)), torch.float32)


@functools.cache
def _mutated(func: Any) -> tuple[bool, ...]:
    """Return whether an operation changes each of its positional arguments."""
    return tuple(bool(a.alias_info and a.alias_info.is_write) for a in func._schema.arguments if not a.kwarg_only)


@functools.cache
def _makes(func: Any) -> bool:
    """Return whether an operation creates a tensor from numbers only."""
    arguments = {a.name: str(a.type) for a in func._schema.arguments}
    return "device" in arguments and "generator" not in arguments and not any("Tensor" in t for t in arguments.values())


@functools.cache
def _changes(func: Any) -> bool:
    """Return whether an operation returns nothing, or only operands that it has changed."""
    return all(bool(r.alias_info and r.alias_info.is_write) for r in func._schema.returns)


def _maker_of(func: Any, result: Any) -> Callable[[Any, Any], Any] | None:
    """Return a function that creates the result of an operation."""
    if not func._schema.returns:
        return lambda args, kwargs: None
    if _changes(func):
        if len(func._schema.returns) > 1:
            return None
        return lambda args, kwargs: kwargs["out"] if "out" in kwargs else args[_mutated(func).index(True)]
    is_one = isinstance(result, torch.Tensor)
    made = result if isinstance(result, (list, tuple)) else [result]
    if any(r.alias_info for r in func._schema.returns) or not all(isinstance(t, torch.Tensor) for t in made):
        return None
    kind = type(result)
    forms = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in made]

    def make(args: Any, kwargs: Any) -> Any:
        tensors = [torch.empty_strided(shape, stride, dtype=dtype, device="meta") for shape, stride, dtype in forms]
        return tensors[0] if is_one else kind(tensors)

    return make


def _signature(value: Any) -> Any:
    """Return the properties of an argument that determine the result and the cost of an operation."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.is_meta
    if isinstance(value, (list, tuple)):
        return tuple(map(_signature, value))
    is_plain = isinstance(value, (int, float, str, torch.dtype, torch.device))
    return (type(value), value) if is_plain else type(value)  # 1 and 1.0 are equal, but give different dtypes


def _all_tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors on the meta device in nested arguments. Other tensors are small and count as free."""
    return [tensor for tensor in _all_tensors(tree) if tensor.is_meta]


def _nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor. Elements repeated by broadcasting count once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
