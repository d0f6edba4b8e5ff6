"""Adam with one bit per element on the wire."""

from __future__ import annotations

from collections.abc import Callable

import torch

from commlib.algorithms.momentum import AveragedMomentum
from commlib.algorithms.policy import MATRICES
from commlib.codecs.floats import OneBit


class OneBitAdam(AveragedMomentum):
    """Adam with a warm-up, after which the variance is frozen and the momentum averaged in one bit with error feedback.

    After the warm-up, with C the one-bit codec, m the common momentum, e_r and f the residuals:

        v_r = b1 m + (1 - b1) g_r + e_r,   e_r <- v_r - C(v_r)
        w   = 1/N sum_r C(v_r) + f,        f   <- w - C(w),      m = C(w)

    and the optimizer steps along m / sqrt(v). It requires `optimizer=commlib.optim.FrozenVarianceAdam(...)`.

    Args:
        warmup_steps: Steps of Adam with full-precision averaging, until the variance has settled (the paper: 15 to 20 %
            of all steps).
        hierarchical: Whether momentum is first summed inside each node in full precision.
        compress: Selects the parameters to compress; by default matrices of 1,024 elements or more. The momentum of the
            others is averaged in full precision.

    Paper: Tang et al., "1-bit Adam" (ICML 2021), algorithm 1.
    Deviations: one scale per 512 elements instead of one per tensor; decoupled weight decay, as in AdamW; Adam's bias
    corrections are kept, with the variance's fixed at its value at the freeze; an element's step is bounded as in Adam
    (`FrozenVarianceAdam`).
    """

    made_for = "adam"

    def __init__(
        self,
        warmup_steps: int = 100,
        hierarchical: bool = False,
        compress: Callable[[str, torch.Tensor], bool] = MATRICES,
    ) -> None:
        super().__init__(
            OneBit(), warmup_steps=warmup_steps, feedback=True, hierarchical=hierarchical, compress=compress
        )
