"""Models that are sharded in islands of ranks, by FSDP2 and tensor parallelism, and trained by commlib between them."""

from __future__ import annotations

import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import commlib
from commlib.algorithms import AllReduce
from commlib.errors import CommlibError, ConfigError
from commlib.replica import replica_of
from tests.contract.subjects import Subject
from tests.multi.common import raises_on_every_rank, seeded
from tests.multi.fault_scripts import LONG_S, report_error
from tests.multi.notices import await_told, tell
from tests.multi.pool import on_ranks
from tests.multi.rank_worker import default_group_from_env
from tests.multi.test_blame import check, die
from tests.thin import fast

ALGORITHMS = commlib.algorithms.list()
#: Rows that two and three ranks share unevenly, and one that most ranks have no part of.
WIDTH = 33


class Net(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.second = nn.Linear(width, 16)
        self.third = nn.Linear(16, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(inputs)))))


def batch(step: int, place: int) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(1000 * step + place))


def loss(model: nn.Module, step: int, place: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    return (model(batch(step, place).to(dtype)) - 0.5).square().mean()


def mesh_of(*sizes: int) -> DeviceMesh:
    names = ("replicate", "shard", "tensor")[: len(sizes)]
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def fsdp(model: Any, mesh: DeviceMesh, **options: Any) -> Any:
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh["shard"], **options)
    return fully_shard(model, mesh=mesh["shard"], **options)


def tensor_parallel(model: Any, mesh: DeviceMesh, dim: str = "shard") -> Any:
    return parallelize_module(model, mesh[dim], {"first": ColwiseParallel(), "second": RowwiseParallel()})


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()  # type: ignore[attr-defined]


def far(got: Any, expected: Any) -> float:
    """The largest difference, relative to the largest value."""
    pairs = [(full(a), b) for a, b in zip(got, expected, strict=True) if b is not None]
    with torch.no_grad():
        return max(float((a - b).abs().max()) for a, b in pairs) / max(float(b.abs().max()) for _, b in pairs)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def wrapped(model: Any, mesh: DeviceMesh, algorithm: Any, optimizer: Any, **options: Any) -> Any:
    options = {"bucket_cap_mb": 0.001, **options}
    return commlib.wrap(model, algorithm, optimizer=optimizer, process_group=mesh["replicate"], **options)


class Pair:
    """A sharded model under commlib, and the whole model trained in full precision on the data of all ranks."""

    def __init__(self, mesh: DeviceMesh, model: Any, num_places: int, width: int = WIDTH, **options: Any) -> None:
        self.model = model
        self.reference = seeded(lambda: Net(width)).to(next(model.parameters()).dtype)
        self.num_places = num_places
        self.place = dist.get_rank() * num_places // dist.get_world_size()
        self.optimizers = [momentum(self.model), momentum(self.reference)]
        wrapped(self.model, mesh, options.pop("algorithm", "allreduce"), self.optimizers[0], **options)

    def step(self, step: int, micro: int = 1, before: Callable[[bool], None] = lambda is_last: None) -> float:
        """Make a step on both; return how far gradients are apart."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for part in range(micro):
            before(part == micro - 1)
            loss(self.model, 10 * step + part, self.place).backward()
            for place in range(self.num_places):
                (loss(self.reference, 10 * step + part, place) / self.num_places).backward()
        distance = far([p.grad for p in self.model.parameters()], [p.grad for p in self.reference.parameters()])
        for optimizer in self.optimizers:
            optimizer.step()
        return distance

    @property
    def distance(self) -> float:
        """How far weights are apart."""
        return far(self.model.parameters(), self.reference.parameters())


@on_ranks(4)
def test_gradients_and_weights_are_those_of_the_whole_model() -> None:
    """FSDP2, tensor parallelism, and both, after 1, 2 and 50 steps."""
    by_two, by_three = mesh_of(2, 2), mesh_of(2, 1, 2)
    double = lambda width=WIDTH: seeded(lambda: Net(width)).double()  # noqa: E731
    pairs = {
        "FSDP2": Pair(by_two, fsdp(double(), by_two), 4),
        "tensor parallel": Pair(by_two, tensor_parallel(double(32), by_two), 2, 32),
        "both": Pair(
            by_three, fully_shard(tensor_parallel(double(32), by_three, "tensor"), mesh=by_three["shard"]), 2, 32
        ),
    }
    for what, pair in pairs.items():
        for step in range(50):
            assert pair.step(step) < 1e-10, f"{what}: gradients differ in step {step}"
            if step + 1 in (1, 2, 50):
                assert pair.distance < 1e-10, f"{what}: weights differ after {step + 1} steps"


@on_ranks(3)
def test_one_island_of_three_ranks() -> None:
    mesh = mesh_of(1, 3)
    pair = Pair(mesh, fsdp(seeded(Net).double(), mesh), 3)
    for step in range(50):
        assert pair.step(step) < 1e-10
    assert pair.distance < 1e-10


class WithLoss(nn.Module):
    """Nobody shards the outermost module, whose output announces the backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.inner(inputs) - 0.5).square().mean()


