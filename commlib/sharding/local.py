"""This rank's local part of DTensor parameters, as created by FSDP2 and tensor parallelism.

[Note: replicas of shards] A sharded parameter lies on a mesh of ranks, an island. The ranks that a wrapped model
communicates with are in other islands, at the same mesh coordinate, and have the same part of the parameter. A part is
communicated like any parameter; gradients and weights are written back as DTensors of the same placements.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn


def is_sharded(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor."""
    if type(tensor) in (torch.Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor  # a slow import (0.3 s) that most models do not need

    return isinstance(tensor, DTensor)


def local_of(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a DTensor, in the same memory. Return any other tensor unchanged."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        part = tensor.to_local()
    return part.wait() if hasattr(part, "wait") else part  # tensor parallelism may return a pending collective


def communicated(parameter: nn.Parameter) -> Any:
    """Return the object to communicate for a parameter: a `LocalPart` of a DTensor, else the parameter itself."""
    return LocalPart(parameter) if is_sharded(parameter) else parameter


def like(whole: Any, part: torch.Tensor, placements: Sequence[Any] | None = None) -> Any:
    """Return a DTensor with the spec of `whole`, or with other placements, and the local part `part`."""
    from torch.distributed.tensor import DTensor

    placed = whole.placements if placements is None else placements
    with torch.no_grad():
        return DTensor.from_local(
            part, whole.device_mesh, placed, run_check=False, shape=whole.shape, stride=whole.stride()
        )


def places_of(parameters: Iterable[Any]) -> list[list[list[int]]]:
    """Return each mesh's shape and this rank's coordinate in it, for the meshes of sharded parameters."""
    meshes = [parameter.device_mesh for parameter in parameters if is_sharded(parameter)]
    found = {(tuple(mesh.shape), tuple(mesh.get_coordinate() or ())) for mesh in meshes}
    return [[list(shape), list(at)] for shape, at in sorted(found)]


def layout_of(parameters: Iterable[Any]) -> list[str]:
    """Return descriptions of the parameters' sharding, with the ranks of each mesh.

    Two runs have equal layouts on all ranks or on no rank. This does not hold for `places_of`.
    """
    sharded = [parameter for parameter in parameters if is_sharded(parameter)]
    return sorted({f"{', '.join(map(str, each.placements))} on {each.device_mesh.mesh.tolist()}" for each in sharded})


def reshard(model: nn.Module) -> None:
    """Make FSDP2 free the unsharded parameters that it gathered for a forward.

    They stay gathered after a forward without a backward, as do the root module's. The model's parameters are then the
    unsharded ones, and values written into the sharded ones reach no forward.
    """
    for module in _modules_of_fsdp(model):
        module.reshard()


def ranks_of(tensor: Any) -> set[int]:
    """Return the global ranks of a DTensor's mesh; the empty set for any other tensor."""
    return set(tensor.device_mesh.mesh.flatten().tolist()) if is_sharded(tensor) else set()


def placing_of(tensor: Any) -> tuple[tuple[int, bool], ...]:
    """Return, for each mesh dimension of a DTensor, its size and whether it shards the tensor; () for other tensors."""
    if not is_sharded(tensor):
        return ()
    return tuple(
        (size, not placement.is_replicate())
        for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    )


def copied(tensors: Mapping[str, Any]) -> list[str]:
    """Return the names of tensors of which several ranks of the island have the same part; [Note: copies of parts].

    [Note: copies of parts] Tensor parallelism replicates some parameters on all its ranks, and FSDP2 shards them over
    its own dimension only. Each of these ranks communicates its copy with a different group, and the copies must stay
    identical, bit for bit. So such parameters share buckets only with parameters of the same `placing_of`; the contents
    of these buckets are then the same on all of the ranks. The bucket plan must not depend on timing, and algorithms
    whose rounds end by the clock are rejected.
    """
    island = island_of(tensors.values())
    return [name for name, each in tensors.items() if _num_parts(each) < len(island)]


def _num_parts(tensor: Any) -> int:
    return math.prod(size for size, is_cut in placing_of(tensor) if is_cut)


def island_of(tensors: Iterable[Any]) -> set[int]:
    """Return the global ranks of all the tensors' meshes."""
    return set[int]().union(*map(ranks_of, tensors))


def is_by_fsdp(model: nn.Module) -> bool:
    """Return whether FSDP2 shards any module of the model, so that the ranks of an island process different data."""
    return bool(_modules_of_fsdp(model))


def _modules_of_fsdp(model: nn.Module) -> list[Any]:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # a slow import that most models do not need
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def divide_factors(model: nn.Module) -> set[float | None]:
    """Return the divisors of FSDP2's gradient sums set by `set_gradient_divide_factor`; None for unset ones."""
    groups: list[Any] = []
    for module in _modules_of_fsdp(model):
        state = module._get_fsdp_state()
        found = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one
        groups += [state._fsdp_param_group] if found is None else found
    return {getattr(group, "gradient_divide_factor", None) for group in groups if group is not None}


def spec_of(tensor: Any) -> str:
    """Return a description of this rank's part of a DTensor; "" for any other tensor."""
    if not is_sharded(tensor):
        return ""
    mesh = tensor.device_mesh
    placed = ", ".join(map(str, tensor.placements))
    return f", at {mesh.get_coordinate()} of {tuple(tensor.shape)} by {placed} on a mesh of {tuple(mesh.shape)}"


class LocalPart:
    """This rank's part of a DTensor parameter, with the interface of a parameter that the engine uses.

    Args:
        whole: The parameter.

    Attributes:
        whole: The parameter.
    """

    __slots__ = ("_dtensor", "_placements", "_view", "whole")

    def __init__(self, whole: Any) -> None:
        self.whole = whole
        self._placements: Sequence[Any] = whole.placements  # of its gradients, which may be partial sums
        self._view: torch.Tensor | None = None
        self._dtensor: Any = None

    @property
    def data(self) -> torch.Tensor:
        """The values, in the parameter's memory."""
        return local_of(self.whole.data)

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient's part. Returns the same tensor that was set as long as the gradient is not replaced."""
        gradient = self.whole.grad
        if gradient is None:
            return None
        if gradient is self._dtensor:
            return self._view
        self._placements = gradient.placements
        return local_of(gradient)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None:
            self.whole.grad = None
            return
        if value is not self._view or self._dtensor is None or self._dtensor.placements != self._placements:
            self._view, self._dtensor = value, like(self.whole, value, self._placements)
        self.whole.grad = self._dtensor

    def place_gradient(self) -> None:
        """Redistribute the gradient to the parameter's placements; sums partial gradients. Collective in the island.

        Without this, an algorithm would use partial sums as gradients, each rank a different one.
        """
        gradient = self.whole.grad
        if is_sharded(gradient) and gradient.placements != self.whole.placements:
            self.whole.grad = gradient.redistribute(placements=self.whole.placements)

    @property
    def shape(self) -> torch.Size:
        """The shape of the part."""
        return self.data.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the part."""
        return self.whole.dtype

    @property
    def device(self) -> torch.device:
        """The device of the part."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """The size of the part in bytes."""
        return self.data.nbytes

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter requires a gradient."""
        return self.whole.requires_grad

    def numel(self) -> int:
        """Return the number of elements of the part."""
        return self.data.numel()

    def dim(self) -> int:
        """Return the number of dimensions of the part."""
        return self.data.dim()

    def stride(self, *dim: int) -> Any:
        """Return the strides of the part."""
        return self.data.stride(*dim)

    def is_contiguous(self) -> bool:
        """Return whether the part is contiguous."""
        return self.data.is_contiguous()
