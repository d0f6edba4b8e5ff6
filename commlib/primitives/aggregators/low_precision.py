"""Aggregators that encode with a block codec in both stages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from commlib.codecs.base import BlockCodec, Random
from commlib.primitives.aggregators.base import Aggregator, Round, Stretch
from commlib.primitives.low_precision import LowPrecisionWorkspace, centralized_low_precision
from commlib.primitives.parts import Part
from commlib.transport.base import Communication


class LowPrecision(Aggregator[LowPrecisionWorkspace]):
    """Encodes the tensor of each rank, and then the sum of each chunk; see `centralized_low_precision`.

    Args:
        codec: Codec of both stages.
        feedback: Whether each rank, and each chunk's owner, adds the error of its last encoding to the next one.
        seed: Seed of stochastic rounding, 0 to 2**64 - 1; None rounds to nearest.
        averaging: With feedback: the residual becomes `averaging * e + (1 - averaging) * error`.
        reset_every: With feedback: number of rounds after which residuals are set to zero; None never.
    """

    def __init__(
        self,
        codec: BlockCodec,
        *,
        feedback: bool,
        seed: int | None = None,
        averaging: float = 0.0,
        reset_every: int | None = None,
    ) -> None:
        self.codec = codec
        self.feedback = feedback
        self.seed = seed
        self.averaging = averaging
        self.reset_every = reset_every
        self.kinds = ("worker", "owner")
        self.has_state = feedback
        self.exactness = "compensated" if feedback else "8bit" if _has_8_bits(codec) else "any"

    @override
    def workspace(self, stretch: Stretch) -> LowPrecisionWorkspace:
        return LowPrecisionWorkspace(
            stretch.numel,
            stretch.device,
            self.codec,
            stretch.comm,
            begin=stretch.begin,
            feedback=self.feedback,
            averaging=self.averaging,
            segments=_segments_from(stretch.begin, stretch.parts),
        )

    @override
    def average(self, tensor: torch.Tensor, workspace: LowPrecisionWorkspace, of: Round) -> Communication:
        if self.reset_every is not None and of.comm.step % self.reset_every == 0:
            workspace.forget()
        yield from centralized_low_precision(
            tensor,
            workspace,
            of.peers,
            divisor=of.divisor,
            scale=of.scale,
            decay=of.decay,
            random_of=lambda stage: self._random(workspace, of, stage),
        )

    def _random(self, workspace: LowPrecisionWorkspace, of: Round, stage: int) -> Random | None:
        if self.seed is None:
            return None
        return Random(self.seed, of.comm.step, of.comm.rank, stage, workspace.segments)


class MajorityVote(LowPrecision):
    """Each rank votes with the signs of its tensor; the result is the sign of the sum, 1 or -1. A tie is 1.

    Args:
        codec: Codec of both stages; represents 1 and -1 exactly.
    """

    def __init__(self, codec: BlockCodec) -> None:
        super().__init__(codec, feedback=False)

    @override
    def average(self, tensor: torch.Tensor, workspace: LowPrecisionWorkspace, of: Round) -> Communication:
        _to_signs(tensor)
        yield from super().average(tensor, workspace, of)
        _to_signs(tensor)


def _has_8_bits(codec: BlockCodec) -> bool:
    numel = 1 << 16
    return codec.payload_bytes(numel) >= numel


def _to_signs(x: torch.Tensor) -> None:
    """Replace finite values by 1 or -1, with the sign of zeros kept, and others by NaN."""
    signs = torch.copysign(torch.ones((), dtype=x.dtype, device=x.device), x)
    x.mul_(0).add_(signs)


def _segments_from(begin: int, parts: Sequence[Part]) -> list[tuple[int, int]]:
    """Return the first element of each parameter in the stretch that begins at `begin`, and in the model (`Random`)."""
    starts = [(part.start - begin, part.offset) for part in parts if part.numel]
    if not starts:
        return [(0, 0)]
    first = max(idx for idx, (start, _) in enumerate(starts) if start <= 0)
    start, offset = starts[first]
    return [(0, offset - start), *starts[first + 1 :]]
