"""Trackers as docs/how-to/watch-a-run.md uses them: each snippet runs with the real package where it is installed."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlib
from commlib.engine.stats import Stats
from commlib.sharding.stats import ShardStats
from tests.pages import ROOT, blocks
from tests.waiting import eventually

PAGE = ROOT / "docs" / "how-to" / "watch-a-run.md"
FIGURES = {"comm/rounds", "comm/wire_bytes", "comm/compression_ratio", "comm/exposed_s"}


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


@pytest.fixture
def namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names that the page's code uses, on one rank, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = commlib.wrap(model, "topk", optimizer=optimizer)
    yield {"commlib": commlib, "torch": torch, "model": model, "optimizer": optimizer}
    commlib.unwrap(model)
    dist.destroy_process_group()


def run(package: str, namespace: dict[str, Any]) -> None:
    (code,) = (block.text for block in blocks(PAGE) if block.text.startswith(f"import {package}\n"))
    exec(code, namespace)


def test_the_page_explains_every_figure() -> None:
    figures = {field.name for field in fields(Stats) if "int" in str(field.type) or "float" in str(field.type)}
    figures |= {"cost_latency_s", "cost_s_per_byte"}
    figures |= {f"shard_{field.name}" for field in fields(ShardStats) if field.type in ("int", "float")}
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    table = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert figures <= table, figures - table


@needs("wandb")
@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_receives_the_figures(namespace: dict[str, Any]) -> None:
    run("wandb", namespace)
    (path,) = Path("wandb").glob("offline-run-*/*.wandb")
    # Another process writes the file, and may not have written all of it yet.
    assert eventually(lambda: all(name.encode() in path.read_bytes() for name in FIGURES))


@needs("mlflow")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_receives_the_figures(namespace: dict[str, Any]) -> None:
    run("mlflow", namespace)
    client = namespace["mlflow"].MlflowClient()
    (found,) = client.search_runs(["0"])
    assert found.data.metrics.keys() >= FIGURES
    sizes = [(each.step, each.value) for each in client.get_metric_history(found.info.run_id, "comm/world_size")]
    assert sizes == [(0, 1), (1, 1), (2, 1)]
