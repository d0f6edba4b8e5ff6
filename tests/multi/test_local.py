"""Local SGD and DiLoCo against references in one process; their saved state, traffic and errors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commlib
from commlib.algorithms import (
    Algorithm,
    DiLoCo,
    HierarchicalLocalSGD,
    LocalSGD,
    PostLocalSGD,
    SparseLoCo,
    StreamingDiLoCo,
)
from commlib.codecs import BlockTopK, Int4, Int8, OneBit, RandomK, Threshold, TopK
from commlib.errors import ConfigError
from commlib.kernels.reference import BLOCK_CODECS
from commlib.replica import replica_of
from tests.multi.common import (
    SMALL_BUCKET_MB,
    Mlp,
    assert_close,
    assert_replicas_identical,
    assert_same_trace,
    data,
    is_exact,
    mlp_loss,
    raises_on_every_rank,
    seeded,
    sgd,
    tensors,
    train,
    wrap,
)
from tests.multi.equations import against_equations, classes_of
from tests.multi.local_references import (
    Average,
    BalancedAverage,
    OuterReference,
    SparseAverage,
    above,
    block_top_k,
    mean,
    quantized,
    top_k,
)
from tests.multi.pool import on_ranks, run_ranks
from tests.multi.test_relaxations import two_nodes
from tests.thin import fast


def nesterov(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


def heavy_ball(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5, momentum=0.8)


def plain_step(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02)


# The algorithm; a function from the number of ranks to the average, or its codec and whether errors are fed back; the
# outer optimizer; the reference's other options.
Case = tuple[Callable[[], Algorithm], Callable[[int], Average] | tuple[str, bool] | None, Any, dict[str, Any]]

CASES: dict[str, Case] = {
    "local_sgd": (lambda: LocalSGD(period=3), None, None, {"period": 3}),
    "local_sgd, every step": (lambda: LocalSGD(period=1), None, None, {"period": 1}),
    "local_sgd, 8 bits": (lambda: LocalSGD(period=3, codec=Int8()), ("int8", True), plain_step, {"period": 3}),
    "post_local_sgd": (lambda: PostLocalSGD(5, period=3), None, None, {"period": 3, "warm_up": 5}),
    "post_local_sgd, 4 bits": (
        lambda: PostLocalSGD(2, period=3, codec=Int4()),
        ("int4", True),
        plain_step,
        {"period": 3, "warm_up": 2},
    ),
    "diloco": (lambda: DiLoCo(period=4), None, nesterov, {"period": 4}),
    "diloco, AdamW outside": (lambda: DiLoCo(period=4, outer=adamw), None, adamw, {"period": 4}),
    "diloco, the same SGD outside": (lambda: DiLoCo(period=4, outer=nesterov), None, nesterov, {"period": 4}),
    "diloco, heavy ball": (
        lambda: DiLoCo(period=4, outer_lr=0.5, outer_momentum=0.8, nesterov=False, warmup_steps=3),
        None,
        heavy_ball,
        {"period": 4, "warm_up": 3},
    ),
    "diloco, 4 bits": (lambda: DiLoCo(period=4, codec=Int4()), ("int4", True), nesterov, {"period": 4}),
    "diloco, 8 bits without feedback": (
        lambda: DiLoCo(period=4, codec=Int8(), feedback=False),
        ("int8", False),
        nesterov,
        {"period": 4},
    ),
    "diloco, 4 bits with errors that decay": (
        lambda: DiLoCo(period=4, codec=Int4(), error_decay=0.5),
        lambda size: quantized(BLOCK_CODECS["int4"], size, feedback=True, decay=0.5),
        nesterov,
        {"period": 4},
    ),
    "diloco, 1 bit": (lambda: DiLoCo(period=4, codec=OneBit()), ("onebit", True), nesterov, {"period": 4}),
    "streaming_diloco": (
        lambda: StreamingDiLoCo(period=6, fragments=3, delay=1, mixing=0.5),
        None,
        nesterov,
        {"period": 2, "delay": 1, "mixing": 0.5},
    ),
    "streaming_diloco, 4 bits, no mixing": (
        lambda: StreamingDiLoCo(period=6, fragments=2, delay=3, mixing=0.0, codec=Int4(), warmup_steps=2),
        ("int4", True),
        nesterov,
        {"period": 3, "delay": 3, "mixing": 0.0, "warm_up": 2},
    ),
    "streaming_diloco, waited for": (
        lambda: StreamingDiLoCo(period=4, fragments=2, delay=0, mixing=0.0),
        None,
        nesterov,
        {"period": 2},
    ),
}

# With few elements sent of buckets of a few hundred.
SPARSE_CASES: dict[str, Case] = {
    "sparse_loco": (
        lambda: SparseLoCo(period=3, kept=16),
        lambda size: SparseAverage(size, block_top_k(16), 0.95),
        plain_step,
        {"period": 3},
    ),
    "sparse_loco, every step": (
        lambda: SparseLoCo(period=1, kept=5, error_decay=0.5),
        lambda size: SparseAverage(size, block_top_k(5), 0.5),
        plain_step,
        {"period": 1},
    ),
    "sparse_loco, half a step": (
        lambda: SparseLoCo(period=4, kept=64, error_decay=1.0, outer_lr=0.5, warmup_steps=2),
        lambda size: SparseAverage(size, block_top_k(64), 1.0),
        lambda params: torch.optim.SGD(params, lr=0.5),
        {"period": 4, "warm_up": 2},
    ),
    "sparse_loco, in the background": (
        lambda: SparseLoCo(period=3, kept=16, delay=2),
        lambda size: SparseAverage(size, block_top_k(16), 0.95),
        plain_step,
        {"period": 3, "delay": 2},
    ),
    "sparse_loco, in the background throughout": (
        lambda: SparseLoCo(period=3, kept=16, delay=3),
        lambda size: SparseAverage(size, block_top_k(16), 0.95),
        plain_step,
        {"period": 3, "delay": 3},
    ),
    "sparse_loco, balanced": (
        lambda: SparseLoCo(period=3, kept=256, exchange="balanced"),
        lambda size: BalancedAverage(size, 256 / 4096, 0.95),
        plain_step,
        {"period": 3},
    ),
    "sparse_loco, balanced, in the background": (
        lambda: SparseLoCo(period=3, kept=512, error_decay=0.5, outer_lr=0.5, delay=2, exchange="balanced"),
        lambda size: BalancedAverage(size, 512 / 4096, 0.5),
        lambda params: torch.optim.SGD(params, lr=0.5),
        {"period": 3, "delay": 2},
    ),
    "diloco, top-k": (
        lambda: DiLoCo(period=4, codec=TopK(0.1)),
        lambda size: SparseAverage(size, top_k(0.1), 1.0),
        nesterov,
        {"period": 4},
    ),
    "diloco, top-k of blocks": (
        lambda: DiLoCo(period=3, codec=BlockTopK(16), error_decay=0.9, outer=adamw),
        lambda size: SparseAverage(size, block_top_k(16), 0.9),
        adamw,
        {"period": 3},
    ),
    "diloco, above a threshold": (
        lambda: DiLoCo(period=4, codec=Threshold(0.02, 0.25), error_decay=0.5, warmup_steps=2),
        lambda size: SparseAverage(size, above(0.02, 0.25), 0.5),
        nesterov,
        {"period": 4, "warm_up": 2},
    ),
    "streaming_diloco, top-k": (
        lambda: StreamingDiLoCo(period=6, fragments=2, delay=3, mixing=0.0, codec=TopK(0.1), error_decay=0.9),
        lambda size: SparseAverage(size, top_k(0.1), 0.9),
        nesterov,
        {"period": 3, "delay": 3, "mixing": 0.0},
    ),
    "local_sgd, top-k": (
        lambda: LocalSGD(period=3, codec=TopK(0.1)),
        lambda size: SparseAverage(size, top_k(0.1), 1.0),
        plain_step,
        {"period": 3},
    ),
}


def wrapped(algorithm: Algorithm, seed: int = 7, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = seeded(Mlp, seed)
    optimizer = sgd(model)
    options = {"bucket_cap_mb": SMALL_BUCKET_MB, **options}
    return wrap(model, algorithm=algorithm, optimizer=optimizer, **options), optimizer


def fragments_of(model: Any) -> list[list[list[str]]]:
    """Return the names in the buckets of each fragment."""
    rounds = replica_of(model).engine.channels[-1]
    names = [[part.name for part in bucket.parts] for bucket in rounds.buckets]
    count = replica_of(model).engine.algorithm.channel.fragments
    return [names[turn::count] for turn in range(count)]


def gathered(model: nn.Module) -> list[Tensor]:
    """Return every rank's parameters as one vector."""
    own = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return everyone


