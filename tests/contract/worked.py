"""The algorithm of docs/how-to/write-an-algorithm.md, word for word."""

from typing import Any

import torch

from commlib.algorithms import Algorithm, BucketView, Context
from commlib.algorithms.families.policy import Units
from commlib.primitives.parts import cut, pasted
from commlib.transport.base import Communication, Communicator


class RoundedFeedback(Algorithm):
    """Average gradients in bfloat16; each rank adds its rounding error to its next gradient.

        v_r = g_r + e_r,  s_r = bf16(v_r),  e_r = v_r - s_r,  g = 1/N sum_r s_r

    Paper: Karimireddy et al., "Error Feedback Fixes SignSGD" (ICML 2019), algorithm 2, with rounding as the compressor.
    Deviations: the sum over the ranks is rounded to bfloat16 too, and that error is dropped.
    """

    exactness = "compensated"

    def __init__(self) -> None:
        self._units = Units()
        self._parts: dict[int, Any] = {}
        self._residuals: dict[int, torch.Tensor] = {}

    def setup(self, context: Context) -> None:
        saved = self.state_dict()  # of the previous buckets
        self._units.follow(context.optimizer, context.scaler)
        self._parts = {bucket.index: bucket.parts for bucket in context.buckets}
        self._residuals = {b.index: torch.zeros_like(b.flat, dtype=torch.float32) for b in context.buckets}
        self.load_state_dict(saved)

    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        residual = self._residuals[bucket.index]
        scale = self._units.scale(comm.step)
        sent = bucket.flat.bfloat16()
        if comm.contributes:  # else this rank has no data (`model.join`) and adds zeros
            value = bucket.flat.float() + residual * scale
            sent = value.bfloat16()
            lost = (value - sent) / scale
            residual.copy_(torch.where(lost.isfinite().all(), lost, residual))  # unchanged by an overflow
        yield comm.all_reduce(sent)
        bucket.flat.copy_(sent).div_(self.divisor(comm))

    def forget(self) -> None:
        for residual in self._residuals.values():
            residual.zero_()

    def state_dict(self) -> dict[str, Any]:
        pieces: dict[str, Any] = {}
        for index, residual in self._residuals.items():
            pieces.update(cut(residual, 0, self._parts[index]))
        return {"residual": pieces, "units": self._units.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._units.load_state_dict(state["units"])
        for index, residual in self._residuals.items():
            residual.copy_(pasted(state["residual"], self._parts[index], residual))
