"""This rank's part of parameters that are DTensors, as FSDP2 and tensor parallelism make them.

[Note: replicas of shards] A sharded parameter lies on a mesh of ranks, an island; the ranks that a wrapped model
communicates with are in other islands, at the same place, and have the same part of it. So a part is communicated as
any parameter is, and gradients and weights are written back as DTensors of the same placements.
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
    from torch.distributed.tensor import DTensor  # takes a third of a second, and most models have none

    return isinstance(tensor, DTensor)


def local_of(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a DTensor, in the same memory; any other tensor itself."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        part = tensor.to_local()
    return part.wait() if hasattr(part, "wait") else part  # tensor parallelism's may be under way


def communicated(parameter: nn.Parameter) -> Any:
    """Return what of a parameter is communicated: a `LocalPart` of a DTensor, any other one itself."""
    return LocalPart(parameter) if is_sharded(parameter) else parameter


def like(whole: Any, part: torch.Tensor, placements: Sequence[Any] | None = None) -> Any:
    """Return a DTensor of the spec of `whole`, or of other placements, whose part on this rank is `part`."""
    from torch.distributed.tensor import DTensor

    placed = whole.placements if placements is None else placements
    with torch.no_grad():
        return DTensor.from_local(
            part, whole.device_mesh, placed, run_check=False, shape=whole.shape, stride=whole.stride()
        )


def places_of(parameters: Iterable[Any]) -> list[list[list[int]]]:
    """Return where this rank is in the meshes of sharded parameters: each mesh's shape and this rank's coordinate."""
    meshes = [parameter.device_mesh for parameter in parameters if is_sharded(parameter)]
    found = {(tuple(mesh.shape), tuple(mesh.get_coordinate() or ())) for mesh in meshes}
    return [[list(shape), list(at)] for shape, at in sorted(found)]


def layout_of(parameters: Iterable[Any]) -> list[str]:
    """Return in words how parameters are sharded, and on which ranks.

    Two runs have the same layout on all ranks or on none, which does not hold of `places_of`.
    """
    sharded = [parameter for parameter in parameters if is_sharded(parameter)]
    return sorted({f"{', '.join(map(str, each.placements))} on {each.device_mesh.mesh.tolist()}" for each in sharded})


def reshard(model: nn.Module) -> None:
    """Let FSDP2 put the sharded parameters back that it has gathered for a forward.

    They stay gathered after a forward without a backward, as the root's do: then the model's parameters are others, and
    what is written into the sharded ones reaches no forward.
    """
    for module in _modules_of_fsdp(model):
        module.reshard()


def ranks_of(tensor: Any) -> set[int]:
    """Return the global ranks that a DTensor's mesh has; none for any other tensor."""
    return set(tensor.device_mesh.mesh.flatten().tolist()) if is_sharded(tensor) else set()


def placing_of(tensor: Any) -> tuple[tuple[int, bool], ...]:
    """Return the size of each dimension of a DTensor's mesh, and whether it is sharded there; () for other tensors."""
    if not is_sharded(tensor):
        return ()
    return tuple(
        (size, not placement.is_replicate())
        for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    )


def copied(tensors: Mapping[str, Any]) -> list[str]:
    """Return the names of tensors of which several ranks of the island have the same part; [Note: copies of parts].

    [Note: copies of parts] Tensor parallelism leaves some parameters whole on all its ranks, and FSDP2 shards them over
    its own dimension only. Each of these ranks communicates its copy with other ranks than the others do, and the
    copies must stay the same, bit for bit. So such parameters share buckets with their like only (`placing_of`): what
    is in these is then the same on all of them. No clock has a say in the plan, and algorithms whose rounds end by the
    clock are refused.
    """
    island = island_of(tensors.values())
    return [name for name, each in tensors.items() if _num_parts(each) < len(island)]


def _num_parts(tensor: Any) -> int:
    return math.prod(size for size, is_cut in placing_of(tensor) if is_cut)


def island_of(tensors: Iterable[Any]) -> set[int]:
    """Return the global ranks that any of the tensors is sharded over."""
    return set[int]().union(*map(ranks_of, tensors))


def is_by_fsdp(model: nn.Module) -> bool:
    """Return whether FSDP2 shards anything of the model, so that the ranks of an island have different data."""
    return bool(_modules_of_fsdp(model))


def _modules_of_fsdp(model: nn.Module) -> list[Any]:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # the import takes a while, and most models have none of it
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def divide_factors(model: nn.Module) -> set[float | None]:
    """Return by what FSDP2 divides sums of gradients where `set_gradient_divide_factor` says so, and None elsewhere."""
    groups: list[Any] = []
    for module in _modules_of_fsdp(model):
        state = module._get_fsdp_state()
        found = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one
        groups += [state._fsdp_param_group] if found is None else found
    return {getattr(group, "gradient_divide_factor", None) for group in groups if group is not None}


def spec_of(tensor: Any) -> str:
    """Return in words which part of what this rank has of a DTensor; "" for any other tensor."""
    if not is_sharded(tensor):
        return ""
    mesh = tensor.device_mesh
    placed = ", ".join(map(str, tensor.placements))
    return f", at {mesh.get_coordinate()} of {tuple(tensor.shape)} by {placed} on a mesh of {tuple(mesh.shape)}"


class LocalPart:
    """This rank's part of a parameter that is a DTensor, with what the engine asks of a parameter.

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
        """The gradient's part; the very tensor that was set, for as long as it is the gradient."""
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
        """Give a gradient the parameter's placements: of partial sums in the island, make their sum. Collective there.

        An algorithm would take a partial sum for the gradient, and those of other ranks for others.
        """
        gradient = self.whole.grad
        if is_sharded(gradient) and gradient.placements != self.whole.placements:
            self.whole.grad = gradient.redistribute(placements=self.whole.placements)

    @property
    def shape(self) -> torch.Size:
        """Of the part."""
        return self.data.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the part."""
        return self.whole.dtype

    @property
    def device(self) -> torch.device:
        """Of the part."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Of the part."""
        return self.data.nbytes

    @property
    def requires_grad(self) -> bool:
        """Of the parameter."""
        return self.whole.requires_grad

    def numel(self) -> int:
        """Return how many elements the part has."""
        return self.data.numel()

    def dim(self) -> int:
        """Return how many dimensions it has."""
        return self.data.dim()

    def stride(self, *dim: int) -> Any:
        """Return the strides of the part."""
        return self.data.stride(*dim)

    def is_contiguous(self) -> bool:
        """Return whether the part is contiguous."""
        return self.data.is_contiguous()
