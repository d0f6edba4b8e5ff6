"""`torch.compile` in every form: compiled models train as eager ones do, and no graph has commlib's own work in it."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters, get_compilation_metrics
from torch.utils.checkpoint import checkpoint

import commlib
from commlib.algorithms import Gradients
from tests.contract.subjects import Mlp as SubjectMlp
from tests.contract.subjects import Subject, loss_of
from tests.contract.subjects import build as build_subject
from tests.multi.common import (
    SMALL_BUCKET_MB,
    Branches,
    Cnn,
    Mlp,
    Trace,
    assert_replicas_identical,
    assert_same_trace,
    cnn_loss,
    data,
    ddp,
    gradients,
    mlp_loss,
    seeded,
    sgd,
    tensors,
    train,
    wrap,
)
from tests.multi.pool import on_ranks, run_ranks
from tests.thin import fast

Parallel = Callable[[nn.Module], Any]
wrapped = functools.partial(wrap, bucket_cap_mb=SMALL_BUCKET_MB)
ALGORITHMS = [name for name in commlib.algorithms.list() if isinstance(Subject(name).channel, Gradients)]


def compiled_after(model: nn.Module, parallel: Parallel, **options: Any) -> Any:
    return torch.compile(parallel(model), **options)


def compiled_before(model: nn.Module, parallel: Parallel, **options: Any) -> Any:
    return parallel(torch.compile(model, **options))  # type: ignore[arg-type]


def compiled_in_place_after(model: nn.Module, parallel: Parallel, **options: Any) -> Any:
    outer = parallel(model)
    outer.compile(**options)
    return outer


def compiled_in_place_before(model: nn.Module, parallel: Parallel, **options: Any) -> Any:
    model.compile(**options)
    return parallel(model)


WAYS = {
    "after": compiled_after,
    "before": compiled_before,
    "in-place-after": compiled_in_place_after,
    "in-place-before": compiled_in_place_before,
}


@contextlib.contextmanager
def fresh_compiler() -> Iterator[None]:
    """No graphs, counts or metrics of others before, and none left for them."""
    torch.compiler.reset()
    counters.clear()
    get_compilation_metrics().clear()
    warnings.filterwarnings("ignore", category=DeprecationWarning, message="`torch.jit")  # inductor's own imports
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # dynamo's own look
    try:
        yield
    finally:
        torch.compiler.reset()


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def num_breaks() -> int:
    return sum(counters["graph_break"].values())


# --- Values ----------------------------------------------------------------------------------------------------------


def check_compiled(way: str, backend: str) -> None:
    original = seeded(Mlp)
    expected = train(ddp(copy.deepcopy(original)), mlp_loss, 4)
    with fresh_compiler():
        model = WAYS[way](original, wrapped, backend=backend)
        got = train(model, mlp_loss, 4)
    assert_same_trace(got, expected, exact=backend == "aot_eager")
    assert_replicas_identical(model)


@on_ranks(2)
@pytest.mark.parametrize("way", list(WAYS))
def test_compiled_models_train_as_in_ddp(way: str) -> None:
    check_compiled(way, "aot_eager")


class CompiledInside(SubjectMlp):
    """An ordinary module from the outside. Its gradients arrive in the compiled order, which determines the buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.backend = ""

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.compile(super().forward, backend=self.backend)(inputs)


def compiled_inside(model: Any, parallel: Parallel, backend: str) -> Any:
    model.__class__, model.backend = CompiledInside, backend
    return parallel(model)


def trained(name: str, compiled: Callable[..., Any], backend: str, steps: int = 6) -> Trace:
    """Train with an algorithm, compiled in some way, and return all gradients and the final weights."""
    subject = Subject(name)
    model = build_subject()
    optimizer = subject.optimizer(list(model.parameters()))
    parallel = functools.partial(wrapped, algorithm=subject.algorithm(), optimizer=optimizer)
    with fresh_compiler():
        model = compiled(model, parallel, backend=backend)
        trace = Trace()
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            trace.gradients.append(gradients(model))
            trace.losses.append(loss.detach().clone())
            optimizer.step()
        commlib.synchronize(model)
        trace.final = tensors(model)
        commlib.unwrap(model)
    return trace