def are_identical(model: nn.Module) -> bool:
    everyone = gathered(model)
    return all(torch.equal(everyone[0], other) for other in everyone)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    mlp_loss(model, step).backward()
    optimizer.step()


@pytest.mark.thin
@against_equations(*classes_of(make for make, *_ in CASES.values()))
@on_ranks(1, 3, slow=(2, 4))
@pytest.mark.parametrize("case", CASES)
def test_weights_follow_the_equations(case: str) -> None:
    check_against_reference(*CASES[case])


@pytest.mark.thin
@against_equations(*classes_of(make for make, *_ in SPARSE_CASES.values()))
@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("case", SPARSE_CASES)
def test_sparse_weights_follow_the_equations(case: str) -> None:
    check_against_reference(*SPARSE_CASES[case], num_steps=50)


class MuonAndAdamW:
    """Muon for the matrices, AdamW for the rest, as in MuLoCo."""

    def __init__(self, model: nn.Module) -> None:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim != 2]
        self.both = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]

    def zero_grad(self) -> None:
        for optimizer in self.both:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.both:
            optimizer.step()


@on_ranks(2, slow=(3,))
@pytest.mark.parametrize("is_reversed", [False, True], ids=["muon first", "muon last"])
def test_several_inner_optimizers_make_one_step_together(is_reversed: bool) -> None:
    """Bit for bit, whatever the number of ranks: Muon computes in bf16, where one bit becomes a percent."""
    model, size = seeded(Mlp), dist.get_world_size()
    inner = MuonAndAdamW(model)
    if is_reversed:
        inner.both.reverse()
    wrap(model, algorithm=DiLoCo(period=4, codec="int4"), optimizer=inner.both, bucket_cap_mb=SMALL_BUCKET_MB)
    average = quantized(BLOCK_CODECS["int4"], size, feedback=True)
    fragments = fragments_of(model)
    reference = OuterReference(size, fragments, period=4, outer=nesterov, average=average, inner=MuonAndAdamW)
    for step in range(20):
        inner.zero_grad()
        mlp_loss(model, step).backward()
        inner.step()
        reference.step(step)
        own = dict(reference.replicas[dist.get_rank()].named_parameters())
        for name, parameter in model.named_parameters():
            assert_close(parameter.detach(), own[name].detach(), f"{name} after step {step}", exact=True)
        assert are_identical(model) == (step % 4 == 3 or size == 1)


