"""Process groups of jobs that torchrun starts again after a failure.

[Note: restarts] torchrun's agent keeps one store for all lives of a job (torch 2.13). What Gloo wrote there in an
earlier life, the addresses of processes that are dead, is under the same keys in the next one, so that
`torch.distributed.init_process_group` fails, or waits for them, by which rank comes first. `TORCHELASTIC_RESTART_COUNT`
tells lives apart only where a failure, and no change of the nodes, ended the last one. So ranks meet in the store anew
and take a part of it that no life has used (`[Note: meeting]` in transport/rendezvous.py).
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from commlib.errors import ConfigError
from commlib.transport.rendezvous import Meeting


def init_process_group(backend: str | None = None, *, timeout: timedelta | None = None, **options: Any) -> None:
    """Initialise the default process group as `torch.distributed.init_process_group` does, in any life of a job.

    Collective: every rank that torchrun (or whatever sets `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`) has
    started calls it, instead of torch's.

    Args:
        backend: As torch's.
        timeout: As torch's; also how long ranks wait for one another here.
        options: What else torch's takes, but for `init_method`, `store`, `rank` and `world_size`.

    Raises:
        ConfigError: An option is given that this function finds out itself, or the environment is not torchrun's.
        PeerTimeout: Ranks did not come.
        PeerFailure: A rank died meanwhile.
        TransportError: The store does not answer.
    """
    found = sorted({"init_method", "store", "rank", "world_size"} & options.keys())
    if found:
        raise ConfigError(
            f"init_process_group: {', '.join(found)} cannot be given, as torchrun's environment says it. Without "
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
