"""Contracts about saving, loading and repeating runs."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import commlib
from commlib import ConfigError
from commlib.engine.planning import plan as plans
from tests.contract.probes import is_victim, raises_alike
from tests.contract.subjects import Subject, Training, build, everyones, gathered, loss_of, spread

#: Steps after which a run is saved: while plans are profiled and tried, in warm-ups, and after them.
_SAVED_AFTER = (1, 2, 3, 4, 9, 10)


def contract_replicas_alike(subject: Subject) -> None:
    """Ranks that compute gradients together hold the same weights after every step; others after `synchronize`."""
    training = subject.start(build(seed=7 + dist.get_rank()))
    assert spread(training.model) == 0, "wrap did not copy rank 0's weights"
    for step in range(6):
        training.step()
        if subject.on_gradients or step + 1 <= subject.channel.warmup_steps:
            assert spread(training.model) == 0, f"replicas differ after step {step + 1}"
    training.assert_trains_on()


def contract_synchronize(subject: Subject) -> None:
    """`synchronize` gives all ranks the same weights, the mean of theirs if they differ; again it changes nothing."""
    training = subject.start().steps(subject.channel.warmup_steps + 2 * subject.period + 1)
    commlib.state_dict(training.model)  # takes a round that is under way
    mean = everyones(training.flat()).mean(dim=0)
    commlib.synchronize(training.model)
    assert spread(training.model) == 0, "replicas differ"
    if not subject.runs_by_clocks:
        torch.testing.assert_close(training.flat(), mean, rtol=1e-6, atol=1e-6)
    once = training.flat()
    commlib.synchronize(training.model)
    torch.testing.assert_close(training.flat(), once, rtol=1e-6, atol=1e-6)
    gathered(None)  # nobody trains on before all have looked
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
        _check_resume(subject, steps, weights_first=steps % 2 == 0)


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
    """Return the state that a user saves: communication first, since saving it completes results under way."""
    state = commlib.state_dict(training.model)
    return copy.deepcopy((state, training.model.state_dict(), training.optimizer.state_dict()))


def resume(subject: Subject, saved: Any, steps: int, weights_first: bool = True, **options: Any) -> Training:
    """Return a new run that continues from a saved state."""
    training = subject.start(build(seed=99), **options)
    _take_over(training, saved, steps, weights_first)
    return training


def _take_over(training: Training, saved: Any, steps: int, weights_first: bool) -> None:
    """Load the state that was saved after `steps` steps."""
    state, weights, of_optimizer = copy.deepcopy(saved)
    if weights_first:
        training.model.load_state_dict(weights)
    commlib.load_state_dict(training.model, state)
    if not weights_first:
        training.model.load_state_dict(weights)
    training.optimizer.load_state_dict(of_optimizer)
    training.num_steps = steps


def contract_rolled_back(subject: Subject) -> None:
    """A run that returns to its saved state, any number of steps later, repeats the same steps bit for bit."""
    training = subject.start(bucket_cap_mb=None).steps(4)
    saved = saved_of(training)
    way = [training.steps(1).flat() for _ in range(4)]
    for later in (1, 2, 3, 3):  # after 4 steps more, then after 1, after 2 and after 3
        gathered(None)  # nobody goes on from other weights in a round with those that have yet to load them
        _take_over(training, saved, 4, weights_first=later % 2 == 0)
        gathered(None)
        again = [training.steps(1).flat() for _ in range(later)]
        if not subject.runs_by_clocks:
            for number, (first, second) in enumerate(zip(way, again, strict=False), 1):
                assert torch.equal(first, second), f"step {number} of {later} differs"
    training.assert_trains_on()


def contract_states_of_different_steps(subject: Subject) -> None:
    """Ranks that load states of different steps are all told so, and go on when that was put right."""
    saved = subject.start().steps(subject.channel.warmup_steps)
    early = copy.deepcopy(commlib.state_dict(saved.model))
    late = copy.deepcopy(commlib.state_dict(saved.steps(1).model))
    training = subject.start(build(seed=99))
    if subject.channel.keeps_step and dist.get_world_size() > 1:
        commlib.load_state_dict(training.model, late if is_victim() else early)
        for _ in range(2):  # also where the error was caught
            with raises_alike(ConfigError, "loaded states differ", f"step {late['step']}"):
                training.step()
    commlib.load_state_dict(training.model, early)
    training.steps(3).assert_sound()
    training.assert_trains_on()


def contract_refused_state(subject: Subject) -> None:
    """A state that is refused changes nothing: the run goes on bit for bit as one that was not asked to load it."""
    plain, asked = subject.start().steps(4), subject.start().steps(4)
    state = commlib.state_dict(asked.model)
    commlib.state_dict(plain.model)
    others = {"algorithm": "another", "format": 0, "plan": {"buckets": [["another"]], "ready_s": [0.0]}}
    for key, value in others.items():
        with raises_alike(ConfigError, key):
            commlib.load_state_dict(asked.model, {**copy.deepcopy(state), key: value})
    may_be_absent = {"commlib", "rank", "world_size", "shard"}
    for key in sorted(state.keys() - may_be_absent):
        with raises_alike(ConfigError, key):
            commlib.load_state_dict(asked.model, {k: v for k, v in copy.deepcopy(state).items() if k != key})
    for step in range(4):
        plain.step()
        asked.step()
        if not subject.runs_by_clocks:
            assert torch.equal(plain.flat(), asked.flat()), f"differs {step + 1} steps later"
    asked.assert_trains_on()


def contract_state_dict_is_plain(subject: Subject) -> None:
    """The state is a copy, of tensors, numbers and strings: `torch.load(weights_only=True)` reads it, and resumes.

    It also declares which entries are the same on all ranks, so that new members of an elastic group receive these.
    """
    whole = subject.start().steps(5)
    _check_same(subject, whole.engine.algorithm)
    saved = saved_of(whole)
    live = commlib.state_dict(whole.model)
    before = copy.deepcopy(live)
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    resumed = resume(subject, loaded, 5)
    whole.steps(3)
    assert _is_same(live, before), "the saved state changed with training"
    resumed.steps(3).assert_sound()
    if not subject.runs_by_clocks:
        assert torch.equal(whole.flat(), resumed.flat()), "training from the file differs"


def contract_optimizer_load_state_dict(subject: Subject) -> None:
    """Loading the optimizer's own state in mid-training changes nothing."""
    plain, loaded = subject.start(), subject.start()
    for step in range(7):
        plain.step()
        loaded.step()
        if step in (1, 4):
            loaded.optimizer.load_state_dict(copy.deepcopy(loaded.optimizer.state_dict()))
    loaded.assert_sound()
    if not subject.runs_by_clocks:
        assert torch.equal(plain.flat(), loaded.flat()), "the run went another way"


