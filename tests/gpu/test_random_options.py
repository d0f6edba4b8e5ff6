"""Every codec on a GPU with options drawn at random, in poisoned outputs, against the CPU's bytes."""

from __future__ import annotations

import itertools

import pytest
import torch

from commlib.kernels import cuda
from tests.cuda_emulation import random_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(120),
]

#: Elements at most: enough for many tiles that look back at each other.
MOST = 400_000
DRAWS = 12
#: Draws per test, so that pytest's overhead does not dominate.
PER_TEST = 6


@pytest.fixture(scope="module")
def device() -> torch.device:
    cuda.supported_architectures()
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("first", range(0, DRAWS, PER_TEST))
@pytest.mark.parametrize("name", random_cases.NAMES)
def test_block_codecs(name: str, first: int, device: torch.device) -> None:
    for seed in range(first, first + PER_TEST):
        random_cases.check_block_codec(seed, device, MOST, name)


@pytest.mark.parametrize("first", range(0, 5 * DRAWS, PER_TEST))
@pytest.mark.parametrize("kind", random_cases.KINDS)
def test_sparse_codecs(kind: str, first: int, device: torch.device) -> None:
    for seed in range(first, first + PER_TEST):
        random_cases.check_sparse_codec(seed, device, MOST, kind)


def test_two_streams_at_once(device: torch.device) -> None:
    """Calls on two streams share the device, the damage mark and the kernels, and nothing else."""
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    for seed, stream in itertools.product(range(4), streams):
        with torch.cuda.stream(stream):
            random_cases.check_block_codec(seed, device, MOST, "int8")
            random_cases.check_sparse_codec(seed, device, MOST, "top_k")


def test_two_streams_that_overlap(device: torch.device) -> None:
    """Encodings are queued on both streams behind a wait, so that they run side by side; each has its own bytes."""
    from commlib.codecs import Int8, TopK

    for codec in (Int8(), TopK(0.01)):
        xs = [torch.randn(3_000_000, device=device) for _ in range(2)]
        size = codec.payload_bytes(xs[0].numel())
        outs = [torch.full((size,), 0xA5, dtype=torch.uint8, device=device) for _ in range(20)]
        streams = [torch.cuda.Stream(device) for _ in range(2)]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
        for idx, out in enumerate(outs):
            with torch.cuda.stream(streams[idx % 2]):
                codec.encode(xs[idx % 2], out)
        torch.cuda.synchronize()
        for side, x in enumerate(xs):
            expected = torch.empty(size, dtype=torch.uint8)
            codec.encode(x.cpu(), expected)
            assert all(torch.equal(out.cpu(), expected) for out in outs[side::2]), f"{codec.name}, stream {side}"
