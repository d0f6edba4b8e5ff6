"""Deep Gradient Compression: top-k with momentum correction, local clipping and a warm-up of the ratio."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from typing_extensions import override

from commlib.algorithms._policy import MATRICES
from commlib.algorithms._sparse import Sparse
from commlib.algorithms.base import BucketView, Context
from commlib.codecs import sparse as codecs
from commlib.codecs.base import Feedback
from commlib.codecs.sparse import SparseCodec
from commlib.errors import ConfigError
from commlib.primitives.parts import Part, Pieces, cut, paste
from commlib.primitives.sparse import SparseExchange, mark_not_finite
from commlib.transport.base import Communication, Communicator

_FIRST_RATIO = 0.25


class MomentumExchange(SparseExchange):
    """A `SparseExchange` with u, the local momentum: `velocity` [numel] fp32."""

    def __init__(
        self, numel: int, device: torch.device, codec: SparseCodec, comm: Communicator, *, begin: int = 0
    ) -> None:
        super().__init__(numel, device, codec, comm, begin=begin)
        self.velocity = torch.zeros_like(self.residual)

    @override
    def save(self, parts: Sequence[Part]) -> dict[str, Pieces]:
        return {**super().save(parts), "velocity": cut(self.velocity, self.begin, parts)}

    @override
    def load(self, saved: dict[str, Pieces], parts: Sequence[Part], num_terms: float) -> torch.Tensor | None:
        self.velocity.zero_()
        paste(saved["velocity"], self.velocity, parts)
        return super().load(saved, parts, num_terms)


class DGC(Sparse):
    """Sends the largest elements of a locally accumulated momentum, so that delayed elements keep their momentum.

        g_r clipped to norm  clip * N^-1/2              (in proportion to the bucket's share of the elements)
        u_r <- m u_r + g_r,   v_r <- v_r + u_r
        s_r = top_k(v_r),   v_r <- v_r - s_r,   u_r <- 0 where s_r was chosen,   g = 1/N sum_r s_r

    The result already has its momentum: the optimizer must have none of its own (SGD with momentum=0); one with
    momentum that is given to `wrap` is refused.

    Args:
        ratio: The part of a bucket's elements that is sent after the warm-up, above 0 and at most 1.
        momentum: m above.
        clip: The norm that the gradient of the whole model is clipped to on each rank; None does not clip.
        ratio_warmup_steps: Rounds in which the ratio falls from 0.25 to `ratio`, by the same factor at each quarter.
        compress: Which parameters are made sparse; matrices of 1,024 elements and more by default.

    Paper: Lin et al., "Deep Gradient Compression" (ICLR 2018), algorithm 4 and section 3.
    Deviations: clipping by bucket, as the norm of the whole gradient is not known during backward; no Nesterov
    momentum; parameters that are not made sparse are averaged without momentum.
    """

    kinds = ("worker", "velocity")

    def __init__(
        self,
        ratio: float = 0.001,
        momentum: float = 0.9,
        clip: float | None = None,
        ratio_warmup_steps: int = 0,
        compress: Callable[[str, torch.Tensor], bool] = MATRICES,
    ) -> None:
        if not 0 <= momentum < 1 or (clip is not None and not clip > 0) or ratio_warmup_steps < 0:
            raise ConfigError(
                "DGC: expected 0 <= momentum < 1, clip > 0 or None and ratio_warmup_steps >= 0, got "
                f"{momentum=}, {clip=}, {ratio_warmup_steps=}"
            )
        most = max(ratio, _FIRST_RATIO) if ratio_warmup_steps else ratio
        super().__init__(codecs.TopK(most), op="mean", compress=compress)
        self.ratio = codecs.TopK(ratio).ratio
        self.momentum = momentum
        self.clip = clip
        self.ratio_warmup_steps = ratio_warmup_steps
        self._share: dict[int, float] = {}

    @override
    def setup(self, context: Context) -> None:
        groups = context.optimizer.param_groups if context.optimizer is not None else ()
        if any(group.get("momentum") for group in groups):
            raise ConfigError("DGC: the optimizer has a momentum of its own; use SGD(momentum=0)")
        super().setup(context)
        compressed = [bucket for bucket in context.buckets if bucket.index in self._exchanges]
        total = sum(bucket.flat.numel() for bucket in context.buckets)
        self._share = {bucket.index: bucket.flat.numel() / total for bucket in compressed}

    @override
    def _make_exchange(
        self, bucket: BucketView, numel: int, begin: int, comm: Communicator, device: torch.device
    ) -> MomentumExchange:
        return MomentumExchange(numel, device, self.codec, comm, begin=begin)

    def ratio_at(self, step: int) -> float:
        """Return the ratio of round `step`."""
        if step >= self.ratio_warmup_steps or self.ratio >= _FIRST_RATIO:
            return self.ratio
        quarter = 4 * step // self.ratio_warmup_steps
        return _FIRST_RATIO * (self.ratio / _FIRST_RATIO) ** (quarter / 4)

    @override
    def _exchange(
        self,
        tensor: torch.Tensor,
        exchange: SparseExchange,
        bucket: BucketView,
        comm: Communicator,
        peers: Communicator,
    ) -> Communication:
        codec = codecs.TopK(self.ratio_at(comm.step))
        assert isinstance(exchange, MomentumExchange)
        gradient, velocity, scale = tensor, exchange.velocity, self._units.scale
        own, everyone = exchange.payloads(codec)
        if comm.contributes:
            velocity.mul_(self.momentum).add_(self._clipped(bucket, comm, scale))
            codec.encode(velocity, own, feedback=Feedback(exchange.residual))
            velocity.index_fill_(0, codec.indices(own, exchange.numel).long() & 0xFFFFFFFF, 0.0)
        else:
            codec.encode(gradient, own)
        mark_not_finite(codec.values(own, exchange.numel), gradient)
        yield comm.all_gather(everyone.view(-1), own)
        total = exchange.sum_like(gradient)
        codec.decode_sum(everyone, total, divisor=self.divisor(comm))
        torch.mul(total, scale, out=total)
        if total is not gradient:
            gradient.copy_(total)

    def _clipped(self, bucket: BucketView, comm: Communicator, scale: float) -> torch.Tensor:
        """Return the unscaled gradient in fp32, clipped; zeros where it is not finite."""
        gradient = bucket.flat.float() / scale
        gradient = torch.where(torch.isfinite(gradient), gradient, 0.0)
        if self.clip is None:
            return gradient
        limit = self.clip * math.sqrt(self._share[bucket.index] / comm.world_size)
        return gradient * torch.clamp(limit / (torch.linalg.vector_norm(gradient) + 1e-12), max=1.0)