@on_ranks(8)
@pytest.mark.parametrize(
    "case",
    ["diloco, 4 bits", *(pytest.param(c, marks=pytest.mark.slow) for c in ("local_sgd", "diloco", "streaming_diloco"))],
)
def test_weights_follow_the_equations_on_eight_ranks(case: str) -> None:
    check_against_reference(*CASES[case])


def check_against_reference(
    make: Callable[[], Algorithm],
    codec: Callable[[int], Average] | tuple[str, bool] | None,
    outer: Any,
    options: dict[str, Any],
    num_steps: int = 20,
) -> None:
    """Step by step over five rounds and more: equal bits where the order of a sum is the same."""
    model, optimizer = wrapped(make())
    size, rank = dist.get_world_size(), dist.get_rank()
    if isinstance(codec, tuple):
        average = quantized(BLOCK_CODECS[codec[0]], size, feedback=codec[1])
    else:
        average = mean if codec is None else codec(size)
    reference = OuterReference(size, fragments_of(model), outer=outer, average=average, **options)
    exact = (codec is not None or is_exact()) and not options.get("mixing") and not options.get("warm_up")
    num_taken = 0
    for step in range(options.get("warm_up", 0) + num_steps):
        before = commlib.stats(model).wire_bytes
        num_rounds = reference.num_rounds
        one_step(model, optimizer, step)
        num_taken += reference.step(step)
        expected = tensors(reference.replicas[rank])
        for name, value in tensors(model).items():
            assert_close(value, expected[name], f"step {step}: {name}", exact=exact)
        if options.get("delay", 0) == 0 and step >= options.get("warm_up", 0):
            has_sent = commlib.stats(model).wire_bytes > before
            assert has_sent == (reference.num_rounds > num_rounds and size > 1), f"step {step}"
    assert num_taken >= 5
    commlib.unwrap(model)


@pytest.mark.thin
@on_ranks(3, slow=(2,))
@pytest.mark.parametrize(
    "case",
    [
        "local_sgd",
        "local_sgd, 8 bits",
        "diloco",
        "diloco, 4 bits",
        "diloco, top-k",
        "sparse_loco",
        "sparse_loco, balanced",
    ],
)
def test_replicas_are_identical_after_each_round_and_only_then(case: str) -> None:
    make, _, _, options = (CASES | SPARSE_CASES)[case]
    model, optimizer = wrapped(make())
    for step in range(1, 13):
        one_step(model, optimizer, step)
        assert are_identical(model) == (step % options["period"] == 0), step


