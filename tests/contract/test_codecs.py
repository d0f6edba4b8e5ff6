"""Every registered codec keeps the promises of all codecs, on the CPU."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from commlib.codecs.base import BlockCodec, Feedback, Random
from commlib.codecs.registry import by_name
from commlib.codecs.sparse import PairsCodec, SparseCodec
from commlib.errors import CodecError

SIZES = (0, 1, 2, 31, 32, 33, 127, 255, 257, 511, 513, 4099, 70_001)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BLOCK = [name for name, cls in by_name.items() if issubclass(cls, BlockCodec)]
PAIRS = [name for name, cls in by_name.items() if issubclass(cls, PairsCodec)]
SOURCE = Random(seed=11, step=3, rank=0, stage=1)


def make(name: str, ratio: float = 0.1) -> Any:
    """Make a codec with options that its constructor has; `ratio` is the fraction of elements that are sent."""
    options = inspect.signature(by_name[name]).parameters
    found = {"ratio": ratio, "threshold": 1e-3, "kept": round(4096 * ratio)}
    return by_name[name](**{key: value for key, value in found.items() if key in options})


def values(numel: int, seed: int = 0) -> Tensor:
    """Return `[numel] float32` of magnitudes from 1e-3 to 10."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * 10 ** (torch.rand(numel, generator=generator) * 3 - 2)


def needs_random(codec: Any) -> bool:
    """Return whether the codec refuses to encode without random numbers."""
    return isinstance(codec, SparseCodec) and "required" in (type(codec).encode.__doc__ or "")


def encoded(codec: Any, x: Tensor, *, fill: int = 0xA5, feedback: Feedback | None = None) -> Tensor:
    """Encode into a buffer that held `fill`."""
    out = torch.full((codec.payload_bytes(x.numel()),), fill, dtype=torch.uint8)
    codec.encode(x, out, feedback=feedback, **({"random": SOURCE} if needs_random(codec) else {}))
    return out


