"""Contracts about user code between two steps: accumulation, mixed precision, clipping, optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import commlib
from commlib.errors import ConfigError
from tests.contract.probes import counted, raises_alike, words_of
from tests.contract.subjects import Subject, Training, build, everyones, gathered, joined, loss_of, spread

#: A learning rate so small that no weight moves.
_STANDSTILL = 2.0**-100


def contract_accumulation_in_no_sync(subject: Subject) -> None:
    """Backwards in `no_sync()` send nothing; the one after it sends the mean over the ranks of their sum."""
    training = subject.start().steps(4)
    training.optimizer.zero_grad()
    with counted(training) as sent, training.model.no_sync():
        for step in (4, 5):
            loss_of(training.model, step).backward()
    assert not subject.on_gradients or sent() == 0, f"{sent()} collectives in no_sync()"
    reference = _mean_of_sums(training.model, (4, 5, 6))
    loss_of(training.model, 6).backward()
    if subject.is_exact:
        torch.testing.assert_close(_gradients(training.model), reference, rtol=1e-6, atol=1e-6)
    _assert_gradients_alike(training)
    training.optimizer.step()
    training.assert_sound()
    training.assert_trains_on()


def _mean_of_sums(model: nn.Module, steps: tuple[int, ...]) -> Tensor:
    """Return the mean over the ranks of the gradients of some steps' losses, computed on this rank alone."""
    bare = build()
    bare.load_state_dict(model.state_dict())
    for rank in range(dist.get_world_size()):
        for step in steps:
            (loss_of(bare, step, rank) / dist.get_world_size()).backward()
    return _gradients(bare)


def _gradients(model: nn.Module) -> Tensor:
    return joined([p.grad for p in model.parameters() if p.grad is not None])


def _assert_gradients_alike(training: Training) -> None:
    if training.subject.on_gradients:
        rows = everyones(_gradients(training.model))
        assert (rows == rows[0]).all(), "gradients differ between ranks"


def contract_expected_backward(subject: Subject) -> None:
    """After `expect_backward` a backward that no forward announced is as one of `model(...)`: in value and in bytes."""
    usual, expected = subject.start(), subject.start(unannounced="error")
    for step in range(7):
        usual.step()
        expected.optimizer.zero_grad()
        commlib.expect_backward(expected.model)
        loss_of(expected.model.module, step).backward()
        expected.optimizer.step()
        expected.num_steps += 1
        if not subject.runs_by_clocks:
            assert torch.equal(usual.flat(), expected.flat()), f"other weights after step {step + 1}"
    expected.optimizer.zero_grad()
    if subject.on_gradients and dist.get_world_size() > 1:  # one rank alone has nobody to be apart from
        with raises_alike(ConfigError, "expect_backward"):
            loss_of(expected.model.module, 7).backward()
        with counted(expected) as sent, expected.model.no_sync():
            loss_of(expected.model.module, 7).backward()
        assert sent() == 0, "a backward in no_sync() was communicated"
    expected.assert_trains_on()


def contract_two_synchronised_backwards(subject: Subject) -> None:
    """A second synchronised backward of a step adds its mean; where it cannot, the refusal has no lasting effect."""
    training, plain = subject.start().steps(4), subject.start().steps(4)
    training.backward()
    plain.backward()
    first = _gradients(training.model)
    if subject.on_gradients and not subject.channel.accumulates:
        with raises_alike(ConfigError, "zero_grad"):
            loss_of(training.model, 5).backward()
    else:
        reference = _mean_of_sums(training.model, (5,))
        loss_of(training.model, 5).backward()
        if subject.is_exact:
            torch.testing.assert_close(_gradients(training.model), first + reference, rtol=1e-6, atol=1e-6)
        loss_of(plain.model, 5).backward()
    _assert_gradients_alike(training)
    training.steps(3)
    plain.steps(3)
    _assert_same_way(training, plain)
    training.assert_trains_on()


def _assert_same_way(training: Training, other: Training) -> None:
    training.assert_sound()
    if not training.subject.runs_by_clocks:
        far = float((training.flat() - other.flat()).abs().max())
        assert far == 0, f"weights are {far} from those of a run without it"


def _scaled_step(training: Training, scaler: Any, factor: float = 1.0) -> None:
    training.optimizer.zero_grad()
    scaler.scale(loss_of(training.model, training.num_steps) * factor).backward()
    scaler.step(training.optimizer)
    scaler.update()
    training.num_steps += 1


