"""The bits of tensors as integers, to compare values without rounding and with a single device synchronization."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(values: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor of any dtype as integers of its element size."""
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.view(_INTEGERS[values.element_size()])


def sums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the sum of the bits of each tensor. Synchronizes with the device once."""
    if not tensors:
        return []
    found = [as_integers(tensor).sum(dtype=torch.int64) for tensor in tensors]
    return torch.stack([each.to(found[0].device) for each in found]).tolist()
