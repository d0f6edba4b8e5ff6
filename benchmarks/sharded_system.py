"""FSDP2 over all ranks, alone or with `commlib.shard`, and the lower bound of that: its bytes without its work."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard


def shard(model: nn.Module, kind: str, options: Mapping[str, Any]) -> nn.Module:
    """Shard each layer, and the rest, over all ranks. Each layer prefetches the next one in forward.

    Args:
        model: The model; its layers are in `blocks` or `layers`.
        kind: "fsdp", "shard" or "shardbound".
        options: `reshard_after_forward` and, unless `kind` is "fsdp", arguments of `commlib.shard`.
    """
    own = dict(options)
    reshard = own.pop("reshard_after_forward", None)
    layers: list[Any] = list(getattr(model, "blocks", getattr(model, "layers", ())))
    for layer in layers:
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    for layer, after in itertools.pairwise(layers):
        layer.set_modules_to_forward_prefetch([after])
    if kind == "fsdp":
        return model
    import commlib  # lazily: the other systems are measured without it

    if own.get("feedback"):
        fsdp: Any = model
        fsdp.set_reduce_scatter_unused_params(True)
    commlib.shard(model, **own)
    if kind == "shardbound":
        _leave_out_work(model)
    return model


def _leave_out_work(model: nn.Module) -> None:
    """Send payloads without encoding, decoding or summing; weights and gradients become zeros."""
    from commlib.shard import sharded_of
    from commlib.sharding.layout import Layout

    class Bound(Layout):
        def encode(self, row: torch.Tensor, payload: torch.Tensor, feedback_of: Any = None) -> None:
            pass

        def decode(self, payloads: torch.Tensor, rows: torch.Tensor) -> None:
            rows.zero_()

        def decode_sum(self, payloads: torch.Tensor, row: torch.Tensor, divisor: float) -> None:
            row.zero_()

    class Bounds(dict[Any, Layout]):
        def __setitem__(self, key: Any, layout: Layout) -> None:
            layout.__class__ = Bound
            super().__setitem__(key, layout)

    sharded = sharded_of(model)
    assert sharded is not None
    for each in (*sharded.gathers, *sharded.scatters):
        each._layouts = Bounds()