def without_root(model: Any, mesh: DeviceMesh) -> Any:
    for layer in (model.first, model.second, model.third):
        fully_shard(layer, mesh=mesh["shard"])
    return model


@on_ranks(4)
def test_gradients_that_fsdp_makes_at_the_very_end_of_backward() -> None:
    """In a separate callback after that of the first output, for modules whose inputs have no gradient."""
    mesh = mesh_of(2, 2)
    cases: dict[str, tuple[Any, Any]] = {
        "the loss in an outer module": (WithLoss(fsdp(seeded(Net).double(), mesh)), lambda m, at: m(at)),
        "no root": (
            without_root(seeded(Net).double(), mesh),
            lambda m, at: (m(at) - 0.5).square().mean(),
        ),
    }
    for what, (model, value) in cases.items():
        reference = seeded(Net).double()
        wrapped(model, mesh, "allreduce", momentum(model))
        for step in range(3):
            model.zero_grad()
            reference.zero_grad()
            value(model, batch(step, dist.get_rank()).double()).backward()
            for place in range(4):
                (loss(reference, step, place) / 4).backward()
            distance = far([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])
            assert distance < 1e-10, f"{what}, step {step}: {distance}"


@on_ranks(4)
def test_parameters_that_an_evaluation_has_left_gathered() -> None:
    """`wrap` finds the sharded parameters, and values written into these reach the next forward."""
    mesh = mesh_of(2, 2)
    model, inputs = fsdp(seeded(Net).double(), mesh, reshard_after_forward=False), batch(0, 0).double()
    optimizer = momentum(model)
    for algorithm in ("allreduce", commlib.algorithms.LocalSGD(period=100)):
        with torch.no_grad():
            model(inputs)
        wrapped(model, mesh, algorithm, optimizer)
        assert all(hasattr(each.param, "placements") for each in replica_of(model).engine.parameters)
        train(model, optimizer, range(3))
        with torch.no_grad():
            model(inputs)
            commlib.synchronize(model)
            outputs: list[Any] = [None] * 4
            dist.all_gather_object(outputs, model(inputs))
        assert all(far([each], outputs[:1]) < 1e-12 for each in outputs)
        commlib.unwrap(model)


CASES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "not resharded after forward": {"reshard_after_forward": False},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "reduced in bf16": {"mp_policy": MixedPrecisionPolicy(torch.float32, torch.bfloat16)},
    "computed in bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
}


@on_ranks(4)
def test_policies_of_fsdp_and_several_micro_batches() -> None:
    """A second synchronised backward, one that FSDP2 does not reduce, and one in `no_sync` alone."""
    mesh = mesh_of(2, 2)
    for what, policy in CASES.items():
        bound = 3e-2 if "bf16" in what else 1e-5
        for micro in (1, 2):
            pair = Pair(mesh, fsdp(seeded(Net), mesh, **policy), 4)
            for step in range(3):
                assert pair.step(step, micro) < bound, f"{what}, {micro} micro-batches, step {step}"
        for reduces in (True, False):

            def before(is_last: bool, pair: Pair = pair, reduces: bool = reduces) -> None:
                pair.model.require_backward_grad_sync = is_last
                pair.model.set_requires_gradient_sync(is_last or reduces)

            for step in range(3, 6):
                assert pair.step(step, 3, before) < bound, f"{what}, accumulated in step {step}"


@on_ranks(4)
def test_evaluation_clipping_and_frozen_layers() -> None:
    mesh = mesh_of(2, 2)
    for policy in ({}, {"reshard_after_forward": False}):
        pair = Pair(mesh, fsdp(seeded(Net), mesh, **policy), 4)
        for step in range(12):
            for model in (pair.model, pair.reference):
                model.second.requires_grad_(step % 5 != 1)
            pair.model.eval()
            with torch.no_grad():
                pair.model(batch(99, dist.get_rank()))
            pair.model.train()
            assert pair.step(step) < 1e-5, f"step {step}"
            norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.01) for m in (pair.model, pair.reference)]
            torch.testing.assert_close(full(norms[0]), norms[1], rtol=1e-5, atol=1e-8)


