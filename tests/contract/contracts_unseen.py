"""Contracts about steps and gradients made by third-party libraries: correct, or an error on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

import commlib
from commlib.algorithms import Gradients
from commlib.engine.unseen import NUM_CHANGES
from commlib.errors import ConfigError
from tests.contract.probes import raises_alike
from tests.contract.subjects import Subject, Training, build, gathered, loss_of, spread


def _follows(training: Training) -> bool:
    """Return whether uncounted steps would change the current communication."""
    return training.engine._follows_steps


def _reads_optimizer(subject: Subject) -> bool:
    return isinstance(subject.channel, Gradients) and subject.channel.reads_optimizer


def contract_gradient_data_is_assigned(subject: Subject) -> None:
    """`p.grad.data = f(p.grad.data)` in every step is seen by the step, and by nothing after it."""
    plain, assigned = subject.start(), subject.start()
    for _ in range(8):
        for training in (plain, assigned):
            training.backward()
        for parameter, other in zip(plain.model.parameters(), assigned.model.parameters(), strict=True):
            parameter.grad.mul_(0.5)
            other.grad.data = other.grad.data * 0.5
        for training in (plain, assigned):
            training.optimizer.step()
            training.num_steps += 1
        if not subject.runs_by_clocks:
            assert torch.equal(plain.flat(), assigned.flat()), f"other weights after step {assigned.num_steps}"
    assigned.assert_sound()


def contract_gradients_kept_in_other_memory(subject: Subject) -> None:
    """Gradients that are zeroed in place, in memory that the user has given them, are communicated as any other."""
    plain, moved = subject.start(), subject.start()
    for step in range(6):
        for training in (plain, moved):
            training.optimizer.zero_grad(set_to_none=False)
            loss_of(training.model, step).backward()
        for parameter in moved.model.parameters():
            parameter.grad.data = parameter.grad.data.clone()
        for training in (plain, moved):
            training.optimizer.step()
        if not subject.runs_by_clocks:
            assert torch.equal(plain.flat(), moved.flat()), f"other weights after step {step + 1}"
    moved.assert_sound()


def contract_another_optimizer(subject: Subject) -> None:
    """A step of an optimizer that was not given is refused where steps are followed, before it changes anything."""
    training = subject.start().steps(3)
    other = subject.optimizer(list(training.model.parameters()))
    training.backward()
    before = training.flat()
    if _follows(training):
        with raises_alike(ConfigError, type(other).__name__, "commlib.set_optimizer"):
            other.step()
        assert subject.runs_by_clocks or torch.equal(before, training.flat()), "the step was made"
    training.optimizer.step()
    training.num_steps += 1
    training.assert_trains_on()


def contract_another_optimizer_that_is_set(subject: Subject) -> None:
    """After `set_optimizer` with the old one's state, training goes on as without it."""
    plain, changed = subject.start().steps(5), subject.start().steps(5)
    other = subject.optimizer(list(changed.model.parameters()))
    other.load_state_dict(changed.optimizer.state_dict())
    commlib.set_optimizer(changed.model, other)
    changed.optimizer = other
    for training in (plain, changed):
        training.steps(5)
    changed.assert_sound()
    if not subject.runs_by_clocks and "drops_result" not in subject.limits:
        far = float((plain.flat() - changed.flat()).abs().max())
        assert far == 0, f"weights are {far} from those of a run without it"
    changed.assert_trains_on()


def contract_steps_that_nobody_counts(subject: Subject) -> None:
    """Weights that change again and again without a counted step are an error where steps are followed."""
    training = subject.start().steps(2)
    follows = _follows(training)

    def train_by_hand(count: int) -> None:
        for _ in range(count):
            training.backward()
            for parameter in training.model.parameters():
                parameter.data.add_(parameter.grad, alpha=-0.01)
            training.num_steps += 1

    if follows:
        with raises_alike(ConfigError, "made no step", "commlib.set_optimizer"):
            train_by_hand(NUM_CHANGES + 4)
    else:
        train_by_hand(NUM_CHANGES + 4)
    gathered(None)


def contract_what_is_no_step(subject: Subject) -> None:
    """Many accumulated backwards, skipped steps and weights that are swapped in place are no evidence of any."""
    training = subject.start().steps(2)
    training.optimizer.zero_grad()
    with training.model.no_sync():
        for _ in range(3 * NUM_CHANGES):
            loss_of(training.model, training.num_steps).backward()
    training.step()
    for _ in range(3 * NUM_CHANGES):  # a scaler that is not known leaves out as many
        training.backward()
    kept = [parameter.detach().clone() for parameter in training.model.parameters()]
    for change in (lambda p, k: p.mul_(0.5), lambda p, k: p.copy_(k)):
        with torch.no_grad():
            for parameter, before in zip(training.model.parameters(), kept, strict=True):
                change(parameter, before)
        training.backward()
    training.optimizer.step()
    training.num_steps += 1
    training.assert_trains_on()


def contract_steps_inside_backward(subject: Subject) -> None:
    """A hook that steps as soon as a gradient is ready uses the communicated gradient, or all ranks raise."""
    model = build()
    parts = [subject.optimizer([parameter]) for parameter in model.parameters()]
    by_parameter = dict(zip(model.parameters(), parts, strict=True))
    given = subject.optimizer(list(model.parameters())) if _reads_optimizer(subject) else parts
    training = subject.start(model, given=given)

    def step(parameter: torch.Tensor) -> None:
        by_parameter[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    communicates = training.engine.counter.syncs_gradients and not training.engine.gradients.is_idle
    if communicates:
        with raises_alike(ConfigError, "inside of backward"):
            loss_of(training.model, 0).backward()
    else:
        for idx in range(4):
            loss_of(training.model, idx).backward()


def contract_two_models_in_any_order(subject: Subject) -> None:
    """Losses of two models that are added in another order on one rank end in no wait for a peer."""
    one, other = subject.start(), subject.start()
    for step in range(8):
        for training in (one, other):
            training.optimizer.zero_grad()
        pair = [loss_of(one.model, step), loss_of(other.model, step + 50)]
        loss = pair[0] + pair[1] if dist.get_rank() % 2 else pair[1] + pair[0]
        loss.backward()
        for training in (one, other):
            training.optimizer.step()
            training.num_steps += 1
    for training in (one, other):
        training.assert_sound()


def contract_state_of_the_optimizer(subject: Subject) -> None:
    """An optimizer whose state differs between ranks is refused if replicas must stay identical."""
    model = build()
    optimizer = subject.optimizer(list(model.parameters()))
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    has_state = any(optimizer.state.values())
    is_apart = has_state and dist.get_world_size() > 1 and subject.channel.keeps_replicas_alike
    if is_apart:
        with raises_alike(ConfigError, "commlib.synchronize(model, optimizer=True)"):
            Training(subject, model, optimizer)
        local = Training(Subject("local_sgd"), model, optimizer)
        commlib.synchronize(local.model, optimizer=True)
        commlib.unwrap(model)
    training = subject.start(model, given=optimizer)
    training.optimizer = optimizer
    training.steps(4).assert_sound()
    assert not is_apart or spread(model) == 0