def check_algorithm(name: str, ways: tuple[str, ...], backend: str) -> None:
    """A compiled model goes, bit by bit, the way of an ordinary one that hides the same graphs inside."""
    if Subject(name).runs_by_clocks:
        for way in ways:
            assert all(torch.isfinite(tensor).all() for tensor in trained(name, WAYS[way], backend).final.values())
        return
    expected = trained(name, compiled_inside, backend)
    for way in ways:
        assert_same_trace(trained(name, WAYS[way], backend), expected, exact=True)


@pytest.mark.parametrize(
    "name", fast(["bytegrad", "topk", "powersgd", "onebit_adam", "local_sgd"], "topk", "local_sgd")
)
def test_algorithms_of_each_family_train_compiled(name: str) -> None:
    run_ranks(check_algorithm, 2, name, ("after", "in-place-before"), "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ALGORITHMS, "local_sgd", "diloco"])
def test_every_algorithm_trains_compiled(name: str) -> None:
    run_ranks(check_algorithm, 2, name, tuple(WAYS), "aot_eager")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["allreduce", "topk"])
def test_algorithms_train_compiled_by_inductor(name: str) -> None:
    run_ranks(check_algorithm, 2, name, ("after", "before"), "inductor", timeout=300)


@on_ranks(2, timeout=300)
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", ["after", "before"])
def test_models_compiled_by_inductor_train_as_in_ddp(way: str) -> None:
    check_compiled(way, "inductor")


# --- Other features of training loops -------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Computes the activations of its halves again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = Mlp(), nn.Linear(4, 8), Mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.middle(checkpoint(self.first, inputs, use_reentrant=False))
        return checkpoint(self.last, hidden, use_reentrant=False)


def changing_batch(model: nn.Module, step: int) -> Tensor:
    return model(data(step, 3 + step, 8)).square().mean()


def unused_branches(model: nn.Module, step: int) -> Tensor:
    used = [0, 1] if (step + torch.distributed.get_rank()) % 2 else [0]
    return model(data(step, 5, 8), used).square().mean()


def accumulate(model: Any, loss_of_step: Callable[..., Tensor], steps: int = 4) -> Trace:
    """Train with a local backward before each synchronised one, and an evaluation after each step."""
    optimizer, trace = sgd(model), Trace()
    for step in range(steps):
        optimizer.zero_grad()
        with model.no_sync():
            loss_of_step(model, step).backward()
        loss_of_step(model, step + 50).backward()
        trace.gradients.append(gradients(model))
        optimizer.step()
        model.eval()
        with torch.no_grad():
            trace.losses.append(loss_of_step(model, step + 100).clone())
        model.train()
    trace.final = tensors(model)
    return trace


LOOPS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], Callable[..., Trace]]] = {
    "buffers": (Cnn, cnn_loss, train),
    "checkpointing": (Checkpointed, mlp_loss, train),
    "changing-batch": (Mlp, changing_batch, train),
    "unused": (Branches, unused_branches, train),
    "accumulation-and-evaluation": (Cnn, cnn_loss, accumulate),
}


def check_loop(loop: str, ways: tuple[str, ...]) -> None:
    """Also with no more graphs than the model needs, and no graph break."""
    build, loss_of_step, trainer = LOOPS[loop]
    expected = trainer(ddp(seeded(build), find_unused_parameters=loop == "unused"), loss_of_step, 4)
    graphs = {"changing-batch": 2, "unused": 2, "accumulation-and-evaluation": 2}.get(loop, 1)
    for way in ways:
        with fresh_compiler():
            model = WAYS[way](seeded(build), wrapped, backend="aot_eager")
            got = trainer(model, loss_of_step, 4)
            assert (num_graphs(), num_breaks()) == (graphs, 0), way
        assert_same_trace(got, expected, exact=True, without=buffers_of(model))


@pytest.mark.parametrize("loop", list(LOOPS))
def test_loops_go_compiled_as_in_ddp(loop: str) -> None:
    run_ranks(check_loop, 2, loop, ("after",))


@pytest.mark.slow
@pytest.mark.parametrize("loop", list(LOOPS))
def test_loops_go_as_in_ddp_in_every_form(loop: str) -> None:
    run_ranks(check_loop, 2, loop, tuple(WAYS))


