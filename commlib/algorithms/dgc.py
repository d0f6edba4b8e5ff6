"""Deep Gradient Compression: top-k with momentum correction, local clipping and a warm-up of the ratio."""

from __future__ import annotations

from collections.abc import Callable

import torch
from typing_extensions import override

from commlib.algorithms.base import keeps_momentum
from commlib.algorithms.channels import Gradients
from commlib.algorithms.compressed import Compressed
from commlib.algorithms.context import Context
from commlib.algorithms.policy import MATRICES
from commlib.errors import ConfigError
from commlib.primitives.aggregators.momentum import CorrectedMomentum, LocalMomentum
from commlib.primitives.aggregators.sparse import is_balanced


class DGC(Compressed):
    """Sends the largest elements of a locally accumulated momentum, so that delayed elements keep their momentum.

        g_r clipped to norm  clip * N^-1/2              (in proportion to the bucket's share of the elements)
        u_r <- m u_r + g_r,   v_r <- v_r + u_r
        s_r = top_k(v_r),   v_r <- v_r - s_r,   u_r <- 0 where s_r was chosen,   g = 1/N sum_r s_r

    The result includes momentum, so the optimizer must not apply momentum (SGD with momentum=0). If `wrap` is given an
    optimizer with momentum, it raises a `ConfigError`.

    Args:
        ratio: Fraction of a bucket's elements that is sent after the warm-up, in (0, 1].
        momentum: The momentum m, in [0, 1).
        clip: Norm to which each rank clips the gradient of the model; None does not clip. Parameters that `compress`
            leaves out are not clipped.
        ratio_warmup_steps: Optimizer steps (rounds, without an optimizer) in which the ratio decreases from 0.25 to
            `ratio`, by the same factor at each quarter.
        hierarchical: Whether gradients are first summed inside each node in full precision; each node then acts as one
            worker.
        compress: Selects the parameters to sparsify; by default matrices of 1,024 elements or more. The gradients of
            the others are averaged in full precision before momentum is applied.
        exchange: "gathered", as above, or "balanced", as in `OkTopK`: s_r are then the elements of top_k(v_r) that the
            result contains.

    Paper: Lin et al., "Deep Gradient Compression" (ICLR 2018), algorithm 4 and section 3.
    Deviations: clipping by bucket, as the norm of the whole gradient is not known during backward; no Nesterov
    momentum.
    """

    made_for = "sgd"
    has_momentum = True
    channel = Gradients(accumulates=False)  # a single rank has momentum too

    def __init__(
        self,
        ratio: float = 0.001,
        momentum: float = 0.9,
        clip: float | None = None,
        ratio_warmup_steps: int = 0,
        hierarchical: bool = False,
        compress: Callable[[str, torch.Tensor], bool] = MATRICES,
        exchange: str = "gathered",
    ) -> None:
        if not 0 <= momentum < 1 or (clip is not None and not clip > 0) or ratio_warmup_steps < 0:
            raise ConfigError(
                "DGC: expected 0 <= momentum < 1, clip > 0 or None and ratio_warmup_steps >= 0, got "
                f"{momentum=}, {clip=}, {ratio_warmup_steps=}"
            )
        corrected = CorrectedMomentum(
            ratio,
            momentum=momentum,
            clip=clip,
            ratio_warmup_steps=ratio_warmup_steps,
            balanced=is_balanced("DGC", exchange),
        )
        super().__init__(corrected, others=LocalMomentum(momentum), compress=compress, hierarchical=hierarchical)
        self.codec = corrected.codec
        self.ratio = corrected.ratio
        self.momentum = momentum
        self.clip = clip
        self.ratio_warmup_steps = ratio_warmup_steps
        self.exchange = exchange
        self._corrected = corrected

    def ratio_at(self, step: int) -> float:
        """Return the ratio at an optimizer step, or at a round without an optimizer."""
        return self._corrected.ratio_at(step)

    @override
    def setup(self, context: Context) -> None:
        if keeps_momentum(context.optimizer):
            raise ConfigError("DGC: the optimizer applies momentum, which DGC already includes; use SGD(momentum=0)")
        super().setup(context)
