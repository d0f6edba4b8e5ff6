"""commlib's part of Lightning checkpoints.

[Note: one file] Lightning writes one file, from rank 0. The state that each rank needs to resume bit for bit (error
feedback and, if replicas may differ, its own weights and optimizer states) is gathered into that same file. It then
stays with the file when the file is removed, renamed, linked, copied or written to a remote file system.
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
from commlib import formats
from commlib.replica import replica_of

_log = logging.getLogger("commlib")

#: The key of the state in the file.
KEY = "commlib"
_FORMAT = 1


class Saved:
    """This rank's part of a checkpoint at the current step. Every rank creates one before anything else is saved.

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
        """Copy the state to the CPU, so that later changes of the model do not affect it. Returns `self`."""
        self._state = copy.deepcopy(_on_cpu(self._state))
        return self

    def fit_has_ended(self, model: nn.Module) -> None:
        """Record the weights after `fit`, when all ranks have the consensus. A checkpoint may still be saved later."""
        self._fingerprint = _fingerprint(model) if self._differs else b""

    def is_valid_for(self, model: nn.Module) -> bool:
        """Return whether the state still belongs to the module: its weights have not changed since `fit` ended."""
        return not self._differs or self._fingerprint == _fingerprint(model)

    def gather(self) -> dict[str, Any] | None:
        """Return the entry for the file on rank 0, None on other ranks. Collective."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        own = _on_cpu(self._state)
        if self._is_common:
            states: list[Any] | None = [own]
        else:
            states = [None] * world_size if rank == 0 else None
            dist.gather_object(own, states)
        return None if rank else {**formats.stamp(_FORMAT), "world_size": world_size, "ranks": states}


def load(model: nn.Module, own: Mapping[str, Any] | None, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Load this rank's part of a checkpoint, after everything else was loaded. Every rank calls it.

    Args:
        model: The wrapped module.
        own: commlib's entry in the file; None if it has none.
        optimizers: All of the module's optimizers.

    Raises:
        ConfigError: It is of another format or algorithm, or of another world size and the state is not portable.
    """
    if own is None:
        if dist.get_rank() == 0:
            _log.warning(
                "the checkpoint has no commlib state (it was written by another strategy, or after weights were "
                "changed by hand): model and optimizers continue from it, the communication starts from scratch"
            )
        return
    formats.check(own, _FORMAT, "the checkpoint's commlib state")
    states = own["ranks"]
    rank = dist.get_rank() if len(states) == dist.get_world_size() else 0
    rank_states.load_rank_state(model, states[rank], list(optimizers))


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with all tensors on the CPU."""
    return move_data_to_device(state, torch.device("cpu"))


def _fingerprint(model: nn.Module) -> bytes:
    """Return a hash of the model's values, to detect changes."""
    found = hashlib.blake2b()
    for name, tensor in model.state_dict().items():
        found.update(name.encode())
        if isinstance(tensor, torch.Tensor):
            found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.digest()
