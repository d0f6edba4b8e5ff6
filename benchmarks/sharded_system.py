"""FSDP2 over all ranks, alone or with `commlib.shard`, and the lower bound of that: its bytes without its work."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard


def shard(model: nn.Module, reshard_after_forward: bool | int | None = None, **_: Any) -> nn.Module:
    """Shard each layer, in `blocks` or `layers`, and the rest over all ranks. Layers prefetch the next in forward."""
    layers: list[Any] = list(getattr(model, "blocks", getattr(model, "layers", ())))
    for layer in layers:
        fully_shard(layer, reshard_after_forward=reshard_after_forward)
    fully_shard(model, reshard_after_forward=reshard_after_forward)
    for layer, after in itertools.pairwise(layers):
        layer.set_modules_to_forward_prefetch([after])
    return model


def encode(model: nn.Module, optimizer: Any, kind: str, options: Mapping[str, Any]) -> None:
    """Call `commlib.shard` for a sharded model.

    Args:
        model: The model.
        optimizer: Its optimizer.
        kind: "shard" or "shardbound".
        options: Arguments of `commlib.shard`, and `reshard_after_forward`.
    """
    import commlib  # lazily: the other systems are measured without it

    own = {name: value for name, value in options.items() if name != "reshard_after_forward"}
    if own.get("feedback"):
        fsdp: Any = model
        fsdp.set_reduce_scatter_unused_params(True)
    if own.get("difference"):
        own["optimizer"] = optimizer
    commlib.shard(model, **own)
    if kind == "shardbound":
        _leave_out_work(model)


def _leave_out_work(model: nn.Module) -> None:
    """Send payloads without encoding, decoding or summing; weights and gradients become zeros."""
    from commlib.shard import sharded_of
    from commlib.sharding.layout import Layout

    class Bound(Layout):
        def encode(self, row: torch.Tensor, payload: torch.Tensor, **_: Any) -> None:
            pass

        def decode(self, payloads: torch.Tensor, rows: torch.Tensor) -> None:
            rows.zero_()

        def add_differences(self, payloads: torch.Tensor, reference: torch.Tensor) -> None:
            pass

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
