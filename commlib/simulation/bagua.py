"""BAGUA 0.9 and its competitors as they were measured, with the figures that BAGUA's authors published.

These systems exist only in the simulator. They are not commlib's algorithms but reproduce the released code, so that
the simulator can be compared with measurements by others on 128 V100s.

[Note: BAGUA as it was run] Buckets of 10 MiB have a fixed order, and every operation ends with a host synchronisation.
All communication except a plain all-reduce crosses nodes through one GPU per node: the tensors of the node's other GPUs
are reduced to it, and it broadcasts the result. The codec does not overlap with the computation. The figures imply two
more properties. ByteGrad at 8 Gbit/s has no time to spare beyond the transfer of its bytes, so the codec of a bucket
overlaps with the transfer of the previous bucket. Decentralized averaging is pairwise, at the end of a step and not
overlapped: an all-reduce of the weights would move more bytes than 8 Gbit/s carry, and overlapped pairs would take a
quarter to a half less than each of the three figures.

The figures with 5 ms of latency imply two more properties. An all-gather takes about log2 p sequential messages: the 15
messages of a ring would take 5.4 s, but whole steps took 1.9 and 4.0 s. The messages of an all-to-all leave one after
the other through one window: ByteGrad took 2.1 s longer than 1-bit QAdam, for 0.26 GB more.

The fit has one parameter per transport: the maximum rate that it reaches of 100 Gbit/s (`CEILINGS_GBPS`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from typing_extensions import override

from commlib.algorithms.allreduce import AllReduce
from commlib.algorithms.base import Algorithm
from commlib.algorithms.channels import Gradients, Weights
from commlib.algorithms.context import BucketView, Context
from commlib.codecs.base import BlockCodec
from commlib.codecs.floats import OneBit
from commlib.codecs.integer import UInt8Bagua, UInt8MinMax
from commlib.errors import ConfigError
from commlib.network import presets, workloads
from commlib.network.model import Device, Network, Workload
from commlib.primitives.low_precision import LowPrecisionWorkspace, centralized_low_precision
from commlib.simulation.collectives import TransportProfile
from commlib.simulation.simulator import Options, Result, simulate
from commlib.transport.base import Communication, Communicator

#: The fit: maximum Gbit/s of a transport between two nodes with a 100 Gbit/s adapter.
CEILINGS_GBPS = {
    "nccl-tcp": 23.0,  # DDP, Horovod; NVIDIA/nccl issue 450 measured 32 to 48 with tuned settings on 4 such servers
    "bagua-net": 38.0,  # BAGUA's plug-in, whose authors state 1.5 times NCCL's rate
    "ps-lite": 19.6,  # BytePS
}

#: Delay after an operation until the host knows that it has ended.
_HOST_SYNC_US = 20.0
#: Read rate of one thread block: 256 loads of 16 bytes in flight, which take about 1.6 us including processing.
_BLOCK_GBYTES_S = 2.5


class _ThroughLeaders(Algorithm):
    """Reduces a bucket to one rank per node, combines it across nodes, and broadcasts the result within each node."""

    channel = Gradients(hierarchical=True, window=2)

    @override
    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        assert comm.nodes is not None
        local = comm.nodes.local
        yield local.broadcast(bucket.flat)  # in place of the reduction, which takes the same time
        yield from self._across_nodes(bucket, comm.nodes.across)
        yield local.broadcast(bucket.flat)

    def _across_nodes(self, bucket: BucketView, across: Communicator) -> Communication:
        yield across.all_reduce(bucket.flat)


class BytePS(_ThroughLeaders):
    """Parameter servers on the same machines: each node pushes chunks to the other nodes and pulls the sums."""

    def __init__(self) -> None:
        self._buffers: dict[int, torch.Tensor] = {}

    @override
    def setup(self, context: Context) -> None:
        assert context.comm.nodes is not None
        size = context.comm.nodes.across.world_size
        self._buffers = {
            bucket.index: bucket.flat.new_empty(2, -(-bucket.flat.numel() // size) * size) for bucket in context.buckets
        }

    @override
    def _across_nodes(self, bucket: BucketView, across: Communicator) -> Communication:
        sent, received = self._buffers[bucket.index]
        yield across.all_to_all(received, sent)
        yield across.all_gather(sent, received[: sent.numel() // across.world_size])


class ByteGrad(_ThroughLeaders):
    """BAGUA's ByteGrad: gradients in 8 bits, quantized before and after the sum."""

    def __init__(self, codec: BlockCodec | None = None) -> None:
        self._codec = codec or UInt8Bagua()
        self._workspaces: dict[int, LowPrecisionWorkspace] = {}

    @override
    def setup(self, context: Context) -> None:
        assert context.comm.nodes is not None
        across = context.comm.nodes.across
        self._workspaces = {
            bucket.index: LowPrecisionWorkspace(
                bucket.flat.numel(), context.device, self._codec, across, feedback=False
            )
            for bucket in context.buckets
        }

    @override
    def _across_nodes(self, bucket: BucketView, across: Communicator) -> Communication:
        yield from centralized_low_precision(bucket.flat, self._workspaces[bucket.index], across)


