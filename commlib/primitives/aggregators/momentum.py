"""Aggregators with a local momentum: Deep Gradient Compression."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from commlib.codecs.base import Feedback
from commlib.codecs.sparse import TopK
from commlib.primitives.aggregators.base import Aggregator, FullPrecision, Round, Stretch
from commlib.primitives.finite import all_finite, mark_unless
from commlib.primitives.parts import Part, Pieces, cut, paste, pasted, split_at
from commlib.primitives.sparse import SparseWorkspace, encode_momentum
from commlib.transport.base import Communication

#: Initial ratio of the warm-up.
FIRST_RATIO = 0.25


class MomentumWorkspace(SparseWorkspace):
    """A `SparseWorkspace` with the local momentum u, `velocity` [numel] fp32."""

    def __init__(self, stretch: Stretch, codec: TopK, *, balanced: bool, momentum: float) -> None:
        super().__init__(stretch.numel, stretch.device, codec, stretch.comm, begin=stretch.begin, balanced=balanced)
        self.velocity = torch.zeros_like(self.residual)
        self.share = stretch.numel / max(stretch.model_numel, 1)
        self._momentum = momentum

    def mask(self, codec: TopK, is_summed: torch.Tensor) -> None:
        """Set the velocity to zero at the encoded elements for which `is_summed` [places] bool is true."""
        indices = codec.indices(self.payloads(codec)[0], self.numel).long() & 0xFFFFFFFF
        self.velocity.index_copy_(0, indices, torch.where(is_summed, 0.0, self.velocity[indices]))

    @override
    def forget(self) -> None:
        super().forget()
        self.velocity.zero_()

    @override
    def save(self, parts: Sequence[Part]) -> dict[str, Pieces]:
        return {**super().save(parts), "velocity": cut(self.velocity, self.begin, parts)}

    @override
    def load(self, saved: dict[str, Pieces], parts: Sequence[Part], num_terms: float) -> torch.Tensor | None:
        whole = pasted(saved["velocity"], parts, self.velocity)
        moved = split_at(whole, self.begin, self.velocity)
        rest = super().load(saved, parts, num_terms)
        # `rest` and `moved` belong to elements that another local rank now exchanges. They are added to the gradient,
        # and the momentum m multiplies a gradient by 1 / (1 - m) in total. A residual enters the sum once: factor
        # 1 - m. A velocity would have contributed m / (1 - m) times its value: factor m.
        return None if rest is None else rest.mul_(1 - self._momentum).add_(moved, alpha=self._momentum)


class CorrectedMomentum(Aggregator[MomentumWorkspace]):
    """Sends the largest elements of an accumulated local momentum.

        g_r clipped to norm clip * N^-1/2,   u_r <- m u_r + g_r,   v_r <- v_r + u_r
        s_r = top_k(v_r),   v_r <- v_r - s_r,   u_r <- 0 where s_r was chosen,   g = 1/N sum_r s_r

    Lin et al., "Deep Gradient Compression" (ICLR 2018), algorithm 4. The norm of a stretch is limited to its share of
    the model's elements.

    Args:
        ratio: Fraction of the elements that is sent after the warm-up, in (0, 1].
        momentum: The factor m above.
        clip: Norm to which the gradient of the whole model is clipped on each rank; None does not clip.
        ratio_warmup_steps: Optimizer steps in which the ratio falls from `FIRST_RATIO` to `ratio`.
        balanced: Whether the chosen elements are summed by regions (`BalancedSum`).
    """

    def __init__(
        self, ratio: float, *, momentum: float, clip: float | None, ratio_warmup_steps: int, balanced: bool
    ) -> None:
        self.codec = TopK(max(ratio, FIRST_RATIO) if ratio_warmup_steps else ratio)
        self.ratio = TopK(ratio).ratio
        self.momentum = momentum
        self.clip = clip
        self.ratio_warmup_steps = ratio_warmup_steps
        self.balanced = balanced
        self.kinds = ("worker", "velocity", "regions") if balanced else ("worker", "velocity")
        self.same = ("regions",) if balanced else ()

    def ratio_at(self, step: int) -> float:
        """Return the ratio at an optimizer step (at a round if no optimizer is known)."""
        if step >= self.ratio_warmup_steps or self.ratio >= FIRST_RATIO:
            return self.ratio
        quarter = 4 * step // self.ratio_warmup_steps
        return FIRST_RATIO * (self.ratio / FIRST_RATIO) ** (quarter / 4)

    @override
    def workspace(self, stretch: Stretch) -> MomentumWorkspace:
        return MomentumWorkspace(stretch, self.codec, balanced=self.balanced, momentum=self.momentum)

    @override
    def average(self, tensor: torch.Tensor, workspace: MomentumWorkspace, of: Round) -> Communication:
        codec = TopK(self.ratio_at(of.comm.optimizer_step))
        own, _ = workspace.payloads(codec)
        if of.peers.contributes:
            is_finite = encode_momentum(
                tensor if self.clip is None else self._clipped(tensor, self.clip, workspace, of),
                workspace.velocity,
                codec,
                own,
                Feedback(workspace.residual),
                decay=self.momentum,
                factor=1.0 / of.scale,
                masks=not self.balanced,
            )
        else:
            is_finite = all_finite(tensor)
            codec.encode(tensor, own)
        mark_unless(is_finite, codec.values(own, workspace.numel))
        total = workspace.sum_like(tensor)
        is_summed = yield from workspace.sum_up(codec, total, of.peers, divisor=of.divisor)
        if is_summed is not None and of.peers.contributes:
            workspace.mask(codec, is_summed)
        if total is not tensor or of.scale != 1.0:
            torch.mul(total, of.scale, out=tensor)

    def _clipped(self, tensor: torch.Tensor, clip: float, workspace: MomentumWorkspace, of: Round) -> torch.Tensor:
        """Clip the gradient, in place if it is fp32, else in a copy. With nodes it is the sum of a node's ranks."""
        gradient = tensor.float()
        peers = of.peers.world_size
        limit = of.scale * clip * (of.comm.world_size / peers * math.sqrt(workspace.share / peers))
        norm = torch.linalg.vector_norm(gradient)  # where it is NaN, the gradient counts as 0
        return gradient.mul_(torch.clamp(limit / (norm + 1e-12), max=1.0).nan_to_num_(nan=0.0))


