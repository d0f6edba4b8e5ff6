"""Contracts about what is saved, loaded and repeated."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch

import commlib
from tests.contract.subjects import Subject, Training, build, everyones, flat, spread

#: Steps after which a run is saved: while plans are profiled and tried, in warm-ups, and after them.
_SAVED_AFTER = (1, 2, 3, 5, 9)


def contract_replicas_alike(subject: Subject) -> None:
    """Ranks that compute gradients together hold the same weights after every step; others after `synchronize`."""
    training = subject.start(build(seed=7 + torch.distributed.get_rank()))
    assert spread(training.model) == 0, "wrap did not copy rank 0's weights"
    for step in range(6):
        training.step()
        if subject.on_gradients or step + 1 <= subject.traits.warmup_steps:
            assert spread(training.model) == 0, f"replicas differ after step {step + 1}"
    training.assert_trains_on()


def contract_two_runs_are_alike(subject: Subject) -> None:
    """Under `torch.use_deterministic_algorithms(True)` a run repeats itself bit for bit."""
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (subject.start().steps(7).flat() for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first, second), f"two runs differ by {float((first - second).abs().max())}"


def contract_resume_at_any_step(subject: Subject) -> None:
    """A run that is saved after any step and resumed, in either order of loading, goes on bit for bit."""
    for steps in _SAVED_AFTER:
        for weights_first in (True, False):
            _check_resume(subject, steps, weights_first)


def _check_resume(subject: Subject, steps: int, weights_first: bool) -> None:
    whole = subject.start(bucket_cap_mb=None).steps(steps)
    saved = saved_of(whole)
    resumed = resume(subject, saved, steps, weights_first, bucket_cap_mb=None)
    what = f"saved after step {steps}, {'weights' if weights_first else 'state'} loaded first"
    if subject.runs_by_clocks:
        resumed.assert_trains_on()
        whole.assert_trains_on()
        return
    assert torch.equal(resumed.flat(), whole.flat()), f"{what}: other weights were loaded"
    for after in range(4):
        whole.step()
        resumed.step()
        assert torch.equal(resumed.flat(), whole.flat()), f"{what}: differs {after + 1} steps later"


def saved_of(training: Training) -> Any:
    """Return what a user saves: communication's state first, as it takes results that are under way."""
    state = commlib.state_dict(training.model)
    return copy.deepcopy((state, training.model.state_dict(), training.optimizer.state_dict()))


def resume(subject: Subject, saved: Any, steps: int, weights_first: bool = True, **options: Any) -> Training:
    """Return a fresh run that goes on from what was saved."""
    state, weights, of_optimizer = copy.deepcopy(saved)
    training = subject.start(build(seed=99), **options)
    if weights_first:
        training.model.load_state_dict(weights)
    commlib.load_state_dict(training.model, state)
    if not weights_first:
        training.model.load_state_dict(weights)
    training.optimizer.load_state_dict(of_optimizer)
    training.num_steps = steps
    return training
