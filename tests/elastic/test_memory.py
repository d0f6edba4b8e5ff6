"""The memory that algorithms keep in an elastic group in addition to that in a static one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import commlib
from commlib.algorithms.channels import Weights
from tests.elastic.job import Template, running
from tests.elastic.test_rounds import REFUSED
from tests.memory import make, names_of, rows, value

DOCS = Path(__file__).parents[2] / "docs"
STATIC = dict(rows(DOCS / "reference" / "algorithms.md", "extra memory"))
FURTHER = rows(DOCS / "how-to" / "elastic.md", "further memory")
WIDTH = 20_000
FAST = ("bytegrad", "powersgd", "diloco")


def test_every_algorithm_has_a_row() -> None:
    assert {call for call, _ in FURTHER} == {*commlib.algorithms.list()} - {"auto", *REFUSED}


@pytest.mark.parametrize(
    ("name", "formula"),
    [pytest.param(*row, marks=() if row[0] in FAST else pytest.mark.slow, id=row[0]) for row in FURTHER],
)
def test_members_keep_what_the_page_says(template: Template, tmp_path: Path, name: str, formula: str) -> None:
    algorithm = make(name)
    options: dict[str, Any] = {"warmup_steps": 1} if algorithm.channel.warmup_steps else {}
    options |= {"period": 2} if isinstance(algorithm.channel, Weights) and name != "streaming_diloco" else {}
    options |= {"period": 4, "fragments": 2, "delay": 1} if name == "streaming_diloco" else {}
    matrices = [torch.empty(32, WIDTH), torch.empty(WIDTH, 32)]
    names = names_of(algorithm, [torch.nn.Parameter(each) for each in matrices], 2)
    expected = value(STATIC[name], **names) + value(formula, **names)
    with running(template, tmp_path / "journal") as job:
        job.start(
            *"ab",
            algorithm=name,
            options=options,
            rounds=4,
            width=WIDTH,
            members_at={"1": 2},
            counts_memory=True,
        )
        job.wait("a memory", "b memory")
        for each in "ab":
            assert int(job.said(each, "memory")[0][0]) == pytest.approx(expected, abs=0.02 * names["n"])
