"""Algorithm state in the shape of sharded parameters, saved as DTensors of their spec.

torch.distributed.checkpoint can then load each rank's part of it under any sharding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from commlib.primitives.order import flattened, order_of, shaped
from commlib.primitives.parts import Pieces, order_of_piece
from commlib.replica import Replica
from commlib.sharding.local import is_sharded, like, local_of

Tree = dict[str, dict[str, Any]]


def taken_out(state: Mapping[str, Any], replica: Replica) -> tuple[dict[str, Any], Tree, dict[str, list[str]]]:
    """Split the tensors in the shape of parameters from an algorithm's state.

    Returns:
        The rest of the state; the tensors by kind and parameter, zeros if they do not exist yet; the names of those
        that do not exist, by kind.
    """
    kinds = replica.engine.algorithm.shaped_state
    rest = {kind: value for kind, value in state.items() if kind not in kinds}
    tree = {kind: _tensors(state[kind], replica) for kind in kinds}
    return rest, tree, {kind: _absent(state[kind], replica) for kind in kinds}


def _absent(pieces: Pieces, replica: Replica) -> list[str]:
    """Return the parameters without a piece of which this rank has a part, or all parameters if there are no pieces."""
    names = [each.name for each in replica.engine.parameters if each.part.numel() or not pieces]
    return sorted(set(names) - pieces.keys())


def put_back(state: dict[str, Any], replica: Replica, tree: Tree, absent: Mapping[str, list[str]]) -> None:
    """Put the tensors of `taken_out`, now of this rank's part, back into an algorithm's state."""
    for kind, tensors in tree.items():
        present = {name: local_of(value) for name, value in tensors.items() if name not in absent[kind]}
        orders = {name: order_of(value) for name, value in present.items()}
        state[kind] = {
            name: (0, flattened(value, orders[name]).clone(), *([orders[name]] if orders[name] else []))
            for name, value in present.items()
        }


def _tensors(pieces: Pieces, replica: Replica) -> dict[str, Any]:
    found = {}
    for parameter in replica.engine.parameters:
        part = parameter.part.data
        if parameter.name in pieces:
            piece = pieces[parameter.name]
            values = shaped(piece[1], tuple(part.shape), order_of_piece(piece))
            values = torch.view_as_complex(values) if part.is_complex() else values
        else:
            values = torch.zeros_like(part)
        found[parameter.name] = like(parameter.param, values) if is_sharded(parameter.param) else values
    return found
