"""Relaxed gradient averaging against NumPy references of its equations, over many steps, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import commlib
from commlib.algorithms import (
    DGC,
    QSGD,
    Algorithm,
    AllReduce,
    ByteGrad,
    CompressionPolicy,
    EFQuantized,
    OkTopK,
    PowerSGD,
    RandomK,
    SignSGD,
    TopK,
)
from commlib.codecs import OneBit, UInt8MinMax
from commlib.errors import ConfigError
from commlib.kernels import reference_ops
from commlib.kernels.reference import BLOCK_CODECS, Stream
from commlib.optim import FrozenVarianceAdam
from tests.multi.common import (
    SMALL_BUCKET_MB,
    Mlp,
    assert_replicas_identical,
    assert_same_trace,
    data,
    mlp_loss,
    raises_on_every_rank,
    seeded,
    sgd,
    snapshot,
    train,
    wrap,
)
from tests.multi.equations import against_equations, classes_of
from tests.multi.pool import on_ranks
from tests.multi.relaxation_references import (
    BalancedReference,
    ByName,
    PowerSGDReference,
    QuantizedReference,
    SparseReference,
    Uniforms,
    flat_gradients,
    majority,
)
from tests.thin import fast

EVERYTHING = CompressionPolicy()
GRADIENT_ALGORITHMS = ["bytegrad", "qsgd", "ef_quantized", "signsgd", "topk", "randomk", "dgc", "ok_topk", "powersgd"]
BALANCED = {"exchange": "balanced"}
STEPS = 50


def gradients_of_all_ranks(model: nn.Module, step: int) -> list[ByName]:
    found = []
    for rank in range(dist.get_world_size()):
        bare = snapshot(model, Mlp)
        bare(data(step, 5, 8, rank=rank)).square().mean().backward()
        found.append(flat_gradients(bare))
    return found


def on_rank_0(compute: Callable[[], ByName]) -> ByName:
    """Return on all ranks what rank 0 computes: the references are slow, and the same everywhere."""
    found = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    assert found[0] is not None
    return found[0]


def check(
    algorithm: Algorithm,
    reference: Any,
    *,
    bucket_cap_mb: float | None,
    steps: int = STEPS,
    tolerance: float = 0.0,
    make_optimizer: Any = sgd,
    prepare: Any = None,
    workers_of: Any = list,
) -> Any:
    """Train, and compare every gradient of every step with the reference: equal bits, or relative to the largest.

    `workers_of` maps the gradients of all ranks to those of the reference's ranks.
    """
    stays_local = dist.get_world_size() == 1 and algorithm.channel.idle_alone
    model = wrap(seeded(Mlp), algorithm=algorithm, bucket_cap_mb=bucket_cap_mb)
    optimizer = make_optimizer(model)
    scales: dict[str, float] = {}
    for step in range(steps):
        by_rank = workers_of(gradients_of_all_ranks(model, step))
        optimizer.zero_grad()
        loss = mlp_loss(model, step)  # a plan changes at the start of a forward
        if prepare is not None and not stays_local:
            prepare(model, reference)
        loss.backward()
        buckets = [bucket.parameters for bucket in commlib.stats(model).buckets]
        expected = by_rank[0] if stays_local else on_rank_0(partial(reference.step, step, by_rank, buckets))
        for name, gradient in flat_gradients(model).items():
            difference = f"step {step}: {name} differs by {np.abs(gradient - expected[name]).max()}"
            if tolerance:
                # Errors of earlier, larger gradients are still fed back: the largest so far is the measure.
                scales[name] = max(scales.get(name, 0.0), *(np.abs(own[name]).max() for own in by_rank))
                assert np.abs(gradient - expected[name]).max() <= tolerance * scales[name], difference
            else:
                assert np.array_equal(gradient.view(np.uint32), expected[name].view(np.uint32)), difference
        optimizer.step()
    assert_replicas_identical(model)
    return model


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def numels() -> dict[str, int]:
    return {name: p.numel() for name, p in Mlp().named_parameters()}


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "bytegrad": (lambda: ByteGrad(), {"codec": "int8"}),
    "bytegrad with feedback": (lambda: ByteGrad(feedback=True), {"codec": "int8", "feedback": True}),
    "bytegrad, min-max": (lambda: ByteGrad(codec=UInt8MinMax()), {"codec": "uint8_minmax"}),
    "bytegrad, sum": (lambda: ByteGrad(op="sum"), {"codec": "int8", "divisor": 1.0}),
    "qsgd of 8 bits": (lambda: QSGD(8, seed=5), {"codec": "int8", "seed": 5}),
    "qsgd of 4 bits": (lambda: QSGD(4, seed=1 << 40), {"codec": "int4", "seed": 1 << 40}),
    "qsgd of 2 bits": (lambda: QSGD(2), {"codec": "int2", "seed": 0}),
    "ef_quantized": (lambda: EFQuantized(compress=EVERYTHING), {"codec": "int4", "feedback": True}),
    "ef_quantized, averaged": (
        lambda: EFQuantized(compress=EVERYTHING, averaging=0.75),
        {"codec": "int4", "feedback": True, "averaging": 0.75},
    ),
    "signsgd": (lambda: SignSGD(compress=EVERYTHING), {"codec": "onebit", "feedback": True}),
    "1 bit with feedback": (
        lambda: EFQuantized(codec=OneBit(), compress=EVERYTHING),
        {"codec": "onebit", "feedback": True},
    ),
}


@pytest.mark.thin
@against_equations(*classes_of(make for make, _ in CASES.values()))
@on_ranks(1, 3, slow=(2, 4))
@pytest.mark.parametrize("case", CASES)
def test_quantized_averaging_follows_its_equations(case: str) -> None:
    make, options = CASES[case]
    options = dict(options)
    reference = QuantizedReference(BLOCK_CODECS[options.pop("codec")], dist.get_world_size(), numels(), **options)
    check(make(), reference, bucket_cap_mb=SMALL_BUCKET_MB)


@against_equations(TopK)
@on_ranks(1, 3, slow=(2, 4))
def test_topk_follows_its_equations() -> None:
    reference = SparseReference(
        lambda v, step, bucket: reference_ops.top_k(v, max(1, round(0.1 * len(v)))), dist.get_world_size(), numels()
    )
    check(TopK(0.1, compress=EVERYTHING), reference, bucket_cap_mb=1.0)


@against_equations(RandomK)
@on_ranks(1, 3, slow=(2, 4))
def test_randomk_follows_its_equations() -> None:
    def choose(v: np.ndarray, step: int, bucket: int) -> np.ndarray:
        return reference_ops.random_k(len(v), max(1, round(0.1 * len(v))), Stream(11, step, 0, bucket))

    reference = SparseReference(choose, dist.get_world_size(), numels())
    check(RandomK(0.1, seed=11, compress=EVERYTHING), reference, bucket_cap_mb=SMALL_BUCKET_MB, tolerance=1e-5)


@pytest.mark.thin
@against_equations(DGC)
@on_ranks(1, 3, slow=(2, 4))
@pytest.mark.parametrize("clip", [None, 0.5])
def test_dgc_follows_its_equations(clip: float | None) -> None:
    algorithm = DGC(0.05, momentum=0.9, clip=clip, ratio_warmup_steps=20, compress=EVERYTHING)

    def choose(v: np.ndarray, step: int, bucket: int) -> np.ndarray:
        return reference_ops.top_k(v, max(1, round(algorithm.ratio_at(step) * len(v))))

    assert algorithm.ratio_at(0) == 0.25 > algorithm.ratio_at(10) > algorithm.ratio_at(19) > algorithm.ratio_at(20)
    reference = SparseReference(choose, dist.get_world_size(), numels(), momentum=0.9, clip=clip)
    check(algorithm, reference, bucket_cap_mb=1.0, tolerance=1e-5, make_optimizer=plain_sgd)


@pytest.mark.thin
@against_equations(OkTopK)
@on_ranks(1, 3, slow=(2, 4))
@pytest.mark.parametrize("cap", [SMALL_BUCKET_MB, 1.0])
def test_ok_topk_follows_its_equations(cap: float) -> None:
    reference = BalancedReference(
        lambda v, step, bucket: reference_ops.top_k(v, max(1, round(0.1 * len(v)))), dist.get_world_size(), numels()
    )
    check(OkTopK(0.1, compress=EVERYTHING), reference, bucket_cap_mb=cap)


@on_ranks(3, slow=(2, 4))
def test_dgc_keeps_residual_and_momentum_of_what_is_not_in_a_balanced_sum() -> None:
    algorithm = DGC(0.05, momentum=0.9, ratio_warmup_steps=20, compress=EVERYTHING, exchange="balanced")

    def choose(v: np.ndarray, step: int, bucket: int) -> np.ndarray:
        return reference_ops.top_k(v, max(1, round(algorithm.ratio_at(step) * len(v))))

    reference = BalancedReference(choose, dist.get_world_size(), numels(), momentum=0.9)
    check(algorithm, reference, bucket_cap_mb=1.0, tolerance=1e-5, make_optimizer=plain_sgd)


@on_ranks(3)
def test_topk_with_a_balanced_exchange_is_ok_topk() -> None:
    found = []
    for algorithm in (OkTopK(0.1), TopK(0.1, exchange="balanced")):
        model = wrap(seeded(Mlp), algorithm=algorithm, bucket_cap_mb=SMALL_BUCKET_MB)
        found.append(train(model, mlp_loss, 5, sgd(model)))
    assert_same_trace(*found, exact=True)


@on_ranks(1, 2, 3)
def test_dgc_gives_dense_parameters_their_momentum_too() -> None:
    """With nothing made sparse it is SGD with momentum."""
    dense, model = wrap(seeded(Mlp)), wrap(seeded(Mlp), algorithm=DGC(compress=CompressionPolicy(skip=("*",))))
    train(dense, mlp_loss, 20, torch.optim.SGD(dense.parameters(), lr=0.05, momentum=0.9))
    train(model, mlp_loss, 20, plain_sgd(model))
    for p, q in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert_replicas_identical(model)


@pytest.mark.thin
@against_equations(PowerSGD)
@on_ranks(1, 3, slow=(2, 4))
@pytest.mark.parametrize("cap", [SMALL_BUCKET_MB, 1.0])
def test_powersgd_follows_its_equations(cap: float) -> None:
    check_powersgd(cap, num_workers=dist.get_world_size())


@on_ranks(4)
@pytest.mark.parametrize("cap", fast([SMALL_BUCKET_MB, 1.0], SMALL_BUCKET_MB))
def test_powersgd_by_nodes_follows_its_equations(cap: float) -> None:
    """A node is a worker, and its two ranks share out the matrices."""
    with two_nodes():
        check_powersgd(cap, num_workers=2, hierarchical=True, workers_of=node_means)


def check_powersgd(cap: float, num_workers: int, hierarchical: bool = False, workers_of: Any = list) -> None:
    algorithm = PowerSGD(rank=2, min_compression=1.5, seed=4, hierarchical=hierarchical)
    shapes = {name: (p.shape[0], p.numel() // p.shape[0]) for name, p in Mlp().named_parameters()}
    offsets = dict(zip(numels(), np.cumsum([0, *numels().values()])[:-1].tolist(), strict=True))
    matrices = [name for name, p in Mlp().named_parameters() if algorithm.group(name, p) == "compressed"]
    assert matrices == ["first.weight", "second.weight", "third.weight"][: len(matrices)]
    first_q = {name: powersgd_first_q(shapes[name], offsets[name], rank=2, seed=4) for name in matrices}
    reference = PowerSGDReference(num_workers, shapes, first_q)
    options: dict[str, Any] = {"tolerance": 1e-5, "prepare": follow_state, "workers_of": workers_of}
    check(algorithm, reference, bucket_cap_mb=cap, **options)


def node_means(by_rank: list[ByName]) -> list[ByName]:
    nodes = (by_rank[:2], by_rank[2:])
    return [{name: (one[name] + other[name]) / 2 for name in one} for one, other in nodes]


def follow_state(model: nn.Module, reference: PowerSGDReference) -> None:
    """Give the reference the model's factors and errors (of sums over a node's ranks) once there are any.

    The weaker direction of an almost singular matrix turns with the last bits of fp32, so that two runs part; each step
    still follows from the state before it.
    """
    state = commlib.state_dict(model)["state"]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, state)
    if dist.get_rank() > 0:  # only the reference of rank 0 takes steps
        return
    num = dist.get_world_size() // reference.world_size
    for name in reference.q if commlib.stats(model).rounds else ():
        for worker in range(reference.world_size):
            ranks = everyone[num * worker : num * (worker + 1)]
            (owner,) = [own for own in ranks if name in own["errors"]]
            reference.q[name] = owner["factors"][name][1].numpy().astype(np.float64)
            error = owner["errors"][name][1].numpy().astype(np.float64)
            for own in ranks:
                if name in own["owed"]:  # the error that the last plan's owner has
                    error += own["owed"][name][1].numpy().reshape(error.shape)
            assert np.allclose(error / num, reference.errors[worker][name], rtol=0, atol=1e-5 * np.abs(error).max())
            reference.errors[worker][name] = error / num


def powersgd_first_q(shape: tuple[int, int], offset: int, rank: int, seed: int) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed * 0x9E3779B1 + offset)
    return torch.randn(shape[1], min(rank, *shape), generator=generator).numpy()


@on_ranks(3, slow=(2, 4))
def test_signsgd_is_the_majority() -> None:
    model = wrap(seeded(Mlp), algorithm=SignSGD(feedback=False, compress=EVERYTHING), bucket_cap_mb=SMALL_BUCKET_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        expected = majority(gradients_of_all_ranks(model, step))
        optimizer.zero_grad()
        mlp_loss(model, step).backward()
        for name, gradient in flat_gradients(model).items():
            assert np.array_equal(gradient, expected[name]), (step, name)
        optimizer.step()
    assert_replicas_identical(model)


@on_ranks(3, slow=(2,))
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in GRADIENT_ALGORITHMS),
        ("dgc", {"clip": 0.5}),
        ("dgc", BALANCED),
        ("demo", {}),
        ("demo", {"sign": True}),
    ],
)
def test_overflow_reaches_all_ranks_and_spoils_nothing(name: str, options: dict[str, Any]) -> None:
    """A gradient that is not finite on one rank shows on all of them; the next rounds are finite again."""
    algorithm = commlib.algorithms.get(name)(compress=EVERYTHING, **options)
    model = wrap(seeded(Mlp), algorithm=algorithm, bucket_cap_mb=1.0)
    for step in range(6):
        model.zero_grad()
        loss = mlp_loss(model, step)
        (loss * float("inf") if step == 2 and dist.get_rank() == 1 else loss).backward()
        finite = [bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, all(finite))
        assert everyone == [step != 2] * dist.get_world_size(), (step, everyone)
    for tensor in tensors_in(commlib.state_dict(model)["state"]):
        assert torch.isfinite(tensor).all()


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in inner for tensor in tensors_in(item)]


@pytest.mark.slow  # the contracts of plans hold the same with plans that are given
@on_ranks(3)
def test_residuals_go_with_their_parameters_when_the_plan_changes() -> None:
    """Planning tries several plans: the former owner of a chunk then adds its errors as a worker."""
    reference = QuantizedReference(BLOCK_CODECS["int4"], dist.get_world_size(), numels(), feedback=True)
    model = check(EFQuantized(compress=EVERYTHING), reference, bucket_cap_mb=None, steps=700)
    assert commlib.stats(model).plan == "planned"


@on_ranks(2, 3)
def test_only_what_the_policy_names_is_compressed() -> None:
    policy = CompressionPolicy(min_dims=2, skip=("third.*",))
    exact = wrap(seeded(Mlp))
    model = wrap(seeded(Mlp), algorithm=ByteGrad(compress=policy), bucket_cap_mb=SMALL_BUCKET_MB)
    for step in range(3):
        for other in (exact, model):
            other.zero_grad()
            mlp_loss(other, step).backward()
        for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            is_compressed = policy(name, p)
            assert is_compressed == (name in ("first.weight", "second.weight"))
            assert torch.allclose(p.grad, q.grad, rtol=1e-6, atol=1e-9) != is_compressed, name
    assert_replicas_identical(model)


@on_ranks(3, slow=(2,))
@pytest.mark.parametrize(
    "name", ["bytegrad", "qsgd", "ef_quantized", "topk", "randomk", "dgc", "demo", "ok_topk", "powersgd"]
)
def test_a_resumed_run_is_bit_identical(name: str) -> None:
    options = {
        "bytegrad": {"feedback": True},
        "dgc": {"ratio": 0.1, "ratio_warmup_steps": 10, "compress": CompressionPolicy(min_dims=2)},
        "ok_topk": {"ratio": 0.1},
    }.get(name, {})

    def make() -> Algorithm:
        return commlib.algorithms.get(name)(**{"compress": EVERYTHING, **options})

    whole = seeded(Mlp)
    optimizer = sgd(whole)
    wrap(whole, algorithm=make(), bucket_cap_mb=SMALL_BUCKET_MB)
    train(whole, mlp_loss, 7, optimizer)
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict(), commlib.state_dict(whole)))
    rest = train(whole, lambda m, s: mlp_loss(m, s + 7), 5, optimizer)

    resumed = seeded(Mlp, seed=99)
    own = sgd(resumed)
    resumed.load_state_dict(saved[0])
    own.load_state_dict(saved[1])
    wrap(resumed, algorithm=make(), bucket_cap_mb=SMALL_BUCKET_MB)
    commlib.load_state_dict(resumed, saved[2])
    got = train(resumed, lambda m, s: mlp_loss(m, s + 7), 5, own)
    assert_same_trace(got, rest, exact=True)


@on_ranks(2)
def test_qsgd_is_unbiased() -> None:
    """The mean over many rounds of one gradient is within five standard errors of the true mean, element by element."""
    rounds = 700
    model = wrap(seeded(Mlp), algorithm=QSGD(2, seed=3), bucket_cap_mb=SMALL_BUCKET_MB)
    true = {}
    for name in numels():
        true[name] = np.mean([own[name] for own in gradients_of_all_ranks(model, 0)], axis=0, dtype=np.float64)
    total = {name: np.zeros(n) for name, n in numels().items()}
    squares = {name: np.zeros(n) for name, n in numels().items()}
    for _ in range(rounds):
        model.zero_grad()
        mlp_loss(model, 0).backward()
        for name, gradient in flat_gradients(model).items():
            total[name] += gradient
            squares[name] += gradient.astype(np.float64) ** 2
    deviations = []
    for name in numels():
        mean = total[name] / rounds
        error = np.sqrt(np.maximum(squares[name] / rounds - mean**2, 0) / rounds)
        deviations.append((mean - true[name])[error > 0] / error[error > 0])
    z = np.concatenate(deviations)
    assert len(z) > 400, "stochastic rounding rounded hardly anything"
    assert np.abs(z).max() < 5
    assert abs(z.mean()) < 5 / np.sqrt(len(z))


@contextlib.contextmanager
def two_nodes() -> Iterator[None]:
    """Make the ranks believe that the first half of them is on one machine and the second on another."""
    os.environ["COMMLIB_NODE"] = str(2 * dist.get_rank() // dist.get_world_size())
    try:
        yield
    finally:
        del os.environ["COMMLIB_NODE"]


@pytest.mark.thin
@on_ranks(4)
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("bucket_cap_mb", [SMALL_BUCKET_MB, 1.0])
def test_nodes_are_summed_first_and_stretches_cross(stochastic: bool, bucket_cap_mb: float) -> None:
    """Each local rank carries half of a bucket, of the sums of two nodes; the reference sees one bucket per stretch."""
    algorithm = QSGD(8, seed=9, hierarchical=True) if stochastic else ByteGrad(hierarchical=True)
    codec, offsets = BLOCK_CODECS["int8"], dict(zip(numels(), np.cumsum([0, *numels().values()])[:-1], strict=True))
    with two_nodes():
        model = wrap(seeded(Mlp), algorithm=algorithm, bucket_cap_mb=bucket_cap_mb)
    optimizer = sgd(model)
    for step in range(20):
        by_rank = gradients_of_all_ranks(model, step)
        optimizer.zero_grad()
        mlp_loss(model, step).backward()
        got = flat_gradients(model)
        for names in [bucket.parameters for bucket in commlib.stats(model).buckets]:
            joined = [np.concatenate([own[name] for name in names]) for own in by_rank]
            places = np.concatenate([offsets[name] + np.arange(numels()[name]) for name in names])
            nodes = [joined[0] + joined[1], joined[2] + joined[3]]
            numel = len(joined[0])
            stretch = -(-numel // 32) * 16
            for local in range(2):
                piece = slice(local * stretch, min((local + 1) * stretch, numel))
                count = max(0, piece.stop - piece.start)
                expected = two_stages(codec, [n[piece] for n in nodes], places[piece], step, local, stochastic)
                result = np.concatenate([got[name] for name in names])[piece]
                assert len(result) == count
                assert np.array_equal(result.view(np.uint32), expected.view(np.uint32)), (step, names, local)
        optimizer.step()
    assert_replicas_identical(model)


def two_stages(codec: Any, values: list[Any], places: Any, step: int, local: int, stochastic: bool) -> Any:
    """Average two nodes' stretches of four ranks' sums, by chunks."""
    numel = len(values[0])
    chunk = -(-numel // 32) * 16

    def stream(node: int, stage: int, part: slice) -> Any:
        if not stochastic:
            return None
        uniforms = Stream(9, step, 2 * node + local, stage).uniforms(0, sum(numels().values()))
        return Uniforms(uniforms[places[part]])

    result = np.zeros(numel, np.float32)
    for owner in range(2):
        part = slice(min(owner * chunk, numel), min((owner + 1) * chunk, numel))
        count = part.stop - part.start
        sent = [codec.decode(codec.encode(v[part], stream(n, 0, part)), count) for n, v in enumerate(values)]
        mean = reference_ops.decode_sum(sent, 4.0)
        result[part] = codec.decode(codec.encode(mean, stream(owner, 1, part)), count)
    return result


class NodeSums:
    """The mean over four ranks, each divided first; two nodes' sums, added on the wire."""

    def __init__(self, wire: torch.dtype) -> None:
        self.wire = wire

    def step(self, step: int, by_rank: list[ByName], buckets: Any) -> ByName:
        result = {}
        for name in by_rank[0]:
            own = [torch.from_numpy(rank[name]) / 4 for rank in by_rank]
            total = (own[0] + own[1]).to(self.wire) + (own[2] + own[3]).to(self.wire)
            result[name] = total.float().numpy()
        return result


