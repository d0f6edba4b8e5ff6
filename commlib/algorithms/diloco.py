"""DiLoCo: many local steps, then one step of an outer optimizer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from commlib.algorithms.families.outer import MakeOptimizer, OuterSGD
from commlib.algorithms.families.policy import EVERYTHING
from commlib.codecs.base import BlockCodec


class DiLoCo(OuterSGD):
    """Every `period` local steps, one step of Nesterov SGD along the mean of what the ranks moved.

    With x the global weights and x_r those that rank r came to from them, C the codec, u the outer momentum m:

        g = C(1/N sum_r C(x - x_r)),   u <- m u + g,   x <- x - outer_lr (g + m u),   x_r = x

    The inner optimizer is the user's; AdamW in the paper. The replicas are identical after every outer step.

    Args:
        period: Inner steps from one outer step to the next (H).
        outer_lr: The outer learning rate.
        outer_momentum: The outer momentum m.
        nesterov: Whether the outer momentum is Nesterov's; False steps along u.
        codec: Any block codec or its name for the outer gradients; None sends them in the weights' dtype.
        feedback: Whether errors of the codec are fed back, on both sides; None does where there is a codec.
        compress: With a codec: which parameters are compressed; all by default.
        warmup_steps: Optimizer steps with full-precision averages of the gradients before the first inner step (the
            paper starts from a pretrained model).
        outer: Makes another outer optimizer of the global weights, such as `torch.optim.AdamW`, in place of
            outer_lr, outer_momentum and nesterov; called with lists of parameters, once for each bucket. Its state is
            saved.

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
        codec: BlockCodec | str | None = None,
        feedback: bool | None = None,
        compress: Callable[[str, torch.Tensor], bool] = EVERYTHING,
        warmup_steps: int = 0,
        outer: MakeOptimizer | None = None,
    ) -> None:
        super().__init__(
            lr=outer_lr,
            momentum=outer_momentum,
            nesterov=nesterov,
            outer=outer,
            codec=codec,
            feedback=feedback,
            compress=compress,
            period=period,
            warmup_steps=warmup_steps,
        )
