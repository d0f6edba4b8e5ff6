"""torchft's DistributedDataParallel, LocalSGD and DiLoCo: every rank is a replica group, rank 0 runs the lighthouse."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

# Servers of this process; they serve until it ends.
_servers: list[Any] = []


def install(
    model: nn.Module, optimizer: Optimizer, variant: str, options: dict[str, Any], cap_mb: float | None
) -> tuple[nn.Module, Any]:
    """Return the model and its optimizer; a vote of all replicas precedes each step, or each round of the variants.

    Args:
        model: The model.
        optimizer: Its optimizer; the inner one of DiLoCo.
        variant: "" (DistributedDataParallel), "local_sgd" or "diloco" (Nesterov outside as in its paper).
        options: Keyword arguments of that class.
        cap_mb: Bucket size, MiB.

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
        use_async_quorum=not variant,
    )
    _servers.extend([store, manager])
    if variant:
        _servers.append(_rounds(manager, model, optimizer, variant, options, cap_mb).__enter__())
        return model, optimizer
    wrapped = torchft.DistributedDataParallel(manager, model, bucket_cap_mb=cap_mb, **options)
    optimizer = torchft.Optimizer(manager, optimizer)
    optimizer.zero_grad()  # opens the first step
    return wrapped, optimizer


def _rounds(
    manager: Any, model: nn.Module, optimizer: Optimizer, variant: str, options: dict[str, Any], cap_mb: float | None
) -> Any:
    from torchft import local_sgd

    if variant == "local_sgd":
        return local_sgd.LocalSGD(manager, model, optimizer, **options)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    buckets = {"use_bucketization": True, "bucket_cap_mb": int(cap_mb or 32), "pin_memory": False}
    return local_sgd.DiLoCo(manager, [model], optimizer, outer, **buckets, **options)


def _own_address() -> str:
    """Return the address at which the other ranks reach this one: that from which it would reach the master."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        return probe.getsockname()[0]
