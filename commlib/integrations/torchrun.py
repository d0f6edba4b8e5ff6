"""Process groups of jobs that torchrun restarts after a failure.

[Note: restarts] torchrun's agent keeps one store for all restarts of a job (torch 2.13). Gloo's entries of an earlier
start, the addresses of dead processes, have the same keys as those of the next start, so that
`torch.distributed.init_process_group` fails or waits for dead processes, depending on the order of the ranks.
`TORCHELASTIC_RESTART_COUNT` distinguishes restarts only after a failure, not after a change of the nodes. So ranks
rendezvous in the store again and use a prefix that no earlier start has used (`[Note: meeting]` in
transport/rendezvous.py).
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from commlib.errors import ConfigError
from commlib.transport.rendezvous import Meeting


def init_process_group(backend: str | None = None, *, timeout: timedelta | None = None, **options: Any) -> None:
    """Initialize the default process group as `torch.distributed.init_process_group` does, also after a restart.

    Collective: every rank started by torchrun (or by any launcher that sets `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and
    `MASTER_PORT`) must call it instead of torch's function.

    Args:
        backend: As in torch.
        timeout: As in torch; also the time that ranks wait for each other here.
        options: Other arguments of torch's function, except `init_method`, `store`, `rank` and `world_size`.

    Raises:
        ConfigError: An option is passed that this function determines itself, or the environment is not torchrun's.
        PeerTimeout: Ranks did not arrive in time.
        PeerFailure: A rank died while others waited.
        TransportError: The store does not respond.
    """
    found = sorted({"init_method", "store", "rank", "world_size"} & options.keys())
    if found:
        raise ConfigError(
            f"init_process_group: {', '.join(found)} cannot be given, because torchrun's environment sets it. Without "
            "torchrun call torch.distributed.init_process_group"
        )
    limit = timeout or dist.default_pg_timeout
    try:
        store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=limit)))
    except ValueError as error:
        raise ConfigError(f"init_process_group: this process was not started by torchrun: {error}") from None
    with contextlib.closing(Meeting(store, rank, range(world_size), limit.total_seconds())) as meeting:
        pass
    dist.init_process_group(backend, store=meeting.store, rank=rank, world_size=world_size, timeout=timeout, **options)
