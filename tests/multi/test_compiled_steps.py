"""Functions around a wrapped model that are compiled, and what else commlib offers of a compiled model."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import get_compilation_metrics

import commlib
from commlib.errors import ConfigError
from tests.contract.subjects import Subject, build, loss_of
from tests.multi.common import (
    Mlp,
    assert_same_tensors,
    assert_same_trace,
    data,
    ddp,
    mlp_loss,
    raises_on_every_rank,
    seeded,
    sgd,
    tensors,
    train,
)
from tests.multi.pool import on_ranks
from tests.multi.test_compile import WAYS, compiled_inside, fresh_compiler, num_breaks, wrapped

Step = Callable[[Tensor, Tensor], Tensor]
FOLDER = str(Path(commlib.__file__).parent)


def whole_step(model: Any, optimizer: torch.optim.Optimizer) -> Step:
    def step(_: Tensor, inputs: Tensor) -> Tensor:
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def accumulating_step(model: Any, optimizer: torch.optim.Optimizer) -> Step:
    def step(earlier: Tensor, inputs: Tensor) -> Tensor:
        with model.no_sync():
            model(earlier).square().mean().backward()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def expecting_step(model: Any, optimizer: torch.optim.Optimizer) -> Step:
    def step(_: Tensor, inputs: Tensor) -> Tensor:
        commlib.expect_backward(model)
        loss = model.module(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


#: Graph breaks of a compiled step with DDP and with commlib, with torch 2.13.
BREAKS = {whole_step: [7, 5], accumulating_step: [1, 1]}


def steps_made(make: Callable[..., Step], model: nn.Module, optimizer: Any, compiles: bool) -> dict[str, Tensor]:
    step = make(model, optimizer)
    step = torch.compile(step, backend="aot_eager") if compiles else step
    for idx in range(4):
        step(data(idx, 5, 8), data(idx + 100, 5, 8))
    return tensors(model)


def commlibs_frames() -> list[str]:
    """Return the functions of commlib that dynamo has looked into."""
    found = get_compilation_metrics()
    return [str(each.co_name) for each in found if str(each.co_filename).startswith(FOLDER)]


@on_ranks(2)
@pytest.mark.parametrize("make", [whole_step, accumulating_step])
def test_a_compiled_step_goes_as_in_ddp_and_leaves_commlib_out(make: Callable[..., Step]) -> None:
    model = ddp(seeded(Mlp))
    expected = steps_made(make, model, sgd(model), compiles=False)
    breaks = []
    for parallel in (ddp, wrapped):
        with fresh_compiler():
            model = parallel(seeded(Mlp))
            assert_same_tensors(steps_made(make, model, sgd(model), compiles=True), expected, "weights", exact=True)
            breaks.append(num_breaks())
            assert commlibs_frames() == []
    assert breaks[1] <= breaks[0]
    if torch.__version__.startswith("2.13."):
        assert breaks == BREAKS[make]


@on_ranks(2)
def test_a_compiled_step_may_expect_its_backward() -> None:
    model = ddp(seeded(Mlp))
    expected = steps_made(whole_step, model, sgd(model), compiles=False)
    with fresh_compiler():
        model = wrapped(seeded(Mlp))
        assert_same_tensors(
            steps_made(expecting_step, model, sgd(model), compiles=True), expected, "weights", exact=True
        )
        assert commlibs_frames() == []


@on_ranks(2)
def test_a_compiled_step_with_the_optimizers_hooks() -> None:
    """Rounds over weights begin in hooks of the optimizer, which dynamo comes by in a compiled step."""
    for name in ("topk", "local_sgd"):
        finals = []
        for compiles in (False, True):
            with fresh_compiler():
                model = seeded(Mlp)
                optimizer = sgd(model)
                wrapped(model, algorithm=Subject(name).algorithm(), optimizer=optimizer)
                steps_made(whole_step, model, optimizer, compiles)
                assert commlibs_frames() == []
                commlib.synchronize(model)
                finals.append(tensors(model))
                commlib.unwrap(model)
        torch.testing.assert_close(finals[1], finals[0], rtol=1e-6, atol=1e-7)


@on_ranks(2)
def test_compiled_autograd_is_refused_on_all_ranks() -> None:
    with fresh_compiler(), torch._dynamo.config.patch(compiled_autograd=True):
        model = wrapped(seeded(Mlp))
        with raises_on_every_rank(ConfigError, "compiled autograd", "Turn it off"):
            steps_made(whole_step, model, sgd(model), compiles=True)
    with fresh_compiler():  # and nothing is left of it
        expected = train(ddp(seeded(Mlp)), mlp_loss, 2)
        model.load_state_dict(seeded(Mlp).state_dict())
        model.zero_grad()
        assert_same_trace(train(model, mlp_loss, 2), expected, exact=True)


@on_ranks(2)
def test_compiled_autograd_that_surrounds_the_forward_alone_does_nothing() -> None:
    expected = train(ddp(seeded(Mlp)), mlp_loss, 2)
    with fresh_compiler(), torch._dynamo.config.patch(compiled_autograd=True):
        model = torch.compile(wrapped(seeded(Mlp)), backend="aot_eager")
        assert_same_trace(train(model, mlp_loss, 2), expected, exact=True)  # type: ignore[arg-type]


@on_ranks(2)
def test_a_compiled_model_is_unwrapped_and_stays_compiled() -> None:
    for compiled in WAYS.values():
        with fresh_compiler():
            model = compiled(seeded(Mlp), wrapped, backend="aot_eager")
            train(model, mlp_loss, 2)
            assert commlib.unwrap(model) is model
            model.load_state_dict(dict(zip(model.state_dict(), seeded(Mlp).state_dict().values(), strict=True)))
            got = train(model, mlp_loss, 3)  # each rank alone
        assert_same_trace(got, train(seeded(Mlp), mlp_loss, 3), exact=True)
        with pytest.raises(ConfigError, match="not wrapped"):
            commlib.stats(model)


@on_ranks(2)
def test_what_commlib_offers_of_a_model_takes_the_compiled_one() -> None:
    with fresh_compiler():
        for way in WAYS:
            model = WAYS[way](seeded(Mlp), wrapped, backend="aot_eager")
            train(model, mlp_loss, 2)
            assert commlib.stats(model).algorithm == "allreduce"
            commlib.synchronize(model)
            commlib.load_state_dict(model, commlib.state_dict(model))
            with pytest.raises(ConfigError, match="wrapped already"):
                commlib.wrap(model)
            commlib.unwrap(model)


@on_ranks(2)
def test_a_run_resumes_compiled_in_another_form() -> None:
    """Where parameters have the same names: an `OptimizedModule` that is wrapped has its own."""
    subject, saved = Subject("topk"), {}
    whole = finished(subject, compiled_inside, saved)
    for way in ("after", "in-place-after", "in-place-before"):
        assert_same_tensors(finished(subject, WAYS[way], saved), whole, way, exact=True)
    with raises_on_every_rank(ConfigError, "saved bucket plan is of another model", "_orig_mod.first.bias"):
        finished(subject, WAYS["before"], saved)


def finished(subject: Subject, compiled: Callable[..., Any], saved: dict[str, Any]) -> dict[str, Tensor]:
    """Train 8 steps, of which the first caller saves the first 4, and return the weights."""
    bare = build()
    optimizer = subject.optimizer(list(bare.parameters()))
    parallel = functools.partial(wrapped, algorithm=subject.algorithm(), optimizer=optimizer)
    with fresh_compiler():
        model = compiled(bare, parallel, backend="aot_eager")
        if saved:
            bare.load_state_dict(saved["model"])
            optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
            commlib.load_state_dict(model, saved["commlib"])
        else:
            train_steps(model, optimizer, range(4))
            saved["commlib"] = commlib.state_dict(model)
            saved |= copy.deepcopy({"model": bare.state_dict(), "optimizer": optimizer.state_dict()})
        train_steps(model, optimizer, range(4, 8))
        return tensors(model)


def train_steps(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
