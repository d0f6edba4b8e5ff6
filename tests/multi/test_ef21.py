"""EF21-SGDM in place of error feedback, against a NumPy reference with the state of the paper."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import commlib
from commlib.algorithms import Algorithm, CompressionPolicy, EFQuantized, RandomK, SignSGD, TopK
from commlib.engine.planning import plan as plans
from commlib.errors import ConfigError
from commlib.kernels import reference_ops
from commlib.kernels.reference import BLOCK_CODECS, Stream
from commlib.replica import replica_of
from tests.multi.common import (
    SMALL_BUCKET_MB,
    Mlp,
    assert_replicas_identical,
    assert_same_trace,
    mlp_loss,
    seeded,
    sgd,
    train,
    wrap,
)
from tests.multi.pool import on_ranks
from tests.multi.relaxation_references import (
    EF21Reference,
    Floats,
    QuantizedEF21Reference,
    QuantizedReference,
    flat_gradients,
)
from tests.multi.test_relaxations import EVERYTHING, check, gradients_of_all_ranks, numels, plain_sgd, tensors_in

MATRICES = CompressionPolicy(min_dims=2)


def sending(choose: Callable[[Floats, int, int], Any]) -> Callable[[Floats, int, int], Floats]:
    """Return what arrives where the elements that `choose` returns are sent."""

    def compress(v: Floats, step: int, bucket: int) -> Floats:
        sent = np.zeros_like(v)
        indices = choose(v, step, bucket)
        sent[indices] = v[indices]
        return sent

    return compress


def top_k(v: Floats, step: int, bucket: int) -> Any:
    return reference_ops.top_k(v, max(1, round(0.1 * len(v))))


def random_k(v: Floats, step: int, bucket: int) -> Any:
    return reference_ops.random_k(len(v), max(1, round(0.1 * len(v))), Stream(11, step, 0, bucket))


def are_matrices(names: Sequence[str]) -> bool:
    return all(name.endswith("weight") for name in names)


# The algorithm, which elements are sent, and the reference's options.
SPARSE: dict[str, tuple[Callable[[], Algorithm], Callable[[Floats, int, int], Any], dict[str, Any]]] = {
    "topk": (lambda: TopK(0.1, compress=EVERYTHING, ef21=0.2), top_k, {"weight": 0.2}),
    "topk without momentum": (lambda: TopK(0.1, compress=EVERYTHING, ef21=1.0), top_k, {"weight": 1.0}),
    "topk of matrices": (
        lambda: TopK(0.1, compress=MATRICES, ef21=0.2),
        top_k,
        {"weight": 0.2, "is_sent": are_matrices},
    ),
    "randomk": (lambda: RandomK(0.1, seed=11, compress=EVERYTHING, ef21=0.2), random_k, {"weight": 0.2}),
}

# The algorithm, its codec, and the weight.
QUANTIZED: dict[str, tuple[Callable[[], Algorithm], str, float]] = {
    "ef_quantized": (lambda: EFQuantized(compress=EVERYTHING, ef21=0.2), "int4", 0.2),
    "8 bits without momentum": (lambda: EFQuantized("int8", compress=EVERYTHING, ef21=1.0), "int8", 1.0),
    "signsgd": (lambda: SignSGD(compress=EVERYTHING, ef21=0.3), "onebit", 0.3),
}


@pytest.mark.thin
@on_ranks(1, 3, slow=(2, 4))
@pytest.mark.parametrize("case", SPARSE)
def test_sparse_gradients_follow_the_equations(case: str) -> None:
    make, choose, options = SPARSE[case]
    reference = EF21Reference(sending(choose), dist.get_world_size(), numels(), **options)
    check(make(), reference, bucket_cap_mb=1.0, tolerance=1e-5)


@pytest.mark.thin
@on_ranks(1, 3, slow=(2, 4))
@pytest.mark.parametrize("case", QUANTIZED)
def test_quantized_gradients_follow_the_equations(case: str) -> None:
    """Bit for bit, also when the plan changes: the former owner of a chunk then adds its errors as a worker."""
    make, codec, weight = QUANTIZED[case]
    average = QuantizedReference(BLOCK_CODECS[codec], dist.get_world_size(), numels(), feedback=True)
    check(make(), QuantizedEF21Reference(average, weight), bucket_cap_mb=SMALL_BUCKET_MB)


MAKE: dict[str, Callable[[], Algorithm]] = {
    "topk": lambda: TopK(0.25, compress=MATRICES, ef21=0.5),
    "randomk": lambda: RandomK(0.25, compress=EVERYTHING, ef21=0.5),
    "ef_quantized": lambda: EFQuantized(compress=EVERYTHING, ef21=0.5),
    "signsgd": lambda: SignSGD(compress=EVERYTHING, ef21=0.5),
}
#: Those whose estimate of a constant gradient is correct after a few dozen rounds.
FAST = ["topk", "randomk", "ef_quantized"]


@on_ranks(3, slow=(2,))
@pytest.mark.parametrize("name", MAKE)
def test_a_resumed_run_is_bit_identical(name: str) -> None:
    whole = seeded(Mlp)
    optimizer = sgd(whole)
    wrap(whole, algorithm=MAKE[name](), bucket_cap_mb=SMALL_BUCKET_MB)
    train(whole, mlp_loss, 7, optimizer)
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict(), commlib.state_dict(whole)))
    rest = train(whole, lambda m, s: mlp_loss(m, s + 7), 5, optimizer)

    resumed = seeded(Mlp, seed=99)
    own = sgd(resumed)
    resumed.load_state_dict(saved[0])
    own.load_state_dict(saved[1])
    wrap(resumed, algorithm=MAKE[name](), bucket_cap_mb=SMALL_BUCKET_MB)
    commlib.load_state_dict(resumed, saved[2])
    got = train(resumed, lambda m, s: mlp_loss(m, s + 7), 5, own)
    assert_same_trace(got, rest, exact=True)


def one_round(model: Any, factor: float = 1.0) -> dict[str, Floats]:
    """Communicate the gradients of step 0, times a factor on this rank."""
    model.zero_grad()
    (mlp_loss(model, 0) * factor).backward()
    return flat_gradients(model)


def assert_comes_to_the_mean(model: Any) -> None:
    true = gradients_of_all_ranks(model, 0)
    got = [one_round(model) for _ in range(60)][-1]
    for name, gradient in got.items():
        mean = np.mean([own[name] for own in true], axis=0, dtype=np.float64)
        assert np.abs(gradient - mean).max() <= 1e-5 * max(np.abs(own[name]).max() for own in true), name


@on_ranks(3, slow=(2,))
@pytest.mark.parametrize("name", FAST)
def test_an_overflow_reaches_all_ranks_and_leaves_no_trace(name: str) -> None:
    """Estimates and what ranks have sent of them agree again, so that they still come to the mean."""
    model = wrap(seeded(Mlp), algorithm=MAKE[name](), bucket_cap_mb=1.0)
    for step in range(4):
        factor = float("inf") if step == 2 and dist.get_rank() == 1 else 1.0
        finite = [bool(np.isfinite(gradient).all()) for gradient in one_round(model, factor).values()]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, all(finite))
        assert everyone == [step != 2] * dist.get_world_size(), (step, everyone)
        assert all(torch.isfinite(tensor).all() for tensor in tensors_in(commlib.state_dict(model)["state"]))
    assert_comes_to_the_mean(model)


@on_ranks(3, slow=(2,))
@pytest.mark.parametrize("name", FAST)
def test_state_goes_with_its_parameters_to_another_plan(name: str) -> None:
    model = wrap(seeded(Mlp), algorithm=MAKE[name](), bucket_cap_mb=SMALL_BUCKET_MB)
    for _ in range(3):
        one_round(model)
    before, gradients = commlib.state_dict(model)["state"], replica_of(model).engine.gradients
    num_buckets = len(commlib.stats(model).buckets)
    gradients.restore(plans.by_sizes(replica_of(model).engine.parameters, 1 << 30), gradients.backward.hook_counts())
    assert len(commlib.stats(model).buckets) < num_buckets
    after = commlib.state_dict(model)["state"]
    assert any(values.any() for _, values in before["estimate"].values())
    for kind in ("momentum", "estimate"):
        for parameter, (_, values) in before[kind].items():
            assert torch.equal(after[kind][parameter][1], values), (kind, parameter)
    assert_comes_to_the_mean(model)


@on_ranks(3, slow=(2,))
@pytest.mark.parametrize("name", MAKE)
def test_state_is_kept_without_loss_scale_and_learning_rate(name: str) -> None:
    """A scale and a rate that change under way change nothing, bit for bit, as the scales are powers of two."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7)
    model, plain = seeded(Mlp), wrap(seeded(Mlp), algorithm=MAKE[name](), bucket_cap_mb=1.0)
    optimizer = plain_sgd(model)
    wrap(model, algorithm=MAKE[name](), bucket_cap_mb=1.0, optimizer=optimizer, scaler=scaler)
    for step in range(8):
        optimizer.param_groups[0]["lr"] = 2.0 ** (-100 - step)  # so that no weight moves
        optimizer.zero_grad()
        plain.zero_grad()
        mlp_loss(plain, step).backward()
        scaler.scale(mlp_loss(model, step)).backward()
        scaler.unscale_(optimizer)
        got, expected = flat_gradients(model), flat_gradients(plain)
        for parameter, gradient in expected.items():
            assert np.array_equal(got[parameter], gradient), (step, parameter)
        scaler.step(optimizer)
        scaler.update(2.0 ** (8 + step))