@pytest.mark.thin
@on_ranks(4)
@pytest.mark.parametrize("wire_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("bucket_cap_mb", [SMALL_BUCKET_MB, 1.0])
def test_full_precision_is_summed_by_node_first(wire_dtype: str, bucket_cap_mb: float) -> None:
    reference = NodeSums({"fp32": torch.float32, "bf16": torch.bfloat16}[wire_dtype])
    with two_nodes():
        check(AllReduce(wire_dtype=wire_dtype, hierarchical=True), reference, bucket_cap_mb=bucket_cap_mb, steps=10)


@on_ranks(4)
@pytest.mark.parametrize(
    "name",
    [
        "topk",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("ok_topk", "ef_quantized", "signsgd", "randomk", "dgc", "powersgd")
        ),
    ],
)
def test_across_nodes_nothing_is_lost_in_the_long_run(name: str) -> None:
    """The mean of many rounds of one gradient comes to the true mean, through several changes of the plan too."""
    options = {
        "topk": {"ratio": 0.2},
        "ok_topk": {"ratio": 0.2},
        "randomk": {"ratio": 0.5},
        "dgc": {"ratio": 0.2, "momentum": 0.0},
        "powersgd": {"min_compression": 1.0},
    }.get(name, {})
    algorithm = commlib.algorithms.get(name)(hierarchical=True, compress=EVERYTHING, **options)
    with two_nodes():
        model = wrap(seeded(Mlp), algorithm=algorithm)
    true = {}
    for parameter in numels():
        true[parameter] = np.mean([own[parameter] for own in gradients_of_all_ranks(model, 0)], axis=0)
    total = {parameter: np.zeros(n) for parameter, n in numels().items()}
    rounds = 700
    for _ in range(rounds):
        model.zero_grad()
        mlp_loss(model, 0).backward()
        for parameter, gradient in flat_gradients(model).items():
            total[parameter] += gradient
    assert commlib.stats(model).plan == "planned"
    scale = max(np.abs(value).max() for value in true.values())
    for parameter, value in true.items():
        # The error is that of a few rounds: the longest wait until an element is sent. One bit sends a large element as
        # the mean magnitude of its neighbours, so its error is larger.
        owed_rounds = np.abs(total[parameter] - rounds * value).max() / scale
        assert owed_rounds < (60 if name == "signsgd" else 12), (parameter, owed_rounds)
    assert_replicas_identical(model)


