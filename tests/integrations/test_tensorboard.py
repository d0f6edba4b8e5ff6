"""`Stats.as_dict` and TensorBoard: every figure is logged as it is, and read back."""

from __future__ import annotations

import struct
import tempfile

import pytest
import torch
from torch import nn

import commlib
from tests.multi.common import Mlp, data, seeded
from tests.multi.pool import on_ranks


def as_stored(value: float) -> float:
    """TensorBoard keeps scalars in single precision."""
    return struct.unpack("f", struct.pack("f", value))[0]


def read_back(folder: str) -> dict[str, list[tuple[int, float]]]:
    """Step and value of every scalar in the event file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(folder).Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize("algorithm", ["allreduce", "local_sgd"])
@on_ranks(1)
def test_the_figures_are_in_the_event_file(algorithm: str) -> None:
    from torch.utils.tensorboard import SummaryWriter

    model: nn.Module = seeded(Mlp)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    commlib.wrap(model, algorithm, optimizer=optimizer, bucket_cap_mb=1.0)
    logged = []
    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        for step in range(3):
            model(data(step, 4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            logged.append(commlib.stats(model).as_dict("comm/"))
            for name, value in logged[-1].items():
                writer.add_scalar(name, value, step)
        writer.flush()
        found = read_back(folder)
    assert {"comm/rounds", "comm/wire_bytes", "comm/compression_ratio", "comm/exposed_s"} <= found.keys()
    names = {name for figures in logged for name in figures}
    assert found == {
        name: [(step, as_stored(figures[name])) for step, figures in enumerate(logged) if name in figures]
        for name in names
    }
    assert [value for _, value in found["comm/rounds"]] == [figures["comm/rounds"] for figures in logged]
    commlib.unwrap(model)
