"""A simple Triton implementation of int8 with one scale for 256 elements, for comparison; not our wire format.

It rounds half away from zero, keeps scales in fp16 apart from the codes, and supports no NaN, feedback or chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 256
ROWS = 8


@triton.jit
def encode_kernel(x, codes, scales, numel, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Encode ROWS blocks of `x` [numel]."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    places = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(x + places, mask=places < numel, other=0.0)
    scale = tl.max(tl.abs(values), 1) / 127.0
    inverse = tl.where(scale > 0, 1.0 / scale, 0.0)
    scaled = values * inverse[:, None]
    rounded = scaled + tl.where(scaled >= 0, 0.5, -0.5)
    tl.store(codes + places, rounded.to(tl.int8), mask=places < numel)
    tl.store(scales + rows, scale.to(tl.float16), mask=rows * BLOCK < numel)


@triton.jit
def decode_kernel(codes, scales, out, numel, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Decode ROWS blocks into `out` [numel]."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    places = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    scale = tl.load(scales + rows, mask=rows * BLOCK < numel, other=0.0).to(tl.float32)
    values = tl.load(codes + places, mask=places < numel, other=0).to(tl.float32) * scale[:, None]
    tl.store(out + places, values, mask=places < numel)


class Int8:
    """Codes and scales for tensors like `x` [numel] fp32 on a CUDA device."""

    def __init__(self, x: torch.Tensor) -> None:
        self.numel = x.numel()
        self.codes = torch.empty(self.numel, dtype=torch.int8, device=x.device)
        self.scales = torch.empty(triton.cdiv(self.numel, BLOCK), dtype=torch.float16, device=x.device)
        self._grid = (triton.cdiv(self.numel, BLOCK * ROWS),)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def encode(self, x: torch.Tensor) -> None:
        """Encode `x`."""
        encode_kernel[self._grid](x, self.codes, self.scales, self.numel, BLOCK, ROWS)

    def decode(self, out: torch.Tensor) -> None:
        """Decode into `out` [numel] fp32."""
        decode_kernel[self._grid](self.codes, self.scales, out, self.numel, BLOCK, ROWS)
