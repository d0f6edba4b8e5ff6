"""`commlib.shard`: FSDP2 with encoded weights and gradients, compared with computations without any communication."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import commlib
from commlib.algorithms import CompressionPolicy
from commlib.codecs import registry
from commlib.errors import CommlibError, ConfigError
from commlib.shard import sharded_of
from commlib.sharding.fsdp import parameter_groups
from tests.multi.common import raises_on_every_rank, seeded
from tests.multi.fault_scripts import LONG_S, TIMEOUTS_S, TRAPS, VICTIM, come_together, report_error
from tests.multi.pool import on_ranks
from tests.multi.rank_worker import default_group_from_env
from tests.multi.test_blame import check
from tests.waiting import eventually

#: Encodes every parameter of two dimensions, however small.
ALL = CompressionPolicy(min_dims=2)
CODECS = ("int8", "int4", "fp8_e4m3", "mxfp8", "bf16")
#: Rows that two, three and four ranks share unevenly.
WIDTH = 34


#: Whether FSDP2 can reduce gradients of zeros for parameters without one; since torch 2.13.
HAS_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")


def follow_unused(model: Any, follows: bool = True) -> None:
    """Let FSDP2 reduce gradients of zeros for parameters without one; skip the test if this torch cannot."""
    if not HAS_UNUSED:
        pytest.skip("needs set_reduce_scatter_unused_params (torch 2.13)")
    model.set_reduce_scatter_unused_params(follows)


class Net(nn.Module):
    """Three linear layers, two of which FSDP2 gathers on their own, and a buffer."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.second = nn.Linear(width, 33)
        self.third = nn.Linear(33, 3)
        self.register_buffer("offset", torch.full((1,), 0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(inputs))))
        return self.third(hidden) - self.offset


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss(model: Any, step: int, rank: int) -> Tensor:
    dtype = model.third.weight.dtype
    return model(batch(step, rank).to(dtype)).float().square().mean()


def fsdp(model: Any, mesh: DeviceMesh | None = None, **options: Any) -> Any:
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def sharded(weights: str = "fp32", gradients: str = "fp32", **options: Any) -> Any:
    return commlib.shard(fsdp(seeded(Net)), weights, gradients, compress=ALL, **options)


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(each.grad) for name, each in model.named_parameters() if each.grad is not None}


def shards(value: Tensor, num_ranks: int) -> list[Tensor]:
    """Return the padded rows of a parameter, as FSDP2 shards it."""
    rows = -(-value.shape[0] // num_ranks)
    padded = value.new_zeros(rows * num_ranks, *value.shape[1:])
    padded[: value.shape[0]] = value
    return list(padded.reshape(num_ranks, -1))


def through(codec: str, value: Tensor) -> Tensor:
    """Return a row as it arrives."""
    its = registry.block_codec(codec)
    payload = torch.empty(its.payload_bytes(value.numel()), dtype=torch.uint8)
    out = torch.empty_like(value)
    its.encode(value.contiguous(), payload)
    its.decode(payload, out)
    return out


def decoded(model: nn.Module, codec: str) -> nn.Module:
    """Return an unsharded copy that has the weights which all ranks decode."""
    whole = seeded(Net).to(next(model.parameters()).dtype)
    num_ranks = dist.get_world_size()
    with torch.no_grad():
        for own, other in zip(whole.parameters(), model.parameters(), strict=True):
            value = full(other.detach())
            if codec != "fp32" and own.dim() > 1:
                value = torch.cat([through(codec, row) for row in shards(value, num_ranks)])[: own.numel()]
            own.copy_(value.reshape(own.shape))
    return whole


def mean_gradients(whole: nn.Module, step: int) -> dict[str, Tensor]:
    """Return the gradients of the mean loss over the ranks' batches, computed by this process alone."""
    whole.zero_grad()
    for rank in range(dist.get_world_size()):
        (loss(whole, step, rank) / dist.get_world_size()).backward()
    return gradients(whole)


def assert_near(got: dict[str, Tensor], expected: dict[str, Tensor], relative: float, what: str) -> None:
    assert got.keys() == expected.keys(), what
    for name, value in expected.items():
        distance = float((got[name].double() - value.double()).norm() / value.double().norm())
        assert distance <= relative, f"{what}: the gradient of {name} is {distance:.2g} off"


@on_ranks(2, 3, 4)
def test_gradients_are_those_of_the_decoded_weights() -> None:
    """Before any gradient is encoded; all ranks compute with the same bits, also in the second step."""
    for codec in ("fp32", *CODECS):
        model = sharded(codec)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(2):
            optimizer.zero_grad()
            expected = mean_gradients(decoded(model, codec), step)
            loss(model, step, dist.get_rank()).backward()
            assert_near(gradients(model), expected, 1e-5, f"{codec}, step {step}")
            optimizer.step()
        weights = [full(each) for each in model.parameters()]
        commlib.unwrap(model)
        for layer in (model, model.first, model.second):
            layer.unshard()
        outputs: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(outputs, [each.detach().clone() for each in model.parameters()])
        assert all(torch.equal(a, b) for other in outputs for a, b in zip(other, weights, strict=True)), codec


@on_ranks(2, 3)
def test_all_ranks_gather_the_decoded_weights_bit_for_bit() -> None:
    for codec in ("fp32", *CODECS):
        model = sharded(codec)
        expected = list(decoded(model, codec).parameters())
        for layer in (model, model.first, model.second):
            layer.unshard()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected, strict=True)), codec
        for layer in (model, model.first, model.second):
            layer.reshard()


