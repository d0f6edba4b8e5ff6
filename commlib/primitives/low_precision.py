"""Centralized communication of compressed values: encode, all-to-all, sum, encode, all-gather, decode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from commlib.codecs.base import BlockCodec, Feedback, Random
from commlib.primitives.parts import Part, Pieces, cut, paste, pasted, split_at
from commlib.transport.base import AllGather, AllToAll, Communication, Communicator

#: Chunks begin at multiples of this number of elements (64 bytes of fp32), which keeps the codecs' loads aligned.
_CHUNK_STEP = 16

#: The random numbers of a stage (0: the worker's encoding, 1: the chunk owner's), or None for rounding to nearest.
RandomOf = Callable[[int], Random | None]


def to_nearest(stage: int) -> None:
    """Round to nearest in every stage (a `RandomOf`)."""


class LowPrecisionWorkspace:
    """State of one bucket: two payload buffers and, with error feedback, two residuals.

    The tensor is cut into one chunk per rank; rank r owns chunk r. The worker residual [numel] is the error of this
    rank's last encoding. The owner residual [elements of the own chunk] is the error of the last encoding of the sum.
    Both are fp32 and exclude the loss scale.

    Args:
        numel: Number of elements of the tensor: a bucket, or a stretch of one.
        device: Device of the tensor.
        codec: Codec of both stages.
        comm: The ranks that exchange the tensor.
        begin: First element of the stretch in its bucket.
        feedback: Whether to use error feedback.
        averaging: Weight of the old residual in the new one (LoCo); 0 is plain error feedback.
        segments: First element of each parameter in the tensor and in the model, for stochastic rounding (`Random`).
    """

    def __init__(
        self,
        numel: int,
        device: torch.device,
        codec: BlockCodec,
        comm: Communicator,
        *,
        begin: int = 0,
        feedback: bool,
        averaging: float = 0.0,
        segments: Sequence[tuple[int, int]] = ((0, 0),),
    ) -> None:
        rank, world_size = comm.rank, comm.world_size
        self.codec = codec
        self.begin = begin
        self.segments = segments
        self.numel = numel
        self.chunk = -(-numel // (world_size * _CHUNK_STEP)) * _CHUNK_STEP or 1
        self.first = min(rank * self.chunk, numel)
        self.count = min(self.chunk, numel - self.first)
        nbytes = codec.payload_bytes(self.chunk)
        # Two buffers for the payloads of all chunks. First stage: payloads are sent to the owners from `_sent` and
        # arrive in `_received`. Second stage: the payload of the own sum is at the beginning of `_sent`, and the
        # payloads of all sums are gathered in `_received`.
        self._sent = torch.zeros(world_size * nbytes, dtype=torch.uint8, device=device)
        self._received = torch.zeros_like(self._sent)
        self._world_size = world_size
        self._chunk_bytes = nbytes
        self.worker = torch.zeros(numel if feedback else 0, dtype=torch.float32, device=device)
        self.owner = torch.zeros(self.count if feedback else 0, dtype=torch.float32, device=device)
        self._old = torch.empty_like(self.worker) if averaging else None
        self._averaging = averaging
        self.has_feedback = feedback

    def outgoing(self) -> torch.Tensor:
        """Return the buffer for the payloads of the whole tensor."""
        return self._sent[: self.codec.buffer_bytes(self.numel, self.chunk)]

    def share_out(self, comm: Communicator) -> AllToAll:
        """Create the request that sends each payload to the owner of its chunk."""
        return comm.all_to_all(self._received, self._sent)

    def payloads(self) -> torch.Tensor:
        """Return the received payloads of this rank's chunk, [world_size, bytes]."""
        rows = self._received.view(self._world_size, -1)
        if self.count == self.chunk:
            return rows
        # The last chunk is shorter, so there are gaps between its payloads. Source and target of the move overlap;
        # `_sent` is free and serves as scratch.
        nbytes = self.codec.payload_bytes(self.count)
        numel = self._world_size * nbytes
        close = self._sent[:numel].view(self._world_size, nbytes).copy_(rows[:, :nbytes])
        return self._received[:numel].view(close.shape).copy_(close)

    def own(self) -> torch.Tensor:
        """Return the buffer for the payload of the own chunk's sum. It overwrites the payloads in `outgoing`."""
        return self._sent[: self.codec.payload_bytes(self.count)]

    def gather(self, comm: Communicator) -> AllGather:
        """Create the request that gathers the sums of all chunks on every rank."""
        return comm.all_gather(self._received, self._sent[: self._chunk_bytes])

    def gathered(self) -> torch.Tensor:
        """Return the gathered payloads of the sums of all chunks."""
        return self._received[: self.codec.buffer_bytes(self.numel, self.chunk)]

    def forget(self) -> None:
        """Set the residuals to zero."""
        self.worker.zero_()
        self.owner.zero_()

    def restart(self, keeps: torch.Tensor, values: torch.Tensor) -> None:
        """Set the worker residual to `values` [numel] and the owner residual to 0 where `keeps` [numel] is false."""
        torch.where(keeps, self.worker, values, out=self.worker)
        self.owner.mul_(keeps[self.first : self.first + self.count])

    @contextlib.contextmanager
    def feeding_back(self, residual: torch.Tensor, scale: float, decay: float) -> Iterator[Feedback | None]:
        """Yield the feedback for one encoding, then average the new residual with the old one if `averaging` is set."""
        if not self.has_feedback:
            yield None
            return
        old = None if self._old is None else self._old[: residual.numel()].copy_(residual)
        yield Feedback(residual, scale * decay, 1.0 / scale)
        if old is not None:
            residual.lerp_(old, self._averaging)

    def save(self, parts: Sequence[Part]) -> dict[str, Pieces]:
        """Return copies of the residuals by parameter."""
        if not self.has_feedback:
            return {"worker": {}, "owner": {}}
        owner_begin = self.begin + self.first
        return {"worker": cut(self.worker, self.begin, parts), "owner": cut(self.owner, owner_begin, parts)}

    def load(self, saved: dict[str, Pieces], parts: Sequence[Part], num_terms: float) -> torch.Tensor | None:
        """Load residuals, also of another bucket plan.

        Owner residuals of elements that now have another owner are multiplied by `num_terms`, the divisor of the sum,
        and added to this rank's worker residual. They therefore enter the mean once, with their original magnitude.

        Returns:
            [numel of the bucket] Residuals outside of the stretch, to be added to this rank's next values; None if the
            stretch is the whole bucket.
        """
        if not self.has_feedback:
            return None
        whole = pasted(saved["owner"], parts, self.worker)
        whole = split_at(whole, self.begin + self.first, self.owner).mul_(num_terms)
        paste(saved["worker"], whole, parts)
        rest = split_at(whole, self.begin, self.worker)
        return None if self.numel == rest.numel() else rest


