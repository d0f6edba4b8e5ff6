"""Gradient averaging of the largest elements, with error feedback."""

from __future__ import annotations

from collections.abc import Callable

import torch
from typing_extensions import override

from commlib.algorithms.base import BucketView
from commlib.algorithms.families.policy import MATRICES
from commlib.algorithms.families.sparse import Sparse
from commlib.codecs import sparse as codecs
from commlib.primitives.sparse import SparseWorkspace, centralized_sparse
from commlib.transport.base import Communication, Communicator


class TopK(Sparse):
    """Each rank sends the elements of largest magnitude of each bucket and remembers the others.

        v_r = g_r + e_r,   g = 1/N sum_r top_k(v_r),   e_r <- v_r - top_k(v_r)

    The choice is exact (among equals the lower index), so a run repeats itself. Every rank receives N - 1 payloads of
    8 bytes per element sent: it pays while N * ratio is well below 1.

    Args:
        ratio: The part of a bucket's elements that is sent, above 0 and at most 1.
        op: "mean" or "sum".
        hierarchical: Whether gradients are summed inside each node first, in full precision.
        compress: Which parameters are made sparse; matrices of 1,024 elements and more by default.
        exchange: "gathered", as above, or "balanced", as `OkTopK` does.

    Paper: Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory" (NeurIPS 2018), algorithm 1; Aji and Heafield (EMNLP
    2017).
    Deviations: the largest elements of a bucket, not of each layer or of the whole model; residuals are rescaled when
    the learning rate of an optimizer given to `wrap` changes.
    """

    made_for = "sgd"

    def __init__(
        self,
        ratio: float = 0.01,
        op: str = "mean",
        hierarchical: bool = False,
        compress: Callable[[str, torch.Tensor], bool] = MATRICES,
        exchange: str = "gathered",
    ) -> None:
        codec = codecs.TopK(ratio)
        super().__init__(codec, op=op, compress=compress, hierarchical=hierarchical, exchange=exchange)
        self.ratio = ratio

    @override
    def _average(
        self,
        tensor: torch.Tensor,
        workspace: SparseWorkspace,
        bucket: BucketView,
        comm: Communicator,
        peers: Communicator,
    ) -> Communication:
        yield from centralized_sparse(
            tensor,
            workspace,
            self.codec,
            peers,
            divisor=self.divisor(comm),
            scale=self._units.scale(comm.step),
            decay=self._units.decay(comm.step),
        )