@against_equations(HierarchicalLocalSGD)
@on_ranks(4)
@pytest.mark.parametrize("several", [True, False])
def test_nodes_are_averaged_often_and_all_ranks_seldom(several: bool) -> None:
    algorithm = HierarchicalLocalSGD(period=2, global_every=3)
    if several:
        with two_nodes():
            model, optimizer = wrapped(algorithm)
    else:
        model, optimizer = wrapped(algorithm)
    replicas = [seeded(Mlp) for _ in range(4)]
    optimizers = [sgd(replica) for replica in replicas]
    for step in range(1, 19):
        one_step(model, optimizer, step)
        for rank, replica in enumerate(replicas):
            optimizers[rank].zero_grad()
            replica(data(step, 5, 8, rank=rank)).square().mean().backward()
            optimizers[rank].step()
        groups = [[0, 1, 2, 3]] if not several or step % 6 == 0 else [[0, 1], [2, 3]]
        for group in groups if step % 2 == 0 else []:
            for same in zip(*[replicas[rank].parameters() for rank in group], strict=True):
                average = torch.stack([p.detach() for p in same]).mean(dim=0)
                for p in same:
                    p.detach().copy_(average)
        for name, value in tensors(replicas[dist.get_rank()]).items():
            assert_close(tensors(model)[name], value, f"step {step}: {name}", exact=False)
        if step % 2 == 0:
            assert are_identical(model) == (len(groups) == 1)


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@on_ranks(2, 3)
def test_the_common_weights_are_those_before_the_first_step() -> None:
    """Not those at the time of `wrap`: the model may be loaded in between."""
    model, optimizer = wrapped(DiLoCo(period=2, outer_lr=0.5))
    alone = seeded(Mlp, seed=5)
    model.load_state_dict(alone.state_dict())
    first = vector(alone)
    for step in range(2):
        one_step(model, optimizer, step)
    train(alone, mlp_loss, 2, sgd(alone))
    moved = first - torch.stack(gathered(alone)).mean(dim=0)
    assert_close(vector(model), first - 0.5 * 1.9 * moved, "after the first outer step", exact=False)


RESUMED = {
    "local_sgd": lambda: LocalSGD(period=3),
    "local_sgd, 4 bits": lambda: LocalSGD(period=3, codec=Int4()),
    "post_local_sgd": lambda: PostLocalSGD(6, period=3, codec=Int8()),
    "hierarchical_local_sgd": lambda: HierarchicalLocalSGD(period=3, global_every=2),
    "diloco": lambda: DiLoCo(period=3),
    "diloco, 4 bits": lambda: DiLoCo(period=3, codec=Int4()),
    "diloco, AdamW outside": lambda: DiLoCo(period=3, outer=adamw),
    "streaming_diloco, AdamW outside": lambda: StreamingDiLoCo(period=6, fragments=2, delay=2, outer=adamw),
    "streaming_diloco": lambda: StreamingDiLoCo(period=6, fragments=2, delay=2),
    "sparse_loco": lambda: SparseLoCo(period=3, kept=16),
    "sparse_loco, in the background": lambda: SparseLoCo(period=3, kept=16, delay=2),
    "sparse_loco, balanced": lambda: SparseLoCo(period=3, kept=256, exchange="balanced"),
    "sparse_loco, balanced, in the background": lambda: SparseLoCo(period=3, kept=256, delay=2, exchange="balanced"),
    "diloco, top-k": lambda: DiLoCo(period=3, codec=TopK(0.1), error_decay=0.9),
    "streaming_diloco, top-k of blocks": lambda: StreamingDiLoCo(period=6, fragments=2, delay=2, codec=BlockTopK(16)),
}


#: One of each kind of state: of a codec, of two periods, of rounds in flight, of a sparse choice.
RESUMED_FAST = ("local_sgd, 4 bits", "hierarchical_local_sgd", "streaming_diloco", "sparse_loco")


def saved_of(model: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, Any, Any]:
    communication = commlib.state_dict(model)  # first: it takes results from the background
    return copy.deepcopy((model.state_dict(), optimizer.state_dict(), communication))


