"""Values that are not finite, found and passed on without a wait for the device."""

from __future__ import annotations

import torch

from commlib.kernels import native_ops


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


def accumulate(sums: torch.Tensor, x: torch.Tensor, decay: float, factor: float) -> torch.Tensor:
    """Replace `sums` by decay * sums + factor * x, in which values of `x` that are not finite count as 0.

    Args:
        sums: [numel] fp32; changed in place.
        x: [numel] fp32, bf16, fp16 or fp64; what is not finite may become 0.
        decay: Finite.
        factor: Finite.

    Returns:
        What `all_finite(x)` was.
    """
    if x.device.type == "cpu":
        return torch.tensor(native_ops.accumulate(sums, x, decay, factor))
    is_finite = all_finite(x)
    torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0, out=x)
    sums.mul_(decay).add_(x, alpha=factor)
    return is_finite
