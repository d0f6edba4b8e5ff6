"""This rank's part of parameters that are DTensors, as FSDP2 and tensor parallelism make them.

[Note: replicas of shards] A sharded parameter lies on a mesh of ranks, an island; the ranks that a wrapped model
communicates with are in other islands, at the same place, and have the same part of it. So a part is communicated as
any parameter is, and gradients and weights are written back as DTensors of the same placements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def places_of(parameters: Sequence[Any]) -> list[list[list[int]]]:
    """Return where this rank is in the meshes of sharded parameters: each mesh's shape and this rank's coordinate."""
    meshes = [parameter.device_mesh for parameter in parameters if is_sharded(parameter)]
    found = {(tuple(mesh.shape), tuple(mesh.get_coordinate() or ())) for mesh in meshes}
    return [[list(shape), list(at)] for shape, at in sorted(found)]


def reshard(model: nn.Module) -> None:
    """Let FSDP2 put the sharded parameters back that it has gathered for a forward."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def ranks_of(tensor: Any) -> set[int]:
    """Return the global ranks that a DTensor's mesh has; none for any other tensor."""
    return set(tensor.device_mesh.mesh.flatten().tolist()) if is_sharded(tensor) else set()


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

    def requires_grad_(self, value: bool = True) -> None:
        """Of the parameter."""
        self.whole.requires_grad_(value)

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

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> Any:
        """Call `hook` when the parameter's gradient is there: FSDP2 does so after its reduce-scatter."""
        return self.whole.register_post_accumulate_grad_hook(hook)

    @property
    def _post_accumulate_grad_hooks(self) -> Any:
        return self.whole._post_accumulate_grad_hooks
