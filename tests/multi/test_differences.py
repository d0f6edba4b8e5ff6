"""Differences from DDP: the lines of docs/reference/differences.md that no other file tests."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.errors import ConfigError
from commlib.replica import replica_of
from tests.multi.common import (
    Cnn,
    Mlp,
    assert_replicas_identical,
    assert_same_tensors,
    cnn_loss,
    data,
    mlp_loss,
    raises_on_every_rank,
    seeded,
    sgd,
    tensors,
    train,
    wrap,
)
from tests.multi.pool import on_ranks

ROOT = Path(__file__).parents[2]


def lines_of_the_page() -> list[str]:
    """The bullets of the page, each as one line."""
    page = (ROOT / "docs" / "reference" / "differences.md").read_text(encoding="utf-8")
    return [" ".join(bullet.split()) for bullet in re.split(r"\n- ", page)[1:]]


def test_every_line_of_the_page_names_its_test() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    defined = set(re.findall(r"def (test_\w+|contract_\w+)\(", sources))
    lines = lines_of_the_page()
    assert len(lines) > 10
    for line in lines:
        named = re.findall(r"`(test_\w+|contract_\w+)`", line)
        assert named, f"this line names no test: {line}"
        assert set(named) <= defined, f"no such test: {set(named) - defined}"


@contextlib.contextmanager
def nothing_sent(model: nn.Module) -> Iterator[None]:
    before = commlib.stats(model).wire_bytes
    yield
    assert commlib.stats(model).wire_bytes == before


@on_ranks(2, 3)
def test_no_forward_communicates_buffers() -> None:
    model = wrap(seeded(Cnn))
    train(model, cnn_loss, 3)
    with nothing_sent(model):
        for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
            with mode():
                for _ in range(dist.get_rank()):
                    model(data(0, 4, 2, 6, 6))
    train(model, cnn_loss, 1)
    assert_replicas_identical(model)


@on_ranks(2)
def test_a_buffer_changed_between_steps_is_the_ranks_own_until_the_next_backward_ends() -> None:
    model = wrap(seeded(Cnn))
    train(model, cnn_loss, 2)
    model.norm.running_mean.fill_(100 * dist.get_rank())
    loss = cnn_loss(model, 2)
    assert bool((model.norm.running_mean > 50).all()) is (dist.get_rank() == 1)
    loss.backward()
    model.zero_grad()
    assert_replicas_identical(model)


class OfItsOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)

    def join(self, other: Any) -> str:
        return f"joined {other}"


@on_ranks(2)
def test_a_class_with_a_method_that_a_wrapped_model_needs_is_refused() -> None:
    with raises_on_every_rank(ConfigError, "'join'", "Rename"):
        wrap(OfItsOwn())


@on_ranks(2)
def test_other_wrappers_around_a_wrapped_model_are_refused() -> None:
    from torch.distributed.fsdp import fully_shard

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, inputs: Tensor) -> Tensor:
            return self.inner(inputs)

    model = wrap(seeded(Mlp))
    with raises_on_every_rank(ConfigError, "averaged twice", "unwrap"):
        DistributedDataParallel(model)
    outer = DistributedDataParallel(Outer(model))
    with raises_on_every_rank(ConfigError, "averaged twice"):
        outer(data(0, 5, 8))
    with raises_on_every_rank(ConfigError, "first.weight", "DTensor"):
        wrap(fully_shard(seeded(Mlp)))
    sharded = fully_shard(wrap(seeded(Mlp)))
    with raises_on_every_rank(ConfigError, "first.weight", "fully_shard"):
        sharded(data(0, 5, 8))
    commlib.unwrap(sharded)


@on_ranks(2)
def test_distributed_autograd_is_refused() -> None:
    model = wrap(seeded(Mlp))
    from torch.distributed.rpc import api

    class Context:
        """Stands in for rpc's agent, which needs a network of its own."""

        def __enter__(self) -> None:
            self.before = api._is_current_rpc_agent_set
            api._is_current_rpc_agent_set = lambda: True
            self.current = torch._C._distributed_autograd._current_context
            torch._C._distributed_autograd._current_context = lambda: object()

        def __exit__(self, *_: Any) -> None:
            api._is_current_rpc_agent_set = self.before
            torch._C._distributed_autograd._current_context = self.current

    with Context(), raises_on_every_rank(ConfigError, "torch.distributed.autograd"):
        mlp_loss(model, 0)
    train(model, mlp_loss, 1)
    assert_replicas_identical(model)


