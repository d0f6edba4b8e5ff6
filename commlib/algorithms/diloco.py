"""DiLoCo: many local steps, then one step of an outer optimizer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from commlib.algorithms.outer import MakeOptimizer, OuterAveraging
from commlib.algorithms.policy import EVERYTHING
from commlib.codecs.base import BlockCodec
from commlib.codecs.sparse import SparseCodec


class DiLoCo(OuterAveraging):
    """Every `period` local steps, makes a Nesterov SGD step along the mean of the ranks' outer gradients.

    With x the global weights, x_r the weights of rank r after its local steps from x, C the codec, u the outer momentum
    buffer and m the momentum:

        g = C(1/N sum_r C(x - x_r)),   u <- m u + g,   x <- x - outer_lr (g + m u),   x_r = x

    The inner optimizer is the user's; AdamW in the paper. The replicas are identical after every outer step.

    Args:
        period: Inner steps between outer steps (H).
        outer_lr: Learning rate of the outer optimizer.
        outer_momentum: Momentum m of the outer optimizer.
        nesterov: Whether the outer optimizer uses Nesterov momentum; False steps along u.
        codec: Codec of the outer gradients, or its name: any block codec, or a sparse one, `TopK`, `BlockTopK` or
            `Threshold`, with which the mean is not encoded again. None sends them in the weights' dtype.
        feedback: Whether to use error feedback in all stages; None enables it with a codec. A sparse codec requires it.
        compress: With a codec, selects the parameters to compress; all by default.
        warmup_steps: Optimizer steps with full-precision averages of the gradients before the first inner step (the
            paper starts from a pretrained model).
        outer: Creates another outer optimizer of the global weights, such as `torch.optim.AdamW`, which replaces
            outer_lr, outer_momentum and nesterov. Called with a list of parameters, once for each bucket. Its state is
            saved.
        error_decay: Factor of residuals from one outer step to the next, in [0, 1].

    Paper: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (2023), algorithm 1.
    Deviations: none without a codec; the paper's outer gradients are fp32. The inner optimizer's state stays local, as
    in the paper.
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
