"""What commlib adds to a checkpoint of Lightning's, and takes from one.

[Note: one file] Lightning writes one file, from rank 0. What each rank must have to go on bit for bit (error feedback,
and, where replicas may differ, its own weights and optimizer states) lies in that same file, gathered: so it goes where
the file goes, whether that is removed, renamed, linked to, copied or on a remote file system.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from torch import nn

from commlib import checkpoint as rank_states
from commlib.errors import ConfigError
from commlib.replica import replica_of

_log = logging.getLogger("commlib")

#: Under which name it lies in the file.
KEY = "commlib"
_FORMAT = 1


class Saved:
    """This rank's part of a checkpoint, as it is now. Every rank makes one, before anything else is saved.

    Args:
        model: The wrapped module.
        optimizers: All of its optimizers.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._state = rank_states.rank_state(model, list(optimizers))
        self._differs = rank_states.replicas_differ(model)
        self._is_common = replica_of(model).engine.algorithm.portable and not self._state["model"]
        self._fingerprint = b""

    def detach(self) -> Saved:
        """Let what is done to the model from now on leave this as it is."""
        self._state = copy.deepcopy(_on_cpu(self._state))
        return self

    def fit_has_ended(self, model: nn.Module) -> None:
        """All ranks have the consensus now, and the module is unwrapped: a checkpoint may yet be saved."""
        self._fingerprint = _fingerprint(model) if self._differs else b""

    def is_valid_for(self, model: nn.Module) -> bool:
        """Return whether what was kept when `fit` ended still belongs to the module: its weights were not changed."""
        return not self._differs or self._fingerprint == _fingerprint(model)

    def gather(self) -> dict[str, Any] | None:
        """Return what goes into the file, on rank 0; None elsewhere. Collective."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        own = _on_cpu(self._state)
        if self._is_common:
            states: list[Any] | None = [own]
        else:
            states = [None] * world_size if rank == 0 else None
            dist.gather_object(own, states)
        return None if rank else {"format": _FORMAT, "world_size": world_size, "ranks": states}


def load(model: nn.Module, saved: Mapping[str, Any], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Take over this rank's part of a checkpoint, after everything else was loaded. Every rank calls it.

    Raises:
        ConfigError: It is of another format or algorithm, or of another world size where that matters.
    """
    own = saved.get(KEY)
    if own is None:
        if dist.get_rank() == 0:
            _log.warning(
                "the checkpoint has no state of commlib's (it was written by another strategy, or after weights were "
                "changed by hand): model and optimizers go on from it, the communication starts anew"
            )
        return
    if own.get("format") != _FORMAT:
        raise ConfigError(f"the checkpoint's commlib state has format {own.get('format')!r}, expected {_FORMAT}")
    states = own["ranks"]
    rank = dist.get_rank() if len(states) == dist.get_world_size() else 0
    rank_states.load_rank_state(model, states[rank], list(optimizers))


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state whose tensors are not on a device that only this rank has."""
    return move_data_to_device(state, torch.device("cpu"))


def _fingerprint(model: nn.Module) -> bytes:
    """Return a hash of the model's values, which tells whether they were changed since."""
    found = hashlib.blake2b()
    for name, tensor in model.state_dict().items():
        found.update(name.encode())
        if isinstance(tensor, torch.Tensor):
            found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.digest()