def contract_loaded_weights_stay(subject: Subject) -> None:
    """Earlier weights that all ranks load are the model's from then on: nothing of the later ones comes back."""
    training = subject.start().steps(3)
    commlib.synchronize(training.model)
    earlier = copy.deepcopy(training.model.state_dict())
    training.steps(4)
    for group in training.optimizer.param_groups:
        group["lr"] = 0.0
    gathered(None)
    training.model.load_state_dict(earlier)
    gathered(None)
    expected = training.flat()
    for step in range(6):
        training.step()
        far = float((training.flat() - expected).abs().max())
        assert far < 1e-6, f"weights are {far} from those that were loaded, {step + 1} steps of lr 0 later"


def contract_swapped_weights(subject: Subject) -> None:
    """One rank alone may load other weights, evaluate them, and load its own again: the run goes on bit for bit."""
    plain, swapped = subject.start(), subject.start()
    for step in range(8):
        plain.step()
        swapped.step()
        if step in (2, 3, 6) and is_victim():
            own = copy.deepcopy(swapped.model.state_dict())
            swapped.model.load_state_dict({name: 0.5 * value for name, value in own.items()})
            with torch.no_grad():
                loss_of(swapped.model, step)
            swapped.model.load_state_dict(own)
        if subject.runs_by_clocks:
            gathered(None)
            continue
        assert torch.equal(plain.flat(), swapped.flat()), f"differs after step {step + 1}"
    swapped.assert_trains_on()


