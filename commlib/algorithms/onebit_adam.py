"""Adam with one bit per element on the wire."""

from __future__ import annotations

from collections.abc import Callable

import torch

from commlib.algorithms.momentum import AveragedMomentum
from commlib.algorithms.policy import MATRICES
from commlib.codecs.floats import OneBit


class OneBitAdam(AveragedMomentum):
    """Adam whose variance is frozen after a warm-up; then the momentum is averaged in one bit with error feedback.

    After the warm-up, with C the one-bit codec, m the common momentum, e_r and f the residuals:

        v_r = b1 m + (1 - b1) g_r + e_r,   e_r <- v_r - C(v_r)
        w   = 1/N sum_r C(v_r) + f,        f   <- w - C(w),      m = C(w)

    and the optimizer steps along m / sqrt(v). It requires `optimizer=commlib.optim.FrozenVarianceAdam(...)`.

    Args:
        warmup_steps: Steps of Adam with full-precision averaging, until the variance has settled (the paper:
            15 to 20 % of all steps).
        hierarchical: Whether momentum is summed inside each node first, in full precision.
        compress: Which parameters are compressed; matrices of 1,024 elements and more by default. The momentum of the
            others is averaged in full precision.

    Paper: Tang et al., "1-bit Adam" (ICML 2021), algorithm 1.
    Deviations: a scale for 512 elements instead of one per tensor; decoupled weight decay, as in AdamW; the bias
    corrections of Adam are kept, the variance's as it was at the freeze; an element's step is bounded as Adam's is
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