class QAdam(ByteGrad):
    """BAGUA's QAdam after its warm-up: communicates the momentum instead of the gradients."""

    def __init__(self, codec: BlockCodec | None = None) -> None:
        super().__init__(codec)
        self._momenta: dict[int, torch.Tensor] = {}

    @override
    def setup(self, context: Context) -> None:
        super().setup(context)
        self._momenta = {bucket.index: torch.empty_like(bucket.flat) for bucket in context.buckets}

    @override
    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        momentum = self._momenta[bucket.index]
        bucket.flat.mul_(0.1).add_(momentum, alpha=0.9)
        yield from super().communicate(bucket, comm)
        momentum.copy_(bucket.flat)


class Decentralized(_ThroughLeaders):
    """BAGUA's "shift_one": averages the weights with those of one other node."""

    channel = Weights(hierarchical=True)

    def __init__(self) -> None:
        self._peers: dict[int, torch.Tensor] = {}

    @override
    def setup(self, context: Context) -> None:
        self._peers = {bucket.index: torch.empty_like(bucket.flat) for bucket in context.buckets}

    @override
    def _across_nodes(self, bucket: BucketView, across: Communicator) -> Communication:
        peer = self._peers[bucket.index]
        other = across.rank ^ 1
        yield across.exchange([(other, bucket.flat)], [(other, peer)])
        bucket.flat.add_(peer).mul_(0.5)


class LowPrecisionDecentralized(_ThroughLeaders):
    """BAGUA's low-precision ring: sends the weight change in 8 bits to both neighbours and keeps their replicas."""

    channel = Weights(hierarchical=True)

    def __init__(self) -> None:
        self._codec = UInt8MinMax()  # one scale per bucket: a reduction by the whole device
        self._replicas: dict[int, list[torch.Tensor]] = {}
        self._payloads: dict[int, list[torch.Tensor]] = {}

    @override
    def setup(self, context: Context) -> None:
        codec = self._codec
        self._replicas = {b.index: [torch.empty_like(b.flat) for _ in range(4)] for b in context.buckets}
        self._payloads = {
            b.index: [b.flat.new_empty(codec.payload_bytes(b.flat.numel()), dtype=torch.uint8) for _ in range(3)]
            for b in context.buckets
        }

    @override
    def _across_nodes(self, bucket: BucketView, across: Communicator) -> Communication:
        own, left, right, change = self._replicas[bucket.index]
        sent, *received = self._payloads[bucket.index]
        neighbours = [(across.rank + step) % across.world_size for step in (-1, 1)]
        change.copy_(bucket.flat).add_(left, alpha=1 / 3).add_(right, alpha=1 / 3).add_(own, alpha=-5 / 3)
        self._codec.encode(change, sent)
        yield across.exchange([(rank, sent) for rank in neighbours], list(zip(neighbours, received, strict=True)))
        for payload, replica in zip(received, (left, right), strict=True):
            self._codec.decode_add(payload, replica)
        self._codec.decode_add(sent, own)
        bucket.flat.copy_(own)


class Async(_ThroughLeaders):
    """BAGUA's async: averages weights in the background. A round begins half a second after the previous one has ended.

    Args:
        step_s: Seconds of a step, to convert that half second to steps.
    """

    def __init__(self, step_s: float) -> None:
        self.channel = Weights(hierarchical=True, asynchronous=True, period=1 + math.ceil(0.5 / step_s))


