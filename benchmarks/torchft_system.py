"""torchft's DistributedDataParallel: every rank is a replica group of its own, rank 0 runs the lighthouse."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

# Servers of this process; they serve until it ends.
_servers: list[Any] = []


def install(model: nn.Module, optimizer: Optimizer, options: dict[str, Any], cap_mb: float | None) -> Any:
    """Return the wrapped model and its optimizer, whose steps a vote of all replicas precedes.

    Raises:
        ImportError: torchft is not installed (benchmarks/peers.txt).
    """
    import torchft
    from torchft.coordination import LighthouseServer

    address = _own_address()
    lighthouse = [""]
    if dist.get_rank() == 0:
        _servers.append(LighthouseServer(bind="[::]:0", min_replicas=dist.get_world_size()))
        lighthouse[0] = f"http://{address}:{_servers[-1].address().rpartition(':')[2]}"
    dist.broadcast_object_list(lighthouse)
    limit = datetime.timedelta(seconds=600)  # between two of its steps the other systems have theirs
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=limit),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=dist.get_world_size(),
        timeout=limit,
        quorum_timeout=limit,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=lighthouse[0],
        replica_id=f"replica{dist.get_rank()}",
        hostname=address,
        init_sync=False,  # all models start from one seed
    )
    _servers.extend([store, manager])
    wrapped = torchft.DistributedDataParallel(manager, model, bucket_cap_mb=cap_mb, **options)
    optimizer = torchft.Optimizer(manager, optimizer)
    optimizer.zero_grad()  # opens the first step
    return wrapped, optimizer


def _own_address() -> str:
    """Return the address at which the other ranks reach this one: that from which it would reach the master."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        return probe.getsockname()[0]
