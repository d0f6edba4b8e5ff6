"""The table of this package's codecs: ids, names and payload layouts.

The codec classes, the NumPy reference and the launch code of CUDA kernels take their numbers from here. The kernels in
C++ and CUDA are templates with their own constants. These are checked against the table when the extension is loaded
(native.py) and when a CUDA kernel is compiled. docs/reference/wire_format.md defines the numbers; a test compares it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from commlib.errors import CommlibError
from commlib.installation import reinstall

ALIGNMENT = 16
"""Alignment of sections, in bytes."""
FOREIGN_IDS = range(1 << 15, 1 << 16)
"""The ids for codecs of other packages."""

TOP_K_BLOCK = 4096
"""Elements of a block of `blocktopk`: the range of a 12-bit index."""
_PORTION = 256  # elements processed at once by codecs without blocks


@dataclass(frozen=True)
class SparseRow:
    """A sparse codec.

    Attributes:
        id: The codec's number on the wire.
        name: The codec's name on the wire.
        version: The version of its payload format.
        block: Number of elements of a block of which some are selected; None means the whole chunk.
    """

    id: int
    name: str
    version: int = 1
    block: int | None = None


@dataclass(frozen=True)
class BlockRow:
    """A block codec.

    Attributes:
        id: The codec's number on the wire.
        name: The codec's name on the wire.
        block: Number of elements that share parameters; 0 means the whole chunk, 1 means there are no parameters.
        bits: Bits of a code.
        scale_bytes: Bytes of a block's scale.
        minimum_bytes: Bytes of a block's minima.
        rounds_stochastically: Whether encoding accepts random numbers.
        struct: Name of its struct in csrc/cuda/block_codecs.h.
        tile: Number of elements that a warp processes at once.
        version: The version of its payload format.
    """

    id: int
    name: str
    block: int
    bits: int
    scale_bytes: int = 2
    minimum_bytes: int = 0
    rounds_stochastically: bool = False
    struct: str = ""
    tile: int = 256
    version: int = 1

    @property
    def is_one_block(self) -> bool:
        """Whether a chunk has a single set of parameters."""
        return self.block == 0

    @property
    def portion(self) -> int:
        """Number of elements of a block, or of the unit of processing for codecs without blocks."""
        return self.block if self.block > 1 else _PORTION

    def sections(self, numel: int) -> tuple[int, int, int]:
        """Return the offsets of scales and codes in the payload of `numel` elements, and its size, in bytes."""
        full, rest = divmod(numel, self.portion)
        blocks = full + (rest > 0)
        sets = min(blocks, 1) if self.is_one_block else blocks
        scales_at = aligned(sets * self.minimum_bytes)
        codes_at = scales_at + aligned(blocks * self.scale_bytes)
        code_bytes = full * (self.portion * self.bits // 8) + (rest * self.bits + 7) // 8
        return scales_at, codes_at, aligned(codes_at + code_bytes)

    def payload_bytes(self, numel: int) -> int:
        """Return the size in bytes of the payload of a chunk of `numel` elements."""
        return self.sections(numel)[2]

    @property
    def constants(self) -> dict[str, int | bool]:
        """The constants of the kernels' templates, by field name."""
        names = ("portion", "bits", "scale_bytes", "minimum_bytes", "is_one_block")
        return {name: getattr(self, name) for name in names}


BLOCK_ROWS = (
    BlockRow(1, "int8", 256, 8, rounds_stochastically=True, struct="Int8"),
    BlockRow(2, "uint8_minmax", 256, 8, minimum_bytes=4, rounds_stochastically=True, struct="MinMax"),
    BlockRow(3, "uint8_bagua", 0, 8, 0, 8, struct="Bagua"),
    BlockRow(4, "int4", 128, 4, rounds_stochastically=True, struct="Int4"),
    BlockRow(5, "int2", 128, 2, rounds_stochastically=True, struct="Int2", tile=512),
    BlockRow(6, "onebit", 512, 1, struct="OneBit", tile=512),
    BlockRow(7, "fp8_e4m3", 128, 8, struct="Fp8E4M3"),
    BlockRow(8, "fp8_e5m2", 128, 8, struct="Fp8E5M2"),
    BlockRow(9, "mxfp8", 32, 8, 1, struct="MxFp8"),
    BlockRow(10, "mxfp4", 32, 4, 1, struct="MxFp4"),
    BlockRow(11, "bf16", 1, 16, 0, struct="CastBFloat16"),
    BlockRow(12, "fp16", 1, 16, 0, struct="CastFloat16"),
)
SPARSE_ROWS = (
    SparseRow(13, "topk"),
    SparseRow(14, "randomk"),
    SparseRow(15, "threshold"),
    SparseRow(16, "blocktopk", block=TOP_K_BLOCK),
)
BY_NAME: dict[str, BlockRow | SparseRow] = {row.name: row for row in (*BLOCK_ROWS, *SPARSE_ROWS)}
BLOCK_BY_ID = {row.id: row for row in BLOCK_ROWS}
BLOCK_BY_NAME = {row.name: row for row in BLOCK_ROWS}


def aligned(nbytes: int) -> int:
    """Return `nbytes`, rounded up to the alignment of sections."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def check_built(built: Mapping[int, Mapping[str, object]], top_k_block: int) -> None:
    """Check the constants of the C++ kernels against the table.

    Args:
        built: Name and constants of each block codec in the extension, by id.
        top_k_block: The extension's block size of `blocktopk`, in elements.

    Raises:
        CommlibError: The extension was built from other sources. The message names the codec and the field.
    """
    wrong = [
        f"{row.name}.{field}: expected {value}, got {built[row.id].get(field)}"
        for row in BLOCK_ROWS
        if row.id in built
        for field, value in {"name": row.name, **row.constants}.items()
        if built[row.id].get(field) != value
    ]
    wrong += [f"{row.name}: no kernels for the id {row.id}" for row in BLOCK_ROWS if row.id not in built]
    wrong += [f"{built[codec]['name']}: kernels for the unknown id {codec}" for codec in built.keys() - BLOCK_BY_ID]
    if top_k_block != TOP_K_BLOCK:
        wrong.append(f"blocktopk.block: expected {TOP_K_BLOCK}, got {top_k_block}")
    if wrong:
        raise CommlibError(
            f"The compiled extension commlib._native does not have the codecs of commlib/kernels/codec_table.py: "
            f"{'; '.join(wrong)}. Install commlib again: {reinstall()}"
        )
