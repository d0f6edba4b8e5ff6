"""A model that FSDP2 shards and `commlib.shard` encodes, trained on the device and on the CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import commlib
from tests.contract.subjects import build, gathered, loss_of, set_device

STEPS = 6
#: How far losses may be from those of the CPU, relative: a value that rounds in another way is sent as another code.
_TOLERANCE = 5e-2
#: Arguments of `commlib.shard`, and whether FSDP2 shards again after forward.
_OPTIONS: tuple[tuple[dict[str, Any], bool], ...] = (
    ({"weights": "int8", "gradients": "int8"}, True),
    ({"weights": "mxfp8", "gradients": "fp8_e4m3"}, True),
    ({"weights": "int8", "gradients": "int4", "feedback": True}, True),
    ({"weights": "int4", "gradients": "int8", "difference": True}, False),
)


def check(device: torch.device, timeout_s: float) -> dict[str, Any]:
    """Train with each of several codecs; return the largest distance of a loss from the CPU's. Collective.

    Raises:
        AssertionError: A loss is too far, or ranks gather different weights.
    """
    furthest = 0.0
    for options, reshards in _OPTIONS:
        if options.get("feedback") and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            continue  # torch 2.11 does not report which parameters have a gradient
        losses = _losses(device, options, reshards, timeout_s)
        expected = _losses(torch.device("cpu"), options, reshards, timeout_s)
        set_device(device)
        far = float(((losses - expected).abs() / expected.abs()).max())
        assert far <= _TOLERANCE, f"{options}: losses are {far:.2g} of them from the CPU's, at most {_TOLERANCE}"
        furthest = max(furthest, far)
    return {"from_cpu": furthest}


def _losses(device: torch.device, options: dict[str, Any], reshards: bool, timeout_s: float) -> torch.Tensor:
    set_device(device)
    group = dist.group.WORLD
    assert group is not None
    mesh = DeviceMesh.from_group(group, device.type)
    model = build()
    for layer in (model.second, model.third, model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshards)
    if options.get("feedback"):
        model.set_reduce_scatter_unused_params(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    commlib.shard(model, optimizer=optimizer, timeout=timeout_s, **options)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    model.second.unshard()
    weights = gathered(model.second.weight.detach().cpu())
    assert all(torch.equal(each, weights[0]) for each in weights), f"{options}: ranks gather different weights"
    model.second.reshard()
    stats = commlib.stats(model).shard
    assert stats is not None
    assert stats.gathered_bytes < stats.plain_gathered_bytes, f"{options}: the weights are not encoded"
    commlib.unwrap(model)
    return torch.stack(losses)
