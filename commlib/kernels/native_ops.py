"""Kernels of the C++ extension that fuse a step of an algorithm with a codec."""

from __future__ import annotations

import torch

from commlib.kernels import checks
from commlib.kernels.checks import Feedback
from commlib.kernels.native import load
from commlib.kernels.native_sparse import payload_bytes


def encode_momentum(
    gradient: torch.Tensor,
    velocity: torch.Tensor,
    places: int,
    out: torch.Tensor,
    feedback: Feedback,
    *,
    decay: float,
    factor: float,
) -> bool:
    """Set `velocity` to decay * velocity + factor * gradient, encode it by top-k, and zero the selected elements of it.

    Bitwise equal to the separate steps, but memory is read only once.

    Args:
        gradient: [numel] fp32, bf16, fp16 or fp64, numel <= 2**32 - 2; non-finite elements count as 0.
        velocity: [numel] fp32; changed in place.
        places: At most `numel`.
        out: [payload_bytes(places)] uint8, aligned to 16 bytes.
        feedback: Error feedback.
        decay: Finite, used as a float32.
        factor: Finite, used as a float32.

    Returns:
        Whether all of `gradient` is finite as a float32.

    Raises:
        CodecError: An argument is not as described. Nothing was written.
    """
    try:
        return load().encode_momentum(gradient, velocity, decay, factor, places, out, feedback, torch.get_num_threads())
    except (TypeError, ValueError):
        checks.check_sparse_encoding(gradient, places, payload_bytes(places), out, feedback, name="gradient")
        others = ("gradient", gradient), ("out", out), ("residual", feedback.residual)
        checks.check_state("velocity", velocity, gradient.numel(), *others)
        checks.check_number("decay", decay)
        checks.check_number("factor", factor)
        raise
