"""Gradient averaging with one bit per element."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from commlib.algorithms.compressed import Compressed
from commlib.algorithms.policy import MATRICES
from commlib.codecs.floats import OneBit
from commlib.primitives.aggregators import LowPrecision, MajorityVote


class SignSGD(Compressed):
    """Averages the signs of gradients with error feedback, or takes their majority vote.

    With feedback (the default), C(v) = mean|v| sign(v) by blocks of 512, with error feedback in both stages:

        v_r = g_r + e_r,  e_r <- v_r - C(v_r);   w = 1/N sum_r C(v_r) + f,  f <- w - C(w),   g = C(w)

    Without feedback, each rank votes and g is plus or minus 1 (the sign of the sum of the signs; a tie counts as plus):

        g = sign(sum_r sign(g_r))

    The learning rate is then that of signSGD, far smaller than SGD's.

    With `ef21` = w, each rank sends the compressed difference of its momentum v_r from h_r, the sum of the differences
    it has sent. The result g is the sum h of the compressed means of the differences:

        v_r <- v_r + w (g_r - v_r),   c_r = C(v_r - h_r),   h_r <- h_r + c_r,   h <- h + C(1/N sum_r c_r + f),   g = h

    Args:
        feedback: Whether to use error feedback; False uses the majority vote.
        hierarchical: Whether gradients are first summed inside each node in full precision.
        compress: Selects the parameters to compress; by default matrices of 1,024 elements or more. The others are
            averaged in full precision.
        ef21: Weight w of a new gradient in each rank's momentum, in (0, 1] (EF21-SGDM, see above). None uses plain
            error feedback. Incompatible with `feedback=False` and `hierarchical`.
        rescale_residuals: Whether residuals are rescaled with the learning rate of `torch.optim.SGD`; see `Compressed`.

    Paper: with feedback Karimireddy et al., "Error Feedback Fixes SignSGD" (ICML 2019), algorithm 1, both stages as in
    Zheng et al. (NeurIPS 2019), algorithm 2; the vote is Bernstein et al., "signSGD with Majority Vote" (ICLR 2019).
    EF21-SGDM: Fatkhullin, Tyurin, Richtárik, "Momentum Provides Error Feedback!" (NeurIPS 2023), algorithm 1; with a
    weight of 1 EF21: Richtárik, Sokolov, Fatkhullin (NeurIPS 2021).
    Deviations: one scale per 512 elements instead of one per layer; the vote has no momentum. With `ef21`, the mean is
    compressed once more, with error feedback, and all state is initially zero.
    """

    made_for = "sgd"

    def __init__(
        self,
        feedback: bool = True,
        hierarchical: bool = False,
        compress: Callable[[str, torch.Tensor], bool] = MATRICES,
        ef21: float | None = None,
        rescale_residuals: bool = False,
    ) -> None:
        self.codec = OneBit()
        super().__init__(
            LowPrecision(self.codec, feedback=True) if feedback else MajorityVote(self.codec),
            compress=compress,
            hierarchical=hierarchical,
            rescale_residuals=rescale_residuals,
            ef21=ef21,
            ef21_excludes={"feedback=False": not feedback},
        )
        self.feedback = feedback
        if not feedback:
            self.made_for = "any"  # error feedback is analysed for SGD; a sign works with any optimizer
            self.channel = dataclasses.replace(self.channel, accumulates=False)  # a vote is not a mean of gradients
