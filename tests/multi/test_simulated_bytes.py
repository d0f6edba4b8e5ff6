"""The simulator counts the bytes that real ranks send."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import commlib
from commlib import algorithms
from commlib.network.model import Device, Layer, Network, Workload
from commlib.optim import FrozenVarianceAdam
from commlib.replica import replica_of
from commlib.simulation.sharded import Sharding
from commlib.simulation.simulator import simulate
from commlib.simulation.training import Options
from tests.multi.common import Mlp
from tests.multi.pool import on_ranks

#: One bucket holds everything, so that both have the same buckets, whatever became ready when.
CAP_MB = 100.0
WIDTH = 64

VARIANTS: dict[str, Callable[[], algorithms.Algorithm]] = {
    "topk with EF21": lambda: algorithms.TopK(ef21=0.5),
    "randomk with EF21": lambda: algorithms.RandomK(ef21=0.5),
    "ef_quantized with EF21": lambda: algorithms.EFQuantized(ef21=0.5),
    "diloco, top-k": lambda: algorithms.DiLoCo(period=2, codec="topk"),
    "diloco, top-k of blocks": lambda: algorithms.DiLoCo(period=2, codec="blocktopk"),
    "streaming_diloco, top-k": lambda: algorithms.StreamingDiLoCo(2, fragments=1, delay=0, codec="topk"),
}


def make(name: str) -> algorithms.Algorithm:
    """Return an algorithm whose steps after the first few are identical."""
    if name in VARIANTS:
        return VARIANTS[name]()
    cls = algorithms.get(name)
    options = {"diloco": {"period": 2}, "decentralized": {"overlap": False}}
    options |= {"local_sgd": {"period": 2}, "post_local_sgd": {"period": 2, "warmup_steps": 1}}
    options |= {"onebit_adam": {"warmup_steps": 1}, "qadam": {"warmup_steps": 1}, "gossip": {"period": 1}}
    options |= {"noloco": {"period": 2}, "sparse_loco": {"period": 2}, "zero_one_adam": {"warmup_steps": 1}}
    options |= {"hierarchical_local_sgd": {"period": 2, "global_every": 1}}
    return cls(**options.get(name, {}))


def simulated_bytes(algorithm: algorithms.Algorithm, num_steps: int) -> float:
    layers = tuple(
        Layer(f"layer{idx}", ((name, tuple(param.shape)),), 1.0)
        for idx, (name, param) in enumerate(Mlp(WIDTH).named_parameters())
    )
    workload = Workload("mlp", layers, 1, 0.001, 0.002)
    device = Device("any", 10.0, {"fp32": 0.1})
    network = Network("ranks", nodes=dist.get_world_size())
    options = Options(steps=num_steps, bucket_cap_mb=CAP_MB)
    result = simulate(workload, network, device, algorithm, options)
    return result.wire_bytes * num_steps


@on_ranks(2, 3)
def test_simulated_bytes_are_those_of_real_ranks() -> None:
    num_checked = 0
    for name in [*algorithms.list(), *VARIANTS]:
        if name == "auto":  # which measures the network, and becomes one of the others
            continue
        algorithm = make(name)
        channel = algorithm.channel
        if not channel.has_rounds or getattr(channel, "in_background", False):
            continue  # their traffic at the end of a step depends on timing
        if getattr(channel, "varies", False) and dist.get_world_size() % 2:
            continue  # one of the ranks rests, each time another one
        torch.manual_seed(0)
        model = Mlp(WIDTH)
        optimizer = FrozenVarianceAdam(model.parameters()) if algorithm.optimizer_type else None
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
        commlib.wrap(model, algorithm, optimizer=optimizer, bucket_cap_mb=CAP_MB)
        cycle = channel.cycle
        sent = []
        for step in range(channel.warmup_steps + 3 * cycle + 1):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            if (step + 1 - channel.warmup_steps) % cycle == 0 and step >= channel.warmup_steps:
                sent.append(sum(channel.bytes_sent for channel in replica_of(model).engine.channels))
        commlib.synchronize(model)
        commlib.unwrap(model)
        expected = simulated_bytes(algorithm, cycle)
        assert abs(sent[-1] - sent[-2] - expected) < 1e-3, f"{name}: sent {sent}, simulated {expected}"
        num_checked += 1
    assert num_checked >= 10 + len(VARIANTS)


class Blocks(torch.nn.Module):
    """A model with blocks, a root module, and parameters in full precision."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(WIDTH, WIDTH)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH + idx // 2) for idx in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = block(hidden[:, :WIDTH])
        return hidden


@on_ranks(2, 3)
def test_simulated_bytes_of_shards_are_those_of_real_ranks() -> None:
    world_size = dist.get_world_size()
    shapes = [(name, tuple(param.shape)) for name, param in Blocks().named_parameters()]
    layers = tuple(Layer(name.rpartition(".")[0], ((name.rpartition(".")[2], shape),), 1.0) for name, shape in shapes)
    workload = Workload("blocks", layers, 1, 0.001, 0.002)
    device = Device("host", 10.0, {"fp32": 0.1}, shares_compute=True)
    for weights, gradients, reshards, difference in (
        ("fp32", "fp32", True, False),
        ("int8", "int4", True, False),
        ("int8", "bf16", False, False),
        ("int4", "int8", True, True),
    ):
        torch.manual_seed(0)
        model = Blocks()
        for module in (*model.blocks, model):
            fully_shard(module, reshard_after_forward=None if reshards else False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        commlib.shard(model, weights, gradients, difference=difference, optimizer=optimizer)
        sent = []
        for _ in range(3):
            model(torch.randn(4, WIDTH)).square().mean().backward()
            optimizer.step()
            stats = commlib.stats(model).shard
            assert stats is not None
            sent.append(stats.gathered_bytes + stats.reduced_bytes)
        commlib.unwrap(model)
        sharding = Sharding(world_size, weights, gradients, difference, reshards)
        network = Network("ranks", nodes=world_size)
        expected = simulate(workload, network, device, "allreduce", Options(steps=1, sharding=sharding)).wire_bytes
        assert sent[2] - sent[1] == expected, (weights, gradients, reshards, difference, sent, expected)
