"""Adam with a quantized momentum: BAGUA's QAdam."""

from __future__ import annotations

from collections.abc import Callable

import torch

from commlib.algorithms.momentum import AveragedMomentum
from commlib.algorithms.policy import EVERYTHING
from commlib.codecs.base import BlockCodec
from commlib.codecs.integer import Int8


class QAdam(AveragedMomentum):
    """Adam with a warm-up, after which the variance is frozen and the momentum is averaged in 8 bits.

    After the warm-up, with C the codec and m the common momentum:

        m <- C(1/N sum_r C(b1 m + (1 - b1) g_r))

    and the optimizer steps along m / sqrt(v). It requires `optimizer=commlib.optim.FrozenVarianceAdam(...)`.

    Args:
        codec: Block codec or its name; `Int8` by default.
        warmup_steps: Steps of Adam with full-precision averaging.
        feedback: Whether to use error feedback in both stages.
        hierarchical: Whether momentum is first summed inside each node in full precision.
        compress: Selects the parameters to compress; all by default.

    Paper: Gan et al., "BAGUA" (VLDB 2021), as released: 1-bit Adam's scheme with 8 bits and without error feedback.
    Deviations from BAGUA's code, which correct its defects: the gradient at the switch is used; weight decay (decoupled
    here) and the betas of every group remain in effect after it; the variance's bias correction is frozen with the
    variance; an element's step is bounded as in Adam (`FrozenVarianceAdam`).
    """

    made_for = "adam"

    def __init__(
        self,
        codec: BlockCodec | str | None = None,
        warmup_steps: int = 100,
        feedback: bool = False,
        hierarchical: bool = False,
        compress: Callable[[str, torch.Tensor], bool] = EVERYTHING,
    ) -> None:
        super().__init__(
            codec or Int8(), warmup_steps=warmup_steps, feedback=feedback, hierarchical=hierarchical, compress=compress
        )
