"""Batched Gram-Schmidt is as good as Householder QR, whatever the matrices, and PowerSGD does the same with either."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from commlib.primitives import low_rank
from commlib.primitives.low_rank import LowRankWorkspace, centralized_low_rank
from commlib.primitives.orthogonal import orthonormalise_
from commlib.primitives.parts import Part
from commlib.transport.base import Communicator

SHAPES = [(1, 1), (2, 2), (5, 5), (64, 32), (512, 1), (512, 2), (4096, 4)]
EPS = torch.finfo(torch.float32).eps


def matrices(rows: int, r: int) -> Iterator[tuple[str, torch.Tensor]]:
    random = torch.randn(3, rows, r, generator=torch.Generator().manual_seed(rows + r))
    one = random[:, :, :1]
    repeated, first = random.clone(), torch.zeros(1, rows, r)
    repeated[:, :, -1] = repeated[:, :, 0]
    first[0, 0, :] = 1.0
    yield "random", random
    yield "zeros", torch.zeros(2, rows, r)
    yield "ones", torch.ones(1, rows, r)
    yield "a column twice", repeated
    yield "of rank one", one.expand(3, rows, r).contiguous()
    yield "of rank one, at other scales", one * torch.logspace(0, -20, r)
    yield "one row", first
    yield "a zero column", random * (torch.arange(r) != r // 2)
    yield "nearly dependent", one + 1e-3 * random
    yield "more nearly dependent", one + 1e-6 * random
    yield "dependent but for rounding", one + 1e-7 * random
    yield "huge", random * 1e25
    yield "tiny", random * 1e-37
    yield "graded", random * torch.logspace(0, -30, r)


@pytest.mark.parametrize(("rows", "r"), SHAPES)
def test_bases_are_orthonormal_and_span_the_columns_as_well_as_qr(rows: int, r: int) -> None:
    for label, p in matrices(rows, r):
        exact = p.double() / p.double().abs().amax(dim=(1, 2), keepdim=True).clamp_min(1e-300)
        limit = 16 * EPS * max(r, rows**0.5)

        def errors(q: torch.Tensor, exact: torch.Tensor = exact) -> tuple[float, float]:
            q = q.double()
            orthogonal = q.transpose(1, 2) @ q - torch.eye(q.shape[2], dtype=torch.float64)
            left = exact - q @ (q.transpose(1, 2) @ exact)
            return float(orthogonal.abs().max()), float(left.abs().max())

        by_qr, own = errors(torch.linalg.qr(p)[0]), errors(orthonormalise_(p.clone()))
        assert max(by_qr) <= limit, f"{label}: the limit is not QR's"
        assert max(own) <= limit, f"{label}: {own}, QR: {by_qr}"


def test_it_agrees_with_qr_but_for_signs() -> None:
    p = torch.randn(5, 300, 4, generator=torch.Generator().manual_seed(1))
    own, by_qr = orthonormalise_(p.clone()), torch.linalg.qr(p)[0]
    signs = (own * by_qr).sum(dim=1, keepdim=True).sign()
    torch.testing.assert_close(own, by_qr * signs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_matrix(value: float) -> None:
    p = torch.randn(3, 20, 2, generator=torch.Generator().manual_seed(2))
    alone = orthonormalise_(p[2:].clone())
    p[1, 4, 0] = value
    orthonormalise_(p)
    assert p[1].isnan().all()
    assert p[[0, 2]].isfinite().all()
    torch.testing.assert_close(p[2:], alone, rtol=0, atol=1e-6)


def run(grads: list[torch.Tensor], parts: list[Part], rank: int) -> list[torch.Tensor]:
    workspace = LowRankWorkspace(parts, torch.device("cpu"), rank, seed=3)
    results = []
    for gradient in grads:
        tensor = gradient.clone()
        for _ in centralized_low_rank(tensor, workspace, Communicator(0, 1)):
            pass
        results.append(tensor)
    return results


def test_powersgd_is_the_same_with_either(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(40, 30), (40, 30), (16, 50)]
    parts, start = [], 0
    for idx, shape in enumerate(shapes):
        numel = shape[0] * shape[1]
        parts.append(Part(name=f"p{idx}", start=start, numel=numel, shape=shape, offset=start))
        start += numel
    generator = torch.Generator().manual_seed(4)
    grads = [torch.randn(start, generator=generator) for _ in range(6)]
    grads[3][:1200] = 0.0
    by_qr = run(grads, parts, 3)
    calls: list[tuple[int, ...]] = []

    def counted(p: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(p.shape))
        return orthonormalise_(p)

    monkeypatch.setattr(low_rank, "orthonormalise_", counted)
    monkeypatch.setattr(low_rank, "_qr_is_batched", lambda tensor: False)
    own = run(grads, parts, 3)
    assert calls == [(2, 40, 3), (1, 16, 3)] * 6, "matrices of one shape together"
    for a, b in zip(own, by_qr, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)
