"""Gradient averaging with 8 bits per element on the wire: BAGUA's ByteGrad."""

from __future__ import annotations

from collections.abc import Callable

import torch

from commlib.algorithms.compressed import Compressed
from commlib.algorithms.policy import EVERYTHING
from commlib.codecs.base import BlockCodec
from commlib.codecs.integer import Int8
from commlib.codecs.registry import block_codec
from commlib.primitives.aggregators import LowPrecision


class ByteGrad(Compressed):
    """Averages gradients in 8 bits: quantizes them before the exchange, and their sum again.

    With C the codec and g_r the gradients of rank r, split into one chunk per rank:

        g = C(1/N sum_r C(g_r))

    Args:
        codec: Block codec or its name; `Int8` by default.
        op: "mean" or "sum".
        feedback: Whether the error of each stage is added to the input of the next round; rarely needed with 8 bits.
        hierarchical: Whether gradients are first summed inside each node in full precision.
        compress: Selects the parameters to compress; all by default.
        rescale_residuals: Whether residuals are rescaled with the learning rate of `torch.optim.SGD`; see `Compressed`.

    Paper: Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations" (VLDB 2021), C_LP_S without
    error compensation.
    Deviations: one scale per block of 256 elements, where BAGUA has one per 1/N of a bucket; absmax instead of min-max
    (`codec=UInt8Bagua()` is BAGUA's own). The mean is divided in fp32 after the sum.
    """

    made_for = "any"

    def __init__(
        self,
        codec: BlockCodec | str | None = None,
        op: str = "mean",
        feedback: bool = False,
        hierarchical: bool = False,
        compress: Callable[[str, torch.Tensor], bool] = EVERYTHING,
        rescale_residuals: bool = False,
    ) -> None:
        self.codec = block_codec(codec or Int8())
        super().__init__(
            LowPrecision(self.codec, feedback=feedback),
            op=op,
            compress=compress,
            hierarchical=hierarchical,
            rescale_residuals=rescale_residuals,
        )
        self.feedback = feedback