def resumed(algorithm: Algorithm, saved: tuple[Any, Any, Any], **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = wrapped(algorithm, seed=99, **options)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    commlib.load_state_dict(model, saved[2])
    return model, optimizer


@pytest.mark.thin
@on_ranks(3, slow=(2,))
@pytest.mark.parametrize("stop_after", [0, 4, 8, 9])
@pytest.mark.parametrize("name", fast(RESUMED, *RESUMED_FAST))
def test_a_resumed_run_is_bit_identical(name: str, stop_after: int) -> None:
    """Before the first step, in a warm-up, within a period, with a round in flight, after a round."""
    whole, optimizer = wrapped(RESUMED[name]())
    train(whole, mlp_loss, stop_after, optimizer)
    saved = saved_of(whole, optimizer)
    rest = train(whole, lambda m, s: mlp_loss(m, s + stop_after), 12, optimizer)
    model, own = resumed(RESUMED[name](), saved)
    again = saved_of(model, own)[2]  # includes loaded state that was not used yet
    assert again["state"].keys() == saved[2]["state"].keys()
    got = train(model, lambda m, s: mlp_loss(m, s + stop_after), 12, own)
    assert_same_trace(got, rest, exact=True)
    commlib.unwrap(whole)
    commlib.unwrap(model)


@on_ranks(2)
@pytest.mark.parametrize("name", ["sparse_loco", "sparse_loco, balanced", "diloco, top-k"])
def test_anchors_and_errors_of_sparse_codecs_survive_another_plan(name: str) -> None:
    whole, optimizer = wrapped(RESUMED[name]())
    train(whole, mlp_loss, 7, optimizer)
    saved = saved_of(whole, optimizer)
    model, own = resumed(RESUMED[name](), saved, bucket_cap_mb=1.0)
    assert len(fragments_of(model)[0]) == 1 < len(fragments_of(whole)[0])
    one_step(model, own, 7)
    again = saved_of(model, own)[2]["state"]
    for kind in ("common", "worker"):
        assert saved[2]["state"][kind].keys() == again[kind].keys() == dict(model.named_parameters()).keys()
        assert any(values.any() for _, values in saved[2]["state"][kind].values())
        for name, (start, values) in saved[2]["state"][kind].items():
            assert again[kind][name][0] == start
            assert torch.equal(again[kind][name][1], values)


@on_ranks(2)
@pytest.mark.parametrize("name", ["diloco", "diloco, AdamW outside"])
def test_state_survives_another_plan(name: str) -> None:
    whole, optimizer = wrapped(RESUMED[name]())
    train(whole, mlp_loss, 7, optimizer)
    saved = saved_of(whole, optimizer)
    rest = train(whole, lambda m, s: mlp_loss(m, s + 7), 8, optimizer)
    model, own = resumed(RESUMED[name](), saved, bucket_cap_mb=1.0)
    assert len(fragments_of(model)[0]) == 1 < len(fragments_of(whole)[0])
    assert_same_trace(train(model, lambda m, s: mlp_loss(m, s + 7), 8, own), rest, exact=True)


def train_and_save(name: str, consensus: bool) -> tuple[Any, Any, Any]:
    model, optimizer = wrapped(RESUMED[name]())
    train(model, mlp_loss, 7, optimizer)
    if consensus:
        commlib.synchronize(model)
    return saved_of(model, optimizer)


def resume_and_train(saved: tuple[Any, Any, Any]) -> Any:
    """Train on to the end of the period, and return this rank's weights before the outer step and the common ones."""
    model, optimizer = resumed(DiLoCo(period=3), saved)
    alone = seeded(Mlp)
    alone.load_state_dict(saved[0])
    own = sgd(alone)
    own.load_state_dict(copy.deepcopy(saved[1]))
    for step in (7, 8):
        one_step(model, optimizer, step)
        one_step(alone, own, step)
    return [*gathered(alone)], vector(model), are_identical(model)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 3), (2, 4)])
def test_another_number_of_ranks_goes_on_from_the_same_global_weights_and_momentum(before: int, after: int) -> None:
    states = run_ranks(train_and_save, before, "diloco", True)
    common = [state[2]["state"]["common"] for state in states]
    for name, (_, values) in common[0].items():
        assert all(torch.equal(values, other[name][1]) for other in common)
    weights, got, identical = run_ranks(resume_and_train, after, states[0])[after - 1]
    assert identical
    assert len(weights) == after
    names = list(states[0][0])
    first = torch.cat([common[0][name][1] for name in names])
    momentum = torch.cat([states[0][2]["state"]["velocity"][name][1] for name in names])
    gradient = first - torch.stack(weights).mean(dim=0)
    momentum = 0.9 * momentum + gradient
    assert_close(got, first - 0.7 * (gradient + 0.9 * momentum), "the global weights", exact=False)


def load_elsewhere(name: str, saved: tuple[Any, Any, Any]) -> None:
    model, _ = wrapped(RESUMED[name]())
    with pytest.raises(ConfigError, match="world_size"):
        commlib.load_state_dict(model, saved[2])


@pytest.mark.parametrize("name", ["diloco, 4 bits", "diloco, top-k", "sparse_loco"])
def test_residuals_are_refused_at_another_number_of_ranks(name: str) -> None:
    run_ranks(load_elsewhere, 2, name, run_ranks(train_and_save, 3, name, False)[0])


