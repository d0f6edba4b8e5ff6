"""The CUDA kernels' names and argument structs, as in csrc/cuda.

A kernel is one instance of a template, compiled separately on first use (cuda.py). Its argument is one struct. The
classes here have the same fields in the same order as the structs in the sources, so that ctypes uses the same layout.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from commlib.kernels.checks import Random
from commlib.kernels.codec_table import TOP_K_BLOCK, BlockRow, aligned

WARPS_PER_BLOCK = 8
THREADS = 32 * WARPS_PER_BLOCK
TYPES = {torch.float32: "Float32", torch.bfloat16: "BFloat16", torch.float16: "Float16", torch.float64: "Float64"}
"""The structs of csrc/cuda/device.h by tensor dtype."""


@dataclass(frozen=True)
class Kernel:
    """One instance of a template of csrc/cuda.

    Attributes:
        header: The file that defines the template.
        call: The template's name and arguments.
        args: The name of the argument struct.
        asserts: static_asserts on the template's arguments.
    """

    header: str
    call: str
    args: str
    asserts: str = ""

    @property
    def symbol(self) -> str:
        """The kernel's name in the machine code and in a profiler's trace."""
        return "commlib_" + re.sub(r"\W+", "_", self.call).strip("_")

    def source(self, name: str | None = None) -> str:
        """Return the program that defines the kernel as `name`, by default its symbol."""
        name = name or self.symbol
        return (
            f'#include "{self.header}"\n'
            f"{self.asserts}"
            f'extern "C" __global__ void __launch_bounds__(kThreads) '
            f"{name}(const __grid_constant__ {self.args} args) {{\n"
            f"  {self.call}(args);\n"
            "}\n"
        )


def blocks_of(count: int, per_block: int) -> int:
    """Return the number of thread blocks for `count` items."""
    return -(-count // per_block)


_CONSTANTS = {
    "portion": "kBlock",
    "bits": "kBits",
    "scale_bytes": "kScaleBytes",
    "minimum_bytes": "kMinimumBytes",
    "is_one_block": "kIsOneBlock",
    "tile": "kTile",
}  # of the structs in csrc/cuda/block_codecs.h


# --- structs ----------------------------------------------------------------------------------------------------------

_Size, _Pointer, _Int, _Float = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_float


class BlockLayout(ctypes.Structure):
    """Offsets of the sections in one chunk's payload."""

    _fields_ = (("scales_at", _Size), ("codes_at", _Size), ("nbytes", _Size))


class Chunks(ctypes.Structure):
    """The division of a tensor into chunks and tiles."""

    _fields_ = (
        ("numel", _Size),
        ("chunk", _Size),
        ("tiles_per_chunk", _Size),
        ("num_tiles", _Size),
        ("full", BlockLayout),
        ("last", BlockLayout),
    )


class RandomSource(ctypes.Structure):
    """`Random`. Several segments are stored on the device."""

    _fields_ = (
        ("segments", _Pointer),
        ("num_segments", _Size),
        ("offset", _Size),
        ("key", _Int * 2),
        ("step", _Int),
        ("stage_and_rank", _Int),
    )


class EncodeArgs(ctypes.Structure):
    """Arguments of `encode` and `find_ranges`."""

    _fields_ = (
        ("chunks", Chunks),
        ("x", _Pointer),
        ("inputs", _Pointer),
        ("residual", _Pointer),
        ("out", _Pointer),
        ("ranges", _Pointer),
        ("random", RandomSource),
        ("first", _Size),
        ("num_inputs", _Int),
        ("parts", _Int),
        ("divisor", _Float),
        ("beta", _Float),
        ("gamma", _Float),
    )


class DecodeArgs(ctypes.Structure):
    """Of `decode`."""

    _fields_ = (
        ("chunks", Chunks),
        ("inputs", _Pointer),
        ("out", _Pointer),
        ("num_inputs", _Int),
        ("adds", _Int),
        ("divisor", _Float),
        ("weight", _Float),
    )


class RotateArgs(ctypes.Structure):
    """Of `rotate`."""

    _fields_ = (
        ("x", _Pointer),
        ("out", _Pointer),
        ("numel", _Size),
        ("random", RandomSource),
        ("is_inverse", _Int),
    )


class Selection(ctypes.Structure):
    """Intermediate results shared by the kernels of one sparse encoding."""

    _fields_ = (
        ("histogram", _Int * 4096),
        ("blocks_done", _Int),
        ("tickets", _Int * 2),
        ("prefix", _Int),
        ("wanted", _Int),
        ("has_candidates", _Int),
        ("num_candidates", _Int),
        ("num_used", _Int),
    )


class Status(ctypes.Structure):
    """Results of one tile of a compaction, read by later tiles."""

    _fields_ = (("flag", _Int), ("own", _Int * 2), ("total", _Int * 2))


