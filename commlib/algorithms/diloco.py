"""DiLoCo: many local steps, then one step of an outer optimizer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from commlib.algorithms.outer import MakeOptimizer, OuterAveraging
from commlib.algorithms.policy import EVERYTHING
from commlib.codecs.base import BlockCodec
from commlib.codecs.sparse import SparseCodec


class DiLoCo(OuterAveraging):
    """Every `period` local steps, one step of Nesterov SGD along the mean of what the ranks moved.

    With x the global weights and x_r those that rank r came to from them, C the codec, u the outer momentum m:

        g = C(1/N sum_r C(x - x_r)),   u <- m u + g,   x <- x - outer_lr (g + m u),   x_r = x

    The inner optimizer is the user's; AdamW in the paper. The replicas are identical after every outer step.

    Args:
        period: Inner steps from one outer step to the next (H).
        outer_lr: The outer learning rate.
        outer_momentum: The outer momentum m.
        nesterov: Whether the outer momentum is Nesterov's; False steps along u.
        codec: For the outer gradients: any block codec, or a sparse one, `TopK`, `BlockTopK` or `Threshold`, with which
            the mean is not encoded again; or its name. None sends them in the weights' dtype.
        feedback: Whether errors of the codec are fed back, by all who encode; None does where there is a codec. A
            sparse one needs it.
        compress: With a codec: which parameters are compressed; all by default.
        warmup_steps: Optimizer steps with full-precision averages of the gradients before the first inner step (the
            paper starts from a pretrained model).
        outer: Makes another outer optimizer of the global weights, such as `torch.optim.AdamW`, in place of
            outer_lr, outer_momentum and nesterov; called with lists of parameters, once for each bucket. Its state is
            saved.
        error_decay: What error feedback keeps from one outer step to the next, from 0 to 1.

    Paper: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (2023), algorithm 1.
    Deviations: none without a codec; the paper's outer gradients are fp32. The inner optimizer's state stays local, as
    there.
    """

    made_for = "adam"

    def __init__(
        self,
        period: int = 50,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        codec: BlockCodec | SparseCodec | str | None = None,
        feedback: bool | None = None,
        compress: Callable[[str, torch.Tensor], bool] = EVERYTHING,
        warmup_steps: int = 0,
        outer: MakeOptimizer | None = None,
        error_decay: float = 1.0,
    ) -> None:
        super().__init__(
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            nesterov=nesterov,
            outer=outer,
            codec=codec,
            feedback=feedback,
            error_decay=error_decay,
            compress=compress,
            period=period,
            warmup_steps=warmup_steps,
        )