def contract_amp(subject: Subject) -> None:
    """A GradScaler that is given to `wrap` changes nothing but the scale, also where its scale grows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    scaled, plain = subject.start(scaler=scaler), subject.start()
    for _ in range(8):
        _scaled_step(scaled, scaler)
        plain.step()
    assert scaler.get_scale() == 1024.0, "the scale did not grow"
    scaled.assert_sound()
    if not subject.runs_by_clocks:
        torch.testing.assert_close(scaled.flat(), plain.flat(), rtol=1e-5, atol=1e-6)
    scaled.num_steps = plain.num_steps
    _scaled_step(scaled, scaler)
    scaled.assert_sound()


def contract_nonfinite_step_with_a_scaler(subject: Subject) -> None:
    """A gradient that overflows on one rank costs a step and nothing else: weights and state stay finite, in step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    training = subject.start(scaler=scaler)
    for step in range(10):
        is_bad = step == 4 and dist.get_rank() == dist.get_world_size() - 1
        _scaled_step(training, scaler, float("inf") if is_bad else 1.0)
    scales = gathered(scaler.get_scale())
    skipped = [scale == 128.0 for scale in scales]
    assert all(skipped) if subject.on_gradients else skipped[-1], f"the scales are {scales}"
    _assert_all_finite(training)
    training.assert_sound()
    commlib.synchronize(training.model)
    assert spread(training.model) == 0


def contract_loss_scales_that_part(subject: Subject) -> None:
    """Ranks that share gradients notice in the next backward that one scales its loss by another factor."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    training = subject.start(scaler=scaler)
    for _ in range(3):
        _scaled_step(training, scaler)
    scaler.update(128.0 if dist.get_rank() == 0 else 256.0)
    if not subject.on_gradients or dist.get_world_size() == 1:
        _scaled_step(training, scaler)
        training.assert_trains_on()
        return
    with raises_alike(ConfigError, "the loss scale differs between ranks"):
        _scaled_step(training, scaler)


def contract_nonfinite_step_without_a_scaler(subject: Subject) -> None:
    """A gradient that is infinite on one rank is seen by all that share gradients; a skipped step leaves no trace."""
    training = subject.start()
    if not subject.on_gradients:
        return  # a rank's gradients are its own
    for step in range(9):
        training.optimizer.zero_grad()
        is_bad = step == 4 and dist.get_rank() == dist.get_world_size() - 1
        (loss_of(training.model, step) * (float("inf") if is_bad else 1.0)).backward()
        is_finite = bool(torch.isfinite(_gradients(training.model)).all())
        assert is_finite == (step != 4), f"step {step}: the gradient is {'' if is_finite else 'not '}finite"
        if is_finite:
            training.optimizer.step()
        training.num_steps += 1
    _assert_all_finite(training)
    training.assert_trains_on()


def _assert_all_finite(training: Training) -> None:
    state = {"commlib": commlib.state_dict(training.model), "optimizer": training.optimizer.state_dict()}
    bad = [path for path, value in _tensors(state) if not torch.isfinite(value).all()]
    assert not bad, f"not finite: {bad}"
    assert torch.isfinite(training.flat()).all(), "weights are not finite"


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _tensors(each, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for idx, each in enumerate(value):
            yield from _tensors(each, f"{path}[{idx}]")


def contract_autocast(subject: Subject) -> None:
    """Forwards under autocast to bf16 train fp32 weights with fp32 gradients."""
    training = subject.start()
    for _ in range(5):
        training.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(training.model, training.num_steps)
        loss.backward()
        _assert_gradients_alike(training)
        assert {p.grad.dtype for p in training.model.parameters()} == {torch.float32}
        training.optimizer.step()
        training.num_steps += 1
    training.assert_sound()
    training.assert_trains_on()


def contract_clip_grad_norm(subject: Subject) -> None:
    """Gradients may be clipped after backward: where they are shared, by the same norm on all ranks."""
    training = subject.start()
    for _ in range(6):
        training.backward()
        norm = nn.utils.clip_grad_norm_(training.model.parameters(), 0.01)
        rows = everyones(norm.reshape(1))
        assert not subject.on_gradients or (rows == rows[0]).all(), f"norms differ between ranks: {rows}"
        assert float(torch.linalg.vector_norm(_gradients(training.model))) < 0.0101
        training.optimizer.step()
        training.num_steps += 1
    training.assert_sound()
    training.assert_trains_on()


def contract_falling_learning_rate(subject: Subject) -> None:
    """A falling learning rate leaves averaged gradients unchanged: norms and clipping keep their meaning."""
    if not subject.on_gradients or subject.runs_by_clocks or subject.channel.reads_optimizer:
        return
    constant, falling = subject.start(lr=_STANDSTILL), subject.start(lr=_STANDSTILL)
    for step in range(8):
        for group in falling.optimizer.param_groups:
            group["lr"] = 0.0 if step == 5 else _STANDSTILL / 2.0**step
        constant.step()
        falling.step()
        same = torch.equal(_gradients(constant.model), _gradients(falling.model))
        assert same, f"gradients follow the learning rate in step {step + 1}"


def contract_hooks_on_gradients(subject: Subject) -> None:
    """A hook that changes a gradient is heeded whether it was set before `wrap` or after it, as with DDP."""
    ways = []
    for first in (True, False):
        model = build()
        if first:
            _halve_gradients(model)
        training = subject.start(model)
        if not first:
            _halve_gradients(model)
        training.steps(subject.channel.warmup_steps + 4).assert_sound()
        ways.append(training.flat())
        training.assert_trains_on()
    if not subject.runs_by_clocks:
        assert torch.equal(*ways), "it matters when the hook was set"


def _halve_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_halve)


def _halve(parameter: Tensor) -> None:
    parameter.grad = 0.5 * parameter.grad  # type: ignore[operator]


def contract_closure(subject: Subject) -> None:
    """`optimizer.step(closure)` makes the same step as a backward before it."""
    training, plain = subject.start(), subject.start()

    def closure() -> float:
        training.backward()
        return 0.0

    for _ in range(6):
        training.optimizer.step(closure)
        training.num_steps += 1
        plain.step()
    _assert_same_way(training, plain)


class _Pair:
    """Two optimizers that are stepped one after the other."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def zero_grad(self) -> None:
        for each in self.optimizers:
            each.zero_grad()

    def step(self) -> None:
        for each in self.optimizers:
            each.step()


