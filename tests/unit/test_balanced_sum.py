"""Sums by balanced regions: nothing is lost, nothing counts twice, loads are shared out; all ranks in one process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from commlib import algorithms
from commlib.codecs.sparse import TopK
from commlib.errors import ConfigError
from commlib.primitives.sparse import SparseWorkspace, centralized_sparse
from commlib.transport.base import AllGather, AllToAll, Communicator

CPU = torch.device("cpu")


class Ranks:
    """Ranks that average sparse tensors of `numel` elements in one process, and count the bytes that each sends."""

    def __init__(self, size: int, numel: int, ratio: float) -> None:
        self.size, self.numel, self.codec = size, numel, TopK(ratio)
        self.comms = [Communicator(rank, size) for rank in range(size)]
        self.workspaces = [SparseWorkspace(numel, CPU, self.codec, comm, balanced=True) for comm in self.comms]
        self.sent_bytes = 0.0

    @property
    def regions(self) -> list[int]:
        """The boundaries of the regions, which must be identical on all ranks."""
        found = [each.balanced.regions.tolist() for each in self.workspaces if each.balanced is not None]
        assert len(found) == self.size
        assert all(each == found[0] for each in found)
        return found[0]

    @property
    def residuals(self) -> Tensor:
        """Every rank's residual, [ranks, numel]."""
        return torch.stack([each.residual for each in self.workspaces])

    def sum_up(self, values: Sequence[Tensor], **options: float) -> Tensor:
        """Return the sum [numel] of one round, which must be bitwise identical on all ranks."""
        tensors = [each.clone() for each in values]
        rounds = [
            centralized_sparse(tensor, workspace, self.codec, comm, **options)
            for tensor, workspace, comm in zip(tensors, self.workspaces, self.comms, strict=True)
        ]
        verbs = []
        while requests := [request for each in rounds if (request := next(each, None)) is not None]:
            assert len(requests) == self.size
            verbs.append(requests[0].verb)
            self.sent_bytes += requests[0].wire_bytes()
            self._carry_out(requests)
        assert verbs == ["all_to_all", "all_gather"]
        bits = [each.view(torch.int16 if each.element_size() == 2 else torch.int32) for each in tensors]
        assert all(torch.equal(each, bits[0]) for each in bits)
        return tensors[0]

    def _carry_out(self, requests: Sequence[object]) -> None:
        sent = torch.stack([each.input.clone() for each in requests if isinstance(each, AllToAll | AllGather)])
        for rank, request in enumerate(requests):
            if isinstance(request, AllToAll):
                request.output.copy_(sent.view(self.size, self.size, -1)[:, rank].reshape(-1))
            else:
                assert isinstance(request, AllGather)
                request.output.copy_(sent.view(-1))


def whole_numbers(size: int, numel: int, seed: int, *, skew: float = 0.0) -> list[Tensor]:
    """Return tensors of whole numbers, of which fp32 loses nothing; the larger `skew`, the more at the end is large."""
    generator = torch.Generator().manual_seed(seed)
    slope = torch.linspace(0, 1, numel) ** skew * 100
    return [(torch.randn(numel, generator=generator) * slope).round() for _ in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("skew", [0.0, 8.0])
def test_what_came_in_is_what_went_out_and_the_residuals(size: int, skew: float) -> None:
    """Exactly, with whole numbers, also where regions overflow and elements of several ranks cancel out."""
    ranks = Ranks(size, 997, 0.05)
    given, got = torch.zeros(997, dtype=torch.float64), torch.zeros(997, dtype=torch.float64)
    for step in range(40):
        values = whole_numbers(size, 997, step, skew=skew)
        if step >= 20:
            values = [each.flip(0) for each in values]  # large values are small now
        values[-1][500:505] = -values[0][500:505]
        given += torch.stack(values).double().sum(0)
        got += ranks.sum_up([each * 1024 for each in values], scale=1024.0).double() / 1024
        assert torch.equal(got + ranks.residuals.double().sum(0), given), step
    assert torch.count_nonzero(got) > 300


@pytest.mark.parametrize("size", [2, 5, 64])
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1])
def test_a_rank_sends_six_numbers_of_each_choice_over_the_ranks(size: int, ratio: float) -> None:
    """In addition: 32 bytes for each other rank, and the rounding up to whole pairs and to 32 bytes."""
    numel = 20_000
    ranks = Ranks(size, numel, ratio)
    ranks.sum_up(whole_numbers(size, numel, 0))
    budget = 6 * 4 * ranks.codec.places(numel) * (size - 1) / size
    assert budget <= ranks.sent_bytes <= budget + (size - 1) * (32 + 2 * (8 + 31))


