"""Values that are not finite, found and passed on without a wait for the device."""

from __future__ import annotations

import torch


def all_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Return whether all values of `tensor` are finite: a bool tensor of one element on its device."""
    if not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    # Fast on the CPU too, where torch's norm of order infinity takes many times as long.
    low, high = torch.aminmax(tensor)  # NaN, both of them, where there is one
    return torch.isfinite(low) & torch.isfinite(high)


def mark_unless(is_finite: torch.Tensor, values: torch.Tensor) -> None:
    """Make the first value NaN unless `is_finite`, so that all ranks see it."""
    if values.numel():
        values[0] = torch.where(is_finite, values[0], torch.nan)