@on_ranks(2, 3)
def test_reduced_gradients_are_sums_of_what_the_ranks_encoded() -> None:
    """Bit for bit, with each of FSDP2's operations: the mean, the sum, and a factor before the sum."""
    num_ranks = dist.get_world_size()
    for codec in ("fp32", *CODECS):
        for operation in ("mean", "sum", "factor"):
            model = sharded(gradients=codec)
            divisor = float(num_ranks)
            if operation == "sum":
                for layer in (model, model.first, model.second):
                    layer.set_force_sum_reduction_for_comms(True)
            if operation == "factor":
                for layer in (model, model.first, model.second):
                    layer.set_gradient_divide_factor(4.0 * num_ranks)
                divisor *= 4.0
            loss(model, 0, dist.get_rank()).backward()
            own = [gradients(each) for each in _of_each_rank(seeded(Net))]
            for name, parameter in model.named_parameters():
                rows = [shards(each[name], num_ranks)[dist.get_rank()] for each in own]
                if codec != "fp32" and parameter.dim() > 1:
                    its = registry.block_codec(codec)
                    payloads = torch.empty(num_ranks, its.payload_bytes(rows[0].numel()), dtype=torch.uint8)
                    for row, payload in zip(rows, payloads, strict=True):
                        its.encode(row, payload)
                    expected = torch.empty_like(rows[0])
                    its.decode_sum(payloads, expected, divisor=divisor if operation != "sum" else 1.0)
                    expected = expected / divisor if operation == "sum" else expected
                else:
                    expected = sum(rows[1:], rows[0].clone()) / divisor
                assert parameter.grad is not None
                got = parameter.grad.to_local().reshape(-1)  # type: ignore[operator]
                assert torch.equal(got, expected[: got.numel()]), f"{codec}, {operation}, {name}"


def _of_each_rank(whole: nn.Module) -> Iterator[nn.Module]:
    """Yield copies of a model with the gradients of each rank's batch."""
    for rank in range(dist.get_world_size()):
        model = copy.deepcopy(whole)
        loss(model, 0, rank).backward()
        yield model


def _frozen(model: Any) -> Any:
    model.second.requires_grad_(False)
    return model


def _mixed(model: Any) -> Any:
    """A frozen base in bf16, whose odd sizes put the pieces in fp32 at odd addresses of FSDP2's buffer of bytes."""
    model.first.weight = nn.Parameter(torch.randn(WIDTH, 7).bfloat16(), requires_grad=False)
    model.first.forward = lambda x: nn.functional.linear(x[:, :7], model.first.weight.float(), model.first.bias)
    return model


def _on_meta(model: Any) -> Any:
    values = copy.deepcopy(model.state_dict())
    with torch.device("meta"):
        empty: Any = Net()
    empty._values = values
    return empty


def _materialized(model: Any) -> None:
    model.to_empty(device="cpu")
    model.offset.fill_(0.5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mesh, placements = parameter.device_mesh, parameter.placements
            source = torch.distributed.tensor.distribute_tensor(model._values[name], mesh, placements)
            parameter.copy_(source)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float16)
#: Settings of FSDP2: options of `fully_shard`, and a change of the model before it.
FEATURES: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "as it is": ({}, lambda model: model),
    "not resharded after forward": ({"reshard_after_forward": False}, lambda model: model),
    "resharded to two ranks after forward": ({"reshard_after_forward": 2}, lambda model: model),
    "computed in bf16": ({"mp_policy": BF16}, lambda model: model),
    "reduced in bf16": ({"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}, lambda model: model),
    "reduced in fp16": ({"mp_policy": FP16}, lambda model: model),
    "offloaded": ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, lambda model: model),
    "a frozen layer": ({}, _frozen),
    "a frozen bf16 base": ({}, _mixed),
    "made on the meta device": ({}, _on_meta),
}


