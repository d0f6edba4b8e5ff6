"""The CUDA executor on a GPU, against the NumPy reference, byte for byte. Skipped where there is no GPU.

`scripts/gpu_check` runs these tests and all others that need a GPU. To run only these, where torch has CUDA:

    pip install 'cupy-cuda13x>=14'          # or cupy-cuda12x; `commlib doctor` lists missing packages
    scripts/test tests/gpu -v

The cases are those of tests/unit/test_cuda_emulated.py. NVIDIA's compute-sanitizer finds accesses outside of tensors,
races in shared memory, and reads of uninitialized memory (torch's allocator is turned off, so that tensors do not
share blocks of memory):

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    for tool in memcheck racecheck initcheck synccheck; do
      compute-sanitizer --tool $tool --error-exitcode 9 .venv/bin/python -m pytest tests/gpu/test_sanitized.py -v
    done
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from commlib.codecs import BF16, BlockTopK, Int4, Int8, OneBit, RandomK, Threshold, TopK, UInt8MinMax, by_name, uniforms
from commlib.errors import CodecError
from commlib.kernels import cuda, cuda_codecs, cuda_sparse, native_codecs
from commlib.kernels.checks import Feedback, Random
from commlib.kernels.reference import BLOCK_CODECS
from tests.cuda_emulation import cases
from tests.gpu.waits import no_waiting, waits_of
from tests.plugins import relaxed
from tests.unit.test_block_codecs import IDS, STOCHASTIC

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(300),  # kernels are compiled first
]


@pytest.fixture(scope="module")
def device() -> torch.device:
    try:
        cuda.supported_architectures()
    except CodecError as error:
        pytest.skip(str(error))
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_bytes_and_values(name: str, device: torch.device) -> None:
    cases.check_bytes_and_values(name, device)


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_any_bytes_decode(name: str, device: torch.device) -> None:
    cases.check_any_bytes(name, device)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_stochastic_rounding(name: str, device: torch.device) -> None:
    cases.check_stochastic(name, device)
    cases.check_segments(name, device)


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_error_feedback(name: str, device: torch.device) -> None:
    cases.check_feedback(name, device)


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_sums(name: str, device: torch.device) -> None:
    cases.check_sums(name, device)


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_types_chunks_and_addresses(name: str, device: torch.device) -> None:
    cases.check_types(name, device)
    cases.check_chunks(name, device)
    cases.check_unaligned(name, device)


def test_casts(device: torch.device) -> None:
    cases.check_casts(device)


def test_rotation(device: torch.device) -> None:
    cases.check_rotation(device)
    cases.check_rotation_segments(device)


@pytest.mark.parametrize("dtype", cases.TYPES)
def test_top_k(dtype: torch.dtype, device: torch.device) -> None:
    for numel in (0, 1, 17, 1000, 300_000):
        cases.check_top_k(numel, device, dtype)


@pytest.mark.parametrize("room", [0, 1 << 16])
def test_top_k_with_error_feedback(room: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_sparse, "_FEW_CANDIDATES", room)
    for numel in (1, 1000, 300_000):
        cases.check_top_k_feedback(numel, device)
        cases.check_top_k_feedback(numel, device, 0.9, -1.5)


def test_threshold_and_random_k(device: torch.device) -> None:
    for numel in (0, 1, 1000, 70_000):
        cases.check_threshold(numel, device)
        cases.check_random_k(numel, device)


def test_sparse_decoding(device: torch.device) -> None:
    cases.check_sparse_sums(device)
    cases.check_many_payloads(device)
    cases.check_damage(device)


@pytest.mark.parametrize("dtype", cases.TYPES)
def test_block_top_k(dtype: torch.dtype, device: torch.device) -> None:
    for kept in (1, 64, 4096):
        cases.check_block_top_k(kept, device, dtype)
    cases.check_block_top_k_sums(device)
    cases.check_block_top_k_damage(device)


@pytest.mark.parametrize("name", IDS)
def test_large_tensors_give_the_cpu_s_bytes(name: str, device: torch.device) -> None:
    x = torch.randn(20_000_003, device=device)
    x[::1_000_003] = float("nan")
    chunk = 5_000_001
    nbytes = cuda_codecs.buffer_bytes(IDS[name], x.numel(), chunk)
    out, expected = torch.empty(nbytes, dtype=torch.uint8, device=device), torch.empty(nbytes, dtype=torch.uint8)
    cuda_codecs.encode(IDS[name], x, out, chunk=chunk)
    native_codecs.encode(IDS[name], x.cpu(), expected, chunk=chunk)
    assert torch.equal(out.cpu(), expected)


def test_a_large_top_k_is_exact_and_always_the_same(device: torch.device) -> None:
    """Many tiles look back at each other: whatever their timing, the bytes are one computation's."""
    x = torch.randn(30_000_000, device=device)
    x[1_000_000:2_000_000] = 2.575  # ties at the threshold
    codec = TopK(0.01)
    outs = [torch.empty(codec.payload_bytes(x.numel()), dtype=torch.uint8, device=device) for _ in range(5)]
    for out in outs:
        codec.encode(x, out)
    assert all(torch.equal(outs[0], out) for out in outs[1:])
    expected = torch.empty(outs[0].numel(), dtype=torch.uint8)
    codec.encode(x.cpu(), expected)
    assert torch.equal(outs[0].cpu(), expected)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 24 << 30,
    reason="no device with 24 GiB of memory",
)
def test_more_than_2_31_elements_in_memory(device: torch.device) -> None:
    numel = 2**31 + 1000
    x = torch.zeros(numel, device=device)
    x[-1000:] = torch.arange(1.0, 1001.0)
    out = torch.empty(cuda_codecs.payload_bytes(1, numel), dtype=torch.uint8, device=device)
    cuda_codecs.encode(1, x, out)
    last = out[-1016 - (-numel % 16) :]
    assert int(last.count_nonzero()) > 900
    back = torch.empty(numel, device=device)
    cuda_codecs.decode(1, out, back)
    assert torch.allclose(back[-1000:], x[-1000:], atol=4.0)
    assert not bool(back[:-1024].any())