@on_ranks(4)
def test_a_model_made_on_the_meta_device_and_checkpointed_activations() -> None:
    mesh = mesh_of(2, 2)
    with torch.device("meta"):
        model = Net()
    fsdp(model, mesh)
    model.to_empty(device="cpu")
    source = seeded(Net).state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                torch.distributed.tensor.distribute_tensor(source[name], mesh["shard"], parameter.placements)
            )
    forward = model.second.forward
    model.second.forward = lambda x: torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)  # type: ignore[method-assign]
    pair = Pair(mesh, model, 4)
    assert max(pair.step(step) for step in range(3)) < 1e-5


def settings(name: str) -> Any:
    return Subject(name).algorithm()


WEIGHTS = ("local_sgd", "post_local_sgd", "diloco", "streaming_diloco", "decentralized", "gossip")


def on_weights(name: str) -> Any:
    if name == "streaming_diloco":  # the contents of a fragment depend on sizes, which differ in shards
        return commlib.algorithms.StreamingDiLoCo(period=4, fragments=1, delay=1)
    return settings(name)


@on_ranks(4)
def test_algorithms_on_weights_are_those_of_whole_models() -> None:
    """Each island trains like one rank with the same data, and has the weights of that rank."""
    mesh = mesh_of(2, 2)
    groups = [dist.new_group([0, 1])]
    rank = dist.get_rank()
    for name in WEIGHTS:
        model = fsdp(seeded(Net).double(), mesh)
        optimizer = adam(model)
        wrapped(model, mesh, on_weights(name), optimizer)
        for step in range(9):
            optimizer.zero_grad()
            loss(model, step, rank).backward()
            optimizer.step()
        commlib.state_dict(model)
        islands = [None] * 4
        dist.all_gather_object(islands, [full(p).clone() for p in model.parameters()])
        if rank < 2:
            whole = seeded(Net).double()
            its = adam(whole)
            commlib.wrap(whole, on_weights(name), optimizer=its, process_group=groups[0], bucket_cap_mb=0.001)
            for step in range(9):
                its.zero_grad()
                (sum(loss(whole, step, place) for place in (2 * rank, 2 * rank + 1)) / 2).backward()
                its.step()
            commlib.state_dict(whole)
            distance = far(islands[2 * rank], whole.parameters())
            assert distance < 1e-5, f"{name}: {distance}"
        dist.barrier()
        commlib.synchronize(model)
        everyone: list[Any] = [None] * 4
        dist.all_gather_object(everyone, [full(p).clone() for p in model.parameters()])
        assert all(torch.equal(a, b) for other in everyone for a, b in zip(other, everyone[0], strict=True)), name


GRADIENTS = [
    name
    for name in ALGORITHMS
    if isinstance(commlib.algorithms.create(name).channel, commlib.algorithms.Gradients) and name != "auto"
]


def optimizer_for(name: str, model: nn.Module) -> torch.optim.Optimizer:
    return Subject(name).optimizer(list(model.parameters()))


@on_ranks(4)
@pytest.mark.parametrize("name", fast(GRADIENTS, "allreduce", "topk", "powersgd"))
def test_algorithms_on_gradients_keep_replicas_alike_and_resume(name: str) -> None:
    mesh = mesh_of(2, 2)
    runs = []
    for seed in (7, 99):
        model = fsdp(seeded(Net, seed), mesh)
        optimizer = optimizer_for(name, model)
        runs.append((wrapped(model, mesh, settings(name), optimizer), optimizer))
    train(*runs[0], range(6))
    assert_replicas_alike(runs[0][0], mesh, name)
    with folder() as path:
        save(*runs[0], path)
        load(*runs[1], path)
    for run in runs:
        train(*run, range(6, 9))
    assert_same(runs[0][0], runs[1][0], name)
    for model, _ in runs:
        commlib.unwrap(model)


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(model, step, dist.get_rank()).backward()
        optimizer.step()


def assert_same(one: nn.Module, other: nn.Module, what: str) -> None:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(full(a), full(b)) for a, b in pairs), what


def assert_replicas_alike(model: nn.Module, mesh: DeviceMesh, what: str) -> None:
    for parameter in model.parameters():
        own = parameter.to_local().contiguous() if hasattr(parameter, "to_local") else parameter.data  # type: ignore[operator]
        rows: list[Any] = [None] * mesh["replicate"].size()
        dist.all_gather_object(rows, own.detach().clone(), group=mesh["replicate"].get_group())
        assert all(torch.equal(row, rows[0]) for row in rows), what


