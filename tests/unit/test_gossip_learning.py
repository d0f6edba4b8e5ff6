"""What two ranks learn together, in one process: steps, publications and answers come in a fixed order."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commlib.algorithms import PassiveGossip
from commlib.algorithms.base import Runner
from tests.unit.test_async_schedules import Network, attachment_of

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import corpus

STEPS, PERIOD, SEEDS = 120, 8, (0, 1, 2)
BATCH, CONTEXT = 8, 48


class ByteLstm(nn.Module):
    """Predicts the next byte: [batch, time] int64 to [batch, time, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 32)
        self.lstm = nn.LSTM(32, 96, batch_first=True)
        self.head = nn.Linear(96, 256)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(text))[0])


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


class Rank:
    """A model in training on its own part of the text."""

    def __init__(self, seed: int, rank: int) -> None:
        torch.manual_seed(seed)
        self.seed, self.rank = seed, rank
        self.model = ByteLstm()
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, lr=3e-3)
        self.runner: Runner | None = None
        self.num_steps = 0

    def step(self, text: Tensor) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, corpus.batch(text, (self.seed, self.num_steps, self.rank), BATCH, CONTEXT)).backward()
        self.optimizer.step()
        self.num_steps += 1
        if self.runner is not None:
            with torch.no_grad():
                self.runner.after_step()


def alone(ranks: list[Rank], text: Tensor) -> None:
    for rank in ranks:
        for _ in range(STEPS):
            rank.step(text)


@torch.no_grad()
def averaged(ranks: list[Rank], text: Tensor) -> None:
    """Train by local SGD: the mean of the weights after every period."""
    for _ in range(STEPS // PERIOD):
        with torch.enable_grad():
            for rank in ranks:
                for _ in range(PERIOD):
                    rank.step(text)
        for own in zip(*(rank.parameters for rank in ranks), strict=True):
            mean = torch.stack([each.data for each in own]).mean(dim=0)
            for parameter in own:
                parameter.copy_(mean)


def gossiping(ranks: list[Rank], text: Tensor, behind: int, delay: int) -> None:
    """Train by gossip: rank 1 is `behind` steps behind, and a question is answered `delay` half steps after it."""
    network = Network(len(ranks))
    for rank in ranks:
        named = [(name, parameter) for name, parameter in rank.model.named_parameters()]
        rank.runner = PassiveGossip(PERIOD).attach(attachment_of(rank.rank, network, named, rank.optimizer))
    asked_at: dict[tuple[int, int], int] = {}
    for half in range(2 * (STEPS + behind)):
        at = half // 2 - (behind if half % 2 else 0)
        if 0 <= at < STEPS:
            ranks[half % 2].step(text)
        for pair, questions in network.under_way.items():
            if not questions:
                asked_at.pop(pair, None)
            elif half - asked_at.setdefault(pair, half) >= delay:
                network.deliver(*pair)
                asked_at.pop(pair)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Such small layers take longer with several threads, and much longer where other processes want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def texts() -> tuple[Tensor, Tensor]:
    return corpus.standard_library()


@torch.no_grad()
def unseen_loss(ranks: list[Rank], text: Tensor) -> float:
    batches = [corpus.batch(text, (9, idx), 16, CONTEXT) for idx in range(6)]
    return statistics.mean(float(loss_of(rank.model, batch)) for rank in ranks for batch in batches)


def mean_loss(texts: tuple[Tensor, Tensor], train: Any, *args: Any) -> float:
    found = []
    for seed in SEEDS:
        ranks = [Rank(seed, rank) for rank in range(2)]
        train(ranks, texts[0], *args)
        found.append(unseen_loss(ranks, texts[1]))
    return statistics.mean(found)


@pytest.fixture(scope="module")
def yardsticks(texts: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """The losses without communication and with local SGD."""
    return mean_loss(texts, alone), mean_loss(texts, averaged)


@pytest.mark.slow
@pytest.mark.parametrize(("behind", "delay"), [(0, 0), (0, 4), (4, 0), (9, 2), (40, 1)])
def test_gossip_learns_more_than_each_rank_alone(
    texts: tuple[Tensor, Tensor], yardsticks: tuple[float, float], behind: int, delay: int
) -> None:
    none, local = yardsticks
    found = mean_loss(texts, gossiping, behind, delay)
    assert local < none, "else there is nothing to learn from the partner"
    assert found < none, f"{found:.4f} with gossip, {none:.4f} alone, {local:.4f} with local SGD"
    assert found < 1.01 * local
