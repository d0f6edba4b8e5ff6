"""What the algorithms that average quantized gradients share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from typing_extensions import override

from commlib.algorithms.base import BucketView, Part
from commlib.algorithms.families.ef21 import EF21Option
from commlib.codecs.base import BlockCodec, Random
from commlib.codecs.registry import block_codec
from commlib.errors import ConfigError
from commlib.primitives.low_precision import LowPrecisionWorkspace, centralized_low_precision
from commlib.transport.base import Communication, Communicator


class Quantized(EF21Option[LowPrecisionWorkspace]):
    """Averages gradients with a block codec on the wire, in both directions.

    Args:
        codec: What gradients are encoded with.
        op: "mean" or "sum".
        feedback: Whether each rank, and each chunk's owner, adds what its last encoding lost to the next one.
        seed: For stochastic rounding; None rounds to nearest.
        compress: Which parameters are compressed; the others are averaged in full precision.
        hierarchical: See `Compressed`.
        averaging: With feedback: the residual becomes `averaging * e + (1 - averaging) * lost`.
        reset_every: With feedback: residuals are set to zero every so many rounds.
        rescale_residuals: With feedback: see `Compressed`.
    """

    kinds = ("worker", "owner")

    def __init__(
        self,
        codec: BlockCodec | str,
        *,
        op: str,
        feedback: bool,
        seed: int | None,
        compress: Callable[[str, torch.Tensor], bool],
        hierarchical: bool = False,
        averaging: float = 0.0,
        reset_every: int | None = None,
        rescale_residuals: bool = False,
    ) -> None:
        super().__init__(op=op, compress=compress, hierarchical=hierarchical, rescale_residuals=rescale_residuals)
        if seed is not None and not 0 <= seed < 1 << 64:
            raise ConfigError(f"{type(self).__name__}.seed: expected 0..2**64 - 1, got {seed}")
        if not 0 <= averaging < 1 or (reset_every is not None and reset_every < 1):
            raise ConfigError(
                f"{type(self).__name__}: expected 0 <= averaging < 1 and reset_every >= 1 or None, got "
                f"{averaging=}, {reset_every=}"
            )
        if rescale_residuals and not feedback:
            raise ConfigError(f"{type(self).__name__}.rescale_residuals: expected it with feedback only")
        self.codec = block_codec(codec)
        self.exactness = "compensated" if feedback else "8bit" if _has_8_bits(self.codec) else "any"
        self.feedback = feedback
        self.portable = not feedback and not hierarchical
        self.seed = seed
        self.averaging = averaging
        self.reset_every = reset_every
        self._segments: dict[int, list[tuple[int, int]]] = {}

    @override
    def _make_workspace(
        self, bucket: BucketView, numel: int, begin: int, comm: Communicator, device: torch.device
    ) -> LowPrecisionWorkspace:
        self._segments[bucket.index] = segments_from(begin, self._parts[bucket.index])
        return LowPrecisionWorkspace(
            numel, device, self.codec, comm, begin=begin, feedback=self.feedback, averaging=self.averaging
        )

    @override
    def _average(
        self,
        tensor: torch.Tensor,
        workspace: LowPrecisionWorkspace,
        bucket: BucketView,
        comm: Communicator,
        peers: Communicator,
    ) -> Communication:
        if self.reset_every is not None and comm.step % self.reset_every == 0:
            workspace.forget()
        yield from centralized_low_precision(
            tensor,
            workspace,
            peers,
            divisor=self.divisor(comm),
            scale=self._units.scale(comm.step),
            decay=self._units.decay(comm.step),
            random_of=lambda stage: self._random(bucket, comm, stage),
        )

    def _random(self, bucket: BucketView, comm: Communicator, stage: int) -> Random | None:
        if self.seed is None:
            return None
        return Random(self.seed, comm.step, comm.rank, stage, self._segments[bucket.index])


def _has_8_bits(codec: BlockCodec) -> bool:
    numel = 1 << 16
    return codec.payload_bytes(numel) >= numel


def segments_from(begin: int, parts: Sequence[Part]) -> list[tuple[int, int]]:
    """Return where each parameter begins in the stretch of a bucket from `begin` on, and in the model (`Random`)."""
    starts = [(part.start - begin, part.offset) for part in parts if part.numel]
    if not starts:
        return [(0, 0)]
    first = max(idx for idx, (start, _) in enumerate(starts) if start <= 0)
    start, offset = starts[first]
    return [(0, offset - start), *starts[first + 1 :]]
