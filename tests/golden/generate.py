"""Writes the golden files from the NumPy reference: python tests/golden/generate.py

They are examples for authors of decoders, and fix the bytes: a change here is a new version of a codec.
input.f32 is the chunk (little-endian fp32; uint8_bagua and blocktopk take 0 for its NaN); <codec>.cmlb is its payload
with the header of docs/reference/wire_format.md, and <codec>.f32 its decoded values.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np

from commlib.kernels import reference_ops
from commlib.kernels.codec_table import BLOCK_BY_NAME, BY_NAME
from commlib.kernels.reference import BLOCK_CODECS, F32, Stream

HERE = Path(__file__).parent
PLACES = 7
KEPT = 65
THRESHOLD = 2.0
STREAM = Stream(seed=42, step=1, rank=2, stage=3, offset=5)


def chunk() -> np.ndarray:
    """Return a chunk with full and short blocks, and blocks that are tiny, constant, not finite or far from zero."""
    rng = np.random.default_rng(2026)
    x = rng.standard_normal(1100).astype(F32)
    x[128:256] *= F32(2.0**-104)
    x[256:384] = F32(-0.3)
    x[400] = np.nan
    x[512:768] += F32(1e4)
    x[800:810] = np.array([0.0, -0.0, 1e-45, -1e-38, 0.5, 1.5, 2.5, -2.5, 448, -57344], F32)
    return x


def payloads(x: np.ndarray) -> dict[str, tuple[int, int, np.ndarray, np.ndarray]]:
    """Return (id, places, payload, decoded) of every codec by the name of its file."""
    made = {}
    for name, codec in BLOCK_CODECS.items():
        payload = codec.encode(np.where(np.isnan(x), F32(0), x) if name == "uint8_bagua" else x)
        made[name] = (BY_NAME[name].id, 0, payload, codec.decode(payload, len(x)))
        if BLOCK_BY_NAME[name].rounds_stochastically:
            payload = codec.encode(x, STREAM)
            made[f"{name}_stochastic"] = (BY_NAME[name].id, 0, payload, codec.decode(payload, len(x)))
    bf16, fp16 = reference_ops.cast_to_bf16(x), reference_ops.cast_to_fp16(x)
    made["bf16"] = (BY_NAME["bf16"].id, 0, bf16, reference_ops.cast_from_bf16(bf16, len(x)))
    made["fp16"] = (BY_NAME["fp16"].id, 0, fp16, reference_ops.cast_from_fp16(fp16, len(x)))
    for name, named in (
        ("topk", reference_ops.top_k(x, PLACES)),
        ("randomk", reference_ops.random_k(len(x), PLACES, STREAM)),
        ("threshold", reference_ops.above(x, PLACES, THRESHOLD)),
    ):
        payload = reference_ops.sparse_payload(x, named, PLACES)
        made[name] = (BY_NAME[name].id, PLACES, payload, reference_ops.sparse_values(payload, PLACES, len(x)))
    numbers = np.where(np.isnan(x), F32(0), x)  # one NaN is that of all that a block names
    payload = reference_ops.block_top_k_payload(numbers, KEPT)
    values = reference_ops.block_top_k_values(payload, KEPT, len(x))
    made["blocktopk"] = (BY_NAME["blocktopk"].id, KEPT, payload, values)
    return made


def sealed(codec: int, places: int, payload: np.ndarray, numel: int) -> bytes:
    """Return the payload behind its header; written apart from commlib.codecs.envelope, to check that."""
    body = payload.tobytes()
    header = struct.pack("<4sHHHH", b"CMLB", 1, codec, 1, 0), struct.pack("<QQQ", numel, places, len(body))
    crc = zlib.crc32(header[0] + bytes(4) + header[1] + body)
    return header[0] + struct.pack("<I", crc) + header[1] + body


def main() -> None:
    x = chunk()
    (HERE / "input.f32").write_bytes(x.tobytes())
    for name, (codec, places, payload, decoded) in payloads(x).items():
        (HERE / f"{name}.cmlb").write_bytes(sealed(codec, places, payload, len(x)))
        (HERE / f"{name}.f32").write_bytes(decoded.tobytes())


if __name__ == "__main__":
    main()
