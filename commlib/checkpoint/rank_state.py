"""Per-rank state, saved in addition to a checkpoint that all ranks share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from commlib import formats
from commlib.checkpoint.consensus import may_differ
from commlib.engine import optimizers as proxies
from commlib.errors import ConfigError
from commlib.replica import Replica, replica_of
from commlib.shard import sharded_of
from commlib.sharding.local import is_sharded, layout_of, like, local_of
from commlib.wrap import load_state_dict, state_dict

_FORMAT = 1
_FILE = "commlib-rank{}.pt"
#: The key under which this rank's part of a DTensor is saved.
_PART = "part"

#: One optimizer, several, or a proxy of one.
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def rank_state(model: nn.Module, optimizer: Optimizers = None) -> dict[str, Any]:
    """Return the state that this rank must save in addition to a model and optimizer state that all ranks share.

    It has the communication state (`commlib.state_dict`) and all values that may differ between ranks: weights, buffers
    and optimizer states if replicas may differ; ignored parameters; buffers that are not broadcast. Local. Results of
    background rounds are applied first, which changes weights: save the model after this call.

    Args:
        model: The wrapped model.
        optimizer: The optimizers whose state is saved with the model.

    Returns:
        Copies in tensors, numbers and strings. `torch.load(weights_only=True)` can read them if it can read the
        optimizers' states.

    Raises:
        ConfigError: The model is not wrapped.
    """
    replica = replica_of(model)
    communication = state_dict(model)
    names = _own_names(replica)
    own = {name: _saved(value) for name, value in replica.bare.state_dict().items() if name in names}
    has_own_steps = any(name in names for name, _ in replica.bare.named_parameters(remove_duplicate=False))
    states = [_saved(each.state_dict()) for each in _all_of(optimizer)] if has_own_steps else []
    number, count = place_of(replica)
    sharded = sharded_of(model)
    return {
        **({} if sharded is None else {"shard": sharded.state_dict()}),
        **formats.stamp(_FORMAT),
        "place": {"number": number, "count": count, "layout": layout_of_all(replica)},
        "communication": communication,
        "model": own,
        "optimizers": states,
    }


def load_rank_state(model: nn.Module, state: Mapping[str, Any], optimizer: Optimizers = None) -> None:
    """Load the output of `rank_state`, after the model and the optimizer that all ranks share.

    If the algorithm's state is the same on all ranks (`Algorithm.portable`), `state` may be from any rank and from a
    group of another size; each rank then continues from the shared model and optimizer. Local, except for `auto`, as in
    `commlib.load_state_dict`.

    Raises:
        ConfigError: The state has another format, algorithm, model or number of optimizers, or is from another rank or
            world size and the algorithm's state is not portable.
    """
    replica = replica_of(model)
    formats.check(state, _FORMAT, f"rank {replica.engine.comm.rank}: the rank's state")
    communication, comm = state["communication"], replica.engine.comm
    load_state_dict(model, communication)
    load_shard_state(model, state)
    if (communication["rank"], communication["world_size"]) != (comm.rank, comm.world_size):
        return
    found = _all_of(optimizer)
    if state["optimizers"] and len(state["optimizers"]) != len(found):
        raise ConfigError(
            f"rank {comm.rank}: the rank's state has {len(state['optimizers'])} optimizers of its own, and "
            f"{len(found)} are to be restored. Pass the optimizers that were saved"
        )
    _load_own(replica, state["model"])
    for each, of_optimizer in zip(found, state["optimizers"], strict=False):
        each.load_state_dict(_with_parts(each, of_optimizer))


def load_shard_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load the residuals of `commlib.shard`, if there are any in `state` and in use."""
    sharded = sharded_of(model)
    if sharded is not None and "shard" in state:
        sharded.load_state_dict(state["shard"])


