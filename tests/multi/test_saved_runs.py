"""Runs go as they went, and go on from checkpoints that were written then: every algorithm, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlib
from tests.multi.pool import run_ranks
from tests.multi.saved_runs import NUM_STEPS, RUNS, SAVED_AT, Run, of_ranks, path_of, read, training


def check(names: list[str]) -> None:
    for name in names:
        run, recorded = RUNS[name], read(name)[dist.get_rank()]
        try:
            goes_on(run, recorded)
            if run.repeats_itself:
                goes_as_it_went(run, recorded)
        except Exception as error:
            raise AssertionError(f"the run {name!r}: {error!r}") from error
        dist.barrier()


def goes_on(run: Run, recorded: dict[str, Any]) -> None:
    """Load the saved state, and make the remaining steps."""
    with training(run) as resumed:
        resumed.load(recorded["saved"])
        assert_same(resumed.weights(), flat(recorded["saved"]["model"]), exact=True)
        dist.barrier()  # the ranks of hogwild share their weights: none steps before all have compared them
        resumed.steps(SAVED_AT, NUM_STEPS)
        if run.repeats_itself:
            assert_same(resumed.weights(), recorded["weights"], exact=not run.has_products)


def goes_as_it_went(run: Run, recorded: dict[str, Any]) -> None:
    """Make all steps."""
    with training(run) as whole:
        whole.steps(0, SAVED_AT)
        whole.save()  # which takes results from the background
        whole.steps(SAVED_AT, NUM_STEPS)
        assert_same(whole.weights(), recorded["weights"], exact=not run.has_products)


def flat(state: dict[str, Any]) -> torch.Tensor:
    return torch.cat([value.reshape(-1) for value in state.values()])


def assert_same(got: torch.Tensor, expected: torch.Tensor, *, exact: bool) -> None:
    torch.testing.assert_close(got, expected, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-5)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="the records are of fused multiply-adds"
)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_runs_go_as_they_went_and_go_on_from_their_checkpoints(num_ranks: int) -> None:
    run_ranks(check, num_ranks, of_ranks(num_ranks))


def test_every_algorithm_has_a_run_and_every_run_a_record() -> None:
    assert {run.name for run in RUNS.values()} == {*commlib.algorithms.list()} - {"auto"}, "auto chooses among them"
    assert {path.name for path in path_of("any").parent.iterdir()} == {path_of(name).name for name in RUNS}