def contract_optimizer_list(subject: Subject) -> None:
    """Two optimizers of one kind, each for a part of the parameters, train as one; else all ranks are told why not."""
    model, plain = build(), subject.start()
    parameters = list(model.parameters())
    pair = _Pair(subject.optimizer(parameters[:3]), subject.optimizer(parameters[3:]))
    refused: ConfigError | None = None
    try:
        training = Training(subject, model, pair, given=list(pair.optimizers))
    except ConfigError as error:
        refused = error
    everyone = gathered(words_of(refused))
    if any(everyone):
        assert all(word is not None and "optimizer" in word for word in everyone), f"refused with {everyone}"
        return
    _assert_same_way(training.steps(6), plain.steps(6))


class _Proxy:
    """A trainer's proxy of an optimizer, which forwards all attributes."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def contract_optimizer_proxy(subject: Subject) -> None:
    """An optimizer may be given inside a proxy of it, whose steps count."""
    model, plain = build(), subject.start()
    proxy = _Proxy(subject.optimizer(list(model.parameters())))
    training = Training(subject, model, proxy, given=proxy)
    _assert_same_way(training.steps(6), plain.steps(6))


def contract_rounds_and_steps(subject: Subject) -> None:
    """`stats().rounds` counts communicated rounds; warm-ups and periods count the optimizer's steps."""
    training, channel = subject.start(), subject.channel
    steps = channel.warmup_steps + 4 * subject.period
    for _ in range(steps):
        with training.model.no_sync():
            training.backward()
        loss_of(training.model, training.num_steps).backward()
        training.optimizer.step()
        training.num_steps += 1
    commlib.state_dict(training.model)  # takes a round that is under way
    rounds = commlib.stats(training.model).rounds
    if training.engine.comm.world_size == 1 and subject.on_gradients and channel.idle_alone:
        assert rounds == 0, f"{rounds} rounds of one rank alone"
    elif subject.runs_by_clocks and not subject.on_gradients:
        assert channel.warmup_steps <= rounds <= channel.warmup_steps + 4 * training.engine.comm.world_size
    else:
        expected = steps if subject.on_gradients else channel.warmup_steps + 4
        assert rounds == expected, f"{rounds} rounds in {steps} steps, expected {expected}"
