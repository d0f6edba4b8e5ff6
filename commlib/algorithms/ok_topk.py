"""Ok-Topk: the largest elements of each rank, summed by regions of equal load, and the largest sums of these."""

from __future__ import annotations

from collections.abc import Callable

import torch

from commlib.algorithms.compressed import Compressed
from commlib.algorithms.policy import MATRICES
from commlib.codecs import sparse as codecs
from commlib.primitives.aggregators import Balanced


class OkTopK(Compressed):
    """As `TopK`, but for many ranks: what a rank sends and receives hardly grows with their number N.

        v_r = g_r + e_r,   u = sum_r top_k(v_r),   g = 1/N T(u),   e_r <- v_r - (top_k(v_r) where T(u) has the element)

    Each of N regions of a bucket has a rank that sums it, and T keeps the k/N largest sums of each region. Regions
    follow the choices of the last round, so that about k/N of each rank's fall into each. Every rank sends
    6k(N-1)/N numbers of 4 bytes, where gathering the choices takes 2k(N-1). A rank keeps as its residual what the
    result has not, so nothing is lost and nothing counts twice.

    There are places for 2k/N choices of a rank in a region. What does not fit, the smallest, stays in that rank's
    residual too: sizes are fixed and known to all, so no rank has to be asked whether another one's region overflows,
    and the regions are balanced anew in the next round. Gathering instead would take a collective that all ranks agree
    by, in every round, and make one late element cost what the balance saves.

    Args:
        ratio: The part of a bucket's elements that a rank chooses, and that the result has: above 0 and at most 1.
        op: "mean" or "sum".
        hierarchical: Whether gradients are summed inside each node first, in full precision.
        compress: Which parameters are made sparse; matrices of 1,024 elements and more by default.
        rescale_residuals: Whether residuals follow the learning rate of `torch.optim.SGD`; see `Compressed`.

    Paper: Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (PPoPP 2022), algorithms 1 and
    2.
    Deviations: the choice is exact, where the paper reuses a threshold for some rounds; the k largest sums are the k/N
    largest of each region, where the paper has a threshold for all and evens out what the regions then have; regions
    are balanced in every round, for the next one, as their ends travel with the payloads; payloads have places for
    2k/N choices instead of sizes that are exchanged first. The largest elements of a bucket, not of the whole model.
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
