"""Coming from DDP: every line of the tables of docs/how-to/coming-from-ddp.md, on two ranks next to DDP.

`@line(key)` registers the check of the line whose first cell is `key`. The tables and the checks must have the same
keys, and the check of a habit contains the calls that its line shows.
"""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from markdown_it import MarkdownIt
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, DistributedSampler

import commlib
import commlib.integrations.torchrun
from commlib import ddp_arguments
from commlib.errors import ConfigError
from tests.contract.subjects import Subject, everyones, joined, loss_of
from tests.multi.common import (
    Branches,
    Cnn,
    Mlp,
    Trace,
    assert_close,
    assert_replicas_identical,
    assert_same_tensors,
    assert_same_trace,
    check_like_ddp,
    cnn_loss,
    data,
    gradients,
    mlp_loss,
    raises_on_every_rank,
    seeded,
    sgd,
    tensors,
    train,
)
from tests.multi.pool import on_ranks

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "coming-from-ddp.md"
CHECKS: dict[str, Callable[[], None]] = {}


def line(key: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register the check of the line with this first cell."""

    def register(check: Callable[[], None]) -> Callable[[], None]:
        assert key not in CHECKS, f"two checks of {key}"
        CHECKS[key] = check
        return check

    return register


def tables() -> list[list[list[str]]]:
    """Return the tables of the page, each as a list of rows, each as a list of cells."""
    found: list[list[list[str]]] = []
    for token in MarkdownIt("commonmark").enable("table").parse(PAGE.read_text(encoding="utf-8")):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open" and found:
            found[-1].append([])
        elif token.type == "inline" and found and token.level > 3:
            found[-1][-1].append(token.content)
    return [rows[1:] for rows in found]


def test_every_line_has_a_check_and_every_check_a_line() -> None:
    keys = [row[0] for rows in tables() for row in rows]
    assert len(keys) > 40
    assert sorted(keys) == sorted(CHECKS)


def test_the_check_of_a_habit_makes_the_calls_that_its_line_shows() -> None:
    change, keep, *_ = tables()
    missing = []
    for key, cell in change + keep:
        source = inspect.getsource(CHECKS[key])
        calls = (span for span in re.findall(r"`([^`]+)`", cell) if "(" in span)
        missing += [f"{key}: {call}" for call in calls if _plain(call) not in _plain(source)]
    assert missing == []


def _plain(code: str) -> str:
    """Return code without white space, and with any number in place of its own."""
    return re.sub(r"\d+", "0", "".join(code.split()))


def test_the_classes_of_algorithms_are_those_that_they_declare() -> None:
    named = [(name, row[0].partition(":")[0]) for row in tables()[2] for name in re.findall(r"`(\w+)`", row[1])]
    names = set(commlib.algorithms.list()) - {"auto"}
    assert sorted(named) == sorted((name, commlib.algorithms.create(name).exactness) for name in names)


def test_the_arguments_have_the_words_of_the_errors() -> None:
    rows = {row[0].strip("`"): [cell.replace("`", "") for cell in row[1:]] for row in tables()[3]}
    for name, argument in ddp_arguments.ARGUMENTS.items():
        assert rows[name] == [argument.does.replace("`", ""), argument.advice], name


@on_ranks(2)
def test_every_line_does_as_it_says() -> None:
    warnings.filterwarnings("ignore", message="(The )?`(broadcast_buffers|check_reduction)`", category=FutureWarning)
    for key, check in CHECKS.items():
        try:
            check()
        except BaseException as error:
            error.add_note(f"in the check of the line: {key}")
            raise
        gc.collect()  # end the communication of the models of this line


# --- lines to change -------------------------------------------------------------------------------------------------

SMALL = {"bucket_cap_mb": 0.001}


def state_of_ddp() -> dict[str, Tensor]:
    """Return a checkpoint of a model that DDP has trained."""
    model = DDP(seeded(Mlp))
    train(model, mlp_loss, 2)
    return copy.deepcopy(model.state_dict())


def started(algorithm: Any) -> tuple[Any, torch.optim.Optimizer]:
    """Return a wrapped model and its optimizer."""
    model = seeded(Mlp)
    optimizer = sgd(model)
    return commlib.wrap(model, algorithm, optimizer=optimizer, **SMALL), optimizer


def with_replicas_that_differ() -> tuple[Any, dict[str, Tensor]]:
    """Return a model within a period of local steps, and the mean of the ranks' weights."""
    model, optimizer = started(commlib.algorithms.LocalSGD(period=8))
    train(model, mlp_loss, 3, optimizer)
    return model, {name: mean(value) for name, value in tensors(model).items()}


def mean(value: Tensor) -> Tensor:
    return everyones(value.reshape(-1)).mean(dim=0).view_as(value)


@line("`model = DDP(model)`, then the optimizer")
def optimizer_first() -> None:
    oracle = DDP(seeded(Mlp))
    expected = train(oracle, mlp_loss, 3, sgd(oracle))
    algorithm, model = "allreduce", seeded(Mlp)
    optimizer = sgd(model)
    model = commlib.wrap(model, algorithm, optimizer=optimizer)
    assert_same_trace(train(model, mlp_loss, 3, optimizer), expected, exact=True)
    with raises_on_every_rank(ConfigError, "local_sgd", "optimizer"):
        commlib.wrap(seeded(Mlp), "local_sgd")


@line("loading a checkpoint with the prefix `module.`")
def loading_a_checkpoint_of_ddp() -> None:
    state = state_of_ddp()
    model = commlib.wrap(seeded(Mlp, seed=5))
    for options in ({}, {"strict": False}):
        with pytest.raises(ConfigError, match="removeprefix"):
            model.load_state_dict(state, **options)
    model.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
    oracle = DDP(seeded(Mlp, seed=5))
    oracle.load_state_dict(state)
    assert_same_trace(train(model, mlp_loss), train(oracle, mlp_loss), exact=True)


@line("a checkpoint for a script that uses DDP")
def a_checkpoint_for_ddp() -> None:
    model = commlib.wrap(seeded(Mlp))
    train(model, mlp_loss, 2)
    state = copy.deepcopy(model.state_dict())
    ddp = DDP(seeded(Mlp, seed=5))
    ddp.module.load_state_dict(state)
    assert_same_trace(train(ddp, mlp_loss), train(model, mlp_loss), exact=True)


@line("rank 0 saves `model.module.state_dict()`")
def saving_on_rank_0() -> None:
    oracle, model = DDP(seeded(Cnn)), commlib.wrap(seeded(Cnn))
    for each in (oracle, model):
        train(each, cnn_loss, 2)
    assert not commlib.checkpoint.replicas_differ(model)
    if dist.get_rank() == 0:
        assert_same_tensors(model.module.state_dict(), oracle.module.state_dict(), "state", exact=True)
    model, expected = with_replicas_that_differ()
    assert commlib.checkpoint.replicas_differ(model)
    before = tensors(model)
    assert_same_tensors(commlib.checkpoint.consensus_state_dict(model), expected, "the mean", exact=True)
    assert_same_tensors(tensors(model), before, "own weights", exact=True)


@line("evaluation of `model.module` on one rank")
def evaluation() -> None:
    oracle, model = DDP(seeded(Cnn)), commlib.wrap(seeded(Cnn))
    for each in (oracle, model):
        train(each, cnn_loss, 2)
        each.eval()
    inputs = data(0, 4, 2, 6, 6)
    if dist.get_rank() == 0:
        assert torch.equal(model.module(inputs), oracle.module(inputs))
        assert torch.equal(model(inputs), oracle.module(inputs))
    model, expected = with_replicas_that_differ()
    evaluated = copy.deepcopy(model.module)
    evaluated.load_state_dict(commlib.checkpoint.consensus_state_dict(model))
    assert_same_tensors(tensors(evaluated), expected, "the mean", exact=True)


def averaged(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Train, and return the exponential moving average of this rank's weights."""
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(3):
        train(model, mlp_loss, 1, optimizer)
        ema.update_parameters(model)
    return tensors(ema.module)


@line("`AveragedModel(model.module)`: EMA of weights")
def moving_average_of_weights() -> None:
    oracle = DDP(seeded(Mlp))
    model, optimizer = started("allreduce")
    assert_same_tensors(averaged(model, optimizer), averaged(oracle, sgd(oracle)), "EMA", exact=True)
    local, optimizer = started(commlib.algorithms.LocalSGD(period=8))
    of_means = AveragedModel(seeded(Mlp), multi_avg_fn=get_ema_multi_avg_fn(0.5))
    own = AveragedModel(local.module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(3):
        train(local, mlp_loss, 1, optimizer)
        own.update_parameters(local)
        evaluated = seeded(Mlp)
        evaluated.load_state_dict(commlib.checkpoint.consensus_state_dict(local))
        of_means.update_parameters(evaluated)
    means = {name: mean(value) for name, value in tensors(own.module).items()}
    assert_same_tensors(means, tensors(of_means.module), "mean of the EMAs", exact=False)


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> Trace:
    """Train with a loss scale that overflows once, on rank 1."""
    trace = Trace()
    for step in range(4):
        optimizer.zero_grad()
        loss = mlp_loss(model, step) * (float("inf") if step == dist.get_rank() == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        trace.gradients.append(gradients(model))
        scaler.step(optimizer)
        scaler.update()
        trace.losses.append(torch.tensor(scaler.get_scale()))
    trace.final = tensors(model)
    return trace


@line("`GradScaler`")
def grad_scaler() -> None:
    oracle = DDP(seeded(Mlp))
    expected = scaled(oracle, sgd(oracle), torch.amp.GradScaler("cpu", init_scale=256.0))
    assert expected.losses[-1] == 128.0
    algorithm, scaler, model = "allreduce", torch.amp.GradScaler("cpu", init_scale=256.0), seeded(Mlp)
    optimizer = sgd(model)
    model = commlib.wrap(model, algorithm, optimizer=optimizer, scaler=scaler)
    assert_same_trace(scaled(model, optimizer, scaler), expected, exact=True)


def hooked(hook: Any, state: Any = None) -> DDP:
    """Return a model in DDP with a communication hook, whose name is hidden: by it, DDP refuses bf16 over Gloo."""
    model = DDP(seeded(Mlp))
    model.register_comm_hook(state, lambda state, bucket: hook(state, bucket))
    return model


@line("`bf16_compress_hook`, `fp16_compress_hook`")
def narrow_wire_types() -> None:
    ddp, algorithm = hooked(default_hooks.bf16_compress_hook), commlib.algorithms.AllReduce(wire_dtype="bf16")
    model = commlib.wrap(seeded(Mlp), algorithm)
    assert_same_trace(train(model, mlp_loss), train(ddp, mlp_loss), exact=True)
    ddp, algorithm = hooked(default_hooks.fp16_compress_hook), commlib.algorithms.AllReduce(wire_dtype="fp16")
    model = commlib.wrap(seeded(Mlp), algorithm)
    expected, got = train(ddp, mlp_loss, 1).gradients[0], train(model, mlp_loss, 1).gradients[0]
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=0, atol=2.0**-24)


@line("`powerSGD_hook`")
def power_sgd_hook() -> None:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    ddp = hooked(powerSGD_hook.powerSGD_hook, state)
    model, optimizer = started(commlib.algorithms.PowerSGD(rank=1, warmup_steps=2))
    expected, got = train(ddp, mlp_loss, 4), train(model, mlp_loss, 4, optimizer)
    assert_same_tensors(got.gradients[1], expected.gradients[1], "gradient before compression", exact=True)
    for trace in (got, expected):
        ranks = [int(torch.linalg.matrix_rank(gradient["second.weight"])) for gradient in trace.gradients]
        assert min(ranks[:2]) > ranks[2] == ranks[3] == 1


@line("`post_localSGD_hook` with `PeriodicModelAverager`")
def post_local_sgd_hook() -> None:
    own, *_ = dist.new_subgroups(1)
    state = post_localSGD_hook.PostLocalSGDState(None, own, start_localSGD_iter=2)
    ddp = hooked(post_localSGD_hook.post_localSGD_hook, state)
    averager, optimizer = PeriodicModelAverager(period=3, warmup_steps=2 + 3 - 1), sgd(ddp)
    model, given = started(commlib.algorithms.PostLocalSGD(warmup_steps=2, period=3))
    for _ in range(9):
        train(ddp, mlp_loss, 1, optimizer)
        averager.average_parameters(ddp.parameters())
        train(model, mlp_loss, 1, given)
        assert_same_tensors(tensors(model), tensors(ddp), "weights", exact=False)


@line("`quantization_pertensor_hook`")
def quantization_hook() -> None:
    """torch's hook does not run on a CPU, so DDP's mean is the reference."""
    ddp = DDP(seeded(lambda: Mlp(width=64)))
    mlp_loss(ddp, 0).backward()
    num_bytes = {}
    for name in ("allreduce", "bytegrad"):
        model = commlib.wrap(seeded(lambda: Mlp(width=64)), name)
        before = commlib.stats(model).wire_bytes
        mlp_loss(model, 0).backward()
        num_bytes[name] = commlib.stats(model).wire_bytes - before
    got, expected = (joined([p.grad for p in each.parameters()]) for each in (model, ddp))
    assert 0 < float((got - expected).norm() / expected.norm()) < 0.03
    assert num_bytes["bytegrad"] < 0.3 * num_bytes["allreduce"]


@line("`noop_hook`")
def noop_hook() -> None:
    ddp = hooked(debugging_hooks.noop_hook)
    expected = train(ddp, mlp_loss, 2)
    model = commlib.wrap(seeded(Mlp))
    with model.no_sync():
        got = train(model, mlp_loss, 2)
    assert_same_trace(got, expected, exact=True)


@line("another hook for `register_comm_hook`")
def any_other_hook() -> None:
    with pytest.raises(AttributeError, match="register_comm_hook"):
        commlib.wrap(seeded(Mlp)).register_comm_hook(None, default_hooks.allreduce_hook)


# --- lines to keep ---------------------------------------------------------------------------------------------------


@line("gradient accumulation with `model.no_sync()`")
def accumulation() -> None:
    def accumulating(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        for step in range(4):
            with model.no_sync():
                mlp_loss(model, 10 + step).backward()
            mlp_loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return tensors(model)

    oracle = DDP(seeded(Mlp))
    expected = accumulating(oracle, sgd(oracle))
    assert_same_tensors(accumulating(*started("allreduce")), expected, "weights", exact=True)
    model, optimizer = started(commlib.algorithms.LocalSGD(period=2))
    with model.no_sync():
        train(model, mlp_loss, 1, optimizer)
        assert not everyones_are_equal(model)
        train(model, mlp_loss, 1, optimizer)
        assert everyones_are_equal(model)


def everyones_are_equal(model: nn.Module) -> bool:
    rows = everyones(model.first.weight.detach().reshape(-1))
    return torch.equal(rows[0], rows[1])


@line("uneven inputs with `model.join()`")
def uneven_inputs() -> None:
    def uneven(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        with model.join():
            for step in range(2 + 2 * dist.get_rank()):
                optimizer.zero_grad()
                mlp_loss(model, step).backward()
                optimizer.step()
        return tensors(model)

    oracle = DDP(seeded(Mlp))
    expected = uneven(oracle, sgd(oracle))
    assert_same_tensors(uneven(*started("allreduce")), expected, "weights", exact=True)
    model, _ = started("local_sgd")
    with raises_on_every_rank(ConfigError, "local_sgd", "steps"), model.join():
        pass


@line("`SyncBatchNorm`")
def sync_batch_norm() -> None:
    """DDP does not take such a model on a CPU, and torch does not train it there."""
    model = seeded(Cnn)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert isinstance(model.norm, nn.SyncBatchNorm)
    expected = seeded(Cnn).eval()(data(0, 4, 2, 6, 6))
    model = commlib.wrap(model)
    assert torch.equal(model.eval()(data(0, 4, 2, 6, 6)), expected)
    with raises_on_every_rank(ValueError, "SyncBatchNorm"):
        cnn_loss(model.train(), 0)


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = 4,
    before_step: Callable[[], Any] = lambda: None,
    after_step: Callable[[], Any] = lambda: None,
) -> Trace:
    """Train, with calls around each step of the optimizer."""
    trace = Trace()
    for step in range(steps):
        optimizer.zero_grad()
        loss = mlp_loss(model, step)
        loss.backward()
        before_step()
        trace.losses.append(loss.detach())
        trace.gradients.append(gradients(model))
        optimizer.step()
        after_step()
    trace.final = tensors(model)
    return trace


@line("learning-rate schedules")
def schedules() -> None:
    def scheduled(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trace:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=8)
        return loop(model, optimizer, steps=8, after_step=scheduler.step)

    oracle = DDP(seeded(Mlp))
    expected = scheduled(oracle, sgd(oracle))
    assert_same_trace(scheduled(*started("allreduce")), expected, exact=True)


@line("learning rate scaled by the number of ranks")
def learning_rates() -> None:
    algorithm = commlib.algorithms.LocalSGD(period=1)
    for chosen, options in (("allreduce", {"momentum": 0.9}), (algorithm, {})):
        oracle, model = DDP(seeded(Mlp)), seeded(Mlp)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1 * 2, **options) for each in (oracle, model)]
        commlib.wrap(model, chosen, optimizer=optimizers[1])
        expected = train(oracle, mlp_loss, 4, optimizers[0])
        got = train(model, mlp_loss, 4, optimizers[1])
        assert_same_tensors(got.final, expected.final, "weights", exact=chosen == "allreduce")


@line("gradient norms and clipping after `backward()`")
def clipping() -> None:
    def clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[Tensor], Trace]:
        norms: list[Tensor] = []
        clip = functools.partial(nn.utils.clip_grad_norm_, list(model.parameters()), 0.05)
        return norms, loop(model, optimizer, before_step=lambda: norms.append(clip()))

    oracle = DDP(seeded(Mlp))
    norms, expected = clipped(oracle, sgd(oracle))
    assert min(norms) > 0.05, "nothing is clipped"
    got, trace = clipped(*started("allreduce"))
    assert got == norms
    assert_same_trace(trace, expected, exact=True)


@line("`DistributedSampler`")
def distributed_sampler() -> None:
    inputs = torch.randn(21, 8, generator=torch.Generator().manual_seed(0))

    def sampled(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        sampler: DistributedSampler[Any] = DistributedSampler(inputs)  # type: ignore[arg-type]
        losses = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for batch in DataLoader(inputs, batch_size=4, sampler=sampler):  # type: ignore[arg-type]
                optimizer.zero_grad()
                losses.append(model(batch).square().mean())
                losses[-1].backward()
                optimizer.step()
        return losses

    oracle = DDP(seeded(Mlp))
    expected, got = sampled(oracle, sgd(oracle)), sampled(*started("allreduce"))
    assert len(expected) == 6
    assert torch.equal(torch.stack(got), torch.stack(expected))


@line("`model.module`")
def bare_module() -> None:
    model = commlib.wrap(seeded(Mlp))
    assert type(model.module) is Mlp
    assert model.module.first is model.first is DDP(model.module).module.first
    assert list(model.state_dict()) == list(model.module.state_dict())


@line("`torch.profiler`")
def profiles() -> None:
    model = commlib.wrap(seeded(Mlp), **SMALL)
    train(model, mlp_loss, 2)
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread) as recorded:
        train(model, mlp_loss, 1)
    names = {event.name.split(": ")[1] for event in recorded.events() if event.name.startswith("commlib: ")}
    assert names == {"gather", "encode", "all_reduce", "decode", "wait"}


# --- gradient norms --------------------------------------------------------------------------------------------------


def algorithms_of(key: str) -> list[str]:
    """Return the algorithms in the row of a class."""
    (row,) = (row for row in tables()[2] if row[0] == key)
    return re.findall(r"`(\w+)`", row[1])


def step_of(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Train past the warm-up, and return gradients of the next backward, each `[numel] float64`.

    Returns:
        Those in `param.grad`, those of this rank's own data, and the mean of the ranks' own.
    """
    training = Subject(name).start()
    training.steps(training.subject.channel.warmup_steps + 3)
    dist.barrier()  # the ranks of hogwild share their weights
    alone = copy.deepcopy(training.model.module)
    alone.zero_grad()
    loss_of(alone, training.num_steps).backward()
    training.backward()
    got, own = (joined([p.grad for p in model.parameters()]) for model in (training.model, alone))
    return got, own, everyones(own).mean(dim=0)


def have_one_norm(gradient: Tensor) -> bool:
    norms = everyones(gradient.norm().reshape(1))
    return torch.equal(norms[0], norms[1])


@line("exact")
def norms_of_exact_algorithms() -> None:
    for name in algorithms_of("exact"):
        got, _, expected = step_of(name)
        assert have_one_norm(got), name
        assert_close(got, expected, name, exact=False)


@line("8bit")
def norms_of_8_bit_algorithms() -> None:
    for name in algorithms_of("8bit"):
        got, _, expected = step_of(name)
        assert have_one_norm(got), name
        assert not torch.allclose(got, expected, rtol=1e-4), name
        assert float(got.norm() / expected.norm()) == pytest.approx(1, abs=0.01), name


@line("compensated")
def norms_of_compensated_algorithms() -> None:
    for name in algorithms_of("compensated"):
        got, _, expected = step_of(name)
        assert have_one_norm(got), name
        assert float(got.norm() / expected.norm()) != pytest.approx(1, abs=0.01), name
    model = commlib.wrap(seeded(lambda: Mlp(width=64)), commlib.algorithms.DGC(clip=0.001), **SMALL)
    expected = train(DDP(seeded(lambda: Mlp(width=64))), mlp_loss, 1).gradients[0]["second.weight"]
    train(model, mlp_loss, 1)
    assert 0 < float(model.second.weight.grad.norm()) < 0.001 < float(expected.norm())


@line("any: momentum")
def norms_of_averaged_momentum() -> None:
    for name in algorithms_of("any: momentum"):
        training = Subject(name).start()
        training.steps(training.subject.channel.warmup_steps + 3)
        training.backward()
        momentum = joined([p.grad for p in training.model.parameters()])
        assert have_one_norm(momentum), name
        training.optimizer.step()
        kept = joined([training.optimizer.state[p]["exp_avg"] for p in training.model.parameters()])
        assert torch.equal(kept, momentum), name


def norms_of_own_gradients(key: str) -> None:
    for name in algorithms_of(key):
        got, own, _ = step_of(name)
        assert torch.equal(got, own), name
        assert not have_one_norm(got), name


for _key in ("any: averages of neighbours' weights", "any: local steps", "any: asynchronous"):
    CHECKS[_key] = functools.partial(norms_of_own_gradients, _key)


# --- arguments -------------------------------------------------------------------------------------------------------


def of_ddp(**arguments: Any) -> dict[str, Any]:
    """Return those of the arguments that this torch's DDP has."""
    return {name: value for name, value in arguments.items() if name in inspect.signature(DDP).parameters}


def trains_as_ddp(
    build: Callable[[], nn.Module] = Mlp, loss: Callable[[nn.Module, int], Tensor] = mlp_loss, **arguments: Any
) -> Any:
    """Check that DDP and `wrap` train the same with the same arguments. Returns the wrapped model."""
    return check_like_ddp(build, loss, steps=3, ddp_options=of_ddp(**arguments), wrap_options={**SMALL, **arguments})


def is_refused(*words: str, **arguments: Any) -> None:
    """Check that `wrap` refuses the arguments on all ranks, with their names and these words."""
    with raises_on_every_rank(ConfigError, *arguments, *words):
        commlib.wrap(seeded(Mlp), **arguments)


@line("`device_ids`")
def device_ids() -> None:
    trains_as_ddp(device_ids=None)
    is_refused("move the model", device_ids=[0])
    ddp_arguments.check({"device_ids": [1]}, torch.device("cuda", 1))
    with raises_on_every_rank(ConfigError, "device_ids, is not needed"):
        commlib.wrap(seeded(Mlp), [dist.get_rank()])


@line("`output_device`")
def output_device() -> None:
    trains_as_ddp(output_device=None)
    is_refused("move the model", output_device=0)
    ddp_arguments.check({"output_device": 1}, torch.device("cuda", 1))


@line("`dim`")
def dim() -> None:
    trains_as_ddp(dim=0)
    is_refused("scatter", dim=1)


@line("`broadcast_buffers`")
def broadcast_buffers() -> None:
    model = seeded(Cnn)
    model.norm.running_mean.fill_(dist.get_rank())
    assert not commlib.wrap(model).norm.running_mean.any()
    trains_as_ddp(Cnn, cnn_loss, broadcast_buffers=False)
    model = trains_as_ddp(Cnn, cnn_loss, broadcast_buffers=True)
    model.zero_grad()
    assert_replicas_identical(model)


@line("`init_sync`")
def init_sync() -> None:
    for is_synced in (True, False):
        models = [seeded(Mlp, seed=dist.get_rank()) for _ in range(2)]
        ddp, model = DDP(models[0], init_sync=is_synced), commlib.wrap(models[1], init_sync=is_synced)
        assert_same_tensors(tensors(model), tensors(ddp), "weights", exact=True)
        assert everyones_are_equal(model) is is_synced


@line("`process_group`")
def process_group() -> None:
    trains_as_ddp(process_group=dist.new_group([0, 1]))
    with raises_on_every_rank(ConfigError, "both given"):
        commlib.wrap(seeded(Mlp), process_group=dist.group.WORLD, device_mesh=init_device_mesh("cpu", (2,)))
    check_like_ddp(Mlp, mlp_loss, wrap_options={"process_group": init_device_mesh("cpu", (2,))})


@line("`bucket_cap_mb`")
def bucket_cap_mb() -> None:
    model = trains_as_ddp(bucket_cap_mb=0.001)
    assert commlib.stats(model).num_buckets > 1
    assert commlib.stats(model).plan == "fixed"


@line("`find_unused_parameters`")
def find_unused_parameters() -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        return model(data(step, 5, 8), [step % 2, 2 if dist.get_rank() else 0]).square().mean()

    trains_as_ddp(Branches, loss, find_unused_parameters=True)
    expected = train(DDP(seeded(Branches), find_unused_parameters=True), loss)
    for without in ({}, {"find_unused_parameters": False}):
        assert_same_trace(train(commlib.wrap(seeded(Branches), **without), loss), expected, exact=True)
    is_refused("a bool", find_unused_parameters="yes")


def takes_any_bool(name: str) -> None:
    for value in (False, True):
        trains_as_ddp(**{name: value})
    is_refused("a bool", **{name: "yes"})


for _name in ("check_reduction", "gradient_as_bucket_view", "static_graph", "batched_grad_copy"):
    CHECKS[f"`{_name}`"] = functools.partial(takes_any_bool, _name)


@line("`delay_all_reduce_named_params`")
def delay_all_reduce_named_params() -> None:
    trains_as_ddp(delay_all_reduce_named_params=None)
    is_refused("ignored_parameters", delay_all_reduce_named_params=[("first.weight", None)])


@line("`param_to_hook_all_reduce`")
def param_to_hook_all_reduce() -> None:
    trains_as_ddp(param_to_hook_all_reduce=None)
    is_refused("leave it out", param_to_hook_all_reduce=torch.ones(1))


@line("`mixed_precision`")
def mixed_precision() -> None:
    trains_as_ddp(mixed_precision=None)
    is_refused("autocast", "wire_dtype", mixed_precision=object())


@line("`device_mesh`")
def device_mesh() -> None:
    trains_as_ddp(device_mesh=init_device_mesh("cpu", (2,)))


@line("`skip_all_reduce_unused_params`")
def skip_all_reduce_unused_params() -> None:
    trains_as_ddp(skip_all_reduce_unused_params=False)
    is_refused("ignored_parameters", skip_all_reduce_unused_params=True)


@line("`bucket_cap_mb_list`")
def bucket_cap_mb_list() -> None:
    trains_as_ddp(bucket_cap_mb_list=None)
    is_refused("bucket_cap_mb", bucket_cap_mb_list=[1, 2])


@line("`forward_sync_buffers`")
def forward_sync_buffers() -> None:
    trains_as_ddp(Cnn, cnn_loss, forward_sync_buffers=None)
    model = trains_as_ddp(Cnn, cnn_loss, forward_sync_buffers=False)
    commlib.unwrap(model)
    own = model.norm.running_mean.clone()
    of_rank_0 = everyones(own)[0]
    assert torch.equal(own, of_rank_0) is (dist.get_rank() == 0)
    if options := of_ddp(forward_sync_buffers=False):
        assert torch.equal(DDP(copy.deepcopy(model), **options).module.norm.running_mean, of_rank_0)
    unchanged = commlib.wrap(model, broadcast_buffers=False)
    assert torch.equal(unchanged.norm.running_mean, own)
    commlib.unwrap(model)
    assert torch.equal(commlib.wrap(model, forward_sync_buffers=False).norm.running_mean, of_rank_0)
    is_refused("a bool or None", forward_sync_buffers="no")


@line("`torchrun`, with restarts and elastic")
def restarts_under_torchrun() -> None:
    """The last check, since it replaces the default group. A store of rank 0 stands in for torchrun's agent."""
    rank, expected = dist.get_rank(), train(DDP(seeded(Mlp)), mlp_loss, 2)
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = [None if agent is None else agent.port]
    dist.broadcast_object_list(port)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port[0])}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    state_of = {}
    for algorithm in ("allreduce", "topk"):
        model = commlib.wrap(seeded(Mlp), algorithm)
        train(model, mlp_loss, 1)
        state_of[algorithm] = commlib.state_dict(model)
    own, _ = dist.new_subgroups(1)
    commlib.load_state_dict(commlib.wrap(seeded(Mlp), process_group=own), state_of["allreduce"])
    model = commlib.wrap(seeded(Mlp), "topk", process_group=own)
    with raises_on_every_rank(ConfigError, "world_size 2"):
        commlib.load_state_dict(model, state_of["topk"])
    del model
    for _ in range(2):  # a start and a restart
        gc.collect()
        dist.destroy_process_group()
        commlib.integrations.torchrun.init_process_group("gloo")
        model = commlib.wrap(seeded(Mlp))
        assert_same_trace(train(model, mlp_loss, 2), expected, exact=True)
        del model
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()  # before its store
