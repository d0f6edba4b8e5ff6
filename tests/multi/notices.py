"""Notices between the ranks of a test: one continues when another has reached a point, not after a fixed time."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch.distributed as dist

#: How long a rank waits for the others; only a rank that hangs takes so long.
LIMIT_S = 80.0


def tell(what: str) -> None:
    """Tell the others that this rank has come to a place. Returns at once; needs the default group."""
    _store().set(_key(what, dist.get_rank()), "")


def await_told(what: str, ranks: Iterable[int]) -> None:
    """Wait until all `ranks` have told so. It asks again and again: a wait in the store would hold up its other users.

    Raises:
        TimeoutError: They have not, within `LIMIT_S`.
    """
    store, keys = _store(), {rank: _key(what, rank) for rank in ranks}
    deadline = time.monotonic() + LIMIT_S
    while not store.check(list(keys.values())):
        if time.monotonic() > deadline:
            silent = [rank for rank, key in keys.items() if not store.check([key])]
            raise TimeoutError(f"ranks {silent} did not tell {what!r} within {LIMIT_S:g} s")
        time.sleep(0.005)


def meet() -> None:
    """Return once all ranks have the default group, which torch cannot set up where a rank ends meanwhile.

    A barrier would not do: a rank that is through it may end the barrier of the others.
    """
    tell("here")
    await_told("here", others())


def others() -> list[int]:
    """Return all ranks but this one."""
    return [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]


def _key(what: str, rank: int) -> str:
    return f"notice/{rank}/{what}"


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()
