"""Top-k gradient averaging with error feedback."""

from __future__ import annotations

from collections.abc import Callable

import torch

from commlib.algorithms.compressed import Compressed
from commlib.algorithms.policy import MATRICES
from commlib.codecs import sparse as codecs
from commlib.primitives.aggregators import Balanced, Gathered
from commlib.primitives.aggregators.sparse import is_balanced


class TopK(Compressed):
    """Sends the elements of largest magnitude of each bucket and keeps the others as residuals.

        v_r = g_r + e_r,   g = 1/N sum_r top_k(v_r),   e_r <- v_r - top_k(v_r)

    The selection is exact and deterministic: among equal magnitudes the lower index is selected. Every rank receives N
    - 1 payloads of 8 bytes per element sent, which saves traffic if N * ratio is well below 1.

    With `ef21` = w, each rank sends the compressed difference of its momentum v_r from h_r, the sum of the differences
    it has sent. The result g is the mean of the h_r:

        v_r <- v_r + w (g_r - v_r),   c_r = top_k(v_r - h_r),   h_r <- h_r + c_r,   h <- h + 1/N sum_r c_r,   g = h

    Args:
        ratio: Fraction of a bucket's elements that is sent, in (0, 1].
        op: "mean" or "sum".
        hierarchical: Whether gradients are first summed inside each node in full precision.
        compress: Selects the parameters to sparsify; by default matrices of 1,024 elements or more.
        exchange: "gathered", as above, or "balanced", as in `OkTopK`.
        ef21: Weight w of a new gradient in each rank's momentum, in (0, 1] (EF21-SGDM, see above). None uses plain
            error feedback. Incompatible with `hierarchical` and with `exchange="balanced"`.
        rescale_residuals: Whether residuals are rescaled with the learning rate of `torch.optim.SGD`; see `Compressed`.

    Paper: Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory" (NeurIPS 2018), algorithm 1; Aji and Heafield (EMNLP
    2017).
    EF21-SGDM: Fatkhullin, Tyurin, Richtárik, "Momentum Provides Error Feedback!" (NeurIPS 2023), algorithm 1; with a
    weight of 1 EF21: Richtárik, Sokolov, Fatkhullin (NeurIPS 2021).
    Deviations: the largest elements of a bucket are selected, not of each layer or of the whole model; without
    `rescale_residuals`, residuals have the units of gradients. With `ef21`, all state is initially zero.
    """

    made_for = "sgd"

    def __init__(
        self,
        ratio: float = 0.01,
        op: str = "mean",
        hierarchical: bool = False,
        compress: Callable[[str, torch.Tensor], bool] = MATRICES,
        exchange: str = "gathered",
        ef21: float | None = None,
        rescale_residuals: bool = False,
    ) -> None:
        self.codec = codecs.TopK(ratio)
        super().__init__(
            Balanced(self.codec) if is_balanced("TopK", exchange) else Gathered(self.codec),
            op=op,
            compress=compress,
            hierarchical=hierarchical,
            rescale_residuals=rescale_residuals,
            ef21=ef21,
            ef21_excludes={f"{exchange=}": exchange != "gathered"},
        )
        self.ratio = ratio
        self.exchange = exchange