@on_ranks(4)
def test_nodes_of_different_sizes_are_refused() -> None:
    os.environ["COMMLIB_NODE"] = "a" if dist.get_rank() < 3 else "b"
    try:
        with raises_on_every_rank(ConfigError, "as many ranks on every node", "[1, 3]"):
            wrap(seeded(Mlp), algorithm=ByteGrad(hierarchical=True))
    finally:
        del os.environ["COMMLIB_NODE"]


@on_ranks(3, slow=(2,))
@pytest.mark.parametrize("name", ["ef_quantized", "topk", "dgc", "demo", "ok_topk", "powersgd"])
def test_residuals_are_kept_without_the_loss_scale(name: str) -> None:
    """With a scale that changes under way the unscaled gradients are those of a run without one."""
    options = {"powersgd": {"min_compression": 1.0}}.get(name, {})

    def run(scaler: Any) -> list[ByName]:
        model = seeded(Mlp)
        algorithm = commlib.algorithms.get(name)(compress=EVERYTHING, **options)
        wrap(model, algorithm=algorithm, bucket_cap_mb=1.0, scaler=scaler)
        optimizer, found = plain_sgd(model), []
        for step in range(8):
            optimizer.zero_grad()
            loss = mlp_loss(model, step)
            if scaler is None:
                loss.backward()
            else:
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
            found.append(flat_gradients(model))
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update(2.0 ** (8 + step))
        return found

    plain, scaled = run(None), run(torch.amp.GradScaler("cpu", init_scale=2.0**7))
    for step, (one, other) in enumerate(zip(plain, scaled, strict=True)):
        for parameter, gradient in one.items():
            scale = np.abs(gradient).max()
            assert np.abs(other[parameter] - gradient).max() <= 1e-5 * scale, (step, parameter)


