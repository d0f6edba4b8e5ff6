"""The ranks of a view, and how they meet: through the keys of the view instead of a process group's store."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from commlib.elastic.store import ViewStore
from commlib.elastic.views import View
from commlib.errors import ConfigError, PeerTimeout
from commlib.transport.connections import connect_all
from commlib.transport.plain import decode, encode
from commlib.transport.ranks import Ranks
from commlib.transport.rendezvous import Met, name_of, named


class ViewRanks(Ranks):
    """The members of a view as the ranks of its communicator, in the order of the view.

    Args:
        view: The view.
        own_id: This member's id.
        store: The keys of the view.
    """

    def __init__(self, view: View, own_id: int, store: ViewStore) -> None:
        self.rank, self.global_ranks = view.ids.index(own_id), view.ids
        self._view, self._store = view, store

    @override
    def kind_of_backend(self, device: torch.device) -> str:
        if device.type != "cpu":
            raise ConfigError(f"elastic groups take models on the CPU; this one is on {device}")
        return "gloo"

    @override
    def meet(self, timeout_s: float, last_word: bytes) -> Met:
        introduction = _Introduction(self, self._view.members[self.rank].address, self._store, timeout_s)
        made, accepted = connect_all(introduction, last_word)
        return Met(self._view.key, self._store, made, accepted)


class _Introduction:
    """See `connections.Introduction`."""

    def __init__(self, ranks: ViewRanks, address: str, store: ViewStore, timeout_s: float) -> None:
        self.rank, self.world_size, self.timeout_s = ranks.rank, len(ranks.global_ranks), timeout_s
        self._global_ranks, self._address = ranks.global_ranks, address
        self._store, self._turns = store, itertools.count()

    def local_address(self) -> str:
        return self._address

    def gather_objects(self, value: Any) -> list[Any]:
        turn = next(self._turns)
        keys = [f"introduction/{turn}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], encode(value))
        try:
            self._store.wait(keys, timedelta(seconds=self.timeout_s))
        except dist.DistStoreError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise self.diagnose(TimeoutError(str(error)), "the set-up of a view", missing) from error
        return [decode(self._store.get(key)) for key in keys]

    def diagnose(self, error: Exception, what: str, suspects: Sequence[int] = ()) -> Exception:
        ids = sorted(self._global_ranks[rank] for rank in suspects)
        who = f"{named(ids)} cannot be reached" if ids else "some rank cannot be reached"
        return PeerTimeout(f"{name_of(self.rank, self._global_ranks)}: {what}: {who}. Cause: {error}", ids)
