"""The CUDA kernels, run thread by thread on the CPU, against the NumPy reference, byte for byte.

This is no run on a GPU (tests/gpu is): it shows that the kernels' logic, their arguments and their grids are right.
Threads run in ascending and in descending order; what would depend on the order lacks a barrier.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.errors import CodecError
from commlib.kernels import (
    cuda,
    cuda_args,
    cuda_codecs,
    cuda_sparse,
    native_codecs,
    native_sparse,
    reference_ops,
)
from commlib.kernels.checks import CPU, Feedback, Random
from commlib.kernels.codec_table import BLOCK_BY_ID, TOP_K_BLOCK
from commlib.kernels.reference import BLOCK_CODECS, F32
from tests.cuda_emulation import cases, emulator, random_cases
from tests.thin import fast
from tests.unit.test_block_codecs import IDS, STOCHASTIC

pytestmark = [
    pytest.mark.skipif(emulator.compiler() is None, reason="no g++ to compile the emulation with"),
    pytest.mark.timeout(180),  # the first test of a codec compiles its kernels
]


#: One codec of each kind of packing, for the fast part; bytes and values are compared for all.
CHOSEN = ("int8", "uint8_minmax", "onebit", "mxfp4")


@pytest.fixture(params=["ascending", "descending"])
def threads(request: pytest.FixtureRequest) -> Iterator[emulator.Launches]:
    with emulator.emulated_cuda() as launches:
        launches.is_reversed = request.param == "descending"
        yield launches


@pytest.fixture
def emulated() -> Iterator[emulator.Launches]:
    with emulator.emulated_cuda() as launches:
        yield launches


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_bytes_and_values(name: str, threads: emulator.Launches) -> None:
    cases.check_bytes_and_values(name, CPU)
    assert threads.calls


@pytest.mark.parametrize("name", fast(BLOCK_CODECS, *CHOSEN))
def test_any_bytes_decode(name: str, emulated: emulator.Launches) -> None:
    cases.check_any_bytes(name, CPU)


@pytest.mark.parametrize("name", fast(STOCHASTIC, *CHOSEN))
def test_stochastic_rounding(name: str, threads: emulator.Launches) -> None:
    cases.check_stochastic(name, CPU)


@pytest.mark.parametrize("name", fast(STOCHASTIC, *CHOSEN))
def test_random_numbers_follow_the_segments(name: str, threads: emulator.Launches) -> None:
    cases.check_segments(name, CPU)


@pytest.mark.parametrize("name", fast(BLOCK_CODECS, *CHOSEN))
def test_error_feedback(name: str, threads: emulator.Launches) -> None:
    cases.check_feedback(name, CPU)


@pytest.mark.parametrize("name", fast(BLOCK_CODECS, *CHOSEN))
def test_sums(name: str, threads: emulator.Launches) -> None:
    cases.check_sums(name, CPU)


@pytest.mark.parametrize("name", fast(BLOCK_CODECS, *CHOSEN))
def test_types(name: str, emulated: emulator.Launches) -> None:
    cases.check_types(name, CPU)


@pytest.mark.parametrize("name", fast(BLOCK_CODECS, *CHOSEN))
def test_chunks(name: str, threads: emulator.Launches) -> None:
    cases.check_chunks(name, CPU)


@pytest.mark.parametrize("name", fast(BLOCK_CODECS, *CHOSEN))
def test_unaligned_tensors(name: str, emulated: emulator.Launches) -> None:
    cases.check_unaligned(name, CPU)


def test_casts(threads: emulator.Launches) -> None:
    cases.check_casts(CPU)


def test_rotation(threads: emulator.Launches) -> None:
    cases.check_rotation(CPU)
    cases.check_rotation_segments(CPU)


@pytest.mark.parametrize(  # compiling the kernels of a type takes seconds
    "dtype", [torch.float32, torch.bfloat16, *(pytest.param(t, marks=pytest.mark.slow) for t in cases.TYPES[2:])]
)
def test_top_k(dtype: torch.dtype, threads: emulator.Launches) -> None:
    for numel in (0, 1, 17, 1000, 30_000):
        cases.check_top_k(numel, CPU, dtype)


@pytest.mark.parametrize("room", [0, pytest.param(1 << 16, marks=pytest.mark.slow)])
def test_top_k_with_error_feedback(room: int, threads: emulator.Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with so little room that nearly equal magnitudes do not fit, and later passes read the tensor."""
    monkeypatch.setattr(cuda_sparse, "_FEW_CANDIDATES", room)
    for numel in (1, 1000, 30_000):
        cases.check_top_k(numel, CPU)
        cases.check_top_k_feedback(numel, CPU)
        cases.check_top_k_feedback(numel, CPU, 0.9, -1.5)


