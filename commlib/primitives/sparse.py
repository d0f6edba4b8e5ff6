"""Centralized communication of some elements of each bucket."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from commlib.codecs.base import Feedback, Random
from commlib.codecs.sparse import PairsCodec, SparseCodec, TopK
from commlib.kernels import native_ops
from commlib.primitives.balanced import BalancedSum
from commlib.primitives.finite import all_finite, mark_unless
from commlib.primitives.parts import Part, cut, pasted, split_at
from commlib.transport.base import Communication, Communicator, Request


class SparseWorkspace:
    """State of one bucket: payload buffers and the residual [numel] fp32, unscaled.

    Args:
        numel: Number of elements of the tensor: a bucket, or a stretch of one.
        device: Device of the tensor.
        codec: Chooses the elements; the codec with the largest payload if it changes from round to round.
        comm: The ranks that exchange the tensor.
        begin: First element of the stretch in its bucket.
        gathers: Whether to allocate buffers for the payloads of all ranks; if false, only for this rank's.
        balanced: Whether payloads are summed by regions instead (`BalancedSum`); requires `TopK`.
    """

    def __init__(
        self,
        numel: int,
        device: torch.device,
        codec: SparseCodec,
        comm: Communicator,
        *,
        begin: int = 0,
        gathers: bool = True,
        balanced: bool = False,
    ) -> None:
        self._world_size = world_size = comm.world_size if gathers and not balanced else 0
        self.begin = begin
        self._buffer = torch.zeros((world_size + 1) * codec.payload_bytes(numel), dtype=torch.uint8, device=device)
        self._codec: SparseCodec | None = None  # whose payloads the views are
        self._views = (self._buffer, self._buffer)
        self.numel = numel
        self.residual = torch.zeros(numel, dtype=torch.float32, device=device)
        self._sum = torch.zeros(0, dtype=torch.float32, device=device)
        self.balanced: BalancedSum | None = None
        if balanced:
            assert isinstance(codec, TopK)
            self.balanced = BalancedSum(numel, device, codec, comm)

    def payloads(self, codec: SparseCodec) -> tuple[torch.Tensor, torch.Tensor]:
        """Return buffers for the own payload [bytes] and all ranks' [world_size, bytes]; [0, bytes] if not gathered."""
        if codec is not self._codec:
            nbytes = codec.payload_bytes(self.numel)
            everyone = self._buffer[nbytes : (self._world_size + 1) * nbytes].view(self._world_size, nbytes)
            self._codec, self._views = codec, (self._buffer[:nbytes], everyone)
        return self._views

    def sum_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fp32 target of a sum: `tensor` itself if it is fp32, else a buffer."""
        if tensor.dtype == torch.float32:
            return tensor
        if not self._sum.numel():
            self._sum = self.residual.new_empty(self.numel)
        return self._sum

    def feedback(self, comm: Communicator, scale: float, decay: float) -> Feedback | None:
        """Return the feedback for one encoding; None if this rank does not contribute."""
        return Feedback(self.residual, scale * decay, 1.0 / scale) if comm.contributes else None

    def sum_up(
        self, codec: SparseCodec, total: torch.Tensor, comm: Communicator, *, divisor: float, gamma: float = 1.0
    ) -> Generator[Request, None, torch.Tensor | None]:
        """Write the sum of all ranks' payloads, divided by `divisor`, to `total` [numel] fp32, identical on all ranks.

        A balanced sum may omit some of this rank's elements. These are written back to the residual, times `gamma`.

        Returns:
            [places] bool: which of this rank's chosen elements are in the sum; None if all are.
        """
        own, everyone = self.payloads(codec)
        if self.balanced is None:
            yield comm.all_gather(everyone.view(-1), own)
            codec.decode_sum(everyone, total, divisor=divisor)
            return None
        assert isinstance(codec, TopK)
        is_summed = yield from self.balanced.sum_up(codec, own, total, comm, divisor)
        if comm.contributes:
            indices, values = codec.indices(own, self.numel).long() & 0xFFFFFFFF, codec.values(own, self.numel)
            kept = self.residual[indices]  # residual after encoding: 0 where values are finite
            back = torch.where(is_summed | ~torch.isfinite(values), kept, values * gamma)
            self.residual.index_copy_(0, indices, back)
        return is_summed

    def decode_sum(self, codec: SparseCodec, payloads: torch.Tensor, tensor: torch.Tensor, divisor: float) -> None:
        """Replace `tensor` by the sum of payloads [count, bytes], divided by `divisor`."""
        total = self.sum_like(tensor)
        codec.decode_sum(payloads, total, divisor=divisor)
        if total is not tensor:
            tensor.copy_(total)

    def forget(self) -> None:
        """Set the residual to zero."""
        self.residual.zero_()

    def restart(self, keeps: torch.Tensor, values: torch.Tensor) -> None:
        """Set the residual to `values` [numel] where `keeps` [numel] bool is false."""
        torch.where(keeps, self.residual, values, out=self.residual)

    def save(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Return copies of the residual, by parameter, and of the regions, under the bucket's first parameter."""
        saved: dict[str, Any] = {"worker": cut(self.residual, self.begin, parts)}
        if self.balanced is not None:
            saved["regions"] = {parts[0].name: self.balanced.save()}
        return saved

    def load(self, saved: dict[str, Any], parts: Sequence[Part], num_terms: float) -> torch.Tensor | None:
        """Load the residual, also of another bucket plan, and regions. See `Workspace.load`."""
        regions = saved.get("regions", {}).get(parts[0].name)
        if self.balanced is not None and regions is not None:
            self.balanced.load(regions)
        rest = split_at(pasted(saved["worker"], parts, self.residual), self.begin, self.residual)
        return None if self.numel == rest.numel() else rest


