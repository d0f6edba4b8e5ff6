"""The user's process group: resolution, backend, ranks and nodes."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from commlib.errors import ConfigError

NODE_VARIABLE = "COMMLIB_NODE"
"""The environment variable that names this rank's node, for launchers where host name and GROUP_RANK do not suffice."""


def resolve_group(process_group: Any) -> dist.ProcessGroup:
    """Return the `ProcessGroup` of `process_group`: None (the default group), a group, or a 1-D `DeviceMesh`.

    Raises:
        ConfigError: No default group exists, the mesh has several dimensions, or this process is not in the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "commlib.wrap needs a process group, and none is initialised. Call "
            "torch.distributed.init_process_group('gloo' or 'nccl') first, under torchrun for example."
        )
    if process_group is None:
        return c10d._get_default_group()
    if hasattr(process_group, "get_group") and hasattr(process_group, "ndim"):
        if process_group.ndim != 1:
            raise ConfigError(
                f"process_group is a DeviceMesh of {process_group.ndim} dimensions; commlib.wrap takes one dimension. "
                f"Slice it, for example mesh[{(process_group.mesh_dim_names or ('dp',))[0]!r}]."
            )
        process_group = process_group.get_group()
    if not isinstance(process_group, dist.ProcessGroup):
        raise ConfigError(
            f"process_group: expected a ProcessGroup, a 1-D DeviceMesh or None, got {type(process_group).__name__}. "
            "If new_group() gave it, this process is not a member and must not wrap a model on it."
        )
    return process_group


def as_timedelta(timeout: float | timedelta | None, group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return `timeout` (seconds, a timedelta, or None for the group's own) as a timedelta.

    If the group's backend does not report a timeout (a plug-in's may not), torch's default is used.

    Raises:
        ConfigError: It is not a positive duration.
    """
    if timeout is None:
        backend = parent_backend(group, device)
        try:
            return backend.options._timeout
        except (AttributeError, RuntimeError, TypeError):
            return dist.default_pg_timeout
    value = timeout if isinstance(timeout, timedelta) else timedelta(seconds=float(timeout))
    if value <= timedelta(0):
        raise ConfigError(f"timeout: expected a positive number of seconds or timedelta, got {timeout!r}")
    return value


def global_ranks(group: dist.ProcessGroup) -> Sequence[int]:
    """Return the group's ranks in the default group, or its own ranks if torch does not know the group."""
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, RuntimeError, ValueError):
        return range(group.size())


def name_of_node() -> str:
    """Return the name of this rank's node: identical on all its ranks, different on other nodes."""
    launcher = f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '0')}"
    return os.environ.get(NODE_VARIABLE) or launcher


def kind_of_backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return "gloo" or "nccl"."""
    kind = parent_backend(group, device).name().lower()
    if kind not in ("gloo", "nccl"):
        raise ConfigError(f"the process group's backend for {device.type} tensors is {kind!r}; expected Gloo or NCCL")
    return kind


def parent_backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return a group's backend object for tensors on a device.

    Raises:
        ConfigError: The group has no such backend.
    """
    try:
        return group._get_backend(device)
    except RuntimeError as error:
        raise ConfigError(
            f"the process group has no backend for {device.type} tensors, and the model is on {device}. Initialise "
            f"it with one, for example 'cpu:gloo,cuda:nccl', or move the model: {error}"
        ) from None