@on_ranks(2, slow=(3,))
@pytest.mark.parametrize("rescale", [False, True])
def test_residuals_follow_the_learning_rate_where_it_is_asked_for(rescale: bool) -> None:
    reference = QuantizedReference(BLOCK_CODECS["int4"], dist.get_world_size(), numels(), feedback=True)
    model = seeded(Mlp)
    optimizer = plain_sgd(model)
    algorithm = EFQuantized(compress=EVERYTHING, rescale_residuals=rescale)
    wrap(model, algorithm=algorithm, optimizer=optimizer, bucket_cap_mb=SMALL_BUCKET_MB)
    rates = [0.08, 0.08, 0.04, 0.0, 0.01, 0.16]
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        by_rank = gradients_of_all_ranks(model, step)
        optimizer.zero_grad()
        mlp_loss(model, step).backward()
        beta = rates[step - 1] / rate if rescale and step and rate and rates[step - 1] else 1.0
        expected = reference.step(step, by_rank, [b.parameters for b in commlib.stats(model).buckets], beta)
        for name, gradient in flat_gradients(model).items():
            assert np.array_equal(gradient.view(np.uint32), expected[name].view(np.uint32)), (step, name)
        optimizer.step()


@on_ranks(1)
def test_rescaled_residuals_are_for_sgd() -> None:
    registered = [commlib.algorithms.get(name) for name in commlib.algorithms.list()]
    with_option = [cls for cls in registered if "rescale_residuals" in inspect.signature(cls).parameters]
    assert len(with_option) >= 8
    for cls in with_option:
        make = partial(cls, feedback=True) if cls is ByteGrad else cls
        model = nn.Linear(64, 64)
        for optimizer, got in ((None, "none"), (torch.optim.AdamW(model.parameters()), "AdamW")):
            words = rf"rescale_residuals: expected optimizer=torch.optim.SGD.*, got {got}"
            with pytest.raises(ConfigError, match=words):
                commlib.wrap(model, algorithm=make(rescale_residuals=True), optimizer=optimizer)
        sgd_of_two = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
        commlib.wrap(model, algorithm=make(rescale_residuals=True), optimizer=sgd_of_two)
        with pytest.raises(ConfigError, match="got AdamW"):
            commlib.set_optimizer(model, torch.optim.AdamW(model.parameters()))


