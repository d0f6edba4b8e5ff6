"""Codecs of torch operations and an algorithm with state, as in a package that depends on commlib."""

from __future__ import annotations

import torch

from commlib.algorithms import Algorithm, BucketView, PerElement, Units
from commlib.codecs import BlockCodec, Feedback, Random, TorchBlockCodec, TorchSparseCodec, block_codec
from commlib.transport.base import Communication, Communicator


class Byte64(TorchBlockCodec):
    """Signed 8-bit codes and an fp32 scale for 64 elements: the scales first, then the codes."""

    id = 40_064
    name = "byte64"
    block = 64
    rounds_stochastically = True

    def packed_bytes(self, numel: int) -> int:
        return 4 * -(-numel // 64) + numel

    def pack(self, values: torch.Tensor, uniforms: torch.Tensor | None) -> torch.Tensor:
        numel = values.numel()
        blocks = torch.nn.functional.pad(values, (0, -numel % 64)).view(-1, 64)
        scale = blocks.abs().amax(dim=1, keepdim=True) * (1 / 127)  # no division by a number: see CONTRIBUTING.md
        scale = torch.where(scale < 2.0**-100, 0.0, torch.where(scale.isfinite(), scale, torch.nan))
        y = (blocks / scale).view(-1)[:numel]
        q = y.round() if uniforms is None else (y + uniforms).floor()
        codes = q.nan_to_num(0.0).clamp(-127, 127).to(torch.int8)
        return torch.cat([scale.view(-1).view(torch.uint8), codes.view(torch.uint8)])

    def unpack(self, packed: torch.Tensor, numel: int) -> torch.Tensor:
        scales = packed[: packed.numel() - numel].view(torch.float32)
        codes = packed[packed.numel() - numel :].view(torch.int8)
        return codes * scales.repeat_interleave(64)[:numel]

    def error_bound(self, values: torch.Tensor) -> torch.Tensor:
        """Return the most that rounding to nearest changes each of `values`, [numel] fp64."""
        blocks = torch.nn.functional.pad(values.abs(), (0, -values.numel() % 64)).view(-1, 64)
        return (0.5001 * blocks.amax(dim=1) / 127).repeat_interleave(64)[: values.numel()]


class Top16(TorchSparseCodec):
    """The elements of largest magnitude: a 32-bit index and a bf16 value of each."""

    id = 40_016
    name = "top16"

    def __init__(self, ratio: float = 0.01) -> None:
        self.ratio = ratio

    def places(self, numel: int) -> int:
        return min(numel, max(1, round(numel * self.ratio)))

    @classmethod
    def packed_bytes(cls, numel: int, capacity: int) -> int:
        return 6 * capacity

    def pack(self, values: torch.Tensor, random: Random | None) -> torch.Tensor:
        index = values.abs().topk(self.places(values.numel())).indices.sort().values
        named = values[index].bfloat16()
        return torch.cat([index.int().view(torch.uint8), named.view(torch.uint8)])

    def unpack(self, packed: torch.Tensor, numel: int) -> torch.Tensor:
        at = 4 * self.places(numel)
        index, named = packed[:at].view(torch.int32), packed[at:].view(torch.bfloat16)
        return named.new_zeros(numel, dtype=torch.float32).scatter(0, index.long().clamp(0, numel - 1), named.float())


class RelaxedMean(Algorithm):
    """Every rank sends its encoded gradient to all others; the encoding error is added to the next gradient.

        v_r = g_r + e_r,   g = 1/N sum_r C(v_r),   e_r <- v_r - C(v_r)

    Args:
        codec: C.
    """

    exactness = "compensated"
    made_for = "sgd"

    def __init__(self, codec: BlockCodec | str = "byte64") -> None:
        self.codec = block_codec(codec)
        self.residual = PerElement("residual")
        self.units = Units()
        self.states = (self.residual, self.units)

    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        residual, scale = self.residual[bucket], self.units.scale(comm.step)
        own = residual.new_empty(self.codec.payload_bytes(residual.numel()), dtype=torch.uint8)
        everyone = own.new_empty(comm.world_size, own.numel())
        feedback = Feedback(residual, beta=scale, gamma=1 / scale) if comm.contributes else None
        self.codec.encode(bucket.flat, own, feedback=feedback)
        yield comm.all_gather(everyone.view(-1), own)
        self.codec.decode_sum(everyone, bucket.flat, divisor=self.divisor(comm))
