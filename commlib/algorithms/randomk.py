"""Gradient averaging of random elements, with error feedback."""

from __future__ import annotations

from collections.abc import Callable

import torch

from commlib.algorithms.compressed import Compressed
from commlib.algorithms.policy import MATRICES
from commlib.codecs import sparse as codecs
from commlib.errors import ConfigError
from commlib.primitives.aggregators import Aligned


class RandomK(Compressed):
    """All ranks send the same random elements of each bucket, by all-reduce, and remember the others.

        v_r = g_r + e_r,   g = 1/N sum_r R_t(v_r),   e_r <- v_r - R_t(v_r)

    R_t keeps one random element of each of k neighbourhoods. 4 bytes per element sent and no indices, whatever N.

    With `ef21` = w what is sent is how the momentum v_r differs from what was sent of it, and the sum h of that is g:

        v_r <- v_r + w (g_r - v_r),   c_r = R_t(v_r - h_r),   h_r <- h_r + c_r,   h <- h + 1/N sum_r c_r,   g = h

    Args:
        ratio: The part of a bucket's elements that is sent, above 0 and at most 1.
        seed: Of the choice; the same on all ranks.
        op: "mean" or "sum".
        hierarchical: Whether gradients are summed inside each node first, in full precision.
        compress: Which parameters are made sparse; matrices of 1,024 elements and more by default.
        ef21: The weight w of a new gradient in each rank's momentum, above 0 and at most 1 (EF21-SGDM, see above); None
            is plain error feedback. Not with nodes.
        rescale_residuals: Whether residuals follow the learning rate of `torch.optim.SGD`; see `Compressed`.

    Paper: Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory" (NeurIPS 2018), algorithm 1, with rand_k.
    EF21-SGDM: Fatkhullin, Tyurin, Richtárik, "Momentum Provides Error Feedback!" (NeurIPS 2023), algorithm 1; with a
    weight of 1 EF21: Richtárik, Sokolov, Fatkhullin (NeurIPS 2021).
    Deviations: stratified choice, the same on all ranks. With `ef21` all state begins with zeros.
    """

    made_for = "sgd"

    def __init__(
        self,
        ratio: float = 0.01,
        seed: int = 0,
        op: str = "mean",
        hierarchical: bool = False,
        compress: Callable[[str, torch.Tensor], bool] = MATRICES,
        ef21: float | None = None,
        rescale_residuals: bool = False,
    ) -> None:
        if not 0 <= seed < 1 << 64:
            raise ConfigError(f"RandomK.seed: expected 0..2**64 - 1, got {seed}")
        self.codec = codecs.RandomK(ratio)
        super().__init__(
            Aligned(self.codec, seed),
            op=op,
            compress=compress,
            hierarchical=hierarchical,
            rescale_residuals=rescale_residuals,
            ef21=ef21,
        )
        self.ratio = ratio
        self.seed = seed