def test_residuals_are_rescaled_with_feedback_only() -> None:
    for make in (ByteGrad, partial(SignSGD, feedback=False)):
        with pytest.raises(ConfigError, match="rescale_residuals: expected error feedback with it"):
            make(rescale_residuals=True)


@on_ranks(2)
def test_one_instance_configures_several_models() -> None:
    """The state of one model does not affect the other."""
    algorithm = EFQuantized(compress=EVERYTHING)
    alone = train(wrap(seeded(Mlp), algorithm=EFQuantized(compress=EVERYTHING)), mlp_loss, 6)
    first = wrap(seeded(Mlp), algorithm=algorithm)
    train(first, mlp_loss, 3)
    assert_same_trace(train(wrap(seeded(Mlp), algorithm=algorithm), mlp_loss, 6), alone, exact=True)


@on_ranks(4, timeout=300)
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("across_nodes", [False, True])
def test_replicas_are_identical_after_500_steps(across_nodes: bool) -> None:
    for name in (*GRADIENT_ALGORITHMS, "onebit_adam", "qadam"):
        options: dict[str, Any] = {} if name in GRADIENT_ALGORITHMS else {"warmup_steps": 20}
        algorithm = commlib.algorithms.get(name)(compress=EVERYTHING, hierarchical=across_nodes, **options)
        model = seeded(Mlp)
        optimizer = plain_sgd(model) if name in GRADIENT_ALGORITHMS else FrozenVarianceAdam(model.parameters())
        with two_nodes():
            wrap(model, algorithm=algorithm, optimizer=optimizer)
        train(model, mlp_loss, 500, optimizer)
        assert_replicas_identical(model)
        commlib.unwrap(model)
