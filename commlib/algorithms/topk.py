"""Gradient averaging of the largest elements, with error feedback."""

from __future__ import annotations

from collections.abc import Callable

import torch

from commlib.algorithms.compressed import Compressed
from commlib.algorithms.policy import MATRICES
from commlib.codecs import sparse as codecs
from commlib.primitives.aggregators.sparse import gathered_or_balanced


class TopK(Compressed):
    """Each rank sends the elements of largest magnitude of each bucket and remembers the others.

        v_r = g_r + e_r,   g = 1/N sum_r top_k(v_r),   e_r <- v_r - top_k(v_r)

    The choice is exact (among equals the lower index), so a run repeats itself. Every rank receives N - 1 payloads of
    8 bytes per element sent: it pays while N * ratio is well below 1.

    With `ef21` = w what is sent is how the momentum v_r differs from what was sent of it, and the sum h of that is g:

        v_r <- v_r + w (g_r - v_r),   c_r = top_k(v_r - h_r),   h_r <- h_r + c_r,   h <- h + 1/N sum_r c_r,   g = h

    Args:
        ratio: The part of a bucket's elements that is sent, above 0 and at most 1.
        op: "mean" or "sum".
        hierarchical: Whether gradients are summed inside each node first, in full precision.
        compress: Which parameters are made sparse; matrices of 1,024 elements and more by default.
        exchange: "gathered", as above, or "balanced", as `OkTopK` does.
        ef21: The weight w of a new gradient in each rank's momentum, above 0 and at most 1 (EF21-SGDM, see above); None
            is plain error feedback. Not with nodes, nor with a balanced exchange.
        rescale_residuals: Whether residuals follow the learning rate of `torch.optim.SGD`; see `Compressed`.

    Paper: Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory" (NeurIPS 2018), algorithm 1; Aji and Heafield (EMNLP
    2017).
    EF21-SGDM: Fatkhullin, Tyurin, Richtárik, "Momentum Provides Error Feedback!" (NeurIPS 2023), algorithm 1; with a
    weight of 1 EF21: Richtárik, Sokolov, Fatkhullin (NeurIPS 2021).
    Deviations: the largest elements of a bucket, not of each layer or of the whole model; residuals have the units of
    gradients without `rescale_residuals`. With `ef21` all state begins with zeros.
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
            gathered_or_balanced("TopK", self.codec, exchange),
            op=op,
            compress=compress,
            hierarchical=hierarchical,
            rescale_residuals=rescale_residuals,
            ef21=ef21,
            ef21_excludes={f"{exchange=}": exchange != "gathered"},
        )
        self.ratio = ratio
        self.exchange = exchange