@contextmanager
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as own:
        shared: list[Any] = [own]
        dist.broadcast_object_list(shared, 0)
        yield shared[0]
        dist.barrier()


def save(model: Any, optimizer: Any, path: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"app": commlib.Checkpoint(model, optimizer)}, checkpoint_id=path)


def load(model: Any, optimizer: Any, path: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"app": commlib.Checkpoint(model, optimizer)}, checkpoint_id=path)


@on_ranks(4)
def test_algorithms_on_weights_resume_and_reshard() -> None:
    """In the same islands bit for bit; in one island of four ranks from the consensus, with anchors and momentum."""
    mesh, one = mesh_of(2, 2), mesh_of(1, 4)
    for name in ("local_sgd", "diloco", "decentralized"):
        runs = []
        for seed, where in ((7, mesh), (99, mesh), (99, one)):
            model = fsdp(seeded(Net, seed), where)
            optimizer = adam(model)
            runs.append((wrapped(model, where, settings(name), optimizer), optimizer))
        train(*runs[0], range(5))
        with folder() as path:
            save(*runs[0], path)
            for run in runs[1:]:
                load(*run, path)
        consensus = commlib.checkpoint.consensus_state_dict(runs[0][0])
        resharded = runs[2][0].state_dict()
        assert all(torch.equal(full(value), full(resharded[key])) for key, value in consensus.items()), name
        assert_same_anchor(runs[0][0], runs[2][0], name)
        for run in runs:
            train(*run, range(5, 8))
        assert all(
            torch.equal(full(a), full(b)) for a, b in zip(*[m.parameters() for m, _ in runs[:2]], strict=True)
        ), name


def assert_same_anchor(saved: Any, loaded: Any, name: str) -> None:
    """Where the algorithm has anchors and outer momentum, they are the same whole tensors."""
    trees = [commlib.Checkpoint(model).state_dict()["communication"]["shaped"] for model in (saved, loaded)]
    assert (name == "diloco") == bool(trees[0])
    for kind, tensors in trees[0].items():
        for parameter, value in tensors.items():
            assert full(value).any() or kind == "velocity", f"{name}: {kind} of {parameter}"
            assert torch.equal(full(value), full(trees[1][kind][parameter])), f"{name}: {kind} of {parameter}"


def follow_advice(model: Any, mesh: DeviceMesh, algorithm: str) -> None:
    """Wrap and train a model that was refused before, as the error says."""
    optimizer = momentum(model)
    wrapped(model, mesh, algorithm, optimizer)
    train(model, optimizer, range(2))
    commlib.synchronize(model)
    assert_replicas_alike(model, mesh, algorithm)
    commlib.unwrap(model)


@on_ranks(4)
def test_what_cannot_be_wrapped_is_refused() -> None:
    mesh = mesh_of(2, 2)
    model = fsdp(seeded(Net), mesh)
    with raises_on_every_rank(ConfigError, "first.weight", "DTensors", "process_group=mesh['replicate']"):
        commlib.wrap(model, "allreduce")
    with raises_on_every_rank(ConfigError, "DTensors", "'hogwild' runs without rounds"):
        wrapped(model, mesh, "hogwild", momentum(model))
    hybrid = seeded(Net)
    fully_shard(hybrid, mesh=mesh)
    with raises_on_every_rank(ConfigError, "DTensors", "several ranks of the group"):
        wrapped(hybrid, mesh, "allreduce", momentum(hybrid))
    follow_advice(model, mesh, "allreduce")


@on_ranks(4)
def test_what_would_go_wrong_unseen_is_refused() -> None:
    mesh = mesh_of(2, 2)
    crossed = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    model = fsdp(seeded(lambda: Net(32)), mesh)
    with raises_on_every_rank(ConfigError, "'first.weight'", "(0,) of (32, 8)", "(1,) of (32, 8)"):
        commlib.wrap(model, process_group=crossed[0 if dist.get_rank() in (0, 3) else 1])
    with raises_on_every_rank(ConfigError, "'first.weight'", "'auto'", "Name one algorithm"):
        wrapped(model, mesh, "auto", momentum(model))
    blocks = seeded(Net)
    fully_shard(blocks.first, mesh=mesh["shard"])
    with raises_on_every_rank(ConfigError, "'second.weight'", "are not sharded", "on the whole model"):
        wrapped(blocks, mesh, "allreduce", momentum(blocks))
    follow_advice(model, mesh, "allreduce")  # named, not chosen by "auto"
    follow_advice(fully_shard(blocks, mesh=mesh["shard"]), mesh, "allreduce")
    copies = tensor_parallel(seeded(lambda: Net(32)), mesh)
    with raises_on_every_rank(ConfigError, "'second.bias'", "'async_averaging'", "by the clock"):
        wrapped(copies, mesh, "async_averaging", momentum(copies))
    follow_advice(copies, mesh, "local_sgd")