def buffers_of(model: nn.Module) -> set[str]:
    """Names of buffers: DDP has rank 0's in the next forward only."""
    return {name.removeprefix("_orig_mod.") for name, _ in model.named_buffers()}


# --- Graphs ----------------------------------------------------------------------------------------------------------

#: Graph breaks of a compiled DDP model, with torch 2.13; commlib's has none.
BREAKS_OF_DDP = {"after": 3, "before": 0, "in-place-after": 2, "in-place-before": 0}


@on_ranks(2)
def test_no_form_has_graph_breaks_or_compiles_again() -> None:
    breaks = {}
    for way, compiled in WAYS.items():
        for parallel in (ddp, wrapped):
            with fresh_compiler():
                model = compiled(seeded(Mlp), parallel, backend="aot_eager")
                train(model, mlp_loss, 1)
                after_one_step = num_graphs(), num_breaks(), len(get_compilation_metrics())
                train(model, mlp_loss, 4)
                assert after_one_step == (num_graphs(), num_breaks(), len(get_compilation_metrics()))
                breaks[way, parallel] = num_breaks()
                assert num_graphs() == 1
    assert [breaks[way, wrapped] for way in WAYS] == [0, 0, 0, 0]
    if torch.__version__.startswith("2.13."):
        assert {way: breaks[way, ddp] for way in WAYS} == BREAKS_OF_DDP


@on_ranks(2)
def test_a_whole_graph_is_enough_in_every_form() -> None:
    """With `fullgraph=True`; DDP's work breaks the graph where the model is compiled after it was wrapped."""
    expected = train(ddp(seeded(Mlp)), mlp_loss, 3)
    for way, compiled in WAYS.items():
        with fresh_compiler():
            model = compiled(seeded(Mlp), wrapped, backend="aot_eager", fullgraph=True)
            assert_same_trace(train(model, mlp_loss, 3), expected, exact=True)
        with fresh_compiler():
            model = compiled(seeded(Mlp), ddp, backend="aot_eager", fullgraph=True)
            breaks = pytest.raises(torch._dynamo.exc.Unsupported) if "after" in way else contextlib.nullcontext()
            with breaks:
                train(model, mlp_loss, 3)


@on_ranks(2)
def test_a_class_whose_forward_is_compiled() -> None:
    class Decorated(Mlp):
        @functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs)

    expected = train(ddp(seeded(Mlp)), mlp_loss, 3)
    with fresh_compiler():
        assert_same_trace(train(wrapped(seeded(Decorated)), mlp_loss, 3), expected, exact=True)
        assert (num_graphs(), num_breaks()) == (1, 0)


@on_ranks(2)
def test_a_model_that_was_compiled_before_the_one_inside_was_wrapped() -> None:
    """The compiled object is not wrapped itself, and communicates; DDP's would train each rank alone."""
    expected = train(ddp(seeded(Mlp)), mlp_loss, 3)
    with fresh_compiler():
        bare = seeded(Mlp)
        compiled = torch.compile(bare, backend="aot_eager")
        wrapped(bare)
        assert_same_trace(train(compiled, mlp_loss, 3), expected, exact=True)  # type: ignore[arg-type]


class Layer(nn.Linear):
    """A user-defined class: torch does not compile its own modules individually."""

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(super().forward(inputs))


def layers() -> nn.Module:
    return nn.Sequential(Layer(8, 16), Layer(16, 16), Layer(16, 4))


@on_ranks(2)
def test_layers_that_are_compiled_one_by_one_hand_over_their_gradients_one_by_one() -> None:
    expected = train(ddp(seeded(layers)), mlp_loss, 6)
    with fresh_compiler():
        model = seeded(layers)
        for layer in model.children():
            layer.compile(backend="aot_eager", fullgraph=True)
        wrapped(model)
        assert_same_trace(train(model, mlp_loss, 6), expected, exact=True)
        assert num_breaks() == 0
        order: list[str] = []
        for name, parameter in model.named_parameters():
            parameter.register_hook(functools.partial(lambda name, _: order.append(name.split(".")[0]), name))
        model(data(0, 5, 8)).sum().backward()
    assert order == ["2", "2", "1", "1", "0", "0"]