@on_ranks(2)
def test_state_of_another_outer_optimizer_is_refused() -> None:
    model, optimizer = wrapped(DiLoCo(period=3))
    train(model, mlp_loss, 7, optimizer)
    saved = saved_of(model, optimizer)
    other, _ = wrapped(DiLoCo(period=3, outer=adamw))
    with pytest.raises(ConfigError, match="DiLoCo.outer: expected None, as in the saved state, got AdamW"):
        commlib.load_state_dict(other, saved[2])


@pytest.mark.parametrize("outer", [0.1, torch.optim.AdamW([torch.zeros(1)])])
def test_what_makes_no_optimizer_is_refused_at_once(outer: Any) -> None:
    with pytest.raises(ConfigError, match="DiLoCo.outer: expected a callable"):
        DiLoCo(outer=outer)


def no_optimizer(params: list[nn.Parameter]) -> None:
    """Make nothing."""


@on_ranks(2)
@pytest.mark.parametrize("outer", [no_optimizer, torch.optim.LBFGS], ids=["nothing", "with a closure"])
def test_what_cannot_step_is_refused_on_all_ranks(outer: Any) -> None:
    model, optimizer = wrapped(DiLoCo(period=3, outer=outer))
    with pytest.raises(ConfigError, match="steps without a closure"):
        train(model, mlp_loss, 4, optimizer)


@on_ranks(2)
def test_state_without_a_parameter_is_refused() -> None:
    model, optimizer = wrapped(DiLoCo(period=3))
    train(model, mlp_loss, 4, optimizer)
    saved = commlib.state_dict(model)
    del saved["state"]["common"]["second.bias"]
    with pytest.raises(ConfigError, match=r"another model.*second\.bias"):
        commlib.load_state_dict(model, saved)


class Wide(nn.Module):
    """One matrix and a bias: so many elements that padding does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)


def bytes_of(steps: int, **options: Any) -> float:
    model = seeded(Wide)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrap(model, optimizer=optimizer, bucket_cap_mb=1.0, **options)
    before = commlib.stats(model).wire_bytes
    for step in range(steps):
        optimizer.zero_grad()
        model(data(step, 2, 256)).square().mean().backward()
        optimizer.step()
    sent = commlib.stats(model).wire_bytes - before
    commlib.unwrap(model)
    return sent


@on_ranks(2)
def test_printed_statistics_say_what_rounds_over_weights_have_sent() -> None:
    model, optimizer = wrapped(LocalSGD(period=2))
    shown = []
    for step in range(3):
        stats = commlib.stats(model)
        assert (stats.options, stats.preset, stats.next_round_in) == ("period=2", "", 2 - step % 2)
        assert stats.compression_ratio is None
        shown.append(str(stats).splitlines()[0])
        train(model, mlp_loss, 1, optimizer)
    assert shown[0] == "local_sgd(period=2) on 2 ranks: 0 rounds, the next over weights after 2 steps"
    assert shown[1] == "local_sgd(period=2) on 2 ranks: 0 rounds, the next over weights after 1 step"
    train(model, mlp_loss, 5, optimizer)
    stats = commlib.stats(model)
    assert stats.wire_bytes > 0
    raw = sum(p.nbytes for p in model.parameters())  # 2 (N - 1) / N of it on two ranks
    assert (stats.wire_bytes_per_step, stats.raw_bytes_per_step) == (raw // 2, raw)
    assert stats.compression_ratio == 2.0
    assert f"per step: {raw / 2e6:.2f} MB sent per rank (compression x2.00)" in str(stats)
    assert "of it waiting for communication" in str(stats)
    assert stats.step_s > 0
    assert 0 < stats.waited_share < 1


@on_ranks(2, slow=(4,))
def test_bytes_are_a_small_part_of_ddps() -> None:
    ddp = bytes_of(100)
    num_bytes = sum(p.nbytes for p in Wide().parameters())
    assert ddp >= 100 * 2 * (dist.get_world_size() - 1) / dist.get_world_size() * num_bytes
    assert bytes_of(100, algorithm=DiLoCo(period=50)) <= 0.025 * ddp
    assert bytes_of(100, algorithm=StreamingDiLoCo(period=50, fragments=2)) <= 0.025 * ddp
    assert bytes_of(100, algorithm=DiLoCo(period=50, codec=Int4())) <= 0.004 * ddp
    assert bytes_of(100, algorithm=LocalSGD(period=50)) <= 0.025 * ddp


@on_ranks(1, 2, 4)
def test_sparse_loco_sends_14_bits_of_each_element_that_it_keeps_and_two_levels_of_each_block() -> None:
    numel, others = sum(p.numel() for p in Wide().parameters()), dist.get_world_size() - 1
    blocks = -(-numel // 4096)
    for kept, period in ((64, 1), (32, 5)):
        formula = others * blocks * (kept * (12 + 2) / 8 + 4)
        sent = bytes_of(10, algorithm=SparseLoCo(period=period, kept=kept))
        assert sent == pytest.approx(formula * 10 / period, rel=0.05)


@on_ranks(1, 2, 4)
def test_sparse_loco_with_a_balanced_exchange_sends_six_numbers_of_each_element_that_it_keeps() -> None:
    numel, size = sum(p.numel() for p in Wide().parameters()), dist.get_world_size()
    for kept, period in ((64, 1), (128, 5)):
        formula = (size - 1) / size * 6 * 4 * numel * kept / 4096
        sent = bytes_of(10, algorithm=SparseLoCo(period=period, kept=kept, exchange="balanced"))
        assert sent == pytest.approx(formula * 10 / period, rel=0.05)


@on_ranks(2, 4)
def test_outer_gradients_by_a_sparse_codec_send_its_payload_to_all_others() -> None:
    numel, others = sum(p.numel() for p in Wide().parameters()), dist.get_world_size() - 1
    for codec in (TopK(0.02), BlockTopK(32), Threshold(0.1, 0.05)):
        formula = others * codec.payload_bytes(numel)
        assert bytes_of(10, algorithm=DiLoCo(period=5, codec=codec)) == pytest.approx(2 * formula, rel=0.02)
        streaming = StreamingDiLoCo(period=5, fragments=1, delay=0, codec=codec)
        assert bytes_of(10, algorithm=streaming) == pytest.approx(2 * formula, rel=0.02)


class Mixed(nn.Module):
    """Parameters of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(40, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(40).bfloat16())
        self.paired = nn.Parameter(torch.randn(7, dtype=torch.complex64))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, rank: int) -> Tensor:
        real = sum((p - rank).float().square().sum() for p in (self.wide, self.narrow, self.frozen))
        return real + self.paired.abs().square().sum()