@on_ranks(4)
def test_what_is_whole_and_unfrozen_later_is_refused() -> None:
    mesh = mesh_of(2, 2)
    model: Any = seeded(Net)
    model.third.requires_grad_(False)
    fully_shard(model, mesh=mesh["shard"], ignored_params=set(model.third.parameters()))
    optimizer = momentum(model)
    wrapped(model, mesh, "allreduce", optimizer)
    train(model, optimizer, range(2))
    model.third.requires_grad_(True)
    with raises_on_every_rank(ConfigError, "'third.weight'", "are not sharded"):
        train(model, optimizer, range(2, 3))


class Layers(nn.Module):
    """Some of its layers each rank of a tensor-parallel island has whole, and of some gradients a partial sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.first = nn.Linear(64, 32)
        self.second = nn.Linear(32, 64)
        self.whole = nn.Linear(64, 64)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.whole(self.second(torch.tanh(self.first(self.norm(inputs)))))


def sequence_parallel(model: Any, mesh: DeviceMesh) -> Any:
    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "first": ColwiseParallel(input_layouts=Shard(0)),
        "second": RowwiseParallel(),
    }
    return parallelize_module(model, mesh["shard"], plan)


def loss_of_layers(model: nn.Module, step: int, place: int) -> Tensor:
    inputs = torch.randn(6, 64, generator=torch.Generator().manual_seed(100 * step + place))
    return (model(inputs.to(next(model.parameters()).dtype)) - 0.5).square().mean()


@on_ranks(4)
def test_copies_of_a_part_in_an_island_stay_alike() -> None:
    """Whatever else is compressed, and however plans are made."""
    mesh = mesh_of(2, 2)
    for name in ("bytegrad", "qsgd", "topk", "low_precision_decentralized", "sparse_loco"):
        model = sequence_parallel(seeded(Layers), mesh)
        optimizer = optimizer_for(name, model)
        wrapped(model, mesh, settings(name), optimizer, bucket_cap_mb=None)
        for step in range(6):
            optimizer.zero_grad()
            loss_of_layers(model, step, dist.get_rank() // 2).backward()
            optimizer.step()
        own = {k: v.to_local() if hasattr(v, "to_local") else v for k, v in model.state_dict().items()}
        rows: list[Any] = [None, None]
        dist.all_gather_object(rows, own, group=mesh["shard"].get_group())
        copied = [key for key in own if key.startswith(("norm", "whole", "second.bias"))]
        different = [key for key in copied if not torch.equal(rows[0][key], rows[1][key])]
        assert len(copied) == 5, copied
        assert not different, f"{name}: {different}"
        commlib.unwrap(model)


@on_ranks(4)
def test_partial_sums_of_gradients_are_summed_before_an_algorithm_sees_them() -> None:
    """1-bit Adam adds each rank's momentum to its gradient: in full precision, an island is as one rank is."""
    mesh, group = mesh_of(2, 2), dist.new_group([0, 1])
    place = dist.get_rank() // 2
    algorithm = commlib.algorithms.OneBitAdam(warmup_steps=2, compress=lambda name, parameter: False)
    islands = sequence_parallel(seeded(Layers).double(), mesh)
    loss_of_layers(islands, 0, place).backward()
    assert any(placement.is_partial() for placement in islands.norm.weight.grad.placements)
    runs = [(islands, mesh["replicate"], place)]
    runs += [(seeded(Layers).double(), group, dist.get_rank())] if dist.get_rank() < 2 else []
    for model, process_group, own in runs:
        optimizer = optimizer_for("onebit_adam", model)
        commlib.wrap(model, algorithm, optimizer=optimizer, process_group=process_group)
        for step in range(6):
            optimizer.zero_grad()
            loss_of_layers(model, step, own).backward()
            optimizer.step()
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, [full(parameter).clone() for parameter in islands.parameters()])
    for model, _, own in runs[1:]:
        assert far(everyone[2 * own], model.parameters()) < 1e-12


