"""Every instruction set against the NumPy reference, byte for byte."""

from __future__ import annotations

import multiprocessing
import os
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.errors import CodecError
from commlib.kernels import native, native_codecs, reference_ops
from commlib.kernels.codec_table import BLOCK_ROWS
from commlib.kernels.native_codecs import Feedback, Random
from commlib.kernels.reference import BLOCK_CODECS, F32, Floats, Stream
from tests.waiting import LIMIT_S

IDS = {row.name: row.id for row in BLOCK_ROWS}
STOCHASTIC = tuple(row.name for row in BLOCK_ROWS if row.rounds_stochastically)
SLOW = os.environ.get("COMMLIB_SLOW_TESTS") == "1"
CASES = 10_000 if SLOW else 300
SIZES = (0, 1, 2, 3, 7, 15, 31, 32, 33, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000, 5000)


def special_values() -> Floats:
    """Numbers at which something changes: limits of formats, ties, denormals, infinities and NaN with payloads."""
    numbers = [0.0, 1.0, 1.5, 2.0, 6.0, 127.0, 127.5, 448.0, 464.0, 480.0, 57344.0, 61440.0, 65504.0, 65520.0, 1e8]
    numbers += [2.0**-100, 2.0**-101, 2.0**-126, 2.0**-149, 2.0**127, 1.7e38, 3.4e38, 3.389e38, np.inf, 1e-7]
    positive = np.array(numbers, F32)
    odd = np.array([0x7FC00001, 0xFFC00000, 0x7F800001, 0x00400000, 0x0D7FFFFF, 0x7EFFFFFF], np.uint32).view(F32)
    return np.concatenate([positive, -positive, odd])


def inputs(rng: np.random.Generator, numel: int) -> list[tuple[str, Floats]]:
    normal = rng.standard_normal(numel).astype(F32)
    special = special_values()
    wild = rng.integers(0, 2**32, numel, dtype=np.uint64).astype(np.uint32).view(F32)
    spread = (normal.astype(np.float64) * 2.0 ** rng.integers(-149, 126, numel)).astype(F32)
    sprinkled = normal.copy()
    sprinkled[rng.random(numel) < 0.004] = np.nan
    grid = (rng.integers(-300, 300, numel) / 4).astype(F32)
    return [
        ("normal", normal),
        ("bits", wild),
        ("spread", spread),
        ("some NaN", sprinkled),
        ("ties", grid),
        ("constant", np.full(numel, 0.1, F32)),
        ("zeros", np.where(rng.random(numel) < 0.5, F32(0), F32(-0.0))),
        ("offset", (normal * F32(1e-3) + F32(1e8)).astype(F32)),
        ("tiny", (normal * F32(2.0**-101)).astype(F32)),
        ("denormal", (normal * F32(2.0**-130)).astype(F32)),
        ("huge", (normal * F32(1e37)).astype(F32)),
        ("special", rng.choice(special, numel) if numel else special[:0]),
    ]


def buffer(nbytes: int, fill: int = 0xA5) -> torch.Tensor:
    return torch.full((nbytes,), fill, dtype=torch.uint8)


def encode(name: str, x: Floats, **options: object) -> np.ndarray:
    out = buffer(native_codecs.payload_bytes(IDS[name], len(x)))
    native_codecs.encode(IDS[name], torch.from_numpy(x), out, **options)
    return out.numpy()


def decode(name: str, payload: np.ndarray, numel: int) -> Floats:
    out = torch.full((numel,), 7.0)
    native_codecs.decode(IDS[name], torch.from_numpy(payload), out)
    return out.numpy()