def decoded(codec: Any, payload: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode into a tensor that held something else."""
    out = torch.full((numel,), 7.0, dtype=dtype)
    codec.decode(payload, out)
    return out


def over_blocks(x: Tensor, block: int, of_block: Callable[[Tensor], Tensor]) -> Tensor:
    """Return, for each element, a figure of the block in which it lies."""
    pieces = x.split(block or max(1, x.numel()))
    return torch.cat([of_block(piece).expand_as(piece) for piece in pieces]) if x.numel() else x


def largest(x: Tensor, block: int) -> Tensor:
    return over_blocks(x, block, lambda piece: piece.abs().amax())


def width(x: Tensor, block: int) -> Tensor:
    return over_blocks(x, block, lambda piece: piece.amax() - piece.amin())


def mean_magnitude(x: Tensor, block: int) -> Tensor:
    return over_blocks(x, block, lambda piece: piece.abs().mean())


#: The error bound of an element from a block codec's docstring, in float64, by the codec's name on the wire.
BOUNDS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "int8": lambda x, block: 0.5001 * largest(x, block) / 126,
    "int4": lambda x, block: 0.5001 * largest(x, block) / 6.9,
    "int2": lambda x, block: 0.5001 * 1.008 * largest(x, block),
    "uint8_minmax": lambda x, block: 0.5001 * 1.0001 * width(x, block) / 253 + 2**-23 * largest(x, block),
    "uint8_bagua": lambda x, block: (width(x, block) + 1e-7) / 505 + 2**-20 * largest(x, block),
    "onebit": lambda x, block: 1.004 * mean_magnitude(x, block) + x.abs(),
    "fp8_e4m3": lambda x, block: torch.maximum(2**-4 * 1.0001 * x.abs(), 2**-10 * largest(x, block) / 444),
    "fp8_e5m2": lambda x, block: torch.maximum(2**-3 * 1.0001 * x.abs(), 2**-17 * largest(x, block) / 56800),
    "mxfp8": lambda x, block: torch.maximum(2**-3 * x.abs(), 2**-10 * largest(x, block) / 256),
    "mxfp4": lambda x, block: torch.maximum(2**-2 * x.abs(), largest(x, block) / 16),
    "bf16": lambda x, block: 2**-8 * x.abs(),
    "fp16": lambda x, block: torch.maximum(2**-11 * x.abs(), torch.full_like(x, 2**-25)),
}


@pytest.mark.parametrize("name", by_name)
def test_the_whole_payload_is_written_and_the_same_twice(name: str) -> None:
    codec = make(name)
    for numel in SIZES:
        x = values(numel)
        payload = encoded(codec, x)
        assert torch.equal(payload, encoded(codec, x, fill=0x5A)), f"{numel}: bytes depend on previous contents"
        assert torch.equal(payload, encoded(make(name), x)), f"{numel}: another object writes other bytes"
        got = decoded(codec, payload, numel)
        assert got.isfinite().all(), f"{numel}: decoded values are not finite"
        assert torch.equal(got, decoded(codec, payload, numel))


@pytest.mark.parametrize("name", BLOCK)
def test_the_error_is_within_the_bound_of_the_docstring(name: str) -> None:
    codec = make(name)
    stated = getattr(codec, "error_bound", None)  # of another package's codec
    assert name in BOUNDS or stated, f"state the error bound of {name!r} in BOUNDS or as `error_bound`"
    for seed, numel in enumerate(SIZES):
        x = values(numel, seed)
        error = (decoded(codec, encoded(codec, x), numel).double() - x.double()).abs()
        bound = stated(x.double()) if stated else BOUNDS[name](x.double(), codec.block)
        assert (error <= bound * (1 + 1e-6)).all(), f"{numel}: error {float((error - bound).max())} above the bound"


@pytest.mark.parametrize("name", PAIRS)
def test_named_elements_are_exact_and_others_zero(name: str) -> None:
    codec = make(name)
    for numel in SIZES:
        x = values(numel)
        payload = encoded(codec, x)
        got = decoded(codec, payload, numel)
        named = {idx for idx in codec.indices(payload, numel).tolist() if idx >= 0}
        assert len(named) <= codec.places(numel)
        mask = torch.zeros(numel, dtype=torch.bool)
        mask[sorted(named)] = True
        assert torch.equal(got, torch.where(mask, x, torch.zeros(numel)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", by_name)
def test_every_dtype_counts_as_its_values_in_fp32(name: str, dtype: torch.dtype) -> None:
    codec, x = make(name), values(1000).to(dtype)
    payload = encoded(codec, x)
    assert torch.equal(payload, encoded(codec, x.float()))
    if name in BLOCK:
        assert torch.equal(decoded(codec, payload, 1000, dtype), decoded(codec, payload, 1000).to(dtype))


@pytest.mark.parametrize("name", by_name)
def test_what_is_lost_is_in_the_residual(name: str) -> None:
    codec = make(name)
    for numel in SIZES:
        x, residual = values(numel), values(numel, seed=5)
        owed = x.double() + residual.double()
        payload = encoded(codec, x, feedback=Feedback(residual))
        total = decoded(codec, payload, numel).double() + residual.double()
        torch.testing.assert_close(total, owed, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.bool], ids=str)
@pytest.mark.parametrize("name", by_name)
def test_other_dtypes_are_refused_and_nothing_is_written(name: str, dtype: torch.dtype) -> None:
    codec = make(name)
    _assert_refused(codec, torch.ones(100, dtype=dtype), codec.payload_bytes(100), 100)


@pytest.mark.parametrize("name", by_name)
def test_wrong_sizes_are_refused_and_nothing_is_written(name: str) -> None:
    codec = make(name)
    right = codec.payload_bytes(1000)
    _assert_refused(codec, values(1000), right + 16, 1000)
    _assert_refused(codec, values(1000), max(0, right - 16), 1000)
    _assert_refused(codec, values(1000), right, 999)
    _assert_refused(codec, values(2000)[::2], right, 1000)
    out = torch.full((1000,), 7.0)
    with pytest.raises(CodecError):
        codec.decode(torch.zeros(right + 16, dtype=torch.uint8), out)
    assert (out == 7).all(), "values were written in spite of the error"


def _assert_refused(codec: Any, x: Tensor, nbytes: int, residual_numel: int) -> None:
    out, residual = torch.full((nbytes,), 0xA5, dtype=torch.uint8), torch.full((residual_numel,), 3.0)
    with pytest.raises(CodecError):
        codec.encode(x, out, feedback=Feedback(residual), **({"random": SOURCE} if needs_random(codec) else {}))
    assert (out == 0xA5).all(), "bytes were written in spite of the error"
    assert (residual == 3).all(), "the residual was changed in spite of the error"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("name", by_name)
def test_what_is_not_finite_is_seen_where_it_is_decoded(name: str, bad: float) -> None:
    codec = make(name, ratio=1.0)
    for position in (0, 700):
        x = values(2000)
        x[position] = bad
        got = decoded(codec, encoded(codec, x), 2000)
        assert not got[position].isfinite(), f"{bad} at {position} became {float(got[position])}"
        block = getattr(codec, "block", 1) or 2000
        first = position // block * block
        others = torch.cat([got[:first], got[first + block :]])
        assert others.isfinite().all(), "other blocks are not finite either"


@pytest.mark.parametrize("name", by_name)
def test_sums_are_those_of_the_parts(name: str) -> None:
    codec, numel = make(name), 777
    rows = [encoded(codec, values(numel, seed)) for seed in range(3)]
    parts = [decoded(codec, row, numel) for row in rows]
    total = torch.full((numel,), 7.0)
    codec.decode_sum(torch.stack(rows), total, divisor=2.0)
    torch.testing.assert_close(total, (parts[0] + parts[1] + parts[2]) / 2, rtol=1e-6, atol=1e-6)
    added = values(numel, 9)
    expected = added + 0.5 * parts[0]
    codec.decode_add(rows[0], added, weight=0.5)
    torch.testing.assert_close(added, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", by_name)
def test_the_default_dtype_and_the_global_generators_are_the_users(name: str) -> None:
    codec, x = make(name), values(1000)
    plain = encoded(codec, x)
    expected = decoded(codec, plain, 1000)
    before = (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate())  # type: ignore[index]
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(encoded(codec, x), plain)
        assert torch.equal(decoded(codec, plain, 1000), expected)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()  # type: ignore[index]
    assert random.getstate() == before[2]


@pytest.mark.parametrize("name", [n for n in BLOCK if by_name[n].rounds_stochastically])  # type: ignore[union-attr]
def test_stochastic_rounding_follows_its_seed_alone(name: str) -> None:
    codec, x = make(name), values(1000)
    outs = [torch.empty(codec.payload_bytes(1000), dtype=torch.uint8) for _ in range(3)]
    for out, seed in zip(outs, (1, 1, 2), strict=True):
        codec.encode(x, out, random=Random(seed=seed))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2]), "another seed rounds identically"