class Normed(nn.Module):
    """The ranks of an island have different data, so also different buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.norm(self.first(inputs))


@on_ranks(4)
def test_each_rank_resumes_with_its_own_buffers() -> None:
    for mesh in (mesh_of(2, 2), mesh_of(1, 4)):
        runs = []
        for seed in (7, 99):
            model: Any = fully_shard(seeded(Normed, seed), mesh=mesh["shard"])
            optimizer = momentum(model)
            runs.append((wrapped(model, mesh, "allreduce", optimizer), optimizer))
        train(*runs[0], range(3))
        with folder() as path:
            save(*runs[0], path)
            load(*runs[1], path)
        pairs = list(zip(*[model.named_buffers() for model, _ in runs], strict=True))
        assert all(torch.equal(saved, loaded) for (_, saved), (_, loaded) in pairs), str(mesh)
        everyone: list[Any] = [None] * 4
        dist.all_gather_object(everyone, runs[0][0].norm.running_mean)
        assert not torch.equal(everyone[0], everyone[1])


class Shifted(nn.Module):
    """A layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [batch, 8] to [batch, 8]."""
        return self.layer(inputs) + self.shift


@on_ranks(4)
def test_buffers_that_are_dtensors() -> None:
    mesh = mesh_of(2, 2)
    model: Any = distribute_module(seeded(Shifted), mesh["shard"])
    model.shift.fill_(float(dist.get_rank() // 2))
    assert isinstance(model.shift, DTensor)
    optimizer = momentum(model)
    wrapped(model, mesh, "local_sgd", optimizer)
    assert not full(model.shift).any()
    model.eval()
    model.shift.fill_(float(dist.get_rank() // 2))
    inputs = DTensor.from_local(torch.ones(4, 8), mesh["shard"], [Replicate()])
    model(inputs).square().mean().backward()
    assert not full(commlib.checkpoint.consensus_state_dict(model)["shift"]).any()
    commlib.synchronize(model)
    assert not full(model.shift).any()


@on_ranks(4)
def test_a_mesh_of_the_same_shape_with_other_ranks_is_another_one() -> None:
    """Some ranks are then where they were, and others are not."""
    mesh = mesh_of(2, 2)
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))
    for name in ("local_sgd", "topk"):
        runs = []
        for seed, where in ((7, mesh), (99, other)):
            model = fsdp(seeded(Net, seed), where)
            optimizer = momentum(model)
            runs.append((wrapped(model, where, settings(name), optimizer), optimizer))
        train(*runs[0], range(3))
        with folder() as path:
            save(*runs[0], path)
            if name == "topk":
                with raises_on_every_rank(ConfigError, "another mesh"):
                    load(*runs[1], path)
            else:
                load(*runs[1], path)
                consensus = commlib.checkpoint.consensus_state_dict(runs[0][0])
                resumed = runs[1][0].state_dict()
                assert all(torch.equal(full(value), full(resumed[key])) for key, value in consensus.items())


@on_ranks(4)
def test_state_of_ranks_cannot_be_resharded_and_says_so() -> None:
    mesh, one = mesh_of(2, 2), mesh_of(1, 4)
    runs = []
    for where in (mesh, one):
        model = fsdp(seeded(Net), where)
        optimizer = momentum(model)
        runs.append((wrapped(model, where, settings("topk"), optimizer), optimizer))
    train(*runs[0], range(3))
    with folder() as path:
        save(*runs[0], path)
        with raises_on_every_rank(ConfigError, "another mesh", "'topk'", "differs between ranks"):
            load(*runs[1], path)


@on_ranks(4)
def test_compressed_averages_are_within_the_bound_of_the_codec() -> None:
    mesh = mesh_of(2, 2)
    pair = Pair(mesh, fsdp(seeded(Net), mesh), 4, algorithm="bytegrad")
    assert pair.step(0) < 2 / 127
    exact = Pair(mesh, fsdp(seeded(Net), mesh), 4, algorithm=commlib.algorithms.TopK(ratio=1.0))
    assert exact.step(0) < 1e-5


class Flagged(commlib.algorithms.AllReduce):
    """Says when its first bucket is communicated."""

    begun: ClassVar[threading.Event] = threading.Event()

    def communicate(self, bucket: Any, comm: Any) -> Any:
        self.begun.set()
        yield from super().communicate(bucket, comm)


@on_ranks(4)
def test_buckets_leave_while_backward_runs() -> None:
    mesh = mesh_of(2, 2)
    pair = Pair(mesh, fsdp(seeded(Net), mesh), 4, algorithm=Flagged())
    pair.step(0)
    Flagged.begun.clear()
    left: list[bool] = []

    def wait(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda grad: left.append(Flagged.begun.wait(60)))

    pair.model.first.register_forward_hook(wait)
    assert pair.step(1) < 1e-5
    assert left == [True]  # before the first layer's backward, which is the last


@on_ranks(4)
def test_unwrap_leaves_a_sharded_model() -> None:
    mesh = mesh_of(2, 2)
    model = fsdp(seeded(Net), mesh)
    its_class, optimizer = type(model), momentum(model)
    wrapped(model, mesh, "allreduce", optimizer)
    train(model, optimizer, range(2))
    commlib.unwrap(model)
    assert type(model) is its_class
    train(model, optimizer, range(2, 4))
    with pytest.raises(AssertionError):
        assert_replicas_alike(model, mesh, "islands train by themselves now")


def train_islands_until_killed() -> None:
    """Rank 1 is killed between two rounds; the other island trains on to the next one."""
    rank = default_group_from_env(timeout_s=LONG_S)
    mesh = mesh_of(2, 2)
    model = fsdp(seeded(Net), mesh)
    optimizer = momentum(model)
    wrapped(model, mesh, commlib.algorithms.LocalSGD(period=4), optimizer, timeout=LONG_S)
    for step in range(50):
        if step == 5 and rank < 2:
            tell("trained")
            await_told("trained", [1 - rank])
            die() if rank == 1 else await_told("failed", [3])
        try:
            train(model, optimizer, range(step, step + 1))
        except CommlibError as error:
            report_error(error)
            tell("failed")
            raise


def test_a_rank_that_is_killed_in_another_island_is_named() -> None:
    check(train_islands_until_killed, 4, speakers=(3,))


@on_ranks(4)
def test_native_hsdp_makes_the_same_gradients() -> None:
    mesh = mesh_of(2, 2)
    ours = fsdp(seeded(Net).double(), mesh)
    wrapped(ours, mesh, "allreduce", momentum(ours))
    torchs = seeded(Net).double()
    for layer in (torchs.first, torchs.second):
        fully_shard(layer, mesh=mesh)
    fully_shard(torchs, mesh=mesh)
    for step in range(3):
        for model in (ours, torchs):
            model.zero_grad()
            loss(model, step, dist.get_rank()).backward()
        expected = [full(parameter.grad) for parameter in torchs.parameters()]
        assert far([parameter.grad for parameter in ours.parameters()], expected) < 1e-10


@on_ranks(4)
def test_an_optimizer_that_steps_in_hooks_on_sharded_parameters_is_refused() -> None:
    mesh = mesh_of(2, 2)
    model = fsdp(seeded(Net), mesh)
    optimizers = {parameter: torch.optim.SGD([parameter], 0.1) for parameter in model.parameters()}
    wrapped(model, mesh, "allreduce", None)

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    with raises_on_every_rank(ConfigError, "inside of backward"):
        loss(model, 0, dist.get_rank()).backward()


@on_ranks(4)
def test_a_divide_factor_of_gradients_is_for_sums_over_all_ranks() -> None:
    mesh = mesh_of(2, 2)
    torchs = seeded(Net).double()
    for module in (torchs.first, torchs.second, torchs):
        fully_shard(module, mesh=mesh)
    models = [fsdp(seeded(Net).double(), mesh) for _ in range(2)]
    for model in (torchs, *models):
        for module in (model.first, model.second, model):
            module.set_force_sum_reduction_for_comms(True)
            if module is not models[0].second:
                module.set_gradient_divide_factor(1.0)
    with raises_on_every_rank(ConfigError, "some modules"):
        wrapped(models[0], mesh, AllReduce(op="sum"), momentum(models[0]))
    models[0].second.set_gradient_divide_factor(1.0)
    with raises_on_every_rank(ConfigError, "set_gradient_divide_factor(1)", "op='sum'"):
        wrapped(models[0], mesh, "allreduce", momentum(models[0]))
    wrapped(models[1], mesh, AllReduce(op="sum"), momentum(models[1]))  # as the message says
    for model in (torchs, models[1]):
        loss(model, 0, dist.get_rank()).backward()
    expected = [full(parameter.grad) for parameter in torchs.parameters()]
    assert far([parameter.grad for parameter in models[1].parameters()], expected) < 1e-10


@on_ranks(4)
@pytest.mark.parametrize("algorithm", ["allreduce", "local_sgd"])
def test_parameters_that_are_resharded_in_part_after_a_forward(algorithm: str) -> None:
    mesh = mesh_of(1, 4)
    model = fsdp(seeded(Net), mesh, reshard_after_forward=2)
    optimizer = momentum(model)
    wrapped(model, mesh, algorithm, optimizer)
    reference = Pair(mesh, fsdp(seeded(Net), mesh), 4)
    for step in range(3):
        optimizer.zero_grad()
        loss(model, 10 * step, dist.get_rank()).backward()
        optimizer.step()
        with torch.no_grad():
            loss(model, 99, dist.get_rank())
        reference.step(step)
    for module in (model.first, model.second, model):
        module.reshard()
    assert far(model.parameters(), list(map(full, reference.model.parameters()))) == 0


class _Moved(torch.autograd.Function):
    """What `move` makes of rows, over a group; `back` is its transpose."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any, move: Any, back: Any) -> Tensor:
        ctx.group, ctx.back = group, back
        return move(rows, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return ctx.back(gradient, ctx.group), None, None, None


def gather(rows: Tensor, group: Any) -> Tensor:
    everyones = [torch.empty_like(rows) for _ in range(group.size())]
    dist.all_gather(everyones, rows.contiguous(), group=group)
    return torch.cat(everyones)


def scatter(rows: Tensor, group: Any) -> Tensor:
    total = rows.clone()
    dist.all_reduce(total, group=group)
    return total.chunk(group.size())[group.rank()].clone()


class Experts(nn.Module):
    """A mixture of experts, each token's by the gate; with a mesh each rank has some of them and sees all tokens."""

    def __init__(self, count: int = 6, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.gate = nn.Linear(width, count)
        self.experts = nn.Parameter(torch.randn(count, width, width) / 4)
        self.last = nn.Linear(width, 1)
        self.mesh: DeviceMesh | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        shares = torch.softmax(self.gate(hidden), dim=-1)
        if self.mesh is None:
            return self.last(hidden + self._mixed(hidden, shares, self.experts))
        group = self.mesh.get_group()
        own = _Moved.apply(shares, group, gather, scatter).tensor_split(group.size(), dim=1)[group.rank()]
        everyones = _Moved.apply(hidden, group, gather, scatter)
        mixed = self._mixed(everyones, own, self.experts.to_local())  # type: ignore[attr-defined]
        return self.last(hidden + _Moved.apply(mixed, group, scatter, gather))

    @staticmethod
    def _mixed(hidden: Tensor, shares: Tensor, experts: Tensor) -> Tensor:
        return torch.einsum("te,tef->tf", shares, torch.tanh(torch.einsum("td,edf->tef", hidden, experts)))

    def spread(self, mesh: DeviceMesh) -> Experts:
        """Give each rank of a mesh its part of the experts, with the mean of gradients; FSDP2 shards the rest."""
        self.mesh = mesh
        self.experts = nn.Parameter(distribute_tensor(self.experts.data, mesh, [Shard(0)]))
        self.experts.register_hook(lambda gradient: gradient / mesh.size())
        return fully_shard(self, mesh=mesh, ignored_params={self.experts})  # type: ignore[return-value]


@on_ranks(4)
def test_expert_parallelism_beside_fsdp() -> None:
    """Experts are spread over an island, and averaged with the same experts of the other one."""
    mesh = mesh_of(2, 2)
    model, reference = seeded(Experts).double().spread(mesh["shard"]), seeded(Experts).double()
    optimizers = [momentum(model), momentum(reference)]
    wrapped(model, mesh, "allreduce", optimizers[0])
    for step in range(20):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(model, step, dist.get_rank()).backward()
        for place in range(4):
            (loss(reference, step, place) / 4).backward()
        assert far([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()]) < 1e-10
        for optimizer in optimizers:
            optimizer.step()
    assert far(model.parameters(), reference.parameters()) < 1e-10


@on_ranks(4)
def test_a_gradient_scaler_skips_a_step_on_all_ranks() -> None:
    """Each island looks at its gradients; one that is not finite has reached all by the average."""
    mesh = mesh_of(2, 2)
    model = fsdp(seeded(Net), mesh)
    optimizer = momentum(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    wrapped(model, mesh, settings("topk"), optimizer, scaler=scaler)
    for step in range(6):
        before = [full(parameter).clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        value = loss(model, step, dist.get_rank())
        scale = float("inf") if step == 3 and dist.get_rank() == 2 else 1.0
        scaler.scale(value * scale).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(full(p), b) for p, b in zip(model.parameters(), before, strict=True))
        assert moved is (step != 3), f"step {step}"
        assert_replicas_alike(model, mesh, f"step {step}")