def centralized_low_precision(
    tensor: torch.Tensor,
    workspace: LowPrecisionWorkspace,
    comm: Communicator,
    *,
    divisor: float = 1.0,
    scale: float = 1.0,
    decay: float = 1.0,
    random_of: RandomOf = to_nearest,
) -> Communication:
    """Replace `tensor` by the sum over all ranks, divided by `divisor`. All values are compressed on the wire.

    BAGUA's C_LP_S (Gan et al., VLDB 2021, section 3.2), with C the codec, x_r the tensor of rank r:

        d_r = C(x_r + decay e_r),  e_r = x_r + decay e_r - d_r           on every rank
        y   = C(1/divisor sum_r d_r + decay f),  f = ... - y              on the owner of each chunk
        x_r = y

    The sum is computed in rank order. The result is bit-identical on all ranks. Without feedback e and f are zero. The
    first stage uses an all-to-all, the second an all-gather.

    Args:
        tensor: [numel] fp32, bf16, fp16 or fp64; changed in place.
        workspace: The bucket's buffers and residuals.
        comm: The group.
        divisor: Divisor of the sum (a true division).
        scale: Loss scale of the tensor; residuals are kept unscaled.
        decay: Factor of residuals before they are added, for changes of the learning rate.
        random_of: Random numbers for stochastic rounding.
    """
    codec, chunk = workspace.codec, workspace.chunk

    if comm.contributes:
        with workspace.feeding_back(workspace.worker, scale, decay) as feedback:
            codec.encode(tensor, workspace.outgoing(), chunk=chunk, feedback=feedback, random=random_of(0))
    else:
        codec.encode(tensor, workspace.outgoing(), chunk=chunk)
    yield workspace.share_out(comm)
    with workspace.feeding_back(workspace.owner, scale, decay) as feedback:
        codec.encode_sum(
            workspace.payloads(),
            workspace.count,
            workspace.own(),
            divisor=divisor,
            feedback=feedback,
            random=random_of(1),
            first=workspace.first,
        )
    yield workspace.gather(comm)
    codec.decode(workspace.gathered(), tensor, chunk=chunk)
