"""The ranks of a communicator before it exists: who they are, and how they meet."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from typing_extensions import override

from commlib.errors import TransportError
from commlib.transport.groups import global_ranks, kind_of_backend
from commlib.transport.rendezvous import Met, meet, name_of


class Ranks(ABC):
    """The ranks of a communicator before it exists.

    Attributes:
        rank: This process's rank.
        global_ranks: The names of the ranks in error messages, in rank order.
    """

    rank: int
    global_ranks: Sequence[int]

    @abstractmethod
    def meet(self, timeout_s: float, last_word: bytes) -> Met:
        """Let the ranks meet, and connect every pair. Collective. `last_word` is as for `connections.connect_all`.

        Raises:
            PeerTimeout: Ranks did not arrive in time.
            PeerFailure: Ranks died.
            TransportError: The ranks cannot be connected.
        """

    @abstractmethod
    def kind_of_backend(self, device: torch.device) -> str:
        """Return the backend for tensors on a device: "gloo" or "nccl"."""


class RanksOfGroup(Ranks):
    """The ranks of a process group, which meet in its store.

    Args:
        group: The group. Held weakly, so that a destroyed group's threads can end.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.global_ranks = group.rank(), global_ranks(group)
        self._group = weakref.ref(group)

    @override
    def kind_of_backend(self, device: torch.device) -> str:
        return kind_of_backend(self._alive(), device)

    @override
    def meet(self, timeout_s: float, last_word: bytes) -> Met:
        store = c10d._get_process_group_store(self._alive())
        return meet(store, self.rank, self.global_ranks, timeout_s, last_word)

    def _alive(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            name = name_of(self.rank, self.global_ranks)
            raise TransportError(f"{name}: the process group of the model has been destroyed")
        return group
