"""A few small calls of every kernel, for compute-sanitizer, under which each takes long."""

from __future__ import annotations

import pytest
import torch

import commlib
from commlib.kernels import cuda
from tests.cuda_emulation import cases, random_cases
from tests.gpu.pretended import pretended_ranks
from tests.gpu.wrapped import assert_same_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(300),
]

MOST = 20_000


@pytest.fixture(scope="module")
def device() -> torch.device:
    cuda.supported_architectures()
    return torch.device("cuda", torch.cuda.current_device())


def test_wrapped_steps(device: torch.device) -> None:
    with pretended_ranks():
        assert_same_steps(commlib.algorithms.EFQuantized, 0.1, device, torch.device("cpu"), steps=3)


def test_rotation(device: torch.device) -> None:
    cases.check_rotation_segments(device)


@pytest.mark.parametrize("kind", random_cases.KINDS)
def test_sparse_codecs(kind: str, device: torch.device) -> None:
    random_cases.check_sparse_codec(1, device, MOST, kind)


@pytest.mark.parametrize("name", random_cases.NAMES)
def test_block_codecs(name: str, device: torch.device) -> None:
    random_cases.check_block_codec(1, device, MOST, name)


def test_damaged_payloads(device: torch.device) -> None:
    cases.check_damage(device)
