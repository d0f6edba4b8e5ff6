"""Gradient averaging in 4 bits with error feedback."""

from __future__ import annotations

from collections.abc import Callable

import torch

from commlib.algorithms.compressed import Compressed
from commlib.algorithms.policy import MATRICES
from commlib.codecs.base import BlockCodec
from commlib.codecs.integer import Int4
from commlib.codecs.registry import block_codec
from commlib.errors import ConfigError
from commlib.primitives.aggregators import LowPrecision


class EFQuantized(Compressed):
    """Averages quantized gradients with error feedback in both stages: each adds its error to the next round.

    With C the codec, e_r the residual of rank r, f the residual of a chunk's owner, and lambda = `averaging`:

        v_r = g_r + e_r,              e_r <- lambda e_r + (1 - lambda) (v_r - C(v_r))
        w   = 1/N sum_r C(v_r) + f,   f   <- lambda f + (1 - lambda) (w - C(w)),    g = C(w)

    With `ef21` = w, each rank sends the compressed difference of its momentum v_r from h_r, the sum of the differences
    it has sent. The result g is the sum h of the compressed means of the differences:

        v_r <- v_r + w (g_r - v_r),   c_r = C(v_r - h_r),   h_r <- h_r + c_r,   h <- h + C(1/N sum_r c_r + f),   g = h

    Args:
        codec: Block codec or its name; `Int4` by default.
        op: "mean" or "sum".
        averaging: The factor lambda, in [0, 1). 0 is plain error feedback, which loses nothing in the long run. LoCo
            uses a moving average.
        reset_every: Rounds after which residuals are reset (LoCo: 1024); None never resets them.
        hierarchical: Whether gradients are first summed inside each node in full precision.
        compress: Selects the parameters to compress; by default matrices of 1,024 elements or more.
        ef21: Weight w of a new gradient in each rank's momentum, in (0, 1] (EF21-SGDM, see above). None uses plain
            error feedback. Incompatible with `averaging`, `reset_every` and `hierarchical`.
        rescale_residuals: Whether residuals are rescaled with the learning rate of `torch.optim.SGD`; see `Compressed`.

    Paper: Xie et al., "LoCo: Low-Bit Communication Adaptor for Large-scale Model Training" (2024), equations 4 to 6;
    both stages compensated as in Tang et al., "DoubleSqueeze" (ICML 2019), algorithm 1.
    EF21-SGDM: Fatkhullin, Tyurin, Richtárik, "Momentum Provides Error Feedback!" (NeurIPS 2023), algorithm 1; with a
    weight of 1 EF21: Richtárik, Sokolov, Fatkhullin (NeurIPS 2021).
    Deviations: residuals are fp32, LoCo's are 8-bit; plain error feedback is the default. With `ef21`, the mean is
    compressed once more, with error feedback, and all state is initially zero.
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
        ef21: float | None = None,
        rescale_residuals: bool = False,
    ) -> None:
        if not 0 <= averaging < 1 or (reset_every is not None and reset_every < 1):
            raise ConfigError(
                "EFQuantized: expected 0 <= averaging < 1 and reset_every >= 1 or None, got "
                f"{averaging=}, {reset_every=}"
            )
        self.codec = block_codec(codec or Int4())
        super().__init__(
            LowPrecision(self.codec, feedback=True, averaging=averaging, reset_every=reset_every),
            op=op,
            compress=compress,
            hierarchical=hierarchical,
            rescale_residuals=rescale_residuals,
            ef21=ef21,
            ef21_excludes={f"{averaging=}": averaging != 0, f"{reset_every=}": reset_every is not None},
        )
        self.averaging = averaging
        self.reset_every = reset_every
