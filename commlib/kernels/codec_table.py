"""The table of this package's codecs: ids, names and the shapes of payloads, for everything that needs them.

The codecs' classes, the NumPy reference and what launches CUDA kernels take their numbers from here. The kernels in C++
and CUDA are templates with constants of their own: these are held to the table when the extension is loaded (native.py)
and when a CUDA kernel is compiled. docs/reference/wire_format.md says what the numbers mean; a test compares it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from commlib.errors import CommlibError

ALIGNMENT = 16
"""Bytes: sections begin at multiples of it."""
FOREIGN_IDS = range(1 << 15, 1 << 16)
"""The ids of other packages' codecs."""

TOP_K_BLOCK = 4096
"""Elements of a block of `blocktopk`: what 12 bits tell apart."""
_PORTION = 256  # elements that kernels work on at once where blocks do not say


@dataclass(frozen=True)
class SparseRow:
    """A sparse codec.

    Attributes:
        id: Its number on the wire.
        name: Its name there.
        version: Of its bytes.
        block: Elements that it names some of; None: the whole chunk.
    """

    id: int
    name: str
    version: int = 1
    block: int | None = None


@dataclass(frozen=True)
class BlockRow:
    """A block codec.

    Attributes:
        id: Its number on the wire.
        name: Its name there.
        block: Elements that share parameters; 0 means the whole chunk, 1 that there are no parameters.
        bits: Of a code.
        scale_bytes: Of a block's scale.
        minimum_bytes: Of a block's minima.
        rounds_stochastically: Whether encoding takes random numbers.
        struct: Its struct in csrc/cuda/block_codecs.h.
        tile: Elements that a warp works on at once.
        version: Of its bytes.
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
        """Whether a chunk has only one set of parameters."""
        return self.block == 0

    @property
    def portion(self) -> int:
        """Elements of a block, or of what kernels work on at once where there are no blocks."""
        return self.block if self.block > 1 else _PORTION

    def sections(self, numel: int) -> tuple[int, int, int]:
        """Return where scales and codes begin in the payload of a chunk of `numel` elements, and its size."""
        full, rest = divmod(numel, self.portion)
        blocks = full + (rest > 0)
        sets = min(blocks, 1) if self.is_one_block else blocks
        scales_at = aligned(sets * self.minimum_bytes)
        codes_at = scales_at + aligned(blocks * self.scale_bytes)
        code_bytes = full * (self.portion * self.bits // 8) + (rest * self.bits + 7) // 8
        return scales_at, codes_at, aligned(codes_at + code_bytes)

    def payload_bytes(self, numel: int) -> int:
        """Return the bytes of the payload of a chunk of `numel` elements."""
        return self.sections(numel)[2]

    @property
    def constants(self) -> dict[str, int | bool]:
        """What the kernels' templates have, by its name here."""
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
    """Return `nbytes`, rounded up to where a section may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def check_built(built: Mapping[int, Mapping[str, object]], top_k_block: int) -> None:
    """Hold the C++ kernels to the table.

    Args:
        built: Name and constants of each block codec that the extension has kernels of, by id.
        top_k_block: Elements of its blocks of `blocktopk`.

    Raises:
        CommlibError: It was built from other sources; the codec and the field are named.
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
            f"{'; '.join(wrong)}. Build it again from these sources (pip install --force-reinstall --no-deps .)."
        )
