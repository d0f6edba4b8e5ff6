"""The table of codecs against the extension, the CUDA kernels, the classes and the page."""

from __future__ import annotations

import re
import types
from pathlib import Path

import pytest

from commlib import codecs
from commlib.errors import CommlibError
from commlib.kernels import codec_table, cuda_codecs, native
from commlib.kernels.codec_table import BLOCK_ROWS, BY_NAME, SPARSE_ROWS
from commlib.kernels.cuda_args import codec_asserts
from tests.cuda_emulation import emulator

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "wire_format.md"


def rows_of_the_page() -> dict[str, list[str]]:
    """Return the cells behind the name of each row of the table of codecs."""
    text = PAGE.read_text(encoding="utf-8").partition("## Codecs")[2].partition("\n\nIds from")[0]
    cells = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in text.splitlines()[4:]]
    return {name: [number, version, *rest] for number, version, name, *rest in cells}


def test_numbers_and_names_are_used_once() -> None:
    rows = (*BLOCK_ROWS, *SPARSE_ROWS)
    assert len({row.id for row in rows}) == len({row.name for row in rows}) == len(rows)
    assert not any(row.id in codec_table.FOREIGN_IDS for row in rows)


def test_the_page_has_the_same_table() -> None:
    page = rows_of_the_page()
    assert page.keys() == BY_NAME.keys()
    for row in BLOCK_ROWS:
        number, version, block, minima, scale, bits, _ = page[row.name]
        assert (number, version) == (str(row.id), str(row.version))
        assert block == {0: "the chunk", 1: "-"}.get(row.block, str(row.block)), row.name
        assert minima == {0: "-", 4: "fp32", 8: "see below"}[row.minimum_bytes], row.name
        assert scale == {0: "-", 1: "E8M0", 2: "bf16"}[row.scale_bytes], row.name
        assert bits == str(row.bits), row.name
    for row in SPARSE_ROWS:
        number, version, block = page[row.name][:3]
        assert (number, version, block) == (str(row.id), str(row.version), str(row.block or "the chunk"))


def test_the_classes_have_what_the_table_says() -> None:
    for row in BLOCK_ROWS:
        kind = codecs.by_name[row.name]
        assert codecs.by_id[row.id] is kind
        assert issubclass(kind, codecs.BlockCodec)
        assert (kind.block, kind.version) == (row.block, row.version)
        assert kind.rounds_stochastically == row.rounds_stochastically


@pytest.mark.parametrize(
    ("field", "value"), [("portion", 64), ("bits", 5), ("scale_bytes", 4), ("minimum_bytes", 2), ("is_one_block", True)]
)
def test_an_extension_with_another_shape_is_refused(field: str, value: int) -> None:
    built = {number: dict(fields) for number, fields in native.load().block_codecs().items()}
    built[BY_NAME["int4"].id][field] = value
    with pytest.raises(CommlibError, match=rf"int4\.{field}: expected \w+, got {value}\. Install commlib again"):
        codec_table.check_built(built, codec_table.TOP_K_BLOCK)


def test_an_extension_with_other_codecs_is_refused() -> None:
    built = dict(native.load().block_codecs())
    fewer = {number: fields for number, fields in built.items() if number != BY_NAME["mxfp4"].id}
    with pytest.raises(CommlibError, match="mxfp4: no kernels for the id 10"):
        codec_table.check_built(fewer, codec_table.TOP_K_BLOCK)
    with pytest.raises(CommlibError, match="int3: kernels for the unknown id 31"):
        codec_table.check_built({**built, 31: {**built[1], "name": "int3"}}, codec_table.TOP_K_BLOCK)
    with pytest.raises(CommlibError, match=r"int8\.name: expected int8, got int3"):
        codec_table.check_built({**built, 1: {**built[1], "name": "int3"}}, codec_table.TOP_K_BLOCK)
    with pytest.raises(CommlibError, match=r"blocktopk\.block: expected 4096, got 512"):
        codec_table.check_built(built, 512)


def test_an_extension_of_before_the_table_is_refused() -> None:
    with pytest.raises(CommlibError, match="of another version of commlib"):
        native._check_codecs(types.ModuleType("commlib._native"))


@pytest.mark.parametrize("row", BLOCK_ROWS, ids=lambda row: row.name)
def test_a_cuda_kernel_is_held_to_the_table(row: codec_table.BlockRow) -> None:
    source = cuda_codecs.decode_kernel(row.struct, "Float32", False).source()
    asserts = re.findall(rf"static_assert\({row.struct}::(k\w+) == (\d+)", source)
    assert dict(asserts).keys() == {"kBlock", "kBits", "kScaleBytes", "kMinimumBytes", "kIsOneBlock", "kTile"}


@pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler")
def test_a_cuda_struct_of_another_shape_does_not_compile(tmp_path: Path) -> None:
    row = codec_table.BlockRow(4, "int4", 64, 4, struct="Int4")
    text = f'#include "{emulator.HERE / "cuda_on_cpu.h"}"\n#include "block_codecs.h"\n'
    emulator.compile_to(tmp_path / "right.so", text + "".join(map(codec_asserts, BLOCK_ROWS)), emulator.FLAGS)
    with pytest.raises(AssertionError, match=r"int4\.portion: expected 64, as in commlib/kernels/codec_table"):
        emulator.compile_to(tmp_path / "wrong.so", text + codec_asserts(row), emulator.FLAGS)