@dataclass(frozen=True)
class System:
    """A system with the settings of its published runs.

    Attributes:
        algorithm: Creates the algorithm for a workload.
        transport: A key of `CEILINGS_GBPS`.
        bucket_cap_mb: Size of a bucket, MiB.
        optimizer: Optimizer of the workload; None keeps the workload's own.
        overlaps: Whether communication overlaps with backward.
        passes: Bytes that a node sends per step, as a multiple of the parameters' bytes.
    """

    algorithm: Callable[[Workload], Algorithm]
    transport: str
    bucket_cap_mb: float = 10.0
    optimizer: str | None = None
    overlaps: bool = True
    passes: float = 2 * 15 / 16


#: A bucket size, MiB, that yields a single bucket, as BAGUA has for weights.
_ONE = 1e6

SYSTEMS: Mapping[str, System] = {
    "byteps": System(lambda _: BytePS(), "ps-lite", bucket_cap_mb=4.0),
    "ddp": System(lambda _: AllReduce(), "nccl-tcp", bucket_cap_mb=25.0, passes=2 * 127 / 128),
    "horovod": System(lambda _: AllReduce(), "nccl-tcp", bucket_cap_mb=64.0, passes=2 * 127 / 128),
    "allreduce": System(lambda _: AllReduce(), "bagua-net", passes=2 * 127 / 128),
    "decentralized": System(lambda _: Decentralized(), "bagua-net", _ONE, overlaps=False, passes=1.0),
    "low_precision_decentralized": System(
        lambda _: LowPrecisionDecentralized(), "bagua-net", _ONE, overlaps=False, passes=2 / 4
    ),
    "qadam": System(lambda _: QAdam(), "bagua-net", optimizer="adam", passes=2 * 15 / 16 / 4),
    "qadam_1bit": System(lambda _: QAdam(OneBit()), "bagua-net", optimizer="adam", passes=2 * 15 / 16 / 32),
    "bytegrad": System(lambda _: ByteGrad(), "bagua-net", passes=2 * 15 / 16 / 4),
    "async": System(lambda trained: Async(trained.step_s), "bagua-net", _ONE, passes=0.0),
}


@dataclass(frozen=True)
class PublishedFigure:
    """A published figure.

    Attributes:
        workload: "vgg16" or "bert-large".
        bandwidth_gbps: Rate of a server's adapter.
        system: A key of `SYSTEMS`.
        value: Samples per second over all ranks ("vgg16") or seconds per epoch ("bert-large"), read off a plot to 3 %.
        added_latency_us: Latency that traffic control added to a server's outgoing packets.
    """

    workload: str
    bandwidth_gbps: float
    system: str
    value: float
    added_latency_us: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds per step that the figure implies."""
        if self.workload == "vgg16":
            return _NUM_RANKS * 32 / self.value
        return self.value * _NUM_RANKS * 6 / 88_000


_NUM_RANKS = 128

#: Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations" (VLDB 2021), and the project's benchmark
#: page (tutorials.baguasys.com/benchmark): 16 servers with 8 V100s each.
PUBLISHED: tuple[PublishedFigure, ...] = (
    *(
        PublishedFigure("vgg16", 100.0, system, samples_per_s)
        for system, samples_per_s in {
            "byteps": 8571,
            "ddp": 8882,
            "horovod": 9689,
            "allreduce": 12298,
            "decentralized": 13665,
            "low_precision_decentralized": 15901,
            "qadam": 18882,
            "bytegrad": 21801,
            "async": 28882,
        }.items()
    ),
    *(
        PublishedFigure("bert-large", bandwidth_gbps, system, epoch_s)
        for system, both in {
            "ddp": (320, 125),
            "bytegrad": (90, 86),
            "qadam_1bit": (68, 68),
            "decentralized": (199, 83),
            "low_precision_decentralized": (90, 75),
            "async": (62, 61),
        }.items()
        for bandwidth_gbps, epoch_s in zip((8.0, 100.0), both, strict=True)
    ),
)

#: Figures of the same sources with added latency.
PUBLISHED_WITH_LATENCY: tuple[PublishedFigure, ...] = tuple(
    PublishedFigure("bert-large", 100.0, system, epoch_s, added_latency_us=5000.0)
    for system, epoch_s in {
        "ddp": 903,
        "bytegrad": 461,
        "qadam_1bit": 217,
        "decentralized": 411,
        "low_precision_decentralized": 156,
        "async": 61,
    }.items()
)

#: Relative error of a figure that was read off a plot.
READING_ERROR = 0.03


def workload(name: str) -> Workload:
    """Return the trained model: VGG-16, or BERT-large's encoder (302.3 million parameters, as the paper counts)."""
    if name == "vgg16":
        return workloads.get(name)
    if name != "bert-large":
        raise ConfigError(f"bagua: expected 'vgg16' or 'bert-large', got {name!r}")
    whole = workloads.get(name)
    return dataclasses.replace(whole, layers=tuple(layer for layer in whole.layers if layer.name.startswith("encoder")))