class MeanMomentum:
    """Momentum of a mean, [numel] fp32, unscaled."""

    def __init__(self, stretch: Stretch) -> None:
        self.momentum = torch.zeros(stretch.numel, dtype=torch.float32, device=stretch.device)

    def forget(self) -> None:
        """Set the momentum to zero."""
        self.momentum.zero_()

    def save(self, parts: Sequence[Part]) -> dict[str, Pieces]:
        """See `Workspace.save`."""
        return {"momentum": cut(self.momentum, 0, parts)}

    def load(self, saved: dict[str, Any], parts: Sequence[Part], num_terms: float) -> None:
        """See `Workspace.load`."""
        paste(saved["momentum"], self.momentum.zero_(), parts)


class LocalMomentum(Aggregator[MeanMomentum]):
    """Averages in full precision, and replaces the mean by its momentum: u <- m u + g, g = u.

    Args:
        momentum: The factor m above.
    """

    kinds = ("momentum",)
    same = ("momentum",)

    def __init__(self, momentum: float) -> None:
        self.momentum = momentum
        self._mean = FullPrecision()

    @override
    def workspace(self, stretch: Stretch) -> MeanMomentum:
        return MeanMomentum(stretch)

    @override
    def average(self, tensor: torch.Tensor, workspace: MeanMomentum, of: Round) -> Communication:
        yield from self._mean.average(tensor, None, of)
        momentum, is_finite = workspace.momentum, torch.isfinite(tensor)
        momentum.mul_(self.momentum).add_(torch.where(is_finite, tensor, 0.0), alpha=1.0 / of.scale)
        tensor.copy_(torch.where(is_finite, momentum * of.scale, tensor))