class SparseArgs(ctypes.Structure):
    """Arguments of the sparse encoding kernels."""

    _fields_ = (
        ("x", _Pointer),
        ("residual", _Pointer),
        ("out", _Pointer),
        ("selection", _Pointer),
        ("status", _Pointer * 2),
        ("indices", _Pointer),
        ("bits", _Pointer),
        ("random", RandomSource),
        ("numel", _Size),
        ("values_at", _Size),
        ("nbytes", _Size),
        ("places", _Int),
        ("capacity", _Int),
        ("threshold", _Int),
        ("beta", _Float),
        ("gamma", _Float),
    )


class SparseDecodeArgs(ctypes.Structure):
    """Arguments of `sum_sparse` and `add_sparse`."""

    _fields_ = (
        ("inputs", _Pointer),
        ("out", _Pointer),
        ("damage", _Pointer),
        ("numel", _Size),
        ("values_at", _Size),
        ("nbytes", _Size),
        ("places", _Int),
        ("num_inputs", _Int),
        ("divisor", _Float),
        ("weight", _Float),
    )


class BlockTopKLayout(ctypes.Structure):
    """Offsets of the sections in a payload of `blocktopk`."""

    _fields_ = (("numel", _Size), ("indices_at", _Size), ("codes_at", _Size), ("nbytes", _Size), ("kept", _Int))


class BlockTopKArgs(ctypes.Structure):
    """Of `encode_block_top_k`."""

    _fields_ = (
        ("layout", BlockTopKLayout),
        ("x", _Pointer),
        ("residual", _Pointer),
        ("out", _Pointer),
        ("beta", _Float),
        ("gamma", _Float),
    )


class BlockTopKDecodeArgs(ctypes.Structure):
    """Arguments of `sum_block_top_k` and `add_block_top_k`."""

    _fields_ = (
        ("layout", BlockTopKLayout),
        ("inputs", _Pointer),
        ("out", _Pointer),
        ("damage", _Pointer),
        ("num_inputs", _Int),
        ("divisor", _Float),
        ("weight", _Float),
    )


def block_top_k_layout(numel: int, kept: int) -> BlockTopKLayout:
    """Return the section offsets of a payload of `numel` elements with `kept` selected per block."""
    full, rest = divmod(numel, TOP_K_BLOCK)
    last = min(kept, rest)
    indices_at = aligned(4 * (full + (rest > 0)))
    codes_at = aligned(indices_at + full * ((12 * kept + 7) // 8) + (12 * last + 7) // 8)
    nbytes = aligned(codes_at + full * ((2 * kept + 7) // 8) + (2 * last + 7) // 8)
    return BlockTopKLayout(numel, indices_at, codes_at, nbytes, kept)


def codec_asserts(row: BlockRow) -> str:
    """Return static_asserts that check a codec's struct against its row of the table when a kernel is compiled."""
    expected = {**row.constants, "tile": row.tile}
    return "".join(
        f"static_assert({row.struct}::{constant} == {int(expected[field])}, "
        f'"{row.name}.{field}: expected {int(expected[field])}, as in commlib/kernels/codec_table.py");\n'
        for field, constant in _CONSTANTS.items()
    )


def chunks_of(row: BlockRow, numel: int, chunk: int) -> Chunks:
    """Return the division of a tensor into chunks and tiles."""
    full, rest = divmod(numel, chunk)
    tiles = blocks_of(min(chunk, max(numel, 1)), row.tile)
    num_tiles = full * tiles + blocks_of(rest, row.tile)
    return Chunks(numel, chunk, tiles, num_tiles, BlockLayout(*row.sections(chunk)), BlockLayout(*row.sections(rest)))


def random_source(random: Random | None, device: torch.device) -> RandomSource:
    """Return the kernels' form of `random`; see [Note: segments]."""
    if random is None:
        return RandomSource()
    key = (_Int * 2)(random.seed & 0xFFFFFFFF, random.seed >> 32)
    if len(random.segments) == 1:
        return RandomSource(None, 1, random.segments[0][1], key, random.step, random.stage_and_rank)
    table = segment_table(tuple(random.segments), device)
    if table.is_cuda:
        table.record_stream(torch.cuda.current_stream(device))
    return RandomSource(table.data_ptr(), len(table), 0, key, random.step, random.stage_and_rank)


@functools.lru_cache(maxsize=1024)
def segment_table(segments: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """Return the segments as a tensor [count, 2] int64 on the device.

    [Note: segments] The segments belong to a bucket and are the same in every step. They are copied once, in the first
    step, with a synchronous copy, so that any stream may read them afterwards. No other call waits for the device.
    """
    return torch.tensor(segments, dtype=torch.int64, device="cpu").to(device)
