"""The algorithm of docs/how-to/write-an-algorithm.md, word for word."""

import torch

from commlib.algorithms import Algorithm, BucketView, PerElement, Units
from commlib.transport.base import Communication, Communicator


class RoundedFeedback(Algorithm):
    """Average gradients in bfloat16; each rank adds its rounding error to its next gradient.

        v_r = g_r + e_r,  s_r = bf16(v_r),  e_r = v_r - s_r,  g = 1/N sum_r s_r

    Paper: Karimireddy et al., "Error Feedback Fixes SignSGD" (ICML 2019), algorithm 2, with rounding as the compressor.
    Deviations: the sum over the ranks is rounded to bfloat16 too, and that error is dropped.
    """

    exactness = "compensated"

    def __init__(self) -> None:
        self.residual = PerElement("residual")
        self.units = Units()
        self.states = (self.residual, self.units)

    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        residual = self.residual[bucket]
        scale = self.units.scale(comm.step)
        sent = bucket.flat.bfloat16()
        if comm.contributes:  # else this rank has no data (`model.join`) and adds zeros
            value = bucket.flat.float() + residual * scale
            sent = value.bfloat16()
            lost = (value - sent) / scale
            residual.copy_(torch.where(lost.isfinite().all(), lost, residual))  # unchanged by an overflow
        yield comm.all_reduce(sent)
        bucket.flat.copy_(sent).div_(self.divisor(comm))
