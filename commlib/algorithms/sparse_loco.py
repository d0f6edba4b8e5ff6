"""SparseLoCo: many local steps, then a step along the mean of the sparsified outer gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch

from commlib.algorithms.outer import OuterAveraging
from commlib.algorithms.policy import EVERYTHING
from commlib.codecs.sparse import BlockTopK, TopK
from commlib.errors import ConfigError
from commlib.primitives.aggregators import Balanced
from commlib.primitives.aggregators.sparse import is_balanced


class SparseLoCo(OuterAveraging):
    """Every `period` local steps, makes an SGD step along the mean of the ranks' sparsified outer gradients.

    With x the global weights, x_r the weights of rank r after its local steps from x, e_r its residual, and C the
    largest `kept` elements of each 4,096, with 2 bits of value (the codec `blocktopk`):

        v_r = error_decay e_r + (x - x_r),   e_r <- v_r - C(v_r),   x <- x - outer_lr 1/N sum_r C(v_r),   x_r = x

    The decayed error feedback replaces an outer momentum. Every rank receives N - 1 payloads of (1.75 kept + 4) / 4,096
    bytes per element; with 64 of 4,096 they are 141 times smaller than fp32. The inner optimizer is the user's; AdamW
    in the paper. Without `delay` the replicas are identical after every outer step.

    With `exchange="balanced"` the selected elements are summed as in `OkTopK`: C is the fraction kept / 4,096 of a
    bucket with the largest magnitude, in full precision, as far as it is part of the sum. Every rank sends 24 (N - 1)/N
    kept / 4,096 bytes per element, which is less than with "gathered" for 14 or more ranks.

    Args:
        period: Inner steps between outer steps (H).
        kept: Elements sent of each 4,096 (k), 1 to 4,096.
        error_decay: Factor of residuals from one outer step to the next, in [0, 1].
        outer_lr: Learning rate of the outer optimizer.
        delay: Inner steps for which the payloads are in flight in the background, at most `period`. A rank then adds
            the change of the outer step to its current weights. With 0 the step waits.
        compress: Selects the parameters to sparsify; all by default. The others are averaged in full precision.
        warmup_steps: Optimizer steps with full-precision averages of the gradients before the first inner step.
        exchange: "gathered" or "balanced", see above.

    Paper: Sarfi, Thérien, Lidin, Belilovsky, "Communication Efficient LLM Pre-training with SparseLoCo" (2025),
    algorithm 1.
    Deviations: blocks are 4,096 consecutive elements of a bucket, where the paper's are 64 x 64 pieces of a matrix that
    never span parameters. The 2 bits are a sign and one of two levels of the block. The authors' code divides the
    values of a parameter into four classes about their mean, 1.5 standard deviations wide; as here, it sends the mean
    of each class. Indices are 12 bits wide and not entropy coded. `delay` is not part of the algorithm.
    """

    made_for = "adam"

    def __init__(
        self,
        period: int = 15,
        kept: int = 64,
        error_decay: float = 0.95,
        outer_lr: float = 1.0,
        delay: int = 0,
        compress: Callable[[str, torch.Tensor], bool] = EVERYTHING,
        warmup_steps: int = 0,
        exchange: str = "gathered",
    ) -> None:
        if not 1 <= kept <= BlockTopK.block:
            raise ConfigError(f"SparseLoCo.kept: expected 1 to {BlockTopK.block}, got {kept}")
        largest, balanced = TopK(kept / BlockTopK.block), is_balanced("SparseLoCo", exchange)
        super().__init__(
            outer_lr=outer_lr,
            codec=largest if balanced else BlockTopK(kept),
            aggregator=Balanced(largest) if balanced else None,
            error_decay=error_decay,
            compress=compress,
            period=period,
            delay=delay,
            warmup_steps=warmup_steps,
        )
        self.kept = kept
        self.exchange = exchange