def device(nodes: int = 16) -> Device:
    """Return a V100 with BAGUA's codec.

    The codec finds the minimum and the maximum of each chunk in one thread block (two reads; a third encodes). The
    number of blocks that read at once is the number of nodes; for the sum of the rank's own chunk, it is one.
    """
    copy = presets.device("v100").memory_gbytes_s
    search_ns = 2 * 4 / (nodes * _BLOCK_GBYTES_S)  # per element of the bucket, in either stage
    fractions = {"encode": 5 / copy / (search_ns + 5 / copy), "encode_sum": (1 + 1 / nodes) / copy / search_ns}
    codecs = (UInt8Bagua.name, OneBit.name)
    slow = {f"{codec}.{kernel}": fraction for codec in codecs for kernel, fraction in fractions.items()}
    return presets.device("v100", codec_fractions={**slow, "": 0.85}, contention=1.0)


def network(system: str, bandwidth_gbps: float, latency_us: float | None = None) -> Network:
    """Return the servers and their network, limited to the rate of a system's transport."""
    ceiling_gbps = CEILINGS_GBPS[SYSTEMS[system].transport]
    return presets.network("100gbps", bandwidth_gbps=bandwidth_gbps, latency_us=latency_us, ceiling_gbps=ceiling_gbps)


def profile(system: str) -> TransportProfile:
    """Return how a system executes its collectives."""
    if SYSTEMS[system].transport == "nccl-tcp":
        return TransportProfile("nccl-tcp", connections=2, op_us=10.0)
    return TransportProfile(
        "bagua_v0_9",
        all_gather=("doubling",),
        all_to_all=("sequential",),
        op_us=_HOST_SYNC_US,
        leaders_only=True,
    )


def predict_figure(figure: PublishedFigure) -> Result:
    """Simulate the run of a published figure."""
    latency_us = presets.network("100gbps").latency_us + figure.added_latency_us
    return predict(figure.system, figure.workload, figure.bandwidth_gbps, latency_us)


def predict(system: str, workload_name: str, bandwidth_gbps: float, latency_us: float | None = None) -> Result:
    """Simulate a system with the settings of its published runs.

    Args:
        system: A key of `SYSTEMS`.
        workload_name: "vgg16" or "bert-large".
        bandwidth_gbps: Rate of a server's adapter.
        latency_us: Latency between two servers; None uses the preset's.
    """
    if system not in SYSTEMS:
        raise ConfigError(f"bagua: expected one of {', '.join(SYSTEMS)}, got {system!r}")
    setting = SYSTEMS[system]
    trained = workload(workload_name)
    if setting.optimizer:
        trained = workloads.with_optimizer(trained, setting.optimizer)
    options = Options(steps=8, bucket_cap_mb=setting.bucket_cap_mb, transport=profile(system))
    return simulate(trained, network(system, bandwidth_gbps, latency_us), device(), setting.algorithm(trained), options)


def least_step_s(system: str, workload_name: str, bandwidth_gbps: float) -> float:
    """Return a lower bound of the seconds per step, with the adapter carrying the system's bytes at full line rate."""
    setting, trained = SYSTEMS[system], workload(workload_name)
    wire_s = setting.passes * trained.nbytes / (bandwidth_gbps * 1e9 / 8)
    if not setting.overlaps:
        return trained.step_s + wire_s
    return trained.forward_s + max(trained.backward_s, wire_s) + trained.optimizer_s


def impossible() -> list[PublishedFigure]:
    """Return the published figures that move more bytes than the link can carry, beyond the reading error."""
    return [
        cell
        for cell in PUBLISHED
        if cell.step_s * (1 + READING_ERROR) < least_step_s(cell.system, cell.workload, cell.bandwidth_gbps)
    ]
