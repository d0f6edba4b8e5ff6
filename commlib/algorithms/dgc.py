"""Deep Gradient Compression: top-k with momentum correction, local clipping and a warm-up of the ratio."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from typing_extensions import override

from commlib.algorithms.base import BucketView, Context, keeps_momentum
from commlib.algorithms.channels import Gradients
from commlib.algorithms.families.policy import MATRICES
from commlib.algorithms.families.sparse import Sparse
from commlib.codecs import sparse as codecs
from commlib.codecs.base import Feedback
from commlib.codecs.sparse import SparseCodec
from commlib.errors import ConfigError
from commlib.primitives.finite import all_finite, mark_unless
from commlib.primitives.parts import Part, Pieces, cut, paste, pasted, split_at
from commlib.primitives.sparse import SparseWorkspace, encode_momentum
from commlib.transport.base import Communication, Communicator

_FIRST_RATIO = 0.25


class MomentumWorkspace(SparseWorkspace):
    """A `SparseWorkspace` with u, the local momentum: `velocity` [numel] fp32."""

    def __init__(
        self,
        numel: int,
        device: torch.device,
        codec: SparseCodec,
        comm: Communicator,
        *,
        begin: int,
        balanced: bool,
        momentum: float,
    ) -> None:
        super().__init__(numel, device, codec, comm, begin=begin, balanced=balanced)
        self.velocity = torch.zeros_like(self.residual)
        self._momentum = momentum

    def mask(self, codec: codecs.TopK, is_summed: torch.Tensor) -> None:
        """Set the velocity of what was encoded, and `is_summed` [places], to zero."""
        indices = codec.indices(self.payloads(codec)[0], self.numel).long() & 0xFFFFFFFF
        self.velocity.index_copy_(0, indices, torch.where(is_summed, 0.0, self.velocity[indices]))

    @override
    def save(self, parts: Sequence[Part]) -> dict[str, Pieces]:
        return {**super().save(parts), "velocity": cut(self.velocity, self.begin, parts)}

    @override
    def load(self, saved: dict[str, Pieces], parts: Sequence[Part], num_terms: float) -> torch.Tensor | None:
        whole = pasted(saved["velocity"], parts, self.velocity)
        moved = split_at(whole, self.begin, self.velocity)
        rest = super().load(saved, parts, num_terms)
        # What another local rank carries now enters with the gradient, which the momentum m makes 1 / (1 - m) of in
        # the long run; the moved velocity would still have given m / (1 - m) of itself.
        return None if rest is None else rest.mul_(1 - self._momentum).add_(moved, alpha=self._momentum)


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
        ratio_warmup_steps: Optimizer steps (rounds, without an optimizer) in which the ratio falls from 0.25 to
            `ratio`, by the same factor at each quarter.
        hierarchical: Whether gradients are summed inside each node first, in full precision; a node is a worker then.
        compress: Which parameters are made sparse; matrices of 1,024 elements and more by default. The gradients of the
            others are averaged in full precision, and the momentum comes after.
        exchange: "gathered", as above, or "balanced", as `OkTopK` does: s_r is what of top_k(v_r) is in the result.

    Paper: Lin et al., "Deep Gradient Compression" (ICLR 2018), algorithm 4 and section 3.
    Deviations: clipping by bucket, as the norm of the whole gradient is not known during backward; no Nesterov
    momentum.
    """

    made_for = "sgd"
    has_momentum = True
    channel = Gradients(accumulates=False)  # one rank alone has a momentum too
    # Velocities are the rank's own, momenta everyone's: a parameter that `compress` moves to the others begins anew.
    kinds = ("worker", "velocity", "momentum")

    def __init__(
        self,
        ratio: float = 0.001,
        momentum: float = 0.9,
        clip: float | None = None,
        ratio_warmup_steps: int = 0,
        hierarchical: bool = False,
        compress: Callable[[str, torch.Tensor], bool] = MATRICES,
        exchange: str = "gathered",
    ) -> None:
        if not 0 <= momentum < 1 or (clip is not None and not clip > 0) or ratio_warmup_steps < 0:
            raise ConfigError(
                "DGC: expected 0 <= momentum < 1, clip > 0 or None and ratio_warmup_steps >= 0, got "
                f"{momentum=}, {clip=}, {ratio_warmup_steps=}"
            )
        most = max(ratio, _FIRST_RATIO) if ratio_warmup_steps else ratio
        codec = codecs.TopK(most)
        super().__init__(codec, op="mean", compress=compress, hierarchical=hierarchical, exchange=exchange)
        self.ratio = codecs.TopK(ratio).ratio
        self.momentum = momentum
        self.clip = clip
        self.ratio_warmup_steps = ratio_warmup_steps
        self._num_elements = 0
        self._momenta: dict[int, tuple[Sequence[Part], torch.Tensor]] = {}  # of what is not made sparse

    @override
    def setup(self, context: Context) -> None:
        if keeps_momentum(context.optimizer):
            raise ConfigError("DGC: the optimizer has a momentum of its own; use SGD(momentum=0)")
        saved = self.state_dict()["momentum"]
        super().setup(context)
        self._num_elements = sum(bucket.flat.numel() for bucket in context.buckets)
        plain = [bucket for bucket in context.buckets if bucket.index not in self._workspaces]
        self._momenta = {b.index: (b.parts, torch.zeros_like(b.flat, dtype=torch.float32)) for b in plain}
        self._load_momenta(saved)

    @override
    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        for parts, momentum in self._momenta.values():
            saved["momentum"].update(cut(momentum, 0, parts))
        return saved

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._load_momenta(state["momentum"])

    def _load_momenta(self, pieces: Pieces) -> None:
        for parts, momentum in self._momenta.values():
            paste(pieces, momentum.zero_(), parts)

    @override
    def _make_workspace(
        self, bucket: BucketView, numel: int, begin: int, comm: Communicator, device: torch.device
    ) -> MomentumWorkspace:
        return MomentumWorkspace(
            numel, device, self.codec, comm, begin=begin, balanced=self.is_balanced, momentum=self.momentum
        )

    def ratio_at(self, step: int) -> float:
        """Return the ratio of the optimizer's step of this number (of the round, where no optimizer is known)."""
        if step >= self.ratio_warmup_steps or self.ratio >= _FIRST_RATIO:
            return self.ratio
        quarter = 4 * step // self.ratio_warmup_steps
        return _FIRST_RATIO * (self.ratio / _FIRST_RATIO) ** (quarter / 4)

    @override
    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        yield from super().communicate(bucket, comm)
        if bucket.index in self._momenta:
            _, momentum = self._momenta[bucket.index]
            scale, is_finite = self._units.scale(comm.step), torch.isfinite(bucket.flat)
            momentum.mul_(self.momentum).add_(torch.where(is_finite, bucket.flat, 0.0), alpha=1.0 / scale)
            bucket.flat.copy_(torch.where(is_finite, momentum * scale, bucket.flat))

    @override
    def _average(
        self,
        tensor: torch.Tensor,
        workspace: SparseWorkspace,
        bucket: BucketView,
        comm: Communicator,
        peers: Communicator,
    ) -> Communication:
        codec = codecs.TopK(self.ratio_at(comm.optimizer_step))
        assert isinstance(workspace, MomentumWorkspace)
        scale = self._units.scale(comm.step)
        own, _ = workspace.payloads(codec)
        if peers.contributes:
            gradient = tensor
            if self.clip is not None:
                gradient = tensor.float()  # itself, where it is fp32
                limit = scale * self.clip * self._share_of_norm(workspace, comm, peers)
                norm = torch.linalg.vector_norm(gradient)  # where it is NaN, the gradient counts as 0
                gradient.mul_(torch.clamp(limit / (norm + 1e-12), max=1.0).nan_to_num_(nan=0.0))
            is_finite = encode_momentum(
                gradient,
                workspace.velocity,
                codec,
                own,
                Feedback(workspace.residual),
                decay=self.momentum,
                factor=1.0 / scale,
                masks=not self.is_balanced,
            )
        else:
            is_finite = all_finite(tensor)
            codec.encode(tensor, own)
        mark_unless(is_finite, codec.values(own, workspace.numel))
        total = workspace.sum_like(tensor)
        is_summed = yield from workspace.sum_up(codec, total, peers, divisor=self.divisor(comm))
        if is_summed is not None and peers.contributes:
            workspace.mask(codec, is_summed)
        if total is not tensor or scale != 1.0:
            torch.mul(total, scale, out=tensor)

    def _share_of_norm(self, workspace: SparseWorkspace, comm: Communicator, peers: Communicator) -> float:
        """Return what part of `clip` falls to these elements of one worker, whose gradient is the sum of its node's."""
        share = workspace.numel / self._num_elements
        return comm.world_size / peers.world_size * math.sqrt(share / peers.world_size)