@pytest.mark.parametrize("room", [0, pytest.param(1 << 16, marks=pytest.mark.slow)])
def test_compaction_with_blocks_that_wait_for_each_other(
    room: int, emulated: emulator.Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_sparse, "_FEW_CANDIDATES", room)
    emulated.blocks_at_once = 4
    cases.check_top_k(30_000, CPU)
    cases.check_top_k_feedback(30_000, CPU)


def test_threshold(threads: emulator.Launches) -> None:
    for numel in (0, 1, 1000, 20_000):
        cases.check_threshold(numel, CPU)


def test_random_k(threads: emulator.Launches) -> None:
    for numel in (0, 1, 1000, 20_000):
        cases.check_random_k(numel, CPU)


def test_sparse_sums(threads: emulator.Launches) -> None:
    cases.check_sparse_sums(CPU)
    cases.check_many_payloads(CPU)


@pytest.mark.parametrize("kept", [1, 5, 64, 4096])
def test_block_top_k(kept: int, threads: emulator.Launches) -> None:
    cases.check_block_top_k(kept, CPU)


def test_block_top_k_of_another_type(threads: emulator.Launches) -> None:
    cases.check_block_top_k(64, CPU, torch.bfloat16)


def test_block_top_k_sums(threads: emulator.Launches) -> None:
    cases.check_block_top_k_sums(CPU)
    cases.check_block_top_k_damage(CPU)


def test_sizes_of_block_top_k_are_those_of_the_native_executor() -> None:
    for numel in (0, 1, 4095, 4096, 4097, 100_000, 2**33 + 5):
        for kept in (1, 3, 64, 4096):
            assert cuda_sparse.block_top_k_bytes(numel, kept) == native_sparse.block_top_k_bytes(numel, kept)


def test_damaged_payloads(threads: emulator.Launches) -> None:
    cases.check_damage(CPU)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(sorted(BLOCK_CODECS)), st.integers(0, 1200), st.integers(0, 2**31), st.integers(-120, 110))
def test_any_floats(name: str, numel: int, seed: int, exponent: int) -> None:
    rng, codec = np.random.default_rng(seed), BLOCK_CODECS[name]
    x = (rng.standard_normal(numel) * 2.0 ** (exponent + rng.integers(-8, 8, numel))).astype(F32)
    residual = (rng.standard_normal(numel) * 2.0**exponent).astype(F32)
    payload, rest = reference_ops.encode_with_feedback(codec, x, residual, 0.9)
    own = torch.from_numpy(residual.copy())
    with emulator.emulated_cuda():
        cases.equal(cases.encode(name, x, CPU, feedback=Feedback(own, 0.9)), payload)
        cases.equal(cases.decode(name, payload, numel, CPU).numpy(), codec.decode(payload, numel))
    cases.equal(own.numpy(), rest)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 6000), st.floats(0, 1), st.integers(0, 2**31), st.sampled_from([1, 3, 1000]))
def test_top_k_of_anything(numel: int, part: float, seed: int, levels: int) -> None:
    rng, places = np.random.default_rng(seed), int(part * numel)
    x = (rng.integers(-levels, levels + 1, numel) / 7).astype(F32)
    out = cases.payload_room(cuda_sparse.payload_bytes(places), CPU)
    with emulator.emulated_cuda():
        cuda_sparse.encode_top_k(torch.from_numpy(x), places, out.tensor)
    cases.equal(out.numpy(), reference_ops.sparse_payload(x, reference_ops.top_k(x, places), places))


@pytest.mark.parametrize("name", IDS)
def test_one_launch_for_all_chunks(name: str, emulated: emulator.Launches) -> None:
    x = torch.randn(5000)
    out = torch.empty(cuda_codecs.buffer_bytes(IDS[name], 5000, 300), dtype=torch.uint8)
    cuda_codecs.encode(IDS[name], x, out, chunk=300)
    assert len(emulated.calls) == (2 if name == "uint8_bagua" else 1)
    emulated.calls.clear()
    cuda_codecs.decode(IDS[name], out, x, chunk=300)
    assert len(emulated.calls) == 1


