"""What is launched on a GPU: the kernels' names, and the structs that they take, as the sources in csrc/cuda say.

A kernel is one instance of a template, compiled by itself when it is first used (cuda.py). Its argument is one struct;
the classes here have the fields of those in the sources, in the same order, so that ctypes lays them out alike.
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
"""The structs of csrc/cuda/device.h for the types of tensors."""


@dataclass(frozen=True)
class Kernel:
    """One instance of a template of csrc/cuda.

    Attributes:
        header: The file that has it.
        call: The template's name and its arguments.
        args: The name of the struct that it takes.
        asserts: What must be true of the template's arguments, for the compiler.
    """

    header: str
    call: str
    args: str
    asserts: str = ""

    @property
    def symbol(self) -> str:
        """The kernel's name in its machine code, and so in a profiler's trace."""
        return "commlib_" + re.sub(r"\W+", "_", self.call).strip("_")

    def source(self, name: str | None = None) -> str:
        """Return the program that defines the kernel, as `name` or by its symbol."""
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
    """Return how many blocks of threads work on `count` things."""
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
    """Where the sections of one chunk's payload begin."""

    _fields_ = (("scales_at", _Size), ("codes_at", _Size), ("nbytes", _Size))


class Chunks(ctypes.Structure):
    """How a tensor is cut into chunks and tiles."""

    _fields_ = (
        ("numel", _Size),
        ("chunk", _Size),
        ("tiles_per_chunk", _Size),
        ("num_tiles", _Size),
        ("full", BlockLayout),
        ("last", BlockLayout),
    )


class RandomSource(ctypes.Structure):
    """`Random`, with its segments on the device where there are several."""

    _fields_ = (
        ("segments", _Pointer),
        ("num_segments", _Size),
        ("offset", _Size),
        ("key", _Int * 2),
        ("step", _Int),
        ("stage_and_rank", _Int),
    )


class EncodeArgs(ctypes.Structure):
    """Of `encode` and `find_ranges`."""

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
    """What the kernels of one sparse encoding leave for each other."""

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
    """What a tile of a compaction leaves for the later ones."""

    _fields_ = (("flag", _Int), ("own", _Int * 2), ("total", _Int * 2))


class SparseArgs(ctypes.Structure):
    """Of the kernels that encode with a sparse codec."""

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
    """Of `sum_sparse` and `add_sparse`."""

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
    """Where the sections of a payload of `blocktopk` are."""

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
    """Of `sum_block_top_k` and `add_block_top_k`."""

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
    """Return where the sections of a payload of `numel` elements are that names `kept` of each block."""
    full, rest = divmod(numel, TOP_K_BLOCK)
    last = min(kept, rest)
    indices_at = aligned(4 * (full + (rest > 0)))
    codes_at = aligned(indices_at + full * ((12 * kept + 7) // 8) + (12 * last + 7) // 8)
    nbytes = aligned(codes_at + full * ((2 * kept + 7) // 8) + (2 * last + 7) // 8)
    return BlockTopKLayout(numel, indices_at, codes_at, nbytes, kept)


def codec_asserts(row: BlockRow) -> str:
    """Return what holds a codec's struct to its row of the table, when one of its kernels is compiled."""
    expected = {**row.constants, "tile": row.tile}
    return "".join(
        f"static_assert({row.struct}::{constant} == {int(expected[field])}, "
        f'"{row.name}.{field}: expected {int(expected[field])}, as commlib/kernels/codec_table.py says");\n'
        for field, constant in _CONSTANTS.items()
    )


def chunks_of(row: BlockRow, numel: int, chunk: int) -> Chunks:
    """Return how a tensor is cut."""
    full, rest = divmod(numel, chunk)
    tiles = blocks_of(min(chunk, max(numel, 1)), row.tile)
    num_tiles = full * tiles + blocks_of(rest, row.tile)
    return Chunks(numel, chunk, tiles, num_tiles, BlockLayout(*row.sections(chunk)), BlockLayout(*row.sections(rest)))


def random_source(random: Random | None, device: torch.device) -> RandomSource:
    """Return what the kernels take; [Note: segments]."""
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

    [Note: segments] They are those of a bucket, alike in every step, so they are copied once, in the first one, and
    that copy is waited for: any stream may read them afterwards. It is the only wait for the device.
    """
    return torch.tensor(segments, dtype=torch.int64, device="cpu").to(device)
