"""The random Hadamard rotation against the NumPy reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from commlib.errors import CodecError
from commlib.kernels import native_codecs, reference_ops
from commlib.kernels.native_codecs import Random
from commlib.kernels.reference import F32, Stream

SIZES = (0, 1, 2, 3, 63, 127, 255, 256, 257, 511, 1000, 70_001)


@pytest.mark.parametrize("offset", [0, 77])
def test_bytes_are_those_of_the_reference(isa: str, offset: int) -> None:
    rng = np.random.default_rng(0)
    stream, random = Stream(5, 1, 2, 3, offset), Random(5, 1, 2, 3, [(0, offset)])
    for numel in SIZES:
        for x in (rng.standard_normal(numel), np.full(numel, 3e38), rng.standard_normal(numel) * 1e-40):
            x = x.astype(F32)
            if numel > 300:
                x[290] = np.nan
            for is_inverse, reference in ((False, reference_ops.rotate), (True, reference_ops.rotate_back)):
                out = torch.full((numel,), 9.0)
                native_codecs.rotate(torch.from_numpy(x), out, random, is_inverse=is_inverse)
                np.testing.assert_array_equal(out.numpy().view(np.uint32), reference(x, stream).view(np.uint32))


def test_it_is_orthonormal_and_undone_in_place() -> None:
    x = torch.randn(5000)
    y = x.clone()
    native_codecs.rotate(y, y, Random(1))
    assert y.norm() == pytest.approx(x.norm().item(), rel=1e-5)
    assert not torch.allclose(x, y)
    native_codecs.rotate(y, y, Random(1), is_inverse=True)
    torch.testing.assert_close(y, x, rtol=0, atol=2e-6)


def test_an_outlier_is_spread() -> None:
    x = torch.zeros(256)
    x[7] = 16.0
    native_codecs.rotate(x, x, Random(2))
    assert torch.equal(x.abs(), torch.ones(256))


def test_bad_arguments_are_named() -> None:
    x = torch.randn(100)
    with pytest.raises(CodecError, match="out: expected 100 elements"):
        native_codecs.rotate(x, torch.empty(99), Random(0))
    with pytest.raises(CodecError, match="separate memory"):
        native_codecs.rotate(x[:50], x[1:51], Random(0))
    with pytest.raises(CodecError, match="x: expected torch.float32"):
        native_codecs.rotate(x.double(), x, Random(0))
