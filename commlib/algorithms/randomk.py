"""Random-k gradient averaging with error feedback."""

from __future__ import annotations

from collections.abc import Callable

import torch

from commlib.algorithms.compressed import Compressed
from commlib.algorithms.policy import MATRICES
from commlib.codecs import sparse as codecs
from commlib.errors import ConfigError
from commlib.primitives.aggregators import Aligned


class RandomK(Compressed):
    """Sends the same random elements of each bucket on all ranks, by all-reduce, and keeps the others as residuals.

        v_r = g_r + e_r,   g = 1/N sum_r R_t(v_r),   e_r <- v_r - R_t(v_r)

    R_t keeps one random element of each of k neighbourhoods. The payload has 4 bytes per element sent and no indices,
    for any N.

    With `ef21` = w, each rank sends the compressed difference of its momentum v_r from h_r, the sum of the differences
    it has sent. The result g is the mean of the h_r:

        v_r <- v_r + w (g_r - v_r),   c_r = R_t(v_r - h_r),   h_r <- h_r + c_r,   h <- h + 1/N sum_r c_r,   g = h

    Args:
        ratio: Fraction of a bucket's elements that is sent, in (0, 1].
        seed: Seed of the random selection; the same on all ranks.
        op: "mean" or "sum".
        hierarchical: Whether gradients are first summed inside each node in full precision.
        compress: Selects the parameters to sparsify; by default matrices of 1,024 elements or more.
        ef21: Weight w of a new gradient in each rank's momentum, in (0, 1] (EF21-SGDM, see above). None uses plain
            error feedback. Incompatible with `hierarchical`.
        rescale_residuals: Whether residuals are rescaled with the learning rate of `torch.optim.SGD`; see `Compressed`.

    Paper: Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory" (NeurIPS 2018), algorithm 1, with rand_k.
    EF21-SGDM: Fatkhullin, Tyurin, Richtárik, "Momentum Provides Error Feedback!" (NeurIPS 2023), algorithm 1; with a
    weight of 1 EF21: Richtárik, Sokolov, Fatkhullin (NeurIPS 2021).
    Deviations: the selection is stratified and the same on all ranks. With `ef21`, all state is initially zero.
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