def test_regions_follow_the_choices_and_share_them_out() -> None:
    """All that is large lies in the last region: it overflows once, and then every rank sums as much as the others."""
    size, numel, places = 4, 4000, 200
    ranks = Ranks(size, numel, places / numel)
    own = torch.zeros(numel)
    own[3300:3900] = 1 + torch.arange(600.0)  # the 200 largest are the last
    first = ranks.sum_up([own] * size)
    assert torch.count_nonzero(first) == places / size
    assert torch.equal(first.nonzero().flatten(), torch.arange(3850, 3900)), "the largest of the region"
    assert torch.equal(ranks.residuals[2], torch.where(first > 0, 0.0, own)), "the others are still there"
    assert ranks.regions == [0, 3750, 3800, 3850, numel]
    for each in ranks.workspaces:
        each.forget()
    second = ranks.sum_up([own] * size)
    assert torch.equal(second.nonzero().flatten(), torch.arange(3700, 3900))


def test_what_fits_no_more_waits_and_is_sent_when_it_is_large_enough() -> None:
    """A rank whose choices are all in one region, unlike the others', sends 2 k/N of them, and owes the rest."""
    size, numel, places = 4, 400, 40
    ranks = Ranks(size, numel, places / numel)
    values = [torch.zeros(numel) for _ in range(size)]
    values[0][:places] = 1 + torch.arange(float(places))
    total = ranks.sum_up(values)
    assert torch.equal(total.nonzero().flatten(), torch.arange(30, 40)), "k/N sums of the region"
    for _ in range(8):
        total += ranks.sum_up([torch.zeros(numel)] * size)
    assert torch.equal(total, values[0])
    assert not ranks.residuals.any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_not_finite_reaches_all_ranks_and_no_residual(bad: float, dtype: torch.dtype) -> None:
    ranks = Ranks(3, 300, 0.1)
    for step in range(4):
        values = [each.to(dtype) for each in whole_numbers(3, 300, step)]
        if step == 1:
            values[1][100:200] = bad  # more than the region has places for
        total = ranks.sum_up(values)
        assert bool(torch.isfinite(total).all()) is (step != 1)
        assert torch.isfinite(ranks.residuals).all()


def test_a_rank_that_has_left_has_no_say() -> None:
    """It sends zeros, keeps its residual, and does not move the regions."""
    ranks = Ranks(2, 100, 0.1)
    ranks.sum_up(whole_numbers(2, 100, 0))
    owed, regions = ranks.residuals[1].clone(), ranks.regions
    ranks.comms[1].contributes = False
    values = whole_numbers(1, 100, 1)[0]
    end = (values + ranks.residuals[0]).abs().topk(10).indices.sort().values[5]
    ranks.sum_up([values, torch.zeros(100)])
    assert torch.equal(ranks.residuals[1], owed)
    assert ranks.regions == [0, (int(end) + regions[1]) // 2, 100]


def test_an_empty_stretch_takes_as_many_collectives_as_others() -> None:
    assert not Ranks(3, 0, 0.1).sum_up([torch.zeros(0)] * 3).numel()


@pytest.mark.parametrize("name", ["topk", "dgc", "sparse_loco"])
def test_an_exchange_that_there_is_not_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match=r"exchange: expected 'gathered' or 'balanced', got 'ring'"):
        algorithms.get(name)(exchange="ring")