def _accumulated(model: Any, accumulate: str) -> dict[str, Tensor]:
    """Return the gradients after two micro-batches: of one, both reduced, or both in one reduction."""
    for micro in range(1 if accumulate == "one" else 2):
        model.set_requires_gradient_sync(accumulate != "without sync" or micro == 1)
        loss(model, micro, dist.get_rank()).backward()
    return gradients(model)


@on_ranks(4)
def test_features_of_fsdp2_work_as_in_torch_alone() -> None:
    """Without a codec the gradients are torch's; with one they are near, and other than without."""
    for what, (options, change) in FEATURES.items():
        is_16_bit = "16" in what and "base" not in what
        for accumulate in ("one", "both", "without sync"):
            results = []
            for codecs in (None, ("fp32", "fp32"), ("int8", "int8")):
                model = fsdp(change(seeded(Net)), **options)
                if hasattr(model, "_values"):
                    _materialized(model)
                if codecs is not None:
                    commlib.shard(model, *codecs, compress=ALL)
                results.append(_accumulated(model, accumulate))
            alone, plain, encoded = results
            assert_near(plain, alone, 2e-2 if is_16_bit else 1e-6, f"{what}, {accumulate}, no codec")
            assert_near(encoded, alone, 8e-2, f"{what}, {accumulate}, int8")
            assert any(not torch.equal(encoded[name], plain[name]) for name in plain), what


@on_ranks(4)
def test_a_second_gather_between_fewer_ranks_has_the_weights_of_the_forward() -> None:
    """Bit for bit, with two forwards before a backward, and with activations that backward computes again."""
    for codec in ("fp32", *CODECS):
        for checkpointed in (False, True):
            model = commlib.shard(fsdp(seeded(Net), reshard_after_forward=2), codec, compress=ALL)
            if checkpointed:
                forward = model.second.forward
                model.second.forward = lambda x, run=forward: checkpoint(run, x, use_reentrant=False)
            expected = mean_gradients(decoded(model, codec), 0)
            other = mean_gradients(decoded(model, codec), 1)
            total = loss(model, 0, dist.get_rank()) + loss(model, 1, dist.get_rank())
            total.backward()
            expected = {name: value + other[name] for name, value in expected.items()}
            assert_near(gradients(model), expected, 1e-5, codec)


@on_ranks(2)
def test_prefetched_gathers_are_under_way_at_the_same_time() -> None:
    model = sharded("int8")
    model.set_modules_to_forward_prefetch([model.first, model.second])
    under_way, most = set[Any](), 0
    own = sharded_of(model)
    assert own is not None
    for gather in own.gathers:
        _observe(gather, under_way)
    forward = model.first.forward

    def observed(inputs: Tensor) -> Tensor:
        nonlocal most
        most = max(most, len(under_way))
        return forward(inputs)

    model.first.forward = observed
    expected = mean_gradients(decoded(model, "int8"), 0)
    loss(model, 0, dist.get_rank()).backward()
    assert_near(gradients(model), expected, 1e-5, "prefetched")
    assert most >= 1
    handle = model.second.unshard(async_op=True)
    assert under_way
    handle.wait()
    assert not under_way


