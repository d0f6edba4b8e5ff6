"""The golden files, the header, and bytes that were damaged."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from commlib import codecs
from commlib.codecs.base import BlockCodec
from commlib.codecs.envelope import Envelope, open_envelope, seal
from commlib.errors import CodecError
from commlib.kernels.codec_table import BY_NAME

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.cmlb"))
PLACES, THRESHOLD = 7, 2.0
RANDOM = codecs.Random(seed=42, step=1, rank=2, stage=3, segments=[(0, 5)])
MUTATIONS = 1_000_000 if os.environ.get("COMMLIB_SLOW_TESTS") == "1" else 20_000


def chunk(name: str) -> torch.Tensor:
    x = np.fromfile(GOLDEN / "input.f32", "<f4")
    return torch.from_numpy(np.where(np.isnan(x), np.float32(0), x) if name in ("uint8_bagua", "blocktopk") else x)


def new(envelope: Envelope) -> BlockCodec | codecs.SparseCodec:
    kind = codecs.by_id[envelope.codec]
    if issubclass(kind, BlockCodec):
        return kind()
    if kind is codecs.BlockTopK:
        return codecs.BlockTopK(envelope.places)
    ratio = envelope.places / envelope.numel
    return codecs.Threshold(THRESHOLD, ratio) if kind is codecs.Threshold else kind(ratio)


def golden(name: str) -> tuple[bytes, Envelope]:
    data = (GOLDEN / f"{name}.cmlb").read_bytes()
    return data, open_envelope(data)


def test_every_codec_has_a_golden_file() -> None:
    assert {name.removesuffix("_stochastic") for name in NAMES} == set(BY_NAME)


@pytest.mark.parametrize("name", NAMES)
def test_golden_files_are_what_the_codec_writes_and_reads(name: str) -> None:
    data, envelope = golden(name)
    codec, x = new(envelope), chunk(name)
    out = torch.empty(codec.payload_bytes(x.numel()), dtype=torch.uint8)
    codec.encode(x, out, random=RANDOM if "stochastic" in name or name == "randomk" else None)
    assert seal(codec, out, x.numel()) == data
    decoded = torch.empty(x.numel())
    codec.decode(envelope.payload, decoded)
    assert decoded.numpy().tobytes() == (GOLDEN / f"{name}.f32").read_bytes()


@pytest.mark.parametrize("position", [0, 4, 6, 8, 10, 12, 16, 24, 32, 40, 60])
def test_a_damaged_byte_is_found(position: int) -> None:
    data = bytearray(golden("topk")[0])
    data[position] ^= 0x55
    with pytest.raises(CodecError):
        open_envelope(bytes(data))


def test_truncated_and_longer_bytes_are_refused() -> None:
    data, _ = golden("int8")
    for length in (0, 39, 40, len(data) - 1):
        with pytest.raises(CodecError, match="expected"):
            open_envelope(data[:length])
    with pytest.raises(CodecError, match="expected"):
        open_envelope(data + b"\0")


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (4, 2, "expected version 1, got 2"),
        (6, 99, "id of a known codec"),
        (8, 2, "expected version 1 of codec 1, got 2"),
    ],
)
def test_unknown_codecs_and_versions_are_named(at: int, value: int, message: str) -> None:
    data = bytearray(golden("int8")[0])
    struct.pack_into("<H", data, at, value)
    struct.pack_into("<I", data, 12, 0)
    struct.pack_into("<I", data, 12, zlib.crc32(data))
    with pytest.raises(CodecError, match=message):
        open_envelope(bytes(data))


def test_a_payload_of_another_size_is_not_sealed() -> None:
    with pytest.raises(CodecError, match="payload: expected"):
        seal(codecs.Int8(), torch.zeros(16, dtype=torch.uint8), 1000)


def mutants(payload: torch.Tensor, count: int, rng: np.random.Generator) -> torch.Tensor:
    """Return `count` copies of a payload with up to 8 bytes changed in each, one per row."""
    rows = np.repeat(payload.numpy()[None], count, axis=0)
    for _ in range(8):
        is_hit = np.flatnonzero(rng.random(count) < 0.5)
        rows[is_hit, rng.integers(0, rows.shape[1], len(is_hit))] = rng.integers(0, 256, len(is_hit), dtype=np.uint8)
    return torch.from_numpy(rows)


@pytest.mark.timeout(1800)
def test_mutated_payloads_decode_or_are_refused() -> None:
    """Whatever the bytes, a decoder writes its output and nothing else, or raises."""
    rng, envelopes = np.random.default_rng(0), [golden(name)[1] for name in NAMES]
    done, refused, batch = 0, 0, 500
    while done < MUTATIONS:
        envelope = envelopes[done // batch % len(envelopes)]
        codec = new(envelope)
        around = torch.full((envelope.numel + 128,), 3.0)
        out, guard = around[64:-64], torch.full((64,), 3.0)
        rows = mutants(envelope.payload, batch, rng)
        for at in range(0, batch, 4):
            for call, payload in (
                (codec.decode, rows[at]),
                (codec.decode_add, rows[at + 1]),
                (codec.decode_sum, rows[at + 2 : at + 4]),
            ):
                try:
                    call(payload, out)
                except CodecError:
                    assert envelope.places, "any bytes are a payload of a block codec"
                    refused += 1
        assert torch.equal(around[:64], guard)
        assert torch.equal(around[-64:], guard)
        done += batch
    assert refused > 0


@pytest.mark.parametrize("name", [name for name, kind in codecs.by_name.items() if issubclass(kind, BlockCodec)])
def test_ratios_are_what_the_documentation_says(name: str) -> None:
    codec = codecs.by_name[name]()
    said = {line.split()[1] for line in (type(codec).__doc__ or "").splitlines() if line.strip().startswith("Compress")}
    assert codec.ratio(1 << 20) == pytest.approx(float(said.pop()), rel=3e-3)