@on_ranks(2)
def test_deterministic_runs_refuse_algorithms_that_depend_on_clocks() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        for name in ("auto", "async_averaging", "async_sgd", "passive_gossip", "hogwild"):
            model = seeded(Mlp)
            with raises_on_every_rank(ConfigError, name, "clocks"):
                wrap(model, algorithm=name, optimizer=sgd(model))
    finally:
        torch.use_deterministic_algorithms(False)


@on_ranks(2)
def test_deterministic_runs_and_given_sizes_are_bit_identical() -> None:
    def run(**options: Any) -> dict[str, Tensor]:
        model = seeded(lambda: Mlp(width=64))
        wrap(model, algorithm=commlib.algorithms.TopK(ratio=0.05), **options)
        optimizer = sgd(model)
        for step in range(8):
            time.sleep(0.003 * ((dist.get_rank() + step * id(model)) % 3))
            optimizer.zero_grad()
            mlp_loss(model, step).backward()
            optimizer.step()
        assert commlib.stats(model).plan == "fixed"
        return tensors(commlib.unwrap(model))

    def assert_alike(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
        assert all(torch.equal(one[name], other[name]) for name in one)

    assert_alike(run(bucket_cap_mb=0.01), run(bucket_cap_mb=0.01))
    torch.use_deterministic_algorithms(True)
    try:
        assert_alike(run(), run())
    finally:
        torch.use_deterministic_algorithms(False)


@on_ranks(2, 3)
def test_saving_on_one_rank_settles_the_plan_on_all() -> None:
    model = wrap(seeded(lambda: Mlp(width=64)))
    train(model, mlp_loss, 4)
    assert commlib.stats(model).plan in ("trial", "planned")
    undecided = replica_of(model).engine.gradients.search.is_undecided
    if dist.get_rank() == 0:
        commlib.state_dict(model)
    train(model, mlp_loss, 2)
    assert_replicas_identical(model)
    assert commlib.stats(model).plan == ("settled" if undecided else "planned")


@on_ranks(2)
def test_a_resized_parameter_is_named() -> None:
    for algorithm in ("allreduce", "local_sgd"):
        model = seeded(Mlp)
        optimizer = sgd(model)
        wrap(model, algorithm=algorithm, optimizer=optimizer)
        train(model, mlp_loss, 2, optimizer)
        optimizer.zero_grad()
        optimizer.state.clear()
        model.third.weight.data = torch.zeros(7, 16)
        model.third.bias.data = torch.zeros(7)
        with raises_on_every_rank(ConfigError, "third.weight", "(7, 16)"):
            for _ in range(9):
                train(model, mlp_loss, 1, optimizer)
        commlib.unwrap(model)


@on_ranks(2)
def test_gradients_that_were_communicated_are_not_taken_for_new_ones() -> None:
    for algorithm in ("dgc", commlib.algorithms.SignSGD(feedback=False), commlib.algorithms.AllReduce(op="sum")):
        model = wrap(seeded(lambda: Mlp(width=64)), algorithm=algorithm)
        mlp_loss(model, 0).backward()
        with raises_on_every_rank(ConfigError, "no_sync", ".weight"):
            mlp_loss(model, 1).backward()
        for set_to_none in (True, False):  # and it goes on
            model.zero_grad(set_to_none)
            mlp_loss(model, 2).backward()
        assert_replicas_identical(model)


@on_ranks(2)
def test_a_copy_that_needs_an_optimizer_says_so() -> None:
    model = seeded(Mlp)
    optimizer = sgd(model)
    wrap(model, algorithm="diloco", optimizer=optimizer)
    train(model, mlp_loss, 2, optimizer)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        mlp_loss(twin, 0)
    with raises_on_every_rank(ConfigError, "optimizer", "unwrap"):
        mlp_loss(twin, 0)
    wrap(twin, algorithm="allreduce")
    train(twin, mlp_loss, 2)
    assert_replicas_identical(twin)


@on_ranks(2)
def test_weights_loaded_through_the_bare_module_leave_the_anchor() -> None:
    """The wrapped model sees its own `load_state_dict` only; `.module`'s is the bare class's."""
    for load, moves in ((lambda m: m, False), (lambda m: m.module, True)):
        model = seeded(Mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrap(model, algorithm=commlib.algorithms.DiLoCo(period=2), optimizer=optimizer)
        early = {name: value.clone() for name, value in model.state_dict().items()}
        train(model, mlp_loss, 6, optimizer)
        load(model).load_state_dict(early)
        optimizer.param_groups[0]["lr"] = 0.0
        train(model, mlp_loss, 4, optimizer)
        moved = max(float((value - early[name]).abs().max()) for name, value in model.state_dict().items())
        assert (moved > 1e-4) is moves
        commlib.unwrap(model)


@on_ranks(2)
def test_a_parameter_outside_of_the_optimizers_is_named() -> None:
    model = seeded(Mlp)
    parts = [sgd(model.first), sgd(model.second)]
    with raises_on_every_rank(ConfigError, "third.weight", "list"):
        wrap(model, algorithm="local_sgd", optimizer=parts)
    wrap(model, algorithm="local_sgd", optimizer=[*parts, sgd(model.third)])


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """What commlib logs meanwhile."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("commlib")
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)


@on_ranks(2)
def test_a_forward_of_other_methods_stays_local_and_is_logged_once() -> None:
    model = wrap(seeded(Mlp))
    train(model, mlp_loss, 2)
    with logged() as records:
        for step in range(3):
            model.zero_grad()
            with nothing_sent(model):
                model.third(torch.tanh(model.second(torch.tanh(model.first(data(step, 5, 8)))))).sum().backward()
    assert len([text for text in records if "stay local" in text]) == 1


def step_and_drop(optimizers: dict[Tensor, torch.optim.Optimizer], parameter: Tensor) -> None:
    optimizers[parameter].step()
    parameter.grad = None


def change_and_drop(parameter: Tensor) -> None:
    parameter.data.add_(parameter.grad, alpha=-0.1)
    parameter.grad = None


@pytest.mark.thin
@on_ranks(2)
@pytest.mark.parametrize("algorithm", ["allreduce", "topk"])
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
def test_an_optimizer_in_a_hook_is_refused(algorithm: str, is_first: bool, by_hand: bool) -> None:
    model = seeded(Mlp)
    optimizers: dict[Tensor, torch.optim.Optimizer] = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    hook = change_and_drop if by_hand else functools.partial(step_and_drop, optimizers)
    if not is_first:
        wrap(model, algorithm=algorithm)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    if is_first:
        wrap(model, algorithm=algorithm)
    loss = mlp_loss(model, 0)
    with raises_on_every_rank(ConfigError, "is now None" if by_hand else "inside of backward", "after backward"):
        loss.backward()


@on_ranks(2)
@pytest.mark.parametrize("algorithm", ["allreduce", "local_sgd"])
def test_optimizers_that_torch_lets_step_in_backward_are_refused(algorithm: str) -> None:
    model, late = seeded(Mlp), seeded(Mlp)
    optimizer = sgd(model)
    wrap(late, algorithm=algorithm, optimizer=sgd(late))
    for each in (model, late):
        for parameter in each.parameters():  # as torch.distributed.optim._apply_optimizer_in_backward leaves them
            parameter._in_backward_optimizers = [torch.optim.SGD([parameter], lr=0.1)]  # type: ignore[attr-defined]
    with raises_on_every_rank(ConfigError, "_apply_optimizer_in_backward"):
        wrap(model, algorithm=algorithm, optimizer=optimizer)
    with raises_on_every_rank(ConfigError, "_apply_optimizer_in_backward"):
        mlp_loss(late, 0)


@on_ranks(2)
def test_a_step_with_many_forwards_is_one_of_a_known_optimizer() -> None:
    model = seeded(Mlp)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=8)
    wrap(model, algorithm="local_sgd", optimizer=optimizer)
    num_forwards = 0

    def closure() -> Tensor:
        nonlocal num_forwards
        num_forwards += 1
        optimizer.zero_grad()
        loss = mlp_loss(model, 0)
        loss.backward()
        return loss

    with logged() as records:
        for _ in range(3):
            optimizer.step(closure)  # type: ignore[arg-type]
    assert num_forwards > 10
    assert not records


@on_ranks(2)
@pytest.mark.parametrize(
    ("algorithm", "follows"),
    [("diloco", True), ("post_local_sgd", True), ("topk", False)],
)
def test_a_step_of_an_optimizer_that_was_not_given_is_refused(algorithm: str, follows: bool) -> None:
    model = seeded(Mlp)
    known = sgd(model)
    wrap(model, algorithm=algorithm, optimizer=known)
    train(model, mlp_loss, 4, known)
    other = torch.optim.AdamW(model.parameters())
    for step in range(3):
        mlp_loss(model, step).backward()
        before = tensors(model)
        if follows:
            with raises_on_every_rank(ConfigError, "AdamW", "SGD", algorithm, "commlib.set_optimizer"):
                other.step()
            assert_same_tensors(tensors(model), before, "no step", exact=True)
        else:
            other.step()


@on_ranks(2)
def test_an_optimizer_of_several_that_makes_no_step_is_told_of() -> None:
    model = seeded(Mlp)
    parts = [sgd(model.first), sgd(nn.ModuleList([model.second, model.third]))]
    wrap(model, algorithm="local_sgd", optimizer=parts)
    with logged() as records:
        for step in range(16):
            for part in parts if step < 6 else parts[:1]:
                part.zero_grad()
            mlp_loss(model, step).backward()
            for part in parts if step < 6 else parts[:1]:
                part.step()
            assert bool(records) is (step > 12)  # the eighth step of the first one alone
    assert "made no step while the others made 8" in records[0]


@on_ranks(2)
@pytest.mark.parametrize(("algorithm", "is_refused"), [("allreduce", True), ("diloco", False)])
def test_loss_scales_that_differ_are_refused(algorithm: str, is_refused: bool) -> None:
    model = seeded(Mlp)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + dist.get_rank()))
    if is_refused:
        with raises_on_every_rank(ConfigError, "scaler", "get_scale"):
            wrap(model, algorithm=algorithm, optimizer=sgd(model), scaler=scaler)
    else:  # each rank has its own
        wrap(model, algorithm=algorithm, optimizer=sgd(model), scaler=scaler)


@on_ranks(2)
def test_loss_scales_that_differ_after_loading_are_refused() -> None:
    model = seeded(Mlp)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    wrap(model, optimizer=optimizer, scaler=scaler)
    train(model, mlp_loss, 2, optimizer)
    commlib.load_state_dict(model, commlib.state_dict(model))
    scaler.load_state_dict({**scaler.state_dict(), "scale": 256.0 * 2 ** dist.get_rank()})
    with raises_on_every_rank(ConfigError, "loss scale"):
        mlp_loss(model, 2)


def _policy(numel: int) -> Any:
    return lambda name, parameter: parameter.numel() > numel


@on_ranks(2)
def test_options_that_are_functions_or_tensors_are_compared() -> None:
    rank = dist.get_rank()
    different: dict[str, Any] = {
        "(ranks [0]: option TopK.compress _policy.<locals>.<lambda>: ": commlib.algorithms.TopK(
            compress=_policy(10 + rank)
        ),
        "(ranks [0]: option TopK.compress partial(": commlib.algorithms.TopK(
            compress=functools.partial(_compressed, 10 + rank)
        ),
        "(ranks [0]: option DiLoCo.outer partial(": commlib.algorithms.DiLoCo(
            outer=functools.partial(torch.optim.SGD, lr=0.5 + rank)
        ),
        "(ranks [0]: option LocalSGD.period 2; ranks [1]: option LocalSGD.period 3).": commlib.algorithms.LocalSGD(
            period=2 + rank
        ),
        "(ranks [0]: option algorithm TopK; ranks [1]: option algorithm LocalSGD).": [
            commlib.algorithms.TopK(),
            commlib.algorithms.LocalSGD(),
        ][rank],
    }
    for words, algorithm in different.items():
        model = seeded(Mlp)
        with raises_on_every_rank(ConfigError, "differ between ranks", words):
            wrap(model, algorithm=algorithm, optimizer=sgd(model))
    for algorithm in (
        commlib.algorithms.TopK(compress=_policy(10)),
        commlib.algorithms.TopK(compress=functools.partial(_compressed, 10)),
        commlib.algorithms.DiLoCo(outer=functools.partial(torch.optim.SGD, lr=0.5)),
    ):
        model = seeded(Mlp)
        optimizer = sgd(model)
        wrap(model, algorithm=algorithm, optimizer=optimizer)
        train(model, mlp_loss, 1, optimizer)


def _compressed(numel: int, name: str, parameter: Tensor) -> bool:
    return parameter.numel() > numel


@on_ranks(2)
def test_two_models_with_a_common_part_train_as_one() -> None:
    def pair() -> tuple[nn.Module, nn.Module]:
        encoder = nn.Linear(8, 8)
        return nn.Sequential(encoder, nn.Linear(8, 2)), nn.Sequential(encoder, nn.Linear(8, 3))

    def loss(one: nn.Module, other: nn.Module, step: int, rank: int) -> Tensor:
        inputs = data(step, 4, 8, rank=rank)
        return one(inputs).square().mean() + other(inputs).square().mean()

    torch.manual_seed(0)
    one, other = pair()
    wrap(one)
    with raises_on_every_rank(ConfigError, "'0.weight'", "ModuleList", "expect_backward"):
        wrap(other)
    commlib.unwrap(one)  # as the message says
    both = wrap(nn.ModuleList([one, other]))
    reference = copy.deepcopy(both.module)
    for step in range(5):
        both.zero_grad()
        commlib.expect_backward(both)
        loss(one, other, step, dist.get_rank()).backward()
        reference.zero_grad()
        for rank in range(2):
            (loss(reference[0], reference[1], step, rank) / 2).backward()
        for parameter, wanted in zip(both.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, wanted.grad)


@on_ranks(2)
@pytest.mark.parametrize(
    ("algorithm", "words"),
    [("demo", "starts from zero"), ("diloco", "commlib.synchronize"), ("bytegrad", None)],
)
def test_weights_without_the_state_are_told_of_once(algorithm: str, words: str | None) -> None:
    model = seeded(Mlp)
    optimizer = sgd(model)
    wrap(model, algorithm=algorithm, optimizer=optimizer)
    train(model, mlp_loss, 3, optimizer)
    saved, state = copy.deepcopy(model.state_dict()), commlib.state_dict(model)
    other = seeded(Mlp, seed=9).state_dict()
    with logged() as records:
        for order in ("weights first", "state first"):
            if order == "state first":
                commlib.load_state_dict(model, state)
            model.load_state_dict(saved)
            if order == "weights first":
                commlib.load_state_dict(model, state)
            train(model, mlp_loss, 2, optimizer)
        assert not [text for text in records if "without its state" in text], order
        for _ in range(2):
            model.load_state_dict(other)
            train(model, mlp_loss, 2, optimizer)
    found = [text for text in records if "without its state" in text]
    assert len(found) == (1 if words and dist.get_rank() == 0 else 0)
    assert not found or words in found[0]
