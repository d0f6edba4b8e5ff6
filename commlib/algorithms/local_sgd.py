"""Local SGD: local steps on every rank, and periodic averages of the weights."""

from __future__ import annotations

from collections.abc import Callable

import torch

from commlib.algorithms.outer import OuterAveraging
from commlib.algorithms.policy import EVERYTHING
from commlib.codecs.base import BlockCodec
from commlib.codecs.sparse import SparseCodec


class LocalSGD(OuterAveraging):
    """Averages the weights every `period` optimizer steps, without communication in between.

    With x_r the weights of rank r after its `period` steps:

        x_r = 1/N sum_s x_s

    With a codec C, the differences from the last common weights x are averaged, since weights themselves change little:

        x <- x - C(1/N sum_s C(x - x_s)),   x_r = x

    Args:
        period: Optimizer steps between averages.
        codec: Codec or its name: any block codec, or a sparse one, `TopK`, `BlockTopK` or `Threshold`. None averages in
            the weights' dtype.
        feedback: Whether to use error feedback in all stages; None enables it with a codec. A sparse codec requires it.
        compress: With a codec, selects the parameters to compress; all by default.

    Paper: Stich, "Local SGD Converges Fast and Communicates Little" (ICLR 2019), algorithm 1; with a codec, Basu et
    al., "Qsparse-local-SGD" (NeurIPS 2019), algorithm 1.
    Deviations: the local optimizer is the user's, and its state (momentum, variance) stays local. With a block codec
    the mean is encoded as well, with error feedback.
    """

    made_for = "sgd"

    def __init__(
        self,
        period: int = 8,
        codec: BlockCodec | SparseCodec | str | None = None,
        feedback: bool | None = None,
        compress: Callable[[str, torch.Tensor], bool] = EVERYTHING,
    ) -> None:
        super().__init__(codec=codec, feedback=feedback, compress=compress, period=period)