@pytest.mark.thin
@on_ranks(2, 3)
@pytest.mark.parametrize("codec", [None, Int8()])
def test_every_dtype_takes_its_outer_step_and_what_is_unfrozen_joins(codec: Any) -> None:
    """The targets' mean is approached by all, though each rank has its own; complex weights travel unencoded."""
    model = seeded(Mixed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    wrap(model, algorithm=DiLoCo(period=4, outer_momentum=0.5, codec=codec), optimizer=optimizer, bucket_cap_mb=1.0)
    for step in range(48):
        model.frozen.requires_grad_(step >= 6)
        optimizer.zero_grad()
        model(dist.get_rank()).backward()
        optimizer.step()
    target = (dist.get_world_size() - 1) / 2
    assert torch.allclose(model.wide.detach(), torch.full((40,), target, dtype=torch.float64), atol=0.05)
    assert torch.allclose(model.narrow.detach().float(), torch.full((40,), target), atol=0.05)
    assert torch.allclose(model.frozen.detach(), torch.full((3,), target), atol=0.05)
    assert float(model.paired.detach().abs().max()) < 0.05
    optimizer.zero_grad()
    assert_replicas_identical(model)


@on_ranks(2, 3)
def test_what_is_unfrozen_while_a_round_is_in_flight_joins() -> None:
    model = seeded(Mlp)
    model.third.bias.requires_grad_(False)
    optimizer = sgd(model)
    optimizer.add_param_group({"params": [model.third.bias]})
    algorithm = StreamingDiLoCo(period=4, fragments=2, delay=2, mixing=0.0, codec=Int4())
    wrap(model, algorithm=algorithm, optimizer=optimizer, bucket_cap_mb=SMALL_BUCKET_MB)
    first = model.third.bias.detach().clone()
    for step in range(15):
        model.third.bias.requires_grad_(step >= 3)  # two steps after the round that began at the end of step 1
        one_step(model, optimizer, step)
    assert not torch.equal(model.third.bias, first)
    saved = commlib.state_dict(model)["state"]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: value for name, (_, value) in saved["common"].items()})
    assert everyone[0].keys() == dict(model.named_parameters()).keys()
    for other in everyone:
        assert all(torch.equal(other[name], value) for name, value in everyone[0].items())
    commlib.unwrap(model)


