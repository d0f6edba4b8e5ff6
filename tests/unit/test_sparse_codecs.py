"""topk, randomk and threshold on every instruction set against the NumPy reference, byte for byte."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.codecs import RandomK, Threshold, TopK
from commlib.errors import CodecError
from commlib.kernels import native_ops, native_sparse, reference_ops
from commlib.kernels.native_codecs import Feedback, Random
from commlib.kernels.reference import F32, Floats, Stream

CASES = 10_000 if os.environ.get("COMMLIB_SLOW_TESTS") == "1" else 300
LARGE = 300_000  # enough for the sampled threshold


def distributions(rng: np.random.Generator, numel: int) -> list[tuple[str, Floats]]:
    normal = rng.standard_normal(numel).astype(F32)
    rare = np.zeros(numel, F32)
    rare[rng.integers(0, max(numel, 1), numel // 50)] = 1.0
    hidden = normal * F32(1e-3)  # large values only where a regular sample does not look
    hidden[7::29] += 5
    bait = normal * F32(1e-3)  # large values only where it does look: too few reach the bound that it suggests
    for start in range(0, numel, max(1, numel // max(1, numel // 128 // 16))):
        bait[start : start + 16] += 5
    among_zeros = np.where(bait > 4, F32(5), F32(0))
    spoilt = bait.copy()
    spoilt[:: numel // 20 + 1] = np.inf
    wild = rng.integers(0, 2**32, numel, dtype=np.uint64).astype(np.uint32).view(F32)
    return [
        ("normal", normal),
        ("ascending", np.sort(np.abs(normal))),
        ("descending", np.sort(np.abs(normal))[::-1].copy()),
        ("all equal", np.full(numel, -2.5, F32)),
        ("zeros", np.zeros(numel, F32)),
        ("few values", rng.integers(-2, 3, numel).astype(F32)),
        ("rare", rare),
        ("hidden", hidden),
        ("bait", bait),
        ("bait among zeros", among_zeros),
        ("bait and infinities", spoilt),
        ("bits", wild),
        ("NaN of all kinds", all_kinds_of_nan(rng, numel)),
    ]


def small_and_large(small: tuple[int, ...], settings: list[tuple[float, ...]]) -> list[Any]:
    """Return sizes with settings as parameters of a test; of those of the large size all but the last are slow."""
    found = [pytest.param(numel, *each) for numel in small for each in settings]
    slow = [pytest.mark.slow] * (len(settings) - 1)
    return found + [
        pytest.param(LARGE, *each, marks=mark) for each, mark in itertools.zip_longest(settings, slow, fillvalue=())
    ]


def all_kinds_of_nan(rng: np.random.Generator, numel: int) -> Floats:
    """A third NaN, quiet and signalling, of both signs and any payload; a third infinities; the others numbers."""
    bits = rng.integers(0x7F800001, 0x80000000, numel).astype(np.uint32)
    bits = np.where(rng.random(numel) < 1 / 3, np.uint32(0x7F800000), bits) | rng.integers(0, 2, numel) << 31
    return np.where(rng.random(numel) < 1 / 3, rng.standard_normal(numel), bits.astype(np.uint32).view(F32)).astype(F32)


def sizes(numel: int) -> list[int]:
    return sorted({0, min(1, numel), numel // 100, numel // 3, numel})


def top_k(x: Floats, places: int, feedback: Feedback | None = None) -> np.ndarray:
    out = torch.full((native_sparse.payload_bytes(places),), 0xA5, dtype=torch.uint8)
    native_sparse.encode_top_k(torch.from_numpy(x), places, out, feedback)
    return out.numpy()


NAN_BITS = [0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FA00000, 0x7FC00001]


@pytest.mark.parametrize("kind", ["topk", "threshold", "randomk"])
@pytest.mark.parametrize("has_feedback", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_nan_is_the_same_on_the_wire(isa: str, kind: str, has_feedback: bool, dtype: torch.dtype) -> None:
    """7FC00000, whatever its payload; among them the first ones count, not those of large payloads."""
    x = torch.zeros(64, dtype=dtype)
    places = torch.arange(8) * 7 + 1
    x[places] = torch.from_numpy(np.array(NAN_BITS, np.uint32).view(F32)).to(dtype)
    codec = {"topk": TopK(4 / 64), "threshold": Threshold(1.0, 4 / 64), "randomk": RandomK(1.0)}[kind]
    out = torch.empty(codec.payload_bytes(64), dtype=torch.uint8)
    residual = torch.zeros(64)
    codec.encode(x, out, feedback=Feedback(residual) if has_feedback else None, random=Random(1))
    named, values = codec.indices(out, 64), codec.values(out, 64).view(torch.int32)
    if kind == "randomk":
        assert values[places].tolist() == [0x7FC00000] * 8
        assert values.count_nonzero() == 8
    else:
        assert named.tolist() == places[:4].tolist()
        assert values.tolist() == [0x7FC00000] * 4
    assert not residual.any(), "non-finite values do not change the residual"


@pytest.mark.parametrize("numel", [0, 1, 17, 1000, LARGE])
def test_top_k_is_exact_on_any_distribution(isa: str, numel: int) -> None:
    rng = np.random.default_rng(numel)
    for label, x in distributions(rng, numel):
        for places in sizes(numel):
            expected = reference_ops.sparse_payload(x, reference_ops.top_k(x, places), places)
            np.testing.assert_array_equal(top_k(x, places), expected, err_msg=f"{label}, {places} of {numel}")


@pytest.mark.parametrize(("numel", "beta", "gamma"), small_and_large((1, 1000), [(1.0, 1.0), (0.9, 1.5)]))
def test_top_k_with_error_feedback(isa: str, numel: int, beta: float, gamma: float) -> None:
    rng = np.random.default_rng(numel)
    for label, x in distributions(rng, numel):
        for places in sizes(numel):
            size = 0.0 if label == "bait among zeros" else 0.1  # elements that are 0 and may be sent
            residual = (rng.standard_normal(numel) * size).astype(F32)
            v = reference_ops.compensated(x, residual, beta)
            named = reference_ops.top_k(v, places)
            payload, expected = reference_ops.sparse_with_feedback(v, residual, named, places, gamma)
            own = torch.from_numpy(residual.copy())
            got = top_k(x, places, Feedback(own, beta, gamma))
            np.testing.assert_array_equal(got, payload, err_msg=f"{label}, {places} of {numel}")
            np.testing.assert_array_equal(own.numpy().view(np.uint32), expected.view(np.uint32), err_msg=label)


def with_threads(num_threads: int, run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        return run()
    finally:
        torch.set_num_threads(before)


def assert_threads_change_nothing(run: Callable[[], list[torch.Tensor]], label: str) -> None:
    for parallel, alone in zip(with_threads(3, run), with_threads(1, run), strict=True):
        np.testing.assert_array_equal(parallel.numpy().view(np.uint8), alone.numpy().view(np.uint8), err_msg=label)


@pytest.mark.parametrize("kind", ["top_k", "above", "random_k"])
def test_threads_do_not_change_an_encoding(kind: str) -> None:
    rng = np.random.default_rng(1)
    for label, x in distributions(rng, LARGE):
        tensor, residual = torch.from_numpy(x), torch.from_numpy((rng.standard_normal(LARGE) * 0.1).astype(F32))
        for places in (LARGE // 100, LARGE // 3):

            def encode(feedback: Feedback | None, tensor: torch.Tensor = tensor, places: int = places) -> torch.Tensor:
                out = torch.empty(native_sparse.payload_bytes(places), dtype=torch.uint8)
                if kind == "top_k":
                    native_sparse.encode_top_k(tensor, places, out, feedback)
                elif kind == "above":
                    native_sparse.encode_above(tensor, 1.5, places, out, feedback)
                else:
                    native_sparse.encode_random_k(tensor, places, out, Random(11, 3, 1, 2), feedback)
                return out

            def run(
                encode: Callable[[Feedback | None], torch.Tensor] = encode, residual: torch.Tensor = residual
            ) -> list[torch.Tensor]:
                own = residual.clone()
                return [encode(None), encode(Feedback(own)), own]

            assert_threads_change_nothing(run, f"{label}, {places}")


@pytest.mark.parametrize("places", [LARGE // 100, LARGE // 3, LARGE])
def test_threads_do_not_change_a_decoding(places: int) -> None:
    rng = np.random.default_rng(2)
    payloads = torch.from_numpy(np.stack([top_k(rng.standard_normal(LARGE).astype(F32), places) for _ in range(3)]))
    rare = torch.empty(native_sparse.payload_bytes(places), dtype=torch.uint8)  # most places are not used
    native_sparse.encode_above(torch.from_numpy(rng.standard_normal(LARGE).astype(F32)), 4.0, places, rare)
    payloads[1] = rare
    base = torch.from_numpy(rng.standard_normal(LARGE).astype(F32))

    def run() -> list[torch.Tensor]:
        summed, added, also_added = torch.full((LARGE,), 3.0), base.clone(), base.clone()
        native_sparse.decode_sum(payloads, places, summed, 3.0)
        native_sparse.decode_add(payloads[0], places, added, 0.3)
        native_sparse.decode_add(rare, places, also_added, 0.3)
        return [summed, added, also_added]

    assert_threads_change_nothing(run, "")
    decoded = [reference_ops.sparse_values(payload.numpy(), places, LARGE) for payload in payloads]
    expected = reference_ops.decode_sum(decoded, 3.0)
    np.testing.assert_array_equal(with_threads(3, run)[0].numpy().view(np.uint32), expected.view(np.uint32))


@pytest.mark.timeout(1800)
@settings(deadline=None, max_examples=CASES)
@given(st.integers(0, 400), st.floats(0, 1), st.integers(0, 2**31), st.sampled_from([1, 3, 1000]))
def test_top_k_of_anything(numel: int, part: float, seed: int, levels: int) -> None:
    rng, places = np.random.default_rng(seed), int(part * numel)
    x = (rng.integers(-levels, levels + 1, numel) / 7).astype(F32)
    expected = reference_ops.sparse_payload(x, reference_ops.top_k(x, places), places)
    np.testing.assert_array_equal(top_k(x, places), expected)


def test_threshold(isa: str) -> None:
    for numel in (0, 1, 1000, 70_000):
        rng = np.random.default_rng(numel)
        for label, x in distributions(rng, numel):
            for places in sizes(numel):
                for threshold in (1e-30, 1.0, 2.5):
                    residual = (rng.standard_normal(numel) * 0.1).astype(F32)
                    v = reference_ops.compensated(x, residual)
                    named = reference_ops.above(v, places, threshold)
                    payload, expected = reference_ops.sparse_with_feedback(v, residual, named, places)
                    own = torch.from_numpy(residual.copy())
                    out = torch.empty(native_sparse.payload_bytes(places), dtype=torch.uint8)
                    native_sparse.encode_above(torch.from_numpy(x), threshold, places, out, Feedback(own))
                    np.testing.assert_array_equal(out.numpy(), payload, err_msg=f"{label}, {places} of {numel}")
                    np.testing.assert_array_equal(own.numpy().view(np.uint32), expected.view(np.uint32))


def test_random_k(isa: str) -> None:
    for numel in (0, 1, 1000, 70_000):
        rng = np.random.default_rng(numel)
        x = rng.standard_normal(numel).astype(F32)
        for places in sizes(numel):
            stream = Stream(seed=11, step=3, rank=1, stage=2)
            named = reference_ops.random_k(numel, places, stream)
            assert len(np.unique(named)) == places
            residual = (rng.standard_normal(numel) * 0.1).astype(F32)
            v = reference_ops.compensated(x, residual)
            payload, expected = reference_ops.sparse_with_feedback(v, residual, named, places)
            own = torch.from_numpy(residual.copy())
            out = torch.empty(native_sparse.payload_bytes(places), dtype=torch.uint8)
            native_sparse.encode_random_k(torch.from_numpy(x), places, out, Random(11, 3, 1, 2), Feedback(own))
            np.testing.assert_array_equal(out.numpy(), payload)
            np.testing.assert_array_equal(own.numpy().view(np.uint32), expected.view(np.uint32))


def test_sums_and_additions(isa: str) -> None:
    rng, numel, places = np.random.default_rng(3), 5000, 300
    xs = [rng.standard_normal(numel).astype(F32) for _ in range(4)]
    xs[1][10], xs[2][20] = np.nan, -0.0
    payloads = np.stack([top_k(x, places) for x in xs])
    decoded = [reference_ops.sparse_values(payload, places, numel) for payload in payloads]
    out = torch.full((numel,), 3.0)
    native_sparse.decode_sum(torch.from_numpy(payloads), places, out, 4.0)
    expected = reference_ops.decode_sum(decoded, 4.0)
    np.testing.assert_array_equal(out.numpy().view(np.uint32), expected.view(np.uint32))
    added = torch.from_numpy(xs[0].copy())
    native_sparse.decode_add(torch.from_numpy(payloads[1]), places, added, 0.3)
    is_named = np.isin(np.arange(numel), reference_ops.top_k(xs[1], places))
    expected = np.where(is_named, reference_ops.decode_add(xs[0], decoded[1], 0.3), xs[0])
    np.testing.assert_array_equal(added.numpy().view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("divisor", [1.0, 3.0, -4.0])
@pytest.mark.parametrize("numel", [0, 1, 63, 4096, 10_001])
def test_sums_of_any_length(isa: str, numel: int, divisor: float) -> None:
    """Elements that nothing names become 0 / divisor."""
    rng = np.random.default_rng(numel)
    for count, places in ((1, numel), (3, numel // 20), (3, numel // 2)):
        xs = [rng.integers(-2, 3, numel).astype(F32) for _ in range(count)]
        payloads = np.stack([top_k(x, places) for x in xs])
        out = torch.full((numel,), 3.0)
        native_sparse.decode_sum(torch.from_numpy(payloads), places, out, divisor)
        decoded = [reference_ops.sparse_values(payload, places, numel) for payload in payloads]
        expected = reference_ops.decode_sum(decoded, divisor)
        np.testing.assert_array_equal(out.numpy().view(np.uint32), expected.view(np.uint32), err_msg=f"{places=}")


@pytest.mark.parametrize(
    ("numel", "decay", "factor", "gamma"),
    small_and_large((0, 1, 17, 1000), [(0.9, 1.0, 1.0), (0.99, 1 / 1024, 1.0), (0.0, -0.3, 1.5)]),
)
def test_a_momentum_is_brought_up_to_date_and_encoded(
    isa: str, numel: int, decay: float, factor: float, gamma: float
) -> None:
    rng = np.random.default_rng(numel)
    for label, x in distributions(rng, numel):
        for places in sizes(numel):
            size = 0.0 if label == "bait among zeros" else 0.1
            velocity, residual = ((rng.standard_normal(numel) * size).astype(F32) for _ in range(2))
            u = reference_ops.accumulate(velocity, x, decay, factor)
            v = reference_ops.compensated(u, residual)
            named = reference_ops.top_k(v, places)
            payload, expected = reference_ops.sparse_with_feedback(v, residual, named, places, gamma)
            u[named] = 0.0
            got_u, got_e = torch.from_numpy(velocity), torch.from_numpy(residual)
            out = torch.empty(native_sparse.payload_bytes(places), dtype=torch.uint8)
            feedback = Feedback(got_e, gamma=gamma)
            is_finite = native_ops.encode_momentum(
                torch.from_numpy(x), got_u, places, out, feedback, decay=decay, factor=factor
            )
            assert is_finite == np.isfinite(x).all()
            np.testing.assert_array_equal(out.numpy(), payload, err_msg=f"{label}, {places} of {numel}")
            np.testing.assert_array_equal(got_u.numpy().view(np.uint32), u.view(np.uint32), err_msg=label)
            np.testing.assert_array_equal(got_e.numpy().view(np.uint32), expected.view(np.uint32), err_msg=label)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_momentum_leaves_out_what_is_not_finite(isa: str, dtype: torch.dtype) -> None:
    """The bits are those of the operations that other devices use, whatever the type and the number of threads."""
    places = LARGE // 100
    for spoilt in ([], [torch.nan], [torch.inf, -torch.inf]):
        gradient = torch.randn(LARGE).to(dtype)
        gradient[torch.randperm(LARGE)[: len(spoilt)]] = torch.tensor(spoilt, dtype=dtype)
        velocity, residual = torch.randn(LARGE), torch.randn(LARGE)
        expected_u, expected_e = velocity.clone(), residual.clone()
        expected_u.mul_(0.9).add_(torch.nan_to_num(gradient.float(), nan=0.0, posinf=0.0, neginf=0.0), alpha=1 / 1024)
        expected = torch.from_numpy(top_k(expected_u.numpy(), places, Feedback(expected_e)))
        expected_u[expected.view(torch.int32)[:places].long()] = 0.0

        def run(
            gradient: torch.Tensor = gradient, velocity: torch.Tensor = velocity, residual: torch.Tensor = residual
        ) -> list[torch.Tensor]:
            u, e = velocity.clone(), residual.clone()
            out = torch.empty(native_sparse.payload_bytes(places), dtype=torch.uint8)
            is_finite = native_ops.encode_momentum(gradient, u, places, out, Feedback(e), decay=0.9, factor=1 / 1024)
            return [out, u, e, torch.tensor(is_finite)]

        for num_threads in (1, 3):
            out, u, e, is_finite = with_threads(num_threads, run)
            assert is_finite == (not spoilt)
            assert torch.equal(out, expected)
            assert torch.equal(u, expected_u)
            assert torch.equal(e, expected_e)


def test_a_momentum_of_another_size_or_in_the_same_memory_is_refused() -> None:
    x, u, e, places = torch.randn(100), torch.randn(100), torch.randn(100), 10
    out = torch.empty(native_sparse.payload_bytes(places), dtype=torch.uint8)

    def encode(velocity: torch.Tensor, *, decay: float = 0.9, factor: float = 1.0) -> None:
        native_ops.encode_momentum(x, velocity, places, out, Feedback(e), decay=decay, factor=factor)

    before = [tensor.clone() for tensor in (x, u, e)]
    with pytest.raises(CodecError, match="velocity: expected 100 elements, got 99"):
        encode(u[1:])
    with pytest.raises(CodecError, match=r"velocity: expected torch\.float32"):
        encode(u.double())
    for shared in (x, e):
        with pytest.raises(CodecError, match="velocity and .*: expected separate memory"):
            encode(shared)
    with pytest.raises(CodecError, match="decay: expected"):
        encode(u, decay=float("nan"))
    with pytest.raises(CodecError, match="factor: expected"):
        encode(u, factor=float("inf"))
    assert all(map(torch.equal, before, (x, u, e)))


def test_damaged_indices_are_refused_and_nothing_is_written() -> None:
    x, places = np.arange(1, 101, dtype=F32), 10
    good = top_k(x, places)
    for place, index in ((0, 100), (9, 2**31), (5, 3), (0, 0xFFFFFFFF)):
        bad = good.copy()
        bad[4 * place : 4 * place + 4] = np.array([index], np.uint32).view(np.uint8)
        out = torch.full((100,), 5.0)
        with pytest.raises(CodecError, match="payload 0: expected ascending indices below 100"):
            native_sparse.decode_sum(torch.from_numpy(bad).view(1, -1), places, out)
        assert torch.equal(out, torch.full((100,), 5.0))


def test_damaged_indices_are_found_by_any_thread() -> None:
    places = LARGE // 3
    good = torch.from_numpy(top_k(np.random.default_rng(4).standard_normal(LARGE).astype(F32), places))
    out = torch.full((LARGE,), 5.0)
    for place in range(8192, places, 8192):  # where threads begin
        for index in (LARGE, int(good.view(torch.int32)[place - 1])):  # outside, and the one before again
            bad = good.clone()
            bad.view(torch.int32)[place] = index

            def run(bad: torch.Tensor = bad) -> list[torch.Tensor]:
                with pytest.raises(CodecError, match="payload 0: expected ascending indices"):
                    native_sparse.decode_add(bad, places, out)
                return []

            with_threads(3, run)
    assert torch.equal(out, torch.full((LARGE,), 5.0))


def test_bad_arguments_are_named() -> None:
    x = torch.randn(100)
    out = torch.empty(native_sparse.payload_bytes(10), dtype=torch.uint8)
    with pytest.raises(CodecError, match=r"places: expected 0\.\.100"):
        native_sparse.encode_top_k(x, 101, out)
    with pytest.raises(CodecError, match="out: expected 96 bytes"):
        native_sparse.encode_top_k(x, 10, out[:-16])
    for threshold in (0.0, -1.0, float("nan"), float("inf"), 1e39):
        with pytest.raises(CodecError, match="threshold: expected"):
            native_sparse.encode_above(x, threshold, 10, out)
    with pytest.raises(CodecError, match="residual: expected 100 elements"):
        native_sparse.encode_top_k(x, 10, out, Feedback(torch.zeros(99)))
    with pytest.raises(CodecError, match="divisor"):
        native_sparse.decode_sum(out.view(1, -1), 10, x, 0.0)
