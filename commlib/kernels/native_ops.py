"""Kernels of the C++ extension that belong to no codec."""

from __future__ import annotations

import torch

from commlib.kernels import checks
from commlib.kernels.checks import DTYPE_CODES, Feedback
from commlib.kernels.native import load


def accumulate(sums: torch.Tensor, x: torch.Tensor, decay: float, factor: float) -> bool:
    """Replace `sums` by decay * sums + factor * x, in which values of `x` that are not finite count as 0.

    Args:
        sums: [numel] fp32; changed in place.
        x: [numel] fp32, bf16, fp16 or fp64.
        decay: Finite, used as a float32.
        factor: As `decay`.

    Returns:
        Whether all of `x` is finite as a float32.

    Raises:
        CodecError: An argument is not as described. Nothing was written.
    """
    checks.check_values("x", x)
    checks.check_feedback(Feedback(sums, decay, factor), x.numel(), ("x", x))
    address, code, numel = x.data_ptr(), DTYPE_CODES[x.dtype], x.numel()
    return load().accumulate(address, code, numel, decay, factor, sums.data_ptr(), torch.get_num_threads())