@pytest.mark.parametrize(
    ("header", "name", "value"),
    [
        ("device.h", "kWarpsPerBlock", cuda_args.WARPS_PER_BLOCK),
        ("select_kernels.h", "kItems", cuda_sparse._ITEMS),
        ("sparse_kernels.h", "kRange", cuda_sparse._RANGE),
        ("sparse_kernels.h", "kBins", cuda_args.Selection.histogram.size // 4),
        ("rotate_kernels.h", "kPiece", cuda_codecs._PIECE),
        ("block_top_k_kernels.h", "kTopKBlock", TOP_K_BLOCK),
    ],
)
def test_constants_are_those_of_the_sources(header: str, name: str, value: int) -> None:
    assert f"constexpr int {name} = {value};" in cuda.headers()[header]


@pytest.mark.parametrize("codec", BLOCK_BY_ID)
def test_sizes_are_those_of_the_native_executor(codec: int) -> None:
    for numel in (0, 1, 31, 32, 33, 127, 128, 255, 256, 257, 512, 513, 100_000, 2**33 + 5):
        assert cuda_codecs.payload_bytes(codec, numel) == native_codecs.payload_bytes(codec, numel)


def test_bad_arguments_are_named(emulated: emulator.Launches) -> None:
    x, size = torch.randn(1000), cuda_codecs.payload_bytes(1, 1000)
    good = torch.full((size,), 0xA5, dtype=torch.uint8)
    room = torch.empty(size + 16, dtype=torch.uint8)
    for message, call in {
        "x: expected torch.float32": lambda: cuda_codecs.encode(1, x.int(), good),
        "x: expected a contiguous tensor": lambda: cuda_codecs.encode(1, torch.randn(2000)[::2], good),
        "x: expected a tensor on the CPU, got meta": lambda: cuda_codecs.encode(1, x.to("meta"), good),
        f"out: expected {size} bytes": lambda: cuda_codecs.encode(1, x, room),
        "out: expected an address": lambda: cuda_codecs.encode(1, x, room[1 : size + 1]),
        "out: expected a tensor on a CUDA device, got meta": lambda: cuda_codecs.encode(1, x, good.to("meta")),
        "out and payload": lambda: cuda_codecs.decode(1, x.view(torch.uint8)[:size], x),
        "residual: expected 1000 elements": lambda: cuda_codecs.encode(1, x, good, feedback=Feedback(x[:9].clone())),
        "residual and x": lambda: cuda_codecs.encode(1, x, good, feedback=Feedback(x)),
        "divisor: expected": lambda: cuda_codecs.decode_sum(1, good.view(1, -1), x, divisor=0.0),
        "payloads: expected the shape": lambda: cuda_codecs.decode_sum(1, good, x),
        "chunk: expected": lambda: cuda_codecs.encode(1, x, good, chunk=0),
        "codec: expected": lambda: cuda_codecs.encode(99, x, good),
        "places: expected 0..1000": lambda: cuda_sparse.encode_top_k(x, 1001, good),
        "kept: expected 1..4096": lambda: cuda_sparse.encode_block_top_k(x, 0, good),
        "threshold: expected": lambda: cuda_sparse.encode_above(x, 0.0, 4, good[:32]),
        "out: expected 1000 elements": lambda: cuda_codecs.rotate(x, x[1:].clone(), Random(0)),
    }.items():
        with pytest.raises(CodecError, match=message):
            call()
    assert emulated.calls == []
    assert bool((good == 0xA5).all()), "nothing may be written"


@pytest.mark.parametrize("seed", range(6))
def test_calls_drawn_at_random_have_the_cpu_s_bytes(seed: int, emulated: emulator.Launches) -> None:
    random_cases.check_block_codec(seed, CPU, 3000)
    random_cases.check_sparse_codec(seed, CPU, 20_000)


def test_what_is_not_written_is_found(emulated: emulator.Launches) -> None:
    """An executor that leaves out a byte, or writes behind its output, does not pass."""

    def call(executor, tensors) -> None:
        out = tensors.room("out", 40)
        out[: 39 if executor == "leaves one out" else 40] = 7
        if executor == "writes behind":
            torch.as_strided(out, (41,), (1,))[40] = 7

    random_cases.compare(call, "right", "right", CPU, "the same")
    with pytest.raises(AssertionError, match="1 bytes of out differ, the first at 39"):
        random_cases.compare(call, "right", "leaves one out", CPU, "it")
    with pytest.raises(AssertionError, match="written outside of a buffer"):
        random_cases.compare(call, "right", "writes behind", CPU, "it")
