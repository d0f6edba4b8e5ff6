"""Ok-Topk: top-k gradient averaging with a balanced sparse all-reduce."""

from __future__ import annotations

from collections.abc import Callable

import torch

from commlib.algorithms.compressed import Compressed
from commlib.algorithms.policy import MATRICES
from commlib.codecs import sparse as codecs
from commlib.primitives.aggregators import Balanced


class OkTopK(Compressed):
    """Averages the largest elements like `TopK`, with a traffic per rank that hardly grows with the world size N.

        v_r = g_r + e_r,   u = sum_r top_k(v_r),   g = 1/N T(u),   e_r <- v_r - (top_k(v_r) where T(u) has the element)

    A bucket is divided into N regions, each summed by one rank, and T keeps the k/N largest sums of each region. The
    regions are adapted to the last round's selection, so that each contains about k/N of each rank's selected elements.
    Every rank sends 6k(N-1)/N numbers of 4 bytes; gathering the selections takes 2k(N-1). A rank keeps elements that
    are missing from the result as its residual, so every element is counted exactly once.

    A payload has room for 2k/N selected elements of a rank in a region. The smallest elements, which do not fit, stay
    in that rank's residual too. Sizes are therefore fixed and known to all ranks, so that no rank needs to know whether
    another rank's region overflows. The regions are balanced again for the next round. Falling back to gathering would
    need an agreement collective in every round, and a single overflowing element would cost the savings of the
    exchange.

    Args:
        ratio: Fraction of a bucket's elements that a rank selects, and that the result contains, in (0, 1].
        op: "mean" or "sum".
        hierarchical: Whether gradients are first summed inside each node in full precision.
        compress: Selects the parameters to sparsify; by default matrices of 1,024 elements or more.
        rescale_residuals: Whether residuals are rescaled with the learning rate of `torch.optim.SGD`; see `Compressed`.

    Paper: Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (PPoPP 2022), algorithms 1 and
    2.
    Deviations: the selection is exact, where the paper reuses a threshold for several rounds. The k largest sums are
    the k/N largest of each region, where the paper uses one threshold and then balances the resulting region sizes.
    Regions are balanced in every round for the next one, since their ends are sent with the payloads. Payloads have
    room for 2k/N selected elements instead of sizes that are exchanged first. The largest elements of a bucket are
    selected, not of the whole model.
    """

    made_for = "sgd"

    def __init__(
        self,
        ratio: float = 0.01,
        op: str = "mean",
        hierarchical: bool = False,
        compress: Callable[[str, torch.Tensor], bool] = MATRICES,
        rescale_residuals: bool = False,
    ) -> None:
        self.codec = codecs.TopK(ratio)
        super().__init__(
            Balanced(self.codec),
            op=op,
            compress=compress,
            hierarchical=hierarchical,
            rescale_residuals=rescale_residuals,
        )
        self.ratio = ratio