def _observe(gather: Any, under_way: set[Any]) -> None:
    """Keep the gathers that were started and not waited for in a set."""
    call = type(gather).__call__

    class Observed(type(gather)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            work = call(self, *args, **kwargs)
            under_way.add(work)
            wait = work.wait

            def waited(*args: Any) -> bool:
                under_way.discard(work)
                return wait(*args)

            work.wait = waited
            return work

    gather.__class__ = Observed


@on_ranks(4)
def test_tensor_parallel_copies_stay_identical_and_hybrid_shards_are_reduced_over_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    model: Any = seeded(lambda: Net(32))
    parallelize_module(model, mesh["tensor"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    commlib.shard(fully_shard(model, mesh=mesh["shard"]), "int8", "int8", compress=CompressionPolicy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        optimizer.zero_grad()
        loss(model, step, mesh["shard"].get_local_rank()).backward()
        optimizer.step()
    for name in ("second.bias", "third.weight", "third.bias"):
        own = model.get_parameter(name).to_local().contiguous()
        rows: list[Any] = [None, None]
        dist.all_gather_object(rows, own, group=mesh["tensor"].get_group())
        assert torch.equal(rows[0], rows[1]), name

    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    results = []
    for codecs in (None, ("fp32", "fp32"), ("int8", "int8")):
        model = fsdp(seeded(Net), hybrid)
        results.append(_accumulated(model if codecs is None else commlib.shard(model, *codecs, compress=ALL), "one"))
    assert_near(results[1], results[0], 1e-6, "hybrid")
    assert_near(results[2], results[0], 8e-2, "hybrid, int8")


@on_ranks(3)
def test_what_is_not_finite_on_one_rank_arrives_so_and_the_scaler_skips_on_all() -> None:
    for codec in ("fp32", *CODECS):
        for value in (float("inf"), float("nan")):
            model = sharded(codec, codec)
            before = [full(each).clone() for each in model.parameters()]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            factor = value if dist.get_rank() == 1 else 1.0
            scaler.scale(loss(model, 0, dist.get_rank()) * factor).backward()
            assert not torch.isfinite(full(model.first.weight.grad)).any(), codec
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 2.0, codec
            assert all(torch.equal(full(a), b) for a, b in zip(model.parameters(), before, strict=True)), codec


@on_ranks(3)
def test_feedback_sends_later_what_an_encoding_has_lost() -> None:
    """The sum of all results is that of all gradients, less the residuals; also if the loss scale grows in between."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    model: Any = fsdp(seeded(Net))
    follow_unused(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_factor=2.0, growth_interval=3)
    commlib.shard(model, gradients="int4", feedback=True, compress=ALL, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    reduced: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    for step in range(8):
        optimizer.zero_grad()
        for name, value in mean_gradients(decoded(model, "fp32"), step).items():
            row = shards(value, num_ranks)[rank]
            expected[name] = expected.get(name, torch.zeros_like(row)) + row
        scaler.scale(loss(model, step, rank)).backward()
        scaler.unscale_(optimizer)
        for name, parameter in model.named_parameters():
            own = parameter.grad.to_local().reshape(-1)
            reduced[name] = reduced.get(name, torch.zeros_like(own)) + own
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 16.0
    residuals: list[Any] = [None] * num_ranks
    dist.all_gather_object(residuals, sharded_of(model).state_dict()["residuals"])  # type: ignore[union-attr]
    assert residuals[0].keys() == {"first.weight", "second.weight", "third.weight"}
    for name, value in reduced.items():
        owed = sum(each[name][rank] for each in residuals) / num_ranks if name in residuals[0] else 0.0
        total = (expected[name] - owed)[: value.numel()]
        torch.testing.assert_close(value, total, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
        if name in residuals[0] and value.numel():
            assert float((value - expected[name][: value.numel()]).abs().max()) > 1e-4, name  # the codec is coarse


@contextlib.contextmanager
def on_nodes(node_of: Callable[[int], int]) -> Iterator[None]:
    """Place each rank on a node."""
    with mock.patch.dict(os.environ, COMMLIB_NODE=str(node_of(dist.get_rank()))):
        yield


@on_ranks(4)
def test_nodes_sum_their_gradients_before_they_are_encoded() -> None:
    """Bit for bit, also if the ranks of a node are not consecutive; other nodes receive every gradient once."""
    rank = dist.get_rank()
    for nodes in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]):
        place = next(node.index(rank) for node in nodes if rank in node)
        for codec in ("fp32", "int8", "bf16"):
            with on_nodes(lambda rank, nodes=nodes: next(idx for idx, node in enumerate(nodes) if rank in node)):
                model = sharded(gradients=codec, hierarchical=True)
            loss(model, 0, rank).backward()
            own = [gradients(each) for each in _of_each_rank(seeded(Net))]
            for name, parameter in model.named_parameters():
                rows = [shards(each[name], 4)[rank] for each in own]
                sums = [rows[first] + rows[second] for first, second in nodes]
                expected = sums[0] + sums[1]
                if codec != "fp32" and parameter.dim() > 1:
                    its = registry.block_codec(codec)
                    payloads = torch.empty(2, its.payload_bytes(rows[0].numel()), dtype=torch.uint8)
                    for row, payload in zip(sums, payloads, strict=True):
                        its.encode(row, payload)
                    its.decode_sum(payloads, expected, divisor=4.0)
                else:
                    expected = expected / 4.0
                assert parameter.grad is not None
                got = parameter.grad.to_local().reshape(-1)  # type: ignore[operator]
                assert torch.equal(got, expected[: got.numel()]), f"{nodes}, {place}, {codec}, {name}"
            scatters = sharded_of(model).scatters  # type: ignore[union-attr]
            layouts = [layout for each in scatters for layout in each._layouts.values()]
            expected_bytes = sum(2 * each.row_bytes + each.payload_bytes for each in layouts)
            assert commlib.stats(model).shard.reduced_bytes == expected_bytes, codec  # type: ignore[union-attr]
            commlib.unwrap(model)


@on_ranks(4)
def test_nodes_keep_the_feedback_of_their_sums() -> None:
    """The sum of all results is that of all gradients, less the residuals of the ranks at the same place."""
    rank = dist.get_rank()
    model: Any = fsdp(seeded(Net))
    follow_unused(model)
    options: dict[str, Any] = {"gradients": "int4", "feedback": True, "compress": ALL}
    with on_nodes(lambda rank: rank // 2):
        commlib.shard(model, hierarchical=True, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    reduced: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    for step in range(6):
        optimizer.zero_grad()
        for name, value in mean_gradients(decoded(model, "fp32"), step).items():
            expected[name] = expected.get(name, 0.0) + shards(value, 4)[rank]
        loss(model, step, rank).backward()
        for name, parameter in model.named_parameters():
            reduced[name] = reduced.get(name, 0.0) + parameter.grad.to_local().reshape(-1)
        optimizer.step()
    own = sharded_of(model)
    assert own is not None
    states: list[Any] = [None] * 4
    dist.all_gather_object(states, own.state_dict())
    peers = [states[other]["residuals"] for other in range(4) if other % 2 == rank % 2]
    for name, residuals in peers[0].items():
        assert len(residuals) == 2, "one row per node"
        owed = sum(each[name][rank // 2] for each in peers) / 4
        value = reduced[name]
        torch.testing.assert_close(value, (expected[name] - owed)[: value.numel()], rtol=1e-5, atol=1e-6)
    restored = fsdp(seeded(Net))
    follow_unused(restored)
    with on_nodes(lambda rank: rank // 2):
        commlib.shard(restored, hierarchical=True, **options)
    again = sharded_of(restored)
    assert again is not None
    again.load_state_dict(own.state_dict())
    assert all(
        torch.equal(value, own.state_dict()["residuals"][name])
        for name, value in again.state_dict()["residuals"].items()
    )
    commlib.shard(restored, **options)  # one row per rank
    flat = sharded_of(restored)
    assert flat is not None
    flat.load_state_dict(own.state_dict())
    assert not flat.state_dict()["residuals"], "residuals of nodes do not fit rows of ranks"


@on_ranks(3)
def test_nodes_of_different_sizes_are_refused_on_all_ranks() -> None:
    with on_nodes(lambda rank: rank // 2), raises_on_every_rank(ConfigError, "expected as many ranks on every node"):
        sharded(gradients="int8", hierarchical=True)


@on_ranks(2)
def test_parameters_without_a_gradient_are_reduced_in_full_precision_and_logged() -> None:
    class Half(Net):
        def forward(self, inputs: Tensor) -> Tensor:
            return nn.functional.linear(inputs, self.first.weight).tanh() @ self.second.weight.T

    results, model = [], None
    with mock.patch.object(logging.getLogger("commlib"), "warning") as warning:
        for has_codec in (False, True):
            model = fully_shard(seeded(Half))
            if has_codec:
                commlib.shard(model, gradients="int8", compress=ALL)
            for step in range(2):
                model.zero_grad()
                loss(model, step, dist.get_rank()).backward()
            results.append(gradients(model))
    assert_near(results[1], results[0], 1e-6, "unused parameters")
    assert warning.call_count == 1
    assert "set_reduce_scatter_unused_params" in warning.call_args.args[0]

    sent = []
    for follows in (False, True):  # the advice
        follow_unused(model, follows)
        before = commlib.stats(model).shard.reduced_bytes
        loss(model, 0, dist.get_rank()).backward()
        sent.append(commlib.stats(model).shard.reduced_bytes - before)
    assert sent[1] < sent[0] / 2


@on_ranks(2)
def test_feedback_follows_parameters_that_have_a_gradient() -> None:
    class Half(Net):
        def forward(self, inputs: Tensor) -> Tensor:
            return nn.functional.linear(inputs, self.first.weight).tanh() @ self.second.weight.T

    model: Any = fully_shard(seeded(Half))
    follow_unused(model)
    commlib.shard(model, gradients="int8", feedback=True, compress=ALL)
    follow_unused(model, False)
    with raises_on_every_rank(CommlibError, "some parameters have no gradient", "feedback=True"):
        loss(model, 0, dist.get_rank()).backward()
    fresh: Any = fully_shard(seeded(Half))  # FSDP2 cannot continue after an exception in backward
    follow_unused(fresh)
    commlib.shard(fresh, gradients="int8", feedback=True, compress=ALL)
    loss(fresh, 0, dist.get_rank()).backward()
    assert fresh.third.weight.grad is not None
    assert not full(fresh.third.weight.grad).any()


@on_ranks(2)
def test_what_cannot_be_sharded_is_refused_on_all_ranks() -> None:
    model = fsdp(seeded(Net))
    with raises_on_every_rank(ConfigError, "FSDP2 shards no module", "fully_shard"):
        commlib.shard(seeded(Net), "int8")
    with raises_on_every_rank(ConfigError, "weights", "expected a block codec", "int9", "did you mean", "'fp32'"):
        commlib.shard(model, "int9")
    with raises_on_every_rank(ConfigError, "feedback", "codec of the gradients"):
        commlib.shard(model, "int8", feedback=True)
    needed = "set_reduce_scatter_unused_params(True)" if HAS_UNUSED else "is too old; expected 2.13 or newer"
    with raises_on_every_rank(ConfigError, "feedback", needed):
        commlib.shard(model, gradients="int8", feedback=True)
    with raises_on_every_rank(ConfigError, "difference", "optimizer="):
        commlib.shard(model, "int4", difference=True)
    with raises_on_every_rank(ConfigError, "scaler", "GradScaler"):
        commlib.shard(model, gradients="int8", scaler=3)
    with raises_on_every_rank(ConfigError, "option weights", "Int8()", "Int4()"):
        commlib.shard(model, "int8" if dist.get_rank() else "int4")
    with raises_on_every_rank(ConfigError, "timeout"):
        commlib.shard(model, "int8", timeout=-1)
    allocating: Any = fsdp(seeded(Net))
    allocating.set_allocate_memory_from_process_group_for_comm(True)
    with raises_on_every_rank(ConfigError, "allocates its own memory"):
        commlib.shard(allocating, "int8")
    allocating.set_allocate_memory_from_process_group_for_comm(False)
    commlib.shard(allocating, "int8")
    own = sharded_of(allocating)
    assert own is not None
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with raises_on_every_rank(ConfigError, "after the last fully_shard"):
        own.transport_of(alone)
    group = next(each.source for each in parameter_groups(model) if each.module is model.first)
    local = group.fsdp_params[0]._sharded_local_tensor
    local.fsdp_pre_all_gather = lambda mesh: None
    with raises_on_every_rank(ConfigError, "'first.weight'", "fsdp_pre_all_gather"):
        commlib.shard(model, "int8")
    del local.fsdp_pre_all_gather
    state = model.first._get_fsdp_state()
    with (
        mock.patch.object(state, "_fsdp_param_groups", [group, group], create=True),
        raises_on_every_rank(ConfigError, "'first'", "2 parameter groups"),
    ):
        commlib.shard(model, "int8")
    if HAS_UNUSED:
        follow_unused(model)
    commlib.shard(model, "int8", "int8", feedback=HAS_UNUSED, compress=ALL)  # nothing was left behind
    loss(model, 0, dist.get_rank()).backward()
    with raises_on_every_rank(ConfigError, "not wrapped"):
        commlib.unwrap(seeded(Net))


@on_ranks(4)
def test_islands_train_with_encoded_shards_in_either_order() -> None:
    """`wrap` between islands and `shard` inside: identical replicas, both statistics, and `unwrap` undoes both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    results = []
    for wraps_first in (False, True):
        model = fsdp(seeded(Net), mesh["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if not wraps_first:
            commlib.shard(model, "int8", "int8", compress=ALL)
        commlib.wrap(model, "allreduce", optimizer=optimizer, process_group=mesh["replicate"])
        if wraps_first:
            commlib.shard(model, "int8", "int8", compress=ALL)
        for step in range(3):
            optimizer.zero_grad()
            loss(model, step, dist.get_rank()).backward()
            optimizer.step()
        found = commlib.stats(model)
        assert found.algorithm == "allreduce"
        assert found.shard is not None
        assert (found.shard.num_reductions, found.shard.weights) == (9, "int8")
        assert found.as_dict("comm/")["comm/shard_reduced_bytes"] == found.shard.reduced_bytes > 0
        assert "gradients in int8, 9 reductions" in str(found)
        results.append([full(each).clone() for each in model.parameters()])
        rows: list[Any] = [None] * 4
        dist.all_gather_object(rows, results[-1])
        assert all(torch.equal(a, b) for row in rows for a, b in zip(row, rows[0], strict=True))
        commlib.unwrap(model)
        collectives = [each for group in parameter_groups(model) for each in group.collectives()]
        assert all(type(each).__module__.startswith("torch") for each in collectives)
        loss(model, 3, dist.get_rank()).backward()
        with raises_on_every_rank(ConfigError, "not wrapped"):
            commlib.stats(model)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@on_ranks(4)
def test_statistics_count_the_payloads_and_buffers_are_synchronised() -> None:
    model = sharded("int8", "int4")
    own = sharded_of(model)
    assert own is not None
    (transport,) = own.transports.values()
    before = transport.bytes_sent
    assert str(commlib.stats(model)).startswith("shard on 4 ranks")
    for step in range(2):
        loss(model, step, dist.get_rank()).backward()
    found = commlib.stats(model)
    assert found.shard is not None
    assert (found.algorithm, found.world_size, found.rounds) == ("shard", 4, 2)
    # Rows of a quarter, padded: of `first` 9 of 8, of `second` 9 of 34, of `third` 1 of 33 elements, and biases.
    numels = {"first": (72, 9), "second": (306, 9), "third": (33, 1)}

    def sent(codec: str) -> dict[str, int]:
        its = registry.block_codec(codec)
        aligned = lambda nbytes: -(-nbytes // 16) * 16  # noqa: E731
        return {n: 3 * (aligned(its.payload_bytes(w)) + aligned(4 * b)) for n, (w, b) in numels.items()}

    gathers = {"first": 4, "second": 4, "third": 2}  # FSDP2 gathers the root once per step
    assert found.shard.gathered_bytes == sum(count * sent("int8")[name] for name, count in gathers.items())
    assert found.shard.reduced_bytes == 2 * sum(sent("int4").values())
    assert found.shard.plain_reduced_bytes == 2 * 3 * 4 * sum(w + b for w, b in numels.values())
    assert found.wire_bytes == found.shard.gathered_bytes + found.shard.reduced_bytes
    assert found.wire_bytes_per_step == found.wire_bytes // 2
    assert transport.bytes_sent - before == found.wire_bytes

    model.offset.fill_(float(dist.get_rank() + 1))
    commlib.synchronize(model)
    assert float(model.offset) == 1.0


def _trained(model: Any, optimizer: Any, steps: range) -> list[Tensor]:
    for step in steps:
        optimizer.zero_grad()
        loss(model, step, dist.get_rank()).backward()
        optimizer.step()
    return [full(each).clone() for each in model.parameters()]


def _with_feedback(seed: int, mesh: DeviceMesh | None = None) -> tuple[Any, Any]:
    model: Any = fsdp(seeded(Net, seed), mesh)
    follow_unused(model)
    commlib.shard(model, "int8", "int4", feedback=True, compress=ALL)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


@on_ranks(4)
def test_a_checkpoint_resumes_bit_for_bit_and_in_another_number_of_ranks() -> None:
    one = _with_feedback(7)
    _trained(*one, range(4))
    with tempfile.TemporaryDirectory() as own, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path: list[Any] = [own]
        dist.broadcast_object_list(path, 0)
        dcp.save({"app": commlib.Checkpoint(*one)}, checkpoint_id=path[0])
        other = _with_feedback(8)
        dcp.load({"app": commlib.Checkpoint(*other)}, checkpoint_id=path[0])
        saved = [full(each).clone() for each in one[0].parameters()]
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fewer = _with_feedback(9, mesh["shard"])
        with mock.patch.object(logging.getLogger("commlib"), "warning") as warning:
            dcp.load({"app": commlib.Checkpoint(*fewer)}, checkpoint_id=path[0])
        dist.barrier()
    assert warning.call_count == 1
    assert "Residuals start at zero" in warning.call_args.args[0]
    assert all(torch.equal(full(a), b) for a, b in zip(fewer[0].parameters(), saved, strict=True))
    _trained(*fewer, range(4, 5))
    results = [_trained(*run, range(4, 8)) for run in (one, other)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@on_ranks(2)
def test_a_dropped_model_ends_its_communicators_and_a_second_call_replaces_the_first() -> None:
    model = sharded("int8")
    commlib.shard(model, "int4", "int8", compress=ALL)
    loss(model, 0, dist.get_rank()).backward()
    found = commlib.stats(model).shard
    assert found is not None
    assert (found.weights, found.gradients) == ("int4", "int8")
    names = lambda: [each.name for each in threading.enumerate() if each.name.startswith("commlib")]  # noqa: E731
    assert names()
    del model, found
    gc.collect()
    assert eventually(lambda: not names()), names()


def into_trap(kind: str, where: str) -> None:
    """Train; the victim runs into `kind` in a forward or a backward. The others report the error."""
    rank = default_group_from_env(timeout_s=LONG_S)
    by_node = where == "backward on two nodes"
    with on_nodes(lambda rank: rank // 2):
        model = commlib.shard(
            fsdp(seeded(Net)), "int8", "int8", compress=ALL, timeout=TIMEOUTS_S[kind], hierarchical=by_node
        )
    for step in range(3):
        loss(model, step, rank).backward()
    come_together("trained")
    if rank == VICTIM:
        trap = TRAPS[kind]
        if where == "forward":
            model.second.forward = lambda inputs: trap()
        else:
            forward = model.first.forward
            model.first.forward = lambda x: _trapped(forward(x), trap)
    try:
        loss(model, 3, rank).backward()
    except Exception as error:
        report_error(error)
        raise


def _trapped(output: Tensor, trap: Callable[[], None]) -> Tensor:
    output.register_hook(lambda gradient: trap())
    return output


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("die", "forward"),
        ("die", "backward"),
        ("stop", "forward"),
        ("stop", "backward"),
        ("die", "backward on two nodes"),
    ],
)
def test_a_killed_or_stopped_rank_is_named_by_the_others(kind: str, where: str) -> None:
    check(into_trap, 4 if "nodes" in where else 3, kind, where, kind="PeerFailure" if kind == "die" else "PeerTimeout")


def _rounded(model: nn.Module, reference: dict[str, Tensor] | None, codec: str) -> dict[str, Tensor]:
    """Return the next reference: the weights themselves at first, then advanced by the decoded differences."""
    num_ranks = dist.get_world_size()
    found = {}
    for name, parameter in model.named_parameters():
        value = full(parameter.detach())
        if reference is not None and value.dim() > 1:
            rows = zip(shards(value, num_ranks), shards(reference[name], num_ranks), strict=True)
            flat = torch.cat([old + through(codec, new - old) for new, old in rows])[: value.numel()]
            value = flat.view(value.shape)
        found[name] = value.clone()
    return found


def _with_difference(seed: int, codec: str = "int4", fused: bool = False, **options: Any) -> tuple[Any, Any]:
    model = fsdp(seeded(Net, seed), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    return commlib.shard(model, codec, difference=True, optimizer=optimizer, compress=ALL), optimizer


@on_ranks(2, 4)
def test_differences_advance_a_reference_once_per_step() -> None:
    """As its equations do; evaluations and backward return it without communication, edits begin in full precision."""
    for reshard, fused in ((False, False), (False, True), (True, False), (2, True)):
        if dist.get_world_size() == reshard:
            continue
        options = {"reshard_after_forward": reshard, "fused": fused}
        model, optimizer = _with_difference(7, **options)
        reference: dict[str, Tensor] | None = None
        found = None
        for step in range(6):
            if step == 4:  # an edit
                with torch.no_grad():
                    model.second.weight.mul_(2.0)
            edited = _rounded(model, None, "int4") if step == 4 else {}
            reference = _rounded(model, reference, "int4")
            reference |= {name: value for name, value in edited.items() if name.startswith("second")}
            whole = seeded(Net)
            whole.load_state_dict(reference, strict=False)
            expected = mean_gradients(whole, step)
            optimizer.zero_grad()
            before = 0 if found is None else found.gathered_bytes
            with torch.no_grad():
                model(batch(9, 0))
            found = commlib.stats(model).shard
            assert found is not None
            sent = found.gathered_bytes
            assert sent > before
            loss(model, step, dist.get_rank()).backward()
            found = commlib.stats(model).shard
            assert found is not None
            assert found.gathered_bytes == sent
            assert_near(gradients(model), expected, 1e-5, f"{options}, step {step}")
            optimizer.step()


@on_ranks(4)
def test_a_reference_follows_a_synchronisation_between_islands() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fsdp(seeded(Net), mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    commlib.wrap(model, commlib.algorithms.LocalSGD(period=100), optimizer=optimizer, process_group=mesh["replicate"])
    commlib.shard(model, "int4", difference=True, optimizer=optimizer, compress=ALL)
    for step in range(3):
        optimizer.zero_grad()
        loss(model, step, dist.get_rank()).backward()
        optimizer.step()
    with torch.no_grad():
        before = model(batch(9, 0))  # the reference is then that of this island
        commlib.synchronize(model)
        after = model(batch(9, 0))
    outputs: list[Any] = [None] * 4
    dist.all_gather_object(outputs, (before, after))
    assert not torch.equal(outputs[0][0], outputs[2][0])
    assert all(torch.equal(each, outputs[0][1]) for _, each in outputs)


@on_ranks(3)
def test_a_reference_is_saved_and_resumes_bit_for_bit() -> None:
    for evaluates in (False, True):
        one = _with_difference(7)
        _trained(*one, range(3))
        if evaluates:  # the reference is then that of the saved weights
            with torch.no_grad():
                one[0](batch(9, 0))
        with tempfile.TemporaryDirectory() as own, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path: list[Any] = [own]
            dist.broadcast_object_list(path, 0)
            dcp.save({"app": commlib.Checkpoint(*one)}, checkpoint_id=path[0])
            other = _with_difference(8)
            dcp.load({"app": commlib.Checkpoint(*other)}, checkpoint_id=path[0])
            dist.barrier()
        results = [_trained(*run, range(3, 6)) for run in (one, other)]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
