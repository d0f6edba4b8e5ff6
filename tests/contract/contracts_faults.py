"""Contracts about uneven inputs, backwards that fail, and faults on one rank."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlib
from commlib.engine.planning import plan as plans
from commlib.engine.rounds.drivers import _shared
from commlib.errors import CommlibError, ConfigError
from commlib.transport import closing
from commlib.transport.base import Communication
from tests.contract.contracts_state import saved_of
from tests.contract.probes import (
    Locks,
    counted,
    drop,
    failing_allocation,
    failing_collective,
    is_victim,
    lead_back,
    transports,
    words_of,
)
from tests.contract.subjects import ConvNet, Frozen, Subject, Training, build, gathered, loss_of, spread
from tests.waiting import eventually


def contract_join(subject: Subject) -> None:
    """With uneven inputs in `model.join()` the training ends, with the same weights on all ranks; or it is refused."""
    training = subject.start()
    rank = torch.distributed.get_rank()
    refused: ConfigError | None = None
    try:
        with training.model.join():
            training.steps(4 + 2 * rank)
            before = [None if p.grad is None else p.grad.clone() for p in training.model.parameters()]
    except ConfigError as error:
        refused = error
    if refused is not None:
        assert not subject.on_gradients, f"join was refused: {refused}"
        return
    after = [p.grad for p in training.model.parameters()]
    same = [a is b is None or torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert all(same), "gradients changed while the rank had no data"
    assert spread(training.model) == 0, "replicas differ after join"
    training.num_steps = 20
    training.steps(3)
    assert torch.isfinite(training.flat()).all()


def _break(_: torch.Tensor) -> None:
    raise ArithmeticError("an error in the user's backward, says the test")


def _failed_backward(training: Training) -> None:
    training.optimizer.zero_grad()
    output = training.model(*training.model.inputs(training.num_steps, 0))
    output.register_hook(_break)  # called before any gradient of a parameter is there
    with pytest.raises(ArithmeticError):
        output.sum().backward()


def contract_failed_backward_in_no_sync(subject: Subject) -> None:
    """A backward that fails on one rank inside `no_sync()` costs nothing but its gradients."""
    training = subject.start().steps(4)
    with counted(training) as sent, training.model.no_sync():
        training.optimizer.zero_grad()
        if is_victim():
            _failed_backward(training)
        else:
            loss_of(training.model, 4).backward()
    assert not subject.on_gradients or sent() == 0
    training.assert_trains_on()


def contract_failed_backward_before_any_communication(subject: Subject) -> None:
    """A backward that fails before anything was sent is forgotten."""
    training = subject.start().steps(4)
    _failed_backward(training)
    training.assert_trains_on()


def contract_leaving_after_the_last_step(subject: Subject) -> None:
    """A rank whose script is over does not break what its peers still have to do of the last step."""
    training, rank = subject.start(build(ConvNet)).steps(2), torch.distributed.get_rank()
    if rank == 1 and not is_victim():  # the last one has received rank 0's buffers before this one asks for them
        buffers = training.engine.gradients.buffers
        buffers.copy = functools.partial(_after_a_while, buffers.copy)
    training.step()
    if is_victim():
        commlib.unwrap(training.model)
    else:
        assert torch.isfinite(training.flat()).all()


def contract_collected_within_a_lock(subject: Subject) -> None:
    """A model that is dropped without `unwrap` ends wherever the collector comes upon it, also within a lock."""
    collect_within_each_lock(subject)


def collect_within_each_lock(subject: Subject, **options: Any) -> set[str]:
    """Have a dropped model collected while each lock is held that training takes; return the names of these locks."""
    with Locks().probed() as locks:
        training = subject.start(**options).steps(2)
        users = _shared._drivers[training.engine.device][1]
        num_before = len(users)
        _take_locks(subject, training, **options)
        names, models = sorted(set().union(*gathered(locks.held))), list[weakref.ref[Any]]()
        for name in names:
            lead_back(subject.start().steps(1).model)
            dropped = subject.forget_last()
            models.append(weakref.ref(dropped[0].model))
            locks.armed[name] = functools.partial(drop, dropped)
        del dropped
        gathered(None)
        _take_locks(subject, training, **options)
        assert eventually(lambda: not locks.armed), f"the collector did not run in {set(locks.armed)}"
        assert [model() for model in models] == [None] * len(models)
        assert eventually(lambda: len(users) <= num_before), "the driver was not given up"
        training.assert_trains_on()
    return set(names)


def _take_locks(subject: Subject, training: Training, **options: Any) -> None:
    """Run the operations that take the locks of a training: steps, and `wrap` and `unwrap` of another model."""
    training.steps(subject.period + 1)
    other = subject.start(**options).steps(subject.channel.warmup_steps + subject.period + 1)
    commlib.synchronize(other.model)
    commlib.unwrap(other.model)
    gathered(None)
    subject.forget_last()
    training.assert_trains_on()


def contract_dropped_in_the_middle(subject: Subject) -> None:
    """A model that is dropped without `unwrap` is collected, whatever is under way of its last step."""
    for num_steps in (1, 2, subject.channel.warmup_steps + subject.period + 1):
        subject.start().steps(num_steps)
        _drop_last(subject)


def contract_dropped_after_an_error(subject: Subject) -> None:
    """A model whose communication ended with an error, which the user has caught, is collected once it is dropped."""
    training = _failed(subject)
    with contextlib.suppress(Exception):  # the later one, of which the first is the cause
        training.backward()
    del training
    _drop_last(subject)


def contract_wrapped_anew_after_an_error(subject: Subject) -> None:
    """After an error and `unwrap` the same model can be wrapped again, and no state of the first time is left."""
    model, left = _unwrapped(_failed(subject))
    subject.release()
    gathered(None)
    subject.start(model).steps(3).assert_trains_on()
    _assert_gone(left)


def _failed(subject: Subject) -> Training:
    """Start a training of which a collective fails on one rank."""
    training = subject.start().steps(subject.channel.warmup_steps + 1)
    gathered(None)  # the end of one rank may break what its peers do: not of the steps before
    has_failed = False
    try:
        with failing_collective(training):
            training.steps(2 * subject.period + 1)
    except Exception:
        has_failed = True
    has_none = not subject.on_gradients or dist.get_world_size() == 1  # of the collectives in these steps
    assert has_failed or has_none, "no error came of a collective that failed"
    return training


def _unwrapped(training: Training) -> tuple[Any, list[weakref.ref[Any]]]:
    """Unwrap a model; return it, and references to the objects that must be freed."""
    left = _parts_of(training)
    commlib.unwrap(training.model)
    return training.model, left


def _parts_of(training: Training) -> list[weakref.ref[Any]]:
    return [weakref.ref(each) for each in (training.engine, *transports(training))]


def _drop_last(subject: Subject) -> None:
    """Drop the training that was started last; check that nothing keeps its model and communicators."""
    dropped = subject.forget_last()
    left = [weakref.ref(dropped[0].model), *_parts_of(dropped[0])]
    dropped.clear()
    _assert_gone(left)


def _assert_gone(left: list[weakref.ref[Any]]) -> None:
    def are_gone() -> bool:
        gc.collect()
        return all(each() is None for each in left)

    assert eventually(are_gone), f"still there: {[each() for each in left]}"


def contract_an_end_starts_no_thread(subject: Subject) -> None:
    """However a model ends, that needs no new thread: none can be started at the interpreter's exit (Python 3.12)."""
    num_steps = subject.channel.warmup_steps + subject.period + 1
    training, failed = subject.start().steps(num_steps), subject.start().steps(num_steps)
    lead_back(subject.start().steps(num_steps).model)
    dropped = subject.forget_last()
    gathered(None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", _no_thread)
        drop(dropped)
        closing.drain()
        failed.engine.session.abandon(CommlibError("an error of the user's, says the test"))
        commlib.unwrap(failed.model)
        commlib.unwrap(training.model)
    assert torch.isfinite(training.flat()).all()


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError(f"can't create new thread at interpreter shutdown: {thread.name}")


def _after_a_while(communicate: Callable[[Any], Communication], line: Any) -> Communication:
    time.sleep(0.3)
    yield from communicate(line)


def _all_or_none(training: Training, act: Callable[[], Any]) -> None:
    """Check that after a failure on one rank all ranks raise, or all continue identically."""
    error: BaseException | None = None
    try:
        act()
        training.steps(3)
        commlib.synchronize(training.model)
    except BaseException as raised:
        error = raised
    everyone = gathered(words_of(error))
    assert all(everyone) or not any(everyone), f"some ranks raised and others went on: {everyone}"
    if error is None:
        assert torch.isfinite(training.flat()).all()
        assert spread(training.model) == 0, "all went on, and replicas differ"


def _plan_change(subject: Subject) -> tuple[Training, Callable[[], Any]]:
    training = subject.start().steps(4)
    engine = training.engine

    def act() -> None:
        training.rebuild_weights()
        if not engine.gradients.is_idle:
            gradients = engine.gradients
            gradients.restore(plans.by_sizes(engine.parameters, 1 << 30), gradients.backward.hook_counts())

    return training, act


def _adoption(subject: Subject) -> tuple[Training, Callable[[], Any]]:
    training = subject.start(build(Frozen)).steps(4)

    def act() -> None:
        training.model.second.requires_grad_(True)
        training.model(*training.model.inputs(0, 0))

    return training, act


def _resumption(subject: Subject) -> tuple[Training, Callable[[], Any]]:
    training = subject.start().steps(4)
    commlib.synchronize(training.model)
    state, weights, of_optimizer = saved_of(training)

    def act() -> None:
        commlib.load_state_dict(training.model, state)
        training.model.load_state_dict(weights)
        training.optimizer.load_state_dict(of_optimizer)

    return training, act


_PLACES = (_plan_change, _adoption, _resumption)


def contract_a_failed_allocation(subject: Subject) -> None:
    """If one rank runs out of memory when buckets change or in a resume, all raise, or all continue identically."""
    for place in _PLACES:
        _check_place(subject, place, lambda _: failing_allocation())


def contract_a_failed_collective(subject: Subject) -> None:
    """If a collective fails on one rank when buckets change or in a resume, all raise, or all continue identically."""
    for place in _PLACES:
        _check_place(subject, place, failing_collective)


def _check_place(subject: Subject, place: Any, fault: Callable[[Training], contextlib.AbstractContextManager]) -> None:
    training, act = place(subject)
    gathered(None)  # the end of one rank may break what its peers do: not of the steps before

    def act_with_fault() -> None:
        with fault(training):
            act()
            training.step()  # where the change itself sends nothing

    try:
        _all_or_none(training, act_with_fault)
    except AssertionError as error:
        raise AssertionError(f"in {place.__name__.strip('_')}: {error}") from error
