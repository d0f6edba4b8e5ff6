"""Gradient averaging in 4 bits with error feedback."""

from __future__ import annotations

from collections.abc import Callable

import torch

from commlib.algorithms.families.policy import MATRICES
from commlib.algorithms.families.quantized import Quantized
from commlib.codecs.base import BlockCodec
from commlib.codecs.integer import Int4


class EFQuantized(Quantized):
    """Quantized averaging that remembers, on both sides, what the codec lost, and adds it to the next round.

    With C the codec, e_r the residual of rank r and f that of a chunk's owner, lambda = `averaging`:

        v_r = g_r + e_r,              e_r <- lambda e_r + (1 - lambda) (v_r - C(v_r))
        w   = 1/N sum_r C(v_r) + f,   f   <- lambda f + (1 - lambda) (w - C(w)),    g = C(w)

    Args:
        codec: Any block codec or its name; `Int4` by default.
        op: "mean" or "sum".
        averaging: 0 is plain error feedback, which loses nothing in the long run. LoCo averages.
        reset_every: Rounds after which residuals are forgotten (LoCo: 1024); None never does.
        hierarchical: Whether gradients are summed inside each node first, in full precision.
        compress: Which parameters are compressed; matrices of 1,024 elements and more by default.

    Paper: Xie et al., "LoCo: Low-Bit Communication Adaptor for Large-scale Model Training" (2024), equations 4 to 6;
    both stages compensated as in Tang et al., "DoubleSqueeze" (ICML 2019), algorithm 1.
    Deviations: residuals are fp32, LoCo's are 8-bit; plain feedback by default.
    """

    made_for = "any"

    def __init__(
        self,
        codec: BlockCodec | str | None = None,
        op: str = "mean",
        averaging: float = 0.0,
        reset_every: int | None = None,
        hierarchical: bool = False,
        compress: Callable[[str, torch.Tensor], bool] = MATRICES,
    ) -> None:
        super().__init__(
            codec or Int4(),
            op=op,
            feedback=True,
            seed=None,
            compress=compress,
            hierarchical=hierarchical,
            averaging=averaging,
            reset_every=reset_every,
        )
