"""The parameters that FSDP2 communicates together, read from its modules.

Only this module depends on private attributes of `torch.distributed.fsdp`. The collectives themselves are set by the
public `FSDPModule.set_custom_all_gather` and `set_custom_reduce_scatter`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from commlib.errors import ConfigError


@dataclass(frozen=True)
class Shard:
    """One parameter of a `ParameterGroup`, on this rank.

    Attributes:
        name: The parameter's name in the model.
        source: FSDP2's object of the parameter.
    """

    name: str
    source: Any

    @property
    def parameter(self) -> nn.Parameter:
        """The sharded parameter, a DTensor."""
        return self.source.sharded_param

    @property
    def numel(self) -> int:
        """Elements of a rank's shard, padded to the size of the largest one."""
        return int(self.source.padded_sharded_param_size.numel())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the parameter is gathered."""
        return self.source.param_dtype or self.source.orig_dtype

    @property
    def has_gradient(self) -> bool:
        """Whether a backward can produce a gradient."""
        return bool(getattr(self.source, "_unsharded_param", self.parameter).requires_grad)


@dataclass(frozen=True)
class ParameterGroup:
    """The parameters of one module on which `fully_shard` was called, without those of its sharded submodules.

    Attributes:
        name: The module's name in the model; "the root module" for the model itself.
        module: The module.
        shards: The parameters, in the order of FSDP2's flat buffers.
        source: FSDP2's object of the group.
    """

    name: str
    module: Any
    shards: tuple[Shard, ...]
    source: Any

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that hold the shards."""
        return self.source.mesh_info.shard_process_group

    @property
    def second_process_group(self) -> dist.ProcessGroup | None:
        """The ranks that gather again in backward, with an integer `reshard_after_forward`; None for other settings."""
        info = self.source.post_forward_mesh_info
        return None if info is None or info == self.source.mesh_info else info.shard_process_group

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shard, in a mesh of two dimensions; None in a mesh of one."""
        return getattr(self.source.mesh_info, "replicate_process_group", None)

    @property
    def device(self) -> torch.device:
        """The device on which the parameters are gathered."""
        return self.source.device

    def restore(self, all_gather: Any, reduce_scatter: Any) -> None:
        """Set the collectives that `collectives` returned earlier."""
        self.module.set_custom_all_gather(all_gather)
        self.module.set_custom_reduce_scatter(reduce_scatter)

    def collectives(self) -> tuple[Any, Any]:
        """Return the all-gather and the reduce-scatter in use."""
        return self.source._all_gather_comm, self.source._reduce_scatter_comm


def parameter_groups(model: nn.Module) -> list[ParameterGroup]:
    """Return the groups of all modules that FSDP2 shards over two or more ranks.

    Raises:
        ConfigError: FSDP2 shards no module, or one in a way that its collectives cannot be replaced.
    """
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[int, ParameterGroup] = {}
    for name, module, group in _groups(model):
        if id(group) not in found:
            found[id(group)] = _checked(ParameterGroup(name, module, tuple(_shards(group, names)), group))
    if not found:
        raise ConfigError(
            f"shard: FSDP2 shards no module of this {type(model).__name__}. Call torch.distributed.fsdp.fully_shard on "
            "its layers and on the model first"
        )
    return [each for each in found.values() if each.shards and each.process_group.size() > 1]


def _groups(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # a slow import; not loaded if no module is sharded
    if fsdp is None:
        return
    for name, module in model.named_modules():
        if not isinstance(module, fsdp.FSDPModule):
            continue
        owner: Any = module
        state = owner._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has at most one
        if groups is None:
            groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
        if len(groups) > 1:
            raise ConfigError(
                f"shard: {name or 'the root module'!r} has {len(groups)} parameter groups, as its shard_placement_fn "
                "returns several meshes. FSDP2 allows no other collectives there"
            )
        for group in groups:
            yield name or "the root module", module, group


def _shards(group: Any, names: dict[int, str]) -> Iterator[Shard]:
    for each in group.fsdp_params:
        owner = names.get(id(each._module_info.module), "")
        name = each._module_info.param_name
        yield Shard(f"{owner}.{name}" if owner else name, each)


def _checked(group: ParameterGroup) -> ParameterGroup:
    if not hasattr(group.source.mesh_info, "shard_process_group"):
        raise ConfigError(f"shard: {group.name!r} is replicated, not sharded")
    for kind, comm in zip(("all-gather", "reduce-scatter"), group.collectives(), strict=True):
        module = type(comm).__module__
        if "Alloc" in type(comm).__name__ or "SymmMem" in type(comm).__name__:
            raise ConfigError(
                f"shard: the {kind} of {group.name!r} allocates its own memory ({type(comm).__name__}), which FSDP2 "
                "does not combine with other collectives. Do not call set_allocate_memory_from_process_group_for_comm "
                "or set_symm_mem_for_comm"
            )
        if not module.startswith(("torch.", "commlib.")):
            raise ConfigError(f"shard: {group.name!r} has another {kind}, {module}.{type(comm).__name__}")
    for each in group.shards:
        if hasattr(each.source._sharded_local_tensor, "fsdp_pre_all_gather"):
            raise ConfigError(
                f"shard: the parameter {each.name!r} encodes itself (fsdp_pre_all_gather, as torchao's float8 "
                "parameters do), which cannot be combined with other collectives"
            )
    return group
