"""The consensus model: the mean of the ranks' models, computed without changing any of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from commlib.primitives.replicate import broadcast_all, mean_all
from commlib.replica import Replica, replica_of
from commlib.sharding.local import local_of
from commlib.transport.base import Communication

#: Follows the names of these collectives in the error of a rank that waits for the others.
_ON_ALL = "every rank must save; consensus_state_dict is collective if replicas differ"


def replicas_differ(model: nn.Module) -> bool:
    """Return whether the ranks' weights may differ between steps. All ranks return the same value.

    Weights may differ between several ranks under algorithms that communicate weights or run asynchronously, after
    their warm-up. Algorithms on gradients keep replicas identical.

    Raises:
        ConfigError: The model is not wrapped.
    """
    return may_differ(replica_of(model))


def may_differ(replica: Replica) -> bool:
    """See `replicas_differ`."""
    engine = replica.engine
    return engine.comm.world_size > 1 and not engine.algorithm.channel.keeps_replicas_alike


def consensus_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return `model.state_dict()` as it would be after `commlib.synchronize`, without changing the model.

    Collective if replicas differ (`replicas_differ`): the returned parameters are means over the ranks and the buffers
    are rank 0's, in new memory. Otherwise local, and the model's own tensors are returned.

    Raises:
        ConfigError: The model is not wrapped.
        TransportError: A rank did not participate.
    """
    replica = replica_of(model)
    state = replica.bare.state_dict()
    if not may_differ(replica):
        return state
    weights = {_place(parameter.param.data) for parameter in replica.engine.parameters}
    buffers = {_place(buffer) for buffer in replica.structure.buffers(replica.bare, replica.ignored)}
    copies: dict[Any, torch.Tensor] = {}  # by memory, so that tied tensors stay tied
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and _place(value) in weights | buffers:
            state[name] = copies.setdefault(_place(value), value.detach().clone())
    average(replica, [local_of(value) for place, value in copies.items() if place in weights])
    copy_from_rank_0(replica, [local_of(value) for place, value in copies.items() if place not in weights])
    return state


def average(replica: Replica, tensors: Sequence[torch.Tensor]) -> None:
    """Replace float and complex tensors by their mean over the ranks, others by rank 0's, in place. Collective."""
    means = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    _run(replica, f"the mean of the saved tensors ({_ON_ALL})", mean_all(means, replica.engine.comm))
    copy_from_rank_0(replica, [tensor for tensor in tensors if not (tensor.is_floating_point() or tensor.is_complex())])


def copy_from_rank_0(replica: Replica, tensors: Sequence[torch.Tensor]) -> None:
    """Replace tensors by rank 0's, in place. Collective."""
    _run(replica, f"the copy of the saved tensors ({_ON_ALL})", broadcast_all(tensors, replica.engine.comm))


def _run(replica: Replica, what: str, communication: Communication) -> None:
    with torch.no_grad():
        replica.engine.session.run(what, communication)


def _place(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for tensors that share the same memory.

    The key includes the global shape: the local parts of two DTensors may both be empty, and then have no address.
    """
    part = local_of(tensor)
    return part.data_ptr(), tensor.shape, part.stride(), part.dtype