def same(first: Floats, second: Floats) -> None:
    np.testing.assert_array_equal(first.view(np.uint32), second.view(np.uint32))


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_bytes_and_values_are_those_of_the_reference(name: str, isa: str) -> None:
    rng, codec = np.random.default_rng(1), BLOCK_CODECS[name]
    for numel in SIZES:
        for label, x in inputs(rng, numel):
            expected = codec.encode(x)
            np.testing.assert_array_equal(encode(name, x), expected, err_msg=f"{label}, {numel}")
            same(decode(name, expected, numel), codec.decode(expected, numel))


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_any_bytes_decode_as_the_reference_says(name: str, isa: str) -> None:
    rng, codec = np.random.default_rng(2), BLOCK_CODECS[name]
    for numel in SIZES:
        payload = rng.integers(0, 256, codec.sections(numel)[3], dtype=np.uint8)
        same(decode(name, payload, numel), codec.decode(payload, numel))


@pytest.mark.parametrize("name", STOCHASTIC)
def test_stochastic_rounding_draws_the_reference_s_numbers(name: str, isa: str) -> None:
    rng = np.random.default_rng(3)
    for numel in SIZES:
        for offset in (0, 5, 2**35 + 3):
            stream = Stream(seed=0x1234_5678_9ABC_DEF0, step=7, rank=3, stage=2, offset=offset)
            source = Random(stream.seed, stream.step, stream.rank, stream.stage, [(0, offset)])
            for label, x in inputs(rng, numel):
                expected = BLOCK_CODECS[name].encode(x, stream)
                np.testing.assert_array_equal(encode(name, x, random=source), expected, err_msg=f"{label}, {numel}")


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_error_feedback_is_the_reference_s(name: str, isa: str) -> None:
    rng, codec = np.random.default_rng(4), BLOCK_CODECS[name]
    for numel in (0, 1, 300, 1025):
        for beta, gamma in ((1.0, 1.0), (0.9, 1.1)):
            for label, x in inputs(rng, numel):
                residual = rng.standard_normal(numel).astype(F32)
                payload, expected = reference_ops.encode_with_feedback(codec, x, residual, beta, gamma)
                own = torch.from_numpy(residual.copy())
                got = encode(name, x, feedback=Feedback(own, beta, gamma))
                np.testing.assert_array_equal(got, payload, err_msg=f"{label}, {numel}")
                same(own.numpy(), expected)


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_sums_are_in_rank_order(name: str, isa: str) -> None:
    rng, codec, numel = np.random.default_rng(5), BLOCK_CODECS[name], 700
    for scale in (1.0, 1e36):
        xs = [rng.standard_normal(numel).astype(F32) * F32(scale) for _ in range(5)]
        payloads = np.stack([codec.encode(x) for x in xs])
        expected = reference_ops.decode_sum([codec.decode(p, numel) for p in payloads], 5.0)
        out = torch.empty(numel)
        native_codecs.decode_sum(IDS[name], torch.from_numpy(payloads), out, divisor=5.0)
        same(out.numpy(), expected)
        again = buffer(payloads.shape[1])
        native_codecs.encode_sum(IDS[name], torch.from_numpy(payloads), numel, again, divisor=5.0)
        np.testing.assert_array_equal(again.numpy(), codec.encode(expected))
        added = torch.from_numpy(xs[1].copy())
        native_codecs.decode_add(IDS[name], torch.from_numpy(payloads[0]), added, weight=0.3)
        same(added.numpy(), reference_ops.decode_add(xs[1], codec.decode(payloads[0], numel), 0.3))


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_sums_of_any_bytes_are_the_reference_s(name: str, isa: str) -> None:
    rng, codec, numel = np.random.default_rng(7), BLOCK_CODECS[name], 1100  # 4 whole blocks of 256, and a short one
    size = codec.sections(numel)[3]
    for count, zeros in [*[(count, False) for count in (1, 2, 9, 10, 19) * 6], (3, True)]:
        payloads = np.zeros((count, size), dtype=np.uint8)
        if not zeros:
            payloads = rng.integers(0, 256, payloads.shape, dtype=np.uint8)
        decoded = [codec.decode(payload, numel) for payload in payloads]
        out, again = torch.empty(numel), buffer(size)
        native_codecs.decode_sum(IDS[name], torch.from_numpy(payloads), out, divisor=4.0)
        native_codecs.encode_sum(IDS[name], torch.from_numpy(payloads), numel, again, divisor=4.0)
        added = torch.from_numpy(rng.choice(special_values(), numel))
        with np.errstate(all="ignore"):
            expected = reference_ops.decode_sum(decoded, 4.0)
            same(out.numpy(), expected)
            np.testing.assert_array_equal(again.numpy(), codec.encode(expected))
            expected = reference_ops.decode_add(added.numpy().copy(), decoded[0], -0.3)
        native_codecs.decode_add(IDS[name], torch.from_numpy(payloads[0]), added, weight=-0.3)
        same(added.numpy(), expected)


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_what_exceeds_the_caches_is_the_same(name: str) -> None:
    numel, piece, count = 1 << 24, 1 << 18, 8
    payload, out = buffer(native_codecs.payload_bytes(IDS[name], numel)), torch.empty(numel)
    part, expected = buffer(native_codecs.payload_bytes(IDS[name], piece)), torch.empty(piece)

    def expect_pieces_of_the_same() -> None:
        native_codecs.decode(IDS[name], payload, out)
        native_codecs.decode(IDS[name], part, expected)
        assert torch.equal(out.view(-1, piece), expected.expand(numel // piece, -1))

    x = torch.randn(piece)
    native_codecs.encode(IDS[name], x.repeat(numel // piece), payload)
    native_codecs.encode(IDS[name], x, part)
    expect_pieces_of_the_same()
    native_codecs.encode_sum(IDS[name], payload.repeat(count, 1), numel, payload, divisor=3.0)
    native_codecs.encode_sum(IDS[name], part.repeat(count, 1), piece, part, divisor=3.0)
    expect_pieces_of_the_same()


def test_casts_are_the_reference_s(isa: str) -> None:
    rng = np.random.default_rng(6)
    for numel in SIZES:
        for _, x in inputs(rng, numel):
            for name, to, back in (
                ("bf16", reference_ops.cast_to_bf16, reference_ops.cast_from_bf16),
                ("fp16", reference_ops.cast_to_fp16, reference_ops.cast_from_fp16),
            ):
                expected = to(x)
                np.testing.assert_array_equal(encode(name, x), expected)
                same(decode(name, expected, numel), back(expected, numel))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_are_cast_first_and_last(dtype: torch.dtype, isa: str) -> None:
    x = torch.randn(1000, dtype=torch.float64).to(dtype)
    plain = x.float().numpy()
    for name in BLOCK_CODECS:
        payload = buffer(native_codecs.payload_bytes(IDS[name], 1000))
        native_codecs.encode(IDS[name], x, payload)
        np.testing.assert_array_equal(payload.numpy(), BLOCK_CODECS[name].encode(plain))
        out = torch.empty(1000, dtype=dtype)
        native_codecs.decode(IDS[name], payload, out)
        assert torch.equal(out, torch.from_numpy(BLOCK_CODECS[name].decode(payload.numpy(), 1000)).to(dtype))


@pytest.mark.timeout(1800)
@settings(deadline=None, max_examples=CASES)
@given(
    st.sampled_from(native.supported_isas()),
    st.sampled_from(sorted(BLOCK_CODECS)),
    st.integers(0, 600),
    st.integers(0, 2**31),
    st.integers(-120, 110),
    st.booleans(),
)
def test_any_floats(isa: str, name: str, numel: int, seed: int, exponent: int, feeds: bool) -> None:
    rng, codec = np.random.default_rng(seed), BLOCK_CODECS[name]
    x = (rng.standard_normal(numel) * 2.0 ** (exponent + rng.integers(-8, 8, numel))).astype(F32)
    x[rng.random(numel) < rng.choice([0, 0.001])] = rng.choice(special_values())
    before = native.isa()
    native.load().select_isa(isa)
    try:
        if not feeds:
            expected = codec.encode(x)
            np.testing.assert_array_equal(encode(name, x), expected)
            same(decode(name, expected, numel), codec.decode(expected, numel))
            return
        residual = (rng.standard_normal(numel) * 2.0**exponent).astype(F32)
        payload, rest = reference_ops.encode_with_feedback(codec, x, residual, 0.5, 1.0)
        own = torch.from_numpy(residual.copy())
        np.testing.assert_array_equal(encode(name, x, feedback=Feedback(own, 0.5, 1.0)), payload)
        same(own.numpy(), rest)
    finally:
        native.load().select_isa(before)


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_threads_and_chunks_change_nothing(name: str) -> None:
    x, chunk = torch.randn(300_000), 65_000
    whole = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        out = buffer(native_codecs.buffer_bytes(IDS[name], x.numel(), chunk))
        native_codecs.encode(IDS[name], x, out, chunk=chunk)
        back = torch.empty_like(x)
        native_codecs.decode(IDS[name], out, back, chunk=chunk)
        whole.append((out, back))
    torch.set_num_threads(1)
    assert torch.equal(whole[0][0], whole[1][0])
    assert torch.equal(whole[0][1], whole[1][1])
    last = x[4 * chunk :]
    distance = native_codecs.payload_bytes(IDS[name], chunk)
    np.testing.assert_array_equal(whole[0][0][4 * distance :].numpy(), encode(name, last.numpy()))


def test_random_numbers_follow_the_segments() -> None:
    x = np.linspace(-1, 1, 1000, dtype=F32)
    whole = encode("int8", x, random=Random(9, segments=[(0, 100), (400, 500), (700, 800)]))
    np.testing.assert_array_equal(whole, encode("int8", x, random=Random(9, segments=[(0, 100)])))
    moved = encode("int8", x, random=Random(9, segments=[(0, 100), (401, 7)]))
    assert not np.array_equal(whole, moved)


def test_bad_arguments_are_named() -> None:
    x, size = torch.randn(1000), native_codecs.payload_bytes(1, 1000)
    good = buffer(size)
    for message, call in {
        "x: expected torch.float32": lambda: native_codecs.encode(1, x.int(), good),
        "x: expected a contiguous tensor": lambda: native_codecs.encode(1, torch.randn(2000)[::2], good),
        f"out: expected {size} bytes": lambda: native_codecs.encode(1, x, buffer(size - 1)),
        "out: expected an address": lambda: native_codecs.encode(1, x, buffer(size + 16)[1 : size + 1]),
        "out: expected a dense tensor": lambda: native_codecs.encode(1, x, good.to_sparse()),
        "out: expected torch.uint8": lambda: native_codecs.encode(1, x, good.to(torch.int8)),
        "out and x: expected separate": lambda: native_codecs.decode(1, x.view(torch.uint8)[:size], x),
        "residual: expected 1000 elements": lambda: native_codecs.encode(1, x, good, feedback=Feedback(x[:9].clone())),
        "residual and x": lambda: native_codecs.encode(1, x, good, feedback=Feedback(x)),
        "divisor: expected": lambda: native_codecs.decode_sum(1, good.view(1, -1), x, divisor=0.0),
        "payloads: expected the shape": lambda: native_codecs.decode_sum(1, good, x),
        "chunk: expected": lambda: native_codecs.encode(1, x, good, chunk=0),
        "x: expected a tensor": lambda: native_codecs.encode(1, x.numpy(), good),
        "codec: expected": lambda: native_codecs.encode(99, x, good),
        "on the CPU": lambda: native_codecs.encode(1, x.to("meta"), good),
    }.items():
        with pytest.raises(CodecError, match="out and payload" if "out and x" in message else message):
            call()
    with pytest.raises(CodecError, match="seed"):
        Random(-1)
    with pytest.raises(CodecError, match="segments"):
        Random(0, segments=[(1, 0)])
    assert torch.equal(good, buffer(size)), "nothing may be written"


@pytest.mark.parametrize("name", ["int8", "int4", "onebit", "mxfp4"])
def test_large_tensors_that_are_written_past_the_caches(name: str, isa: str) -> None:
    numel = (36 << 20) // 4 + 77  # more than any machine's limit, and no multiple of a block
    x = torch.randn(numel)
    part = 512 * 1024
    whole = torch.full((native_codecs.payload_bytes(IDS[name], numel),), 0xA5, dtype=torch.uint8)
    native_codecs.encode(IDS[name], x, whole)
    out = torch.full((numel + 32,), 7.0)[16:-16]
    native_codecs.decode(IDS[name], whole, out)
    piece, small = torch.empty(part), buffer(native_codecs.payload_bytes(IDS[name], part))
    for first in range(0, numel - part, part):  # blocks do not depend on the rest of the tensor
        native_codecs.encode(IDS[name], x[first : first + part], small)
        native_codecs.decode(IDS[name], small, piece)
        assert torch.equal(piece, out[first : first + part])
    shifted = torch.empty(numel + 1)[1:]  # an address that only single elements are aligned to
    native_codecs.decode(IDS[name], whole, shifted)
    assert torch.equal(shifted, out)


def test_index_arithmetic_is_of_64_bits() -> None:
    numel = 2**31 + 257
    for name, idx in IDS.items():
        block = native_codecs.payload_bytes(idx, 1 << 20) - native_codecs.payload_bytes(idx, 1 << 19)
        expected = block * (numel // (1 << 19))
        got = native_codecs.payload_bytes(idx, numel)
        assert expected <= got < expected + block + 1024, name
        assert native_codecs.buffer_bytes(idx, numel, 1 << 20) > 2**27


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_more_elements_than_32_bits_count() -> None:
    name, numel = "int8", 2**31 + 257
    if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 8 << 30:
        pytest.skip("needs 8 GiB of free memory")
    x = torch.zeros(numel, dtype=torch.bfloat16)
    tail = torch.randn(1000).to(torch.bfloat16)
    x[-1000:] = tail
    out = torch.zeros(native_codecs.payload_bytes(IDS[name], numel), dtype=torch.uint8)
    native_codecs.encode(IDS[name], x, out)
    x.fill_(3)
    native_codecs.decode(IDS[name], out, x)
    assert not x[: 2**31 - 1000].any()
    error = (x[-1000:] - tail).float().abs().max()
    assert 0 < error < 0.02 * tail.float().abs().max()


def _encode_in_child(x: torch.Tensor, payload: torch.Tensor, out: torch.Tensor) -> None:
    native_codecs.encode(1, x, out)
    os._exit(0 if np.array_equal(out.numpy(), payload.numpy()) else 1)  # torch's own threads did not survive the fork


def test_a_fork_while_another_thread_encodes_leaves_the_child_able_to() -> None:
    x = torch.randn(1 << 20)
    payload = buffer(native_codecs.payload_bytes(1, x.numel()))
    native_codecs.encode(1, x, payload)
    own = torch.zeros_like(payload)
    torch.set_num_threads(2)
    stop = threading.Event()

    def keep_busy() -> None:
        out = torch.empty_like(payload)
        while not stop.is_set():
            native_codecs.encode(1, x, out)

    thread = threading.Thread(target=keep_busy)
    thread.start()
    try:
        for _ in range(8):
            child = multiprocessing.get_context("fork").Process(target=_encode_in_child, args=(x, payload, own))
            child.start()
            child.join(LIMIT_S)
            if child.is_alive():
                child.kill()
            assert child.exitcode == 0
    finally:
        stop.set()
        thread.join()
        torch.set_num_threads(1)