def write_rank_file(folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizers = None) -> Path:
    """Write `rank_state` to this rank's file in `folder`, which must exist. The write is atomic. Local.

    Returns:
        The file's path.

    Raises:
        ConfigError: The model is not wrapped.
        OSError: The file cannot be written.
    """
    path = Path(folder, _FILE.format(place_of(replica_of(model))[0]))
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(rank_state(model, optimizer), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return path


def read_rank_file(folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizers = None) -> None:
    """Load this rank's file of `write_rank_file` in `folder`; see `load_rank_state`.

    A rank that did not exist in the saved run reads another rank's file, if the algorithm allows it.

    Raises:
        ConfigError: The file is missing, or an error of `load_rank_state`.
    """
    rank, _ = place_of(replica_of(model))
    own = Path(folder, _FILE.format(rank))
    found = own if own.is_file() else next(iter(sorted(Path(folder).glob(_FILE.format("*")))), None)
    state = None if found is None else torch.load(found, map_location="cpu", weights_only=True)
    if state is None or (found != own and rank < state["place"]["count"]):
        raise ConfigError(
            f"rank {rank}: {own} is missing. Without it a run cannot resume exactly: it has residuals, anchors and "
            "this rank's own weights. Was the checkpoint saved by commlib's integration, and do all ranks see it?"
        )
    load_rank_state(model, state, optimizer)


def place_of(replica: Replica) -> tuple[int, int]:
    """Return the number that identifies this rank's state and the number of ranks, in the model's group.

    With sharded parameters there are several groups; the numbers are then those of the default group.
    """
    comm = replica.engine.comm
    return (dist.get_rank(), dist.get_world_size()) if _is_in_island(replica) else (comm.rank, comm.world_size)


def layout_of_all(replica: Replica) -> list[str]:
    """Return the sharding of the model's parameters, with the ranks of each mesh."""
    return layout_of(parameter.param for parameter in replica.engine.parameters)


def _is_in_island(replica: Replica) -> bool:
    return any(is_sharded(parameter.param) for parameter in replica.engine.parameters)


def _own_names(replica: Replica) -> set[str]:
    """Return the names in the model's state whose values may differ between ranks."""
    names = set(replica.bare.state_dict())
    if may_differ(replica):
        return names
    buffers = {name for name, _ in replica.bare.named_buffers(remove_duplicate=False)}
    are_copied = replica.copies_buffers and not _is_in_island(replica)  # ranks of an island have buffers of their own
    return names & (replica.ignored | (set() if are_copied else buffers))


def _load_own(replica: Replica, own: Mapping[str, Any]) -> None:
    """Load this rank's own values into the model."""
    unexpected = sorted(own.keys() - replica.bare.state_dict().keys())
    if unexpected:
        raise ConfigError(f"the rank's own state is of another model: {unexpected[0]!r} is not in this one")
    now = replica.bare.state_dict()
    for name in [name for name, value in own.items() if isinstance(value, Mapping) and value.keys() == {_PART}]:
        with torch.no_grad():
            local_of(now[name]).copy_(own[name][_PART])
    plain = {name: value for name, value in own.items() if not is_sharded(now[name])}
    if plain:
        replica.bare.load_state_dict(plain, strict=False)


def _all_of(optimizer: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    return proxies.all_of(proxies.resolve(optimizer or None))


def _saved(value: Any) -> Any:
    """Return a copy of a nested state, with tensors in new memory and DTensors reduced to this rank's part."""
    if is_sharded(value):
        return {_PART: local_of(value).detach().clone()}
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _saved(each) for key, each in value.items()}
    return type(value)(map(_saved, value)) if type(value) in (list, tuple) else value


def _with_parts(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with parts converted back to DTensors of their parameters' spec."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    whole = lambda number, value: like(parameters[number], value[_PART].to(local_of(parameters[number]).device))  # noqa: E731
    is_part = lambda value: isinstance(value, Mapping) and value.keys() == {_PART}  # noqa: E731
    entries = {
        number: {key: whole(number, value) if is_part(value) else value for key, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": entries}