@on_ranks(2)
def test_synchronize_takes_the_round_in_flight_and_gives_the_mean() -> None:
    model, optimizer = wrapped(StreamingDiLoCo(period=6, fragments=2, delay=3))
    train(model, mlp_loss, 4, optimizer)
    assert commlib.stats(model).plan == "fixed"  # nothing waits for a plan of gradients that nobody communicates
    assert commlib.stats(model).consensus_distance is None
    commlib.synchronize(model)
    assert are_identical(model)
    assert commlib.stats(model).consensus_distance > 0  # type: ignore[operator]
    train(model, lambda m, s: mlp_loss(m, s + 4), 8, optimizer)
    model.eval()
    before = vector(model)
    with torch.no_grad():
        model(data(0, 5, 8))
    assert torch.equal(vector(model), before), "weights change at the ends of steps only"
    commlib.unwrap(model)


@on_ranks(2)
def test_the_plan_of_a_warm_up_is_measured_without_the_weights() -> None:
    model = seeded(Mlp)
    optimizer = sgd(model)
    wrap(model, algorithm=PostLocalSGD(8, period=4, codec=Int8()), optimizer=optimizer)
    train(model, mlp_loss, 16, optimizer)
    assert commlib.stats(model).plan in ("trial", "planned")
    assert are_identical(model)


BAD: dict[str, tuple[Callable[[], Algorithm], tuple[str, ...]]] = {
    "outer_lr": (lambda: DiLoCo(outer_lr=0.0), ("DiLoCo", "outer_lr", "0.0")),
    "outer_momentum": (lambda: DiLoCo(outer_momentum=1.0), ("outer_momentum", "1.0")),
    "nesterov": (lambda: DiLoCo(outer_momentum=0.0), ("nesterov", "outer_momentum")),
    "feedback": (lambda: LocalSGD(feedback=True), ("LocalSGD", "feedback", "codec")),
    "period": (lambda: LocalSGD(period=0), ("period",)),
    "warmup_steps": (lambda: PostLocalSGD(-1), ("warmup_steps",)),
    "global_every": (lambda: HierarchicalLocalSGD(global_every=0), ("global_every", "0")),
    "fragments": (lambda: StreamingDiLoCo(period=10, fragments=3), ("multiple of fragments", "period=10", "3")),
    "feedback of a sparse codec": (
        lambda: DiLoCo(codec="topk", feedback=False),
        ("DiLoCo", "feedback=False", "TopK(ratio=0.01)"),
    ),
    "decay without feedback": (
        lambda: DiLoCo(codec=Int8(), feedback=False, error_decay=0.5),
        ("error_decay=0.5", "feedback"),
    ),
    "decay without a codec": (lambda: DiLoCo(error_decay=0.5), ("error_decay=0.5", "codec")),
    "decay of diloco": (lambda: DiLoCo(codec="topk", error_decay=-0.5), ("DiLoCo.error_decay", "-0.5")),
    "randomk": (lambda: DiLoCo(codec=RandomK(0.1)), ("a block codec, TopK, BlockTopK, Threshold", "RandomK")),
    "name of a codec": (lambda: StreamingDiLoCo(codec="blocktop"), ("did you mean 'blocktopk'",)),
    "kept": (lambda: SparseLoCo(kept=0), ("kept", "4096", "0")),
    "error_decay": (lambda: SparseLoCo(error_decay=1.5), ("error_decay", "1.5")),
    "outer_lr of sparse_loco": (lambda: SparseLoCo(outer_lr=-1.0), ("SparseLoCo", "outer_lr", "-1.0")),
    "delay of sparse_loco": (lambda: SparseLoCo(period=3, delay=4), ("delay", "4")),
    "delay": (lambda: StreamingDiLoCo(period=10, fragments=2, delay=6), ("delay", "6")),
    "mixing": (lambda: StreamingDiLoCo(mixing=1.0), ("mixing", "1.0")),
}


@pytest.mark.parametrize(("name", "codec"), [("topk", TopK), ("blocktopk", BlockTopK), ("int4", Int4)])
def test_codecs_of_outer_gradients_have_names(name: str, codec: type) -> None:
    assert isinstance(DiLoCo(codec=name).codec, codec)


@pytest.mark.parametrize("option", BAD)
def test_options_out_of_range_are_refused(option: str) -> None:
    make, words = BAD[option]
    with pytest.raises(ConfigError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)


@on_ranks(2)
@pytest.mark.parametrize("name", sorted({name.split(",")[0] for name in RESUMED}))
def test_an_optimizer_is_required_and_the_defaults_train(name: str) -> None:
    with raises_on_every_rank(ConfigError, "optimizer=", name):
        wrap(seeded(Mlp), algorithm=name)
    model = seeded(Mlp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    wrap(model, algorithm=name, optimizer=optimizer)
    losses = train(model, mlp_loss, 110, optimizer).losses
    assert float(torch.stack(losses[-10:]).mean()) < 0.5 * float(losses[0])
    commlib.unwrap(model)
