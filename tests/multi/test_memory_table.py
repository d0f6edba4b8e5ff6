"""The columns "extra memory" of docs/reference/algorithms.md: the memory that every algorithm keeps."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commlib
from commlib import algorithms
from commlib.replica import replica_of
from tests.memory import make, names_of, rows, storages, value
from tests.multi.common import seeded
from tests.multi.pool import run_ranks
from tests.multi.test_relaxations import two_nodes
from tests.thin import fast
from tests.waiting import eventually

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "algorithms.md"
COLUMN = "extra memory"
#: The algorithms whose first rounds are late: steps until they hold all that they will.
STEPS = {"noloco": 101, "passive_gossip": 33, "streaming_diloco": 12}
#: Bytes an element: biases, flags, padding, and the chunk that is smaller than others.
TOLERANCE = 0.02
WIDTH = 700


class Model(nn.Module):
    """Two matrices that do not divide into equal parts, and little else: about 4 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH + 3, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs))


def has_nodes(row: tuple[str, str]) -> bool:
    return "hierarchical=True" in row[0]


def kept_by(algorithm: Any, expected: float, tolerance: float) -> int:
    """Return the bytes that an algorithm keeps beyond the model, the optimizer's state and one flat buffer.

    Memory that a round in the background holds only until it ends does not count, so the bytes may take a while to be
    as expected.
    """
    before = storages()
    model = seeded(Model)
    optimizer_type = algorithm.optimizer_type or torch.optim.SGD
    optimizer = optimizer_type(model.parameters(), lr=1e-4)
    commlib.wrap(model, algorithm, optimizer=optimizer, bucket_cap_mb=100)
    for _ in range(STEPS.get(replica_of(model).engine.algorithm.name, 3)):
        model(torch.ones(1, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()  # in step: a gossiping rank holds one more copy for a partner that is behind
    engine = replica_of(model).engine
    own = [bucket.flat for bucket in getattr(engine.channels[-1], "buckets", [])]
    own += [each for state in optimizer.state.values() for each in state.values() if torch.is_tensor(each)]
    own += list(model.parameters())
    known = {*before, *(each.untyped_storage().data_ptr() for each in own)}
    kept = 0

    def is_as_expected() -> bool:
        nonlocal kept
        kept = sum(nbytes for address, nbytes in storages().items() if address not in known)
        return abs(kept - expected) <= tolerance

    channel = engine.algorithm.channel
    has_background = getattr(channel, "in_background", False) or not channel.keeps_step
    eventually(is_as_expected) if has_background else is_as_expected()
    dist.barrier()
    commlib.unwrap(model)
    return kept


def wrong_rows(own: list[tuple[str, str]]) -> list[str]:
    """Return the rows of the page that differ from the measurements of this rank."""
    found = []
    gc.collect()
    gc.freeze()  # earlier objects, permanently: `storages` sees the rest only, in a hundredth of the time
    for call, formula in own:
        algorithm = make(call)
        per_node = dist.get_world_size() // 2 if has_nodes((call, formula)) else 1
        names = names_of(algorithm, list(Model().parameters()), dist.get_world_size() // per_node, per_node)
        n, expected = names["n"], value(formula, **names)
        with two_nodes() if has_nodes((call, formula)) else contextlib.nullcontext():
            kept = kept_by(algorithm, expected, TOLERANCE * n)
        if abs(kept - expected) > TOLERANCE * n:
            found.append(f"{call}: {kept / n:.3f} n are kept, the page says {formula}, which is {expected / n:.3f} n")
    return found


def check_rows(own: list[tuple[str, str]]) -> None:
    found = wrong_rows(own)
    assert not found, "\n".join(found)


ROWS = rows(PAGE, COLUMN)
FLAT = [row for row in ROWS if not has_nodes(row)]


@pytest.mark.parametrize("world_size", [3, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("row", fast(FLAT, *FLAT[::4]), ids=lambda row: row[0])
def test_algorithms_keep_what_the_page_says(row: tuple[str, str], world_size: int) -> None:
    run_ranks(check_rows, world_size, [row])


@pytest.mark.parametrize("row", [row for row in ROWS if has_nodes(row)], ids=lambda row: row[0])
def test_hierarchical_algorithms_keep_what_the_page_says(row: tuple[str, str]) -> None:
    run_ranks(check_rows, 4, [row])


def test_every_algorithm_has_a_row() -> None:
    named = {call.partition("(")[0] for call, _ in ROWS}
    assert named == {*algorithms.list()} - {"auto"}, "auto is one of the others"


def test_a_wrong_figure_is_found() -> None:
    run_ranks(check_finds_wrong_rows, 2)


def check_finds_wrong_rows() -> None:
    assert len(wrong_rows([("bytegrad", "0.5n"), ("bytegrad", "2bn"), ("topk", "4n"), ("local_sgd", "4n")])) == 3


@pytest.mark.parametrize(
    ("formula", "expected"),
    [("none", 0), ("2bn", 40), ("4n + 4n/N", 50), ("8(N + 1) · ratio · n", 150), ("8n + (4n + 2bn)/L", 120)],
)
def test_formulas(formula: str, expected: float) -> None:
    assert value(formula, n=10, N=4, b=2, L=2, ratio=3 / 8) == expected


def test_what_is_no_formula_is_an_error() -> None:
    with pytest.raises(AssertionError, match="is not a formula"):
        value("4n & more", n=1)
