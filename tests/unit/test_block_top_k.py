"""blocktopk on every instruction set against the NumPy reference, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.codecs import BlockTopK, Feedback, open_envelope, seal
from commlib.errors import CodecError
from commlib.kernels import meta, reference_ops
from commlib.kernels.reference import F32, Floats
from tests.unit.test_sparse_codecs import CASES, assert_threads_change_nothing, distributions

NUMELS = (0, 1, 3, 63, 64, 65, 4095, 4096, 4097, 13_000)
SEVERAL_PARTS = 300_000


def encoded(codec: BlockTopK, x: Floats | torch.Tensor, feedback: Feedback | None = None) -> np.ndarray:
    tensor = torch.as_tensor(x)
    out = torch.full((codec.payload_bytes(tensor.numel()),), 0xA5, dtype=torch.uint8)
    codec.encode(tensor, out, feedback=feedback)
    return out.numpy()


def decoded(codec: BlockTopK, payload: np.ndarray, numel: int) -> np.ndarray:
    out = torch.full((numel,), 3.0)
    codec.decode(torch.from_numpy(payload), out)
    return out.numpy()


def bits(values: Floats) -> np.ndarray:
    return np.ascontiguousarray(values, F32).view(np.uint32)


@pytest.mark.parametrize("kept", [1, 5, 64, 128, 129, 4096])
@pytest.mark.parametrize(("beta", "gamma"), [(1.0, 1.0), (0.95, 1.5)])
def test_bytes_values_and_residuals_are_the_references(isa: str, kept: int, beta: float, gamma: float) -> None:
    codec = BlockTopK(kept)
    for numel in NUMELS:
        rng = np.random.default_rng(numel)
        for label, x in distributions(rng, numel):
            residual = (rng.standard_normal(numel) * 0.1).astype(F32)
            v = reference_ops.compensated(x, residual, beta)
            expected = reference_ops.block_top_k_payload(v, kept)
            values = reference_ops.block_top_k_values(expected, kept, numel)
            own = torch.from_numpy(residual.copy())
            got = encoded(codec, x, Feedback(own, beta, gamma))
            np.testing.assert_array_equal(got, expected, err_msg=f"{label}, {numel}")
            rest = reference_ops.new_residual(v, values, residual, gamma)
            np.testing.assert_array_equal(bits(own.numpy()), bits(rest), err_msg=f"{label}, {numel}")
            np.testing.assert_array_equal(bits(decoded(codec, got, numel)), bits(values), err_msg=f"{label}, {numel}")
            plain = reference_ops.block_top_k_payload(x, kept)
            np.testing.assert_array_equal(encoded(codec, x), plain, err_msg=f"{label}, {numel}")


@pytest.mark.timeout(1800)
@settings(deadline=None, max_examples=CASES)
@given(st.integers(0, 9000), st.integers(1, 300), st.integers(0, 2**31), st.sampled_from([1, 3, 1000]))
def test_an_encoding_of_anything_is_the_references(numel: int, kept: int, seed: int, levels: int) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.integers(-levels, levels + 1, numel) / 7).astype(F32)
    np.testing.assert_array_equal(encoded(BlockTopK(kept), x), reference_ops.block_top_k_payload(x, kept))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_count_as_their_values(isa: str, dtype: torch.dtype) -> None:
    x = torch.randn(9000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    np.testing.assert_array_equal(encoded(BlockTopK(), x), encoded(BlockTopK(), x.float()))


def test_the_largest_of_each_block_are_named_with_their_sign_and_the_mean_of_their_class() -> None:
    x = np.random.default_rng(0).standard_normal(10_000).astype(F32)
    values = decoded(BlockTopK(64), encoded(BlockTopK(64), x), 10_000)
    for start in range(0, 10_000, 4096):
        block, got = x[start : start + 4096], values[start : start + 4096]
        named = np.flatnonzero(got)
        assert named.tolist() == sorted(np.argsort(-np.abs(block), kind="stable")[:64].tolist())
        assert (np.sign(got[named]) == np.sign(block[named])).all()
        sent, exact = np.abs(got[named]), np.abs(block[named]).astype(np.float64)
        is_high = exact >= exact.mean()
        for chosen in (is_high, ~is_high):
            np.testing.assert_allclose(sent[chosen], exact[chosen].mean(), rtol=2.0**-8)


def test_what_is_zero_stays_zero() -> None:
    x = np.zeros(4096, F32)
    x[[7, 9, 4000]] = 1.0, -3.0, 2.0
    expected = np.zeros(4096, F32)
    expected[[7, 9, 4000]] = 2.0, -2.0, 2.0
    residual = torch.zeros(4096)
    payload = encoded(BlockTopK(), x, Feedback(residual))
    np.testing.assert_array_equal(bits(decoded(BlockTopK(), payload, 4096)), bits(expected))
    np.testing.assert_array_equal(residual.numpy(), x - expected)


def test_the_bytes_follow_from_the_number_of_elements() -> None:
    codec = BlockTopK()
    assert codec.payload_bytes(0) == 0
    for blocks in (1, 2, 100, 1000):
        exact = blocks * (4 + 64 * (12 + 2) // 8)
        assert exact <= codec.payload_bytes(blocks * 4096) <= exact + 3 * 15
    assert codec.payload_bytes(1) == 48, "levels, one index and one code, each at a multiple of 16 bytes"
    assert 4 * (1 << 20) / codec.payload_bytes(1 << 20) == pytest.approx(141, rel=3e-3)


def test_a_block_that_is_not_finite_is_nan_where_it_is_named_and_keeps_these_residuals(isa: str) -> None:
    for bad in (np.nan, np.inf, -np.inf, 2.0**127, 1.8 * 2.0**126):  # of the last one 64 have an infinite sum
        rng = np.random.default_rng(2)
        x = np.tile((rng.standard_normal(4096)).astype(F32), 2)
        x[5000:5064] = bad
        residual = torch.full((8192,), 0.25)
        payload = encoded(BlockTopK(), x, Feedback(residual, 0.0))
        values = decoded(BlockTopK(), payload, 8192)
        assert np.isfinite(values[:4096]).all()
        assert np.flatnonzero(np.isnan(values)).tolist() == list(range(5000, 5064))
        assert (residual[5000:5064] == 0.25).all()
        np.testing.assert_array_equal(residual.numpy()[4096:5000], x[4096:5000])


def test_threads_change_nothing() -> None:
    rng = np.random.default_rng(1)
    for label, x in distributions(rng, SEVERAL_PARTS):
        residual = torch.from_numpy((rng.standard_normal(SEVERAL_PARTS) * 0.1).astype(F32))

        def run(x: Floats = x, residual: torch.Tensor = residual) -> list[torch.Tensor]:
            own, added, total = residual.clone(), residual.clone(), residual.clone()
            payload = torch.from_numpy(encoded(BlockTopK(), x, Feedback(own)))
            BlockTopK().decode_add(payload, added, weight=0.3)
            BlockTopK().decode_sum(torch.stack([payload, payload]), total, divisor=3.0)
            return [payload, own, added, total]

        assert_threads_change_nothing(run, label)


@pytest.mark.parametrize("divisor", [1.0, 3.0, -4.0])
def test_sums_and_additions(isa: str, divisor: float) -> None:
    rng, codec = np.random.default_rng(3), BlockTopK(700)
    for numel in (0, 1, 4096, 10_001):
        xs = [rng.integers(-2, 3, numel).astype(F32) for _ in range(3)]
        payloads = np.stack([encoded(codec, x) for x in xs])
        values = [reference_ops.block_top_k_values(payload, 700, numel) for payload in payloads]
        out = torch.full((numel,), 3.0)
        codec.decode_sum(torch.from_numpy(payloads), out, divisor=divisor)
        np.testing.assert_array_equal(bits(out.numpy()), bits(reference_ops.decode_sum(values, divisor)))
        added = torch.from_numpy(xs[0].copy())
        codec.decode_add(torch.from_numpy(payloads[1]), added, weight=0.3)
        np.testing.assert_array_equal(bits(added.numpy()), bits(reference_ops.decode_add(xs[0], values[1], 0.3)))


@pytest.mark.parametrize(("place", "index"), [(0, 4095), (1, 0), (63, 0), (127, 904)])
def test_damaged_indices_are_refused_and_nothing_is_written(place: int, index: int) -> None:
    """Equal to the one before, below it, and outside of the shorter last block."""
    payload = encoded(BlockTopK(), np.random.default_rng(4).standard_normal(5000).astype(F32))
    at = 16 + place // 2 * 3  # behind the levels of two blocks
    pair = int.from_bytes(payload[at : at + 3].tobytes(), "little")
    pair = (pair & 0xFFF) | index << 12 if place % 2 else (pair & 0xFFF000) | index
    payload[at : at + 3] = np.frombuffer(pair.to_bytes(3, "little"), np.uint8)
    out = torch.full((5000,), 5.0)
    with pytest.raises(CodecError, match="payload 0: expected ascending indices within each block"):
        BlockTopK().decode(torch.from_numpy(payload), out)
    rows = torch.from_numpy(np.stack([encoded(BlockTopK(), np.ones(5000, F32)), payload]))
    with pytest.raises(CodecError, match="payload 1: expected ascending indices"):
        BlockTopK().decode_sum(rows, out)
    assert torch.equal(out, torch.full((5000,), 5.0))


def test_the_header_of_a_file_has_the_places_of_a_full_block() -> None:
    codec, x = BlockTopK(100), np.random.default_rng(5).standard_normal(9000).astype(F32)
    data = seal(codec, torch.from_numpy(encoded(codec, x)), 9000)
    envelope = open_envelope(data)
    assert (envelope.codec, envelope.numel, envelope.places) == (16, 9000, 100)
    assert envelope.payload.numpy().tobytes() == encoded(codec, x).tobytes()


def test_bad_arguments_are_named() -> None:
    for kept in (0, 4097):
        with pytest.raises(CodecError, match=r"kept: expected 1\.\.4096"):
            BlockTopK(kept)
    x, codec = torch.randn(100), BlockTopK()
    out = torch.empty(codec.payload_bytes(100), dtype=torch.uint8)
    with pytest.raises(CodecError, match=f"out: expected {out.numel()} bytes"):
        codec.encode(x, out[:-16])
    with pytest.raises(CodecError, match="residual: expected 100 elements"):
        codec.encode(x, out, feedback=Feedback(torch.zeros(99)))
    with pytest.raises(CodecError, match="divisor"):
        codec.decode_sum(out.view(1, -1), x, divisor=0.0)


def test_the_work_on_meta_tensors_is_reported() -> None:
    codec, kernels = BlockTopK(), []
    x, residual = (torch.empty(10_000, device="meta") for _ in range(2))
    out = torch.empty(codec.payload_bytes(10_000), dtype=torch.uint8, device="meta")
    with meta.reporting(kernels.append):
        codec.encode(x, out, feedback=Feedback(residual))
        codec.decode_sum(out.expand(3, -1).contiguous(), x)
        codec.decode_add(out, x)
    places = 3 * 64
    assert [kernel.nbytes for kernel in kernels] == [
        3 * x.nbytes + out.nbytes,
        3 * out.nbytes + x.nbytes + 8 * 3 * places,
        out.nbytes + 8 * places,
    ]