def centralized_sparse(
    tensor: torch.Tensor,
    workspace: SparseWorkspace,
    codec: SparseCodec,
    comm: Communicator,
    *,
    divisor: float = 1.0,
    scale: float = 1.0,
    decay: float = 1.0,
) -> Communication:
    """Replace `tensor` by the sum of the elements that each rank chooses of its own, divided by `divisor`.

        v_r = x_r + decay e_r,  s_r = the codec's elements of v_r,  e_r = v_r - s_r,  x = 1/divisor sum_r s_r

    All other elements stay in the residual e_r. Every rank receives the N - 1 other payloads and adds all of them in
    rank order, so the result is bit-identical on all ranks. With a balanced workspace the payloads are summed by
    regions, and s_r contains only the chosen elements that are in the sum.

    Args:
        tensor: [numel] fp32, bf16, fp16 or fp64; changed in place.
        workspace: The bucket's buffers and residual.
        codec: Any sparse codec except `RandomK`.
        comm: The group.
        divisor: Divisor of the sum (a true division).
        scale: Loss scale of the tensor; the residual is kept unscaled.
        decay: Factor of the residual before it is added.
    """
    own, everyone = workspace.payloads(codec)
    codec.encode(tensor, own, feedback=workspace.feedback(comm, scale, decay))
    total = workspace.sum_like(tensor)
    if workspace.balanced is None:
        yield comm.all_gather(everyone.view(-1), own)
        codec.decode_sum(everyone, total, divisor=divisor)
    else:
        yield from workspace.sum_up(codec, total, comm, divisor=divisor, gamma=1.0 / scale)
    if total is not tensor:
        tensor.copy_(total)


def centralized_aligned_sparse(
    tensor: torch.Tensor,
    workspace: SparseWorkspace,
    codec: PairsCodec,
    comm: Communicator,
    random: Random,
    *,
    divisor: float = 1.0,
    scale: float = 1.0,
    decay: float = 1.0,
) -> Communication:
    """Do the same as `centralized_sparse` with the same random elements on all ranks: values are all-reduced.

    A value of a rank's tensor that is not finite, chosen or not, sets the first chosen element to NaN on all ranks.

    Args:
        tensor: See `centralized_sparse`.
        workspace: See `centralized_sparse`.
        codec: `RandomK`.
        comm: The group.
        random: Random numbers of the choice; equal on all ranks within a step.
        divisor: See `centralized_sparse`.
        scale: See `centralized_sparse`.
        decay: See `centralized_sparse`.
    """
    own, _ = workspace.payloads(codec)
    codec.encode(tensor, own, feedback=workspace.feedback(comm, scale, decay), random=random)
    values = codec.values(own, workspace.numel)
    mark_unless(all_finite(tensor), values)
    yield comm.all_reduce(values)
    workspace.decode_sum(codec, own.view(1, -1), tensor, divisor)


def encode_momentum(
    gradient: torch.Tensor,
    velocity: torch.Tensor,
    codec: TopK,
    out: torch.Tensor,
    feedback: Feedback,
    *,
    decay: float,
    factor: float,
    masks: bool = True,
) -> torch.Tensor:
    """Replace `velocity` by decay * velocity + factor * gradient, encode it, and set its chosen elements to 0.

    Args:
        gradient: [numel] fp32, bf16, fp16 or fp64; values that are not finite count as 0 and may be set to 0.
        velocity: [numel] fp32; changed in place.
        codec: Chooses the elements.
        out: [codec.payload_bytes(numel)] uint8.
        feedback: Error feedback.
        decay: Factor of the velocity; finite.
        factor: Factor of the gradient; finite.
        masks: Whether chosen elements of the velocity are set to 0.

    Returns:
        `all_finite(gradient)`, for the gradient that was passed: a bool tensor of one element.
    """
    numel = gradient.numel()
    if gradient.device.type == "cpu" and masks:
        places = codec.places(numel)
        return torch.tensor(
            native_ops.encode_momentum(gradient, velocity, places, out, feedback, decay=decay, factor=factor),
            device=gradient.device,
        )
    is_finite = all_finite(gradient)
    torch.nan_to_num(gradient, nan=0.0, posinf=0.0, neginf=0.0, out=gradient)
    velocity.mul_(decay).add_(gradient, alpha=factor)
    codec.encode(velocity, out, feedback=feedback)
    if masks:
        velocity.index_fill_(0, codec.indices(out, numel).long() & 0xFFFFFFFF, 0.0)
    return is_finite
