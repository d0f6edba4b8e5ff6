"""The names in a profile: every phase of every bucket while a profiler is active, and no work otherwise."""

from __future__ import annotations

import types
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import commlib
from commlib.engine.rounds import marks
from tests.multi.common import Mlp, mlp_loss, seeded, train
from tests.multi.pool import on_ranks

PREFIX = "commlib: "
#: The phases of each algorithm's buckets in a step that communicates.
PHASES = {
    "allreduce": {"gather", "encode", "all_reduce", "decode"},
    "bytegrad": {"gather", "encode", "all_to_all", "all_gather", "decode"},
    "local_sgd": {"gather", "encode", "all_reduce", "decode"},
}


def names_of_a_step(algorithm: str) -> tuple[list[str], int]:
    """Return commlib's names in the profile of a step that communicates, and the number of buckets."""
    model = seeded(lambda: Mlp(width=64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"period": 1} if algorithm == "local_sgd" else {}
    chosen = commlib.algorithms.get(algorithm)(**options)
    commlib.wrap(model, chosen, optimizer=optimizer, bucket_cap_mb=0.001)
    train(model, mlp_loss, 3, optimizer)
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread) as recorded:
        train(model, mlp_loss, 1, optimizer)
    names = [event.name.removeprefix(PREFIX) for event in recorded.events() if event.name.startswith(PREFIX)]
    num_buckets = commlib.stats(model).num_buckets
    commlib.unwrap(model)
    return names, num_buckets


@pytest.mark.parametrize("algorithm", list(PHASES))
@on_ranks(2)
def test_every_phase_of_every_bucket_has_a_name(algorithm: str) -> None:
    names, num_buckets = names_of_a_step(algorithm)
    by_phase: dict[str, set[str]] = {}
    for name in names:
        phase, _, what = name.partition(": ")
        if what.startswith("bucket ") and phase != "wait":
            by_phase.setdefault(phase, set()).add(what)
    assert any(name.startswith("wait: ") for name in names)
    assert by_phase.keys() == PHASES[algorithm]
    for phase, buckets in by_phase.items():
        assert len(buckets) >= max(2, num_buckets), f"{phase} of {buckets}"


@on_ranks(2)
def test_nothing_is_named_without_a_profiler() -> None:
    model = commlib.wrap(seeded(Mlp), "bytegrad", bucket_cap_mb=0.004)
    idle = types.SimpleNamespace(_is_profiler_enabled=False)  # which makes no names
    with mock.patch.object(marks, "profiler", idle):
        train(model, mlp_loss, 2)
    commlib.unwrap(model)
