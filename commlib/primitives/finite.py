"""Detection of values that are not finite, without synchronizing with the device."""

from __future__ import annotations

import torch


def all_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Return whether all values of `tensor` are finite: a bool tensor of one element on its device."""
    if not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    # On a CPU this is many times faster than torch's infinity norm.
    low, high = torch.aminmax(tensor)  # both are NaN if any value is
    return torch.isfinite(low) & torch.isfinite(high)


def mark_unless(is_finite: torch.Tensor, values: torch.Tensor) -> None:
    """Set the first value to NaN unless `is_finite`, so that all ranks see it."""
    if values.numel():
        values[0] = torch.where(is_finite, values[0], torch.nan)