def test_nothing_waits_for_the_device(device: torch.device) -> None:
    x, total = torch.randn(100_000, device=device), torch.zeros(100_000, device=device)
    residual = torch.zeros_like(x)
    random = Random(1, segments=[(0, 5), (1000, 7000)])
    for codec in (Int8(), Int4(), UInt8MinMax(), OneBit(), BF16(), by_name["uint8_bagua"]()):
        payload = torch.empty(codec.payload_bytes(100_000), dtype=torch.uint8, device=device)
        stochastic = random if codec.rounds_stochastically else None

        def use(codec=codec, payload=payload, stochastic=stochastic) -> None:
            codec.encode(x, payload, feedback=Feedback(residual), random=stochastic)
            codec.decode(payload, total)
            codec.decode_add(payload, total, weight=0.5)
            codec.decode_sum(payload.view(1, -1), total, divisor=2.0)
            codec.encode_sum(payload.view(1, -1), 100_000, payload.clone())

        use()  # compiles, and copies the segments
        with no_waiting():
            use()
        assert waits_of(use) == []
    for codec in (TopK(0.01), RandomK(0.01), Threshold(2.0), BlockTopK()):
        payload = torch.empty(codec.payload_bytes(100_000), dtype=torch.uint8, device=device)

        def use_sparse(codec=codec, payload=payload) -> None:
            given = Random(3) if isinstance(codec, RandomK) else None
            codec.encode(x, payload, feedback=Feedback(residual), random=given)
            codec.decode(payload, total)
            codec.decode_add(payload, total)

        use_sparse()
        with no_waiting():
            use_sparse()
        assert waits_of(use_sparse) == []
    with no_waiting():
        cuda_codecs.rotate(x, x, Random(1))


def test_kernels_run_on_the_current_stream(device: torch.device) -> None:
    x = torch.randn(1 << 20, device=device)
    payload = torch.empty(cuda_codecs.payload_bytes(1, x.numel()), dtype=torch.uint8, device=device)
    cuda_codecs.encode(1, x, payload)
    expected = payload.clone()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        x.zero_()
        cuda_codecs.encode(1, x, payload)
    assert torch.equal(payload, expected), "encoded before its stream got there"
    torch.cuda.current_stream(device).wait_stream(stream)
    assert not bool(payload.any())


def test_a_thread_that_never_used_the_device_can_launch(device: torch.device) -> None:
    x = torch.randn(1000, device=device)
    payload = torch.zeros(cuda_codecs.payload_bytes(1, 1000), dtype=torch.uint8, device=device)
    thread = threading.Thread(target=cuda_codecs.encode, args=(1, x, payload))
    thread.start()
    thread.join()
    np.testing.assert_array_equal(payload.cpu().numpy(), BLOCK_CODECS["int8"].encode(x.cpu().numpy()))


def test_tensors_on_two_devices_are_refused(device: torch.device) -> None:
    with pytest.raises(CodecError, match="x: expected a tensor on cuda"):
        cuda_codecs.encode(1, torch.randn(10), torch.empty(32, dtype=torch.uint8, device=device))


@pytest.mark.parametrize("codec", [relaxed.Byte64(), relaxed.Top16(0.1)], ids=repr)
def test_codecs_of_torch_operations_have_the_cpu_s_bytes(codec: Any, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    x, residual = (torch.randn(10_001, generator=generator) for _ in range(2))
    found = []
    for where in (torch.device("cpu"), device):
        state = residual.to(where, copy=True)
        payloads = torch.empty(2, codec.payload_bytes(x.numel()), dtype=torch.uint8, device=where)
        for idx, payload in enumerate(payloads):
            codec.encode(x.to(where) * (idx + 1), payload, feedback=Feedback(state, 0.9, 1.1))
        total, added = torch.empty_like(state), torch.ones_like(state)
        codec.decode_sum(payloads, total, divisor=3.0)
        codec.decode_add(payloads[0], added, weight=0.3)
        found.append([payloads, state, total, added])
    for own, other in zip(*found, strict=True):
        assert torch.equal(own, other.cpu())


def test_random_numbers_of_torch_operations_are_the_cpu_s(device: torch.device) -> None:
    source = Random(seed=2**63 + 5, step=9, rank=3, stage=1, segments=[(0, 1 << 40), (333, 7)])
    expected = uniforms(source, 100, 1000, torch.device("cpu"))
    assert torch.equal(uniforms(source, 100, 1000, device).cpu(), expected)