def contract_change_of_plan(subject: Subject) -> None:
    """A change of bucket plan during training loses no unsent values, and exact algorithms give the same weights."""
    training, other = subject.start().steps(4), subject.start().steps(4)
    if not subject.channel.has_rounds:
        return  # there are no buckets
    for finer in (True, False):
        before = _owed(training)
        _change_plan(training, finer)
        _assert_same_owed(_owed(training), before)
        training.steps(2).assert_sound()
        other.steps(2)
    if subject.is_exact:
        torch.testing.assert_close(training.flat(), other.flat(), rtol=1e-6, atol=1e-6)
    training.assert_trains_on()


def _change_plan(training: Training, finer: bool) -> None:
    engine = training.engine
    training.rebuild_weights()
    if not engine.gradients.is_idle:
        single = plans.Plan(tuple((idx,) for idx in reversed(range(len(engine.parameters)))), "settled")
        plan = single if finer else plans.by_sizes(engine.parameters, 1 << 30)
        engine.gradients.restore(plan, engine.gradients.backward.hook_counts())


def _owed(training: Training) -> dict[str, Tensor]:
    """Return every kind of state by parameter, summed over the ranks; an owner's error counts as all its workers'."""
    state = commlib.state_dict(training.model)["state"]
    kinds = {kind: pieces for kind, pieces in state.items() if are_pieces(pieces)}
    found: dict[str, Tensor] = {}
    for kind, name, start, piece in (entry for each in gathered(kinds) for entry in entries(each)):
        key = "worker" if kind in ("owner", "owed") else kind
        values = piece.double().reshape(-1) * (dist.get_world_size() if kind == "owner" else 1)
        total = found.setdefault(f"{key} of {name}", torch.zeros(1 << 12, dtype=torch.float64))
        total[start : start + values.numel()] += values
    return found


def are_pieces(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(each, tuple) and len(each) == 2 and isinstance(each[1], Tensor) for each in value.values()
    )


def entries(kinds: dict[str, Any]) -> Iterator[tuple[str, str, int, Tensor]]:
    for kind, pieces in kinds.items():
        for name, (start, piece) in pieces.items():
            yield kind, name, start, piece


def _check_same(subject: Subject, algorithm: Any) -> None:
    """Check that `State.same` lists the entries that are the same on all ranks, as far as they are not zero."""
    if not (subject.channel.has_rounds and subject.channel.keeps_step and algorithm.can_repeat):
        return  # refused in elastic groups
    if dist.get_world_size() == 1:
        return  # there is no other rank to compare with
    of_ranks = gathered(algorithm.state_dict())
    for kind, own in of_ranks[0].items():
        is_same = all(_is_same(each[kind], own) for each in of_ranks)
        if kind in algorithm.shared_state_dict():
            assert is_same, f"{kind} differs between ranks"
        else:
            assert not is_same or not _has_values(own), f"{kind} is the same on all ranks"


def _has_values(state: Any) -> bool:
    if isinstance(state, Tensor):
        return bool(state.any())
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return any(map(_has_values, parts))


def _assert_same_owed(after: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    for key, value in before.items():
        assert key in after or not value.any(), f"{key} was lost in the change of plan"
        got = after.get(key, torch.zeros_like(value))
        scale = float(value.abs().max())
        assert float((got - value).abs().max()) <= 1e-5 * scale, f"{key} changed with the plan"


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_is_same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_is_same, first, second))
    return first == second