@on_ranks(2)
@pytest.mark.parametrize("name", MAKE)
def test_narrow_gradients_keep_a_wide_state(name: str) -> None:
    model = wrap(seeded(Mlp).bfloat16(), algorithm=MAKE[name](), bucket_cap_mb=1.0)
    optimizer = sgd(model)
    for step in range(5):
        optimizer.zero_grad()
        model(torch.ones(5, 8, dtype=torch.bfloat16) * (1 + step + dist.get_rank())).square().mean().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
        optimizer.step()
    assert_replicas_identical(model)
    state = commlib.state_dict(model)["state"]
    assert all(tensor.dtype == torch.float32 for kind in ("momentum", "estimate") for tensor in tensors_in(state[kind]))


@on_ranks(3, slow=(2,))
@pytest.mark.parametrize("name", MAKE)
def test_a_rank_that_has_joined_early_changes_nothing_of_its_own(name: str) -> None:
    model = wrap(seeded(Mlp), algorithm=MAKE[name](), bucket_cap_mb=1.0)
    optimizer, before = plain_sgd(model), {}
    with model.join():
        for step in range(2 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            mlp_loss(model, step).backward()
            optimizer.step()
        before = copy.deepcopy(commlib.state_dict(model)["state"])
    after = commlib.state_dict(model)["state"]
    for parameter, (_, error) in before["worker"].items():  # without compression the momentum is common
        assert torch.equal(after["worker"][parameter][1], error), parameter
        assert torch.equal(after["momentum"][parameter][1], before["momentum"][parameter][1]), parameter
    model.zero_grad()
    assert_replicas_identical(model)
    train(model, mlp_loss, 2, optimizer)
    assert_replicas_identical(model)


@on_ranks(2)
@pytest.mark.parametrize("name", MAKE)
def test_as_many_bytes_are_sent(name: str) -> None:
    def sent(algorithm: Algorithm) -> float:
        model = wrap(seeded(Mlp), algorithm=algorithm, bucket_cap_mb=1.0)
        train(model, mlp_loss, 2)  # in which the engine's ranks agree on more than gradients, in words of any length
        before = commlib.stats(model).wire_bytes
        train(model, mlp_loss, 3)
        return commlib.stats(model).wire_bytes - before

    plain = {
        "topk": TopK(0.25, compress=MATRICES),
        "randomk": RandomK(0.25, compress=EVERYTHING),
        "ef_quantized": EFQuantized(compress=EVERYTHING),
        "signsgd": SignSGD(compress=EVERYTHING),
    }
    assert sent(MAKE[name]()) == sent(plain[name]) > 0


@on_ranks(2)
@pytest.mark.parametrize("ef21", [None, 0.5])
def test_state_of_the_other_kind_of_feedback_is_refused(ef21: float | None) -> None:
    model = wrap(seeded(Mlp), algorithm=TopK(ef21=ef21))
    train(model, mlp_loss, 2)
    other = wrap(seeded(Mlp), algorithm=TopK(ef21=None if ef21 else 0.5))
    with pytest.raises(ConfigError, match="with EF21" if ef21 else "without EF21"):
        commlib.load_state_dict(other, commlib.state_dict(model))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TopK(ef21=0.0), ("TopK.ef21", "0.0")),
        (lambda: RandomK(ef21=1.5), ("RandomK.ef21", "1.5")),
        (lambda: TopK(ef21=0.5, hierarchical=True), ("TopK.ef21", "hierarchical=True")),
        (lambda: TopK(ef21=0.5, exchange="balanced"), ("TopK.ef21", "balanced")),
        (lambda: EFQuantized(ef21=0.5, averaging=0.8), ("EFQuantized.ef21", "averaging=0.8")),
        (lambda: EFQuantized(ef21=0.5, reset_every=100), ("EFQuantized.ef21", "reset_every=100")),
        (lambda: RandomK(ef21=0.5, rescale_residuals=True), ("RandomK.ef21", "rescale_residuals=True")),
        (lambda: SignSGD(feedback=False, ef21=0.5), ("SignSGD.ef21", "feedback=False")),
    ],
)
def test_what_does_not_go_with_it_is_refused(make: Callable[[], Algorithm], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)
