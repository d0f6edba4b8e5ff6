"""The inputs of a simulation as plain data: a network, a device and a workload.

Names end with units: `_s` seconds, `_us` microseconds, `_gbps` 10^9 bits per second, `_gbytes_s` 10^9 bytes per second.
Every object cites the source of its figures (`source`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from commlib.errors import ConfigError

#: The supported dtypes of a workload, by their name in files and on the command line.
DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
}

#: Linux's default for the largest send buffer of a socket (`net.ipv4.tcp_wmem`), MiB.
WINDOW_MB = 4.0


@dataclass(frozen=True)
class Network:
    """Identical nodes around a non-blocking switch.

    Attributes:
        name: Name of the network.
        nodes: Number of nodes.
        gpus_per_node: Number of ranks per node.
        bandwidth_gbps: Full-duplex rate of a node's network adapter; its ranks share it.
        latency_us: Time of an empty message between two nodes.
        intra_gbps: Full-duplex rate of each rank to the other ranks of its node.
        intra_latency_us: Time of an empty message between two ranks of a node.
        efficiency: Fraction of `bandwidth_gbps` that the transport reaches with large messages, above 0 and at most 1.
        ceiling_gbps: Maximum rate of the transport, whatever the adapter's rate. The processor limits TCP.
        window_mb: Maximum data in flight on a connection between nodes, MiB. For TCP, the sender's largest buffer.
        source: Source of the figures.
        device: Name of the device of the machines that the source describes; "" if there is no such device.
    """

    name: str
    nodes: int
    gpus_per_node: int = 1
    bandwidth_gbps: float = 10.0
    latency_us: float = 25.0
    intra_gbps: float = 1000.0
    intra_latency_us: float = 5.0
    efficiency: float = 1.0
    ceiling_gbps: float = math.inf
    window_mb: float = WINDOW_MB
    source: str = ""
    device: str = ""

    def __post_init__(self) -> None:
        _check_counts(self, "nodes", "gpus_per_node")
        _check_numbers(self, "bandwidth_gbps", "intra_gbps", "efficiency", above_zero=True)
        _check_numbers(self, "latency_us", "intra_latency_us")
        if self.efficiency > 1:
            raise ConfigError(f"Network.efficiency: expected at most 1, got {self.efficiency!r}")
        for name in ("ceiling_gbps", "window_mb"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"Network.{name}: expected a number above 0, got {getattr(self, name)!r}")

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.nodes * self.gpus_per_node

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second that a node's adapter delivers in each direction."""
        return min(self.bandwidth_gbps * self.efficiency, self.ceiling_gbps) * 1e9 / 8

    @property
    def connection_bytes_per_s(self) -> float:
        """Bytes per second of a connection between nodes: one window per round trip."""
        return math.inf if self.latency_us == 0 else self.window_mb * 2**20 / (2e-6 * self.latency_us)

    @property
    def intra_bytes_per_s(self) -> float:
        """Bytes per second from a rank to the other ranks of its node."""
        return self.intra_gbps * 1e9 / 8


@dataclass(frozen=True)
class Device:
    """The device of one rank, with the cost of local work.

    An operation costs its launch plus the longer of its memory traffic and its arithmetic. A codec kernel costs its
    launch plus its memory traffic at a fraction of the copy rate.

    On a processor that also runs the collectives (`shares_compute`), sending takes processor time, and all ranks of a
    machine share its cores. A rank has `cores / ranks_per_machine` cores, which its computation and communication
    threads divide evenly. The times of a workload then hold while all ranks compute at once.

    Attributes:
        name: Name of the device.
        memory_gbytes_s: Rate of a large copy, reads and writes together.
        tflops: Rate of large matrix products, 10^12 floating-point operations per second, by dtype ("fp32", "bf16",
            ...). Must contain "fp32", which also applies to absent dtypes.
        launch_us: Launch time of an operation or kernel.
        codec_fractions: Fraction of `memory_gbytes_s` that a codec kernel reaches, by "<codec>.<kernel>", by "<codec>",
            by "<kernel>" (docs/explanation/simulator.md lists them), or "" for all others.
        contention: Seconds that the computation loses per second of concurrent local communication work (0: none, 1:
            all, so that they do not overlap). Ignored with `shares_compute`.
        shares_compute: Whether collectives run on the processor that computes.
        cpu_s_per_byte: Processor seconds of a rank per byte sent, including the byte received at the same time.
        cpu_s_per_message: Processor seconds of a rank per message sent.
        cores: Number of cores of the machine.
        ranks_per_machine: Number of ranks that share the cores.
        source: Source of the figures.
        memory_gbytes: Size of the memory of a rank, 10^9 bytes.
    """

    name: str
    memory_gbytes_s: float
    tflops: Mapping[str, float]
    launch_us: float = 0.0
    codec_fractions: Mapping[str, float] = field(default_factory=lambda: {"": 1.0})
    contention: float = 0.0
    shares_compute: bool = False
    cpu_s_per_byte: float = 0.0
    cpu_s_per_message: float = 0.0
    cores: int = 1
    ranks_per_machine: int = 1
    source: str = ""
    memory_gbytes: float = math.inf

    def __post_init__(self) -> None:
        if not self.memory_gbytes > 0:
            raise ConfigError(f"Device.memory_gbytes: expected a number above 0, got {self.memory_gbytes!r}")
        _check_counts(self, "cores", "ranks_per_machine")
        _check_numbers(self, "memory_gbytes_s", above_zero=True)
        _check_numbers(self, "launch_us", "contention", "cpu_s_per_byte", "cpu_s_per_message")
        if "fp32" not in self.tflops or any(not value > 0 for value in self.tflops.values()):
            raise ConfigError(f"Device.tflops: expected positive numbers, 'fp32' among them, got {dict(self.tflops)}")
        if "" not in self.codec_fractions or any(not value > 0 for value in self.codec_fractions.values()):
            raise ConfigError(
                f"Device.codec_fractions: expected positive numbers, '' (all others) among them, got "
                f"{dict(self.codec_fractions)}"
            )

    @property
    def share(self) -> float:
        """Number of cores per rank."""
        return self.cores / self.ranks_per_machine

    def flops_per_s(self, dtype: torch.dtype) -> float:
        """Return the rate of large matrix products of `dtype`, per second."""
        names = {value: key for key, value in DTYPES.items()}
        return self.tflops.get(names.get(dtype, "fp32"), self.tflops["fp32"]) * 1e12

    def codec_fraction(self, codec: str, kernel: str) -> float:
        """Return the fraction of the copy rate that a codec's kernel reaches."""
        known = self.codec_fractions
        return next(known[key] for key in (f"{codec}.{kernel}", codec, kernel, "") if key in known)


@dataclass(frozen=True)
class Layer:
    """A part of the model whose gradients become ready together.

    Attributes:
        name: Name of the layer in the model. A parameter's name is "<layer>.<name>".
        shapes: Name and shape of each parameter, in the order of registration; empty for a layer without parameters.
        weight: Share of the time of forward and of backward, relative to the other layers (such as floating-point
            operations).
        tied: Names of parameters of other layers ("<layer>.<name>") that this layer uses too.
    """

    name: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    weight: float
    tied: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_numbers(self, "weight")
        for name, shape in self.shapes:
            if any(size < 1 for size in shape):
                raise ConfigError(f"Layer {self.name!r}: expected positive sizes, got {shape} for {name!r}")

    @property
    def numel(self) -> int:
        """Number of elements of the layer's parameters."""
        return sum(math.prod(shape) for _, shape in self.shapes)


@dataclass(frozen=True)
class Workload:
    """A model in training: its parameters, and the times of a step on one rank without communication.

    Attributes:
        name: Name of the workload.
        layers: Layers in the order of forward.
        batch_per_rank: Samples per rank and step.
        forward_s: Seconds of forward per step on `device`.
        backward_s: Seconds of backward per step on `device`, divided among the layers by `Layer.weight` in reverse
            order.
        optimizer_s: Seconds of an optimizer step.
        device: Name of the device on which the times hold.
        dtype: Dtype of parameters and gradients: a key of `DTYPES`.
        optimizer: "sgd" or "adam"; determines the state tensors.
        samples_per_epoch: Samples per epoch over all ranks; 0 if unknown.
        source: Source of the shapes and times.
        tokens_per_sample: Tokens in a sample; 0 if the workload counts samples.
    """

    name: str
    layers: tuple[Layer, ...]
    batch_per_rank: int
    forward_s: float
    backward_s: float
    optimizer_s: float = 0.0
    device: str = ""
    dtype: str = "fp32"
    optimizer: str = "sgd"
    samples_per_epoch: int = 0
    source: str = ""
    tokens_per_sample: int = 0

    def __post_init__(self) -> None:
        _check_counts(self, "batch_per_rank")
        _check_numbers(self, "forward_s", "backward_s", above_zero=True)
        _check_numbers(self, "optimizer_s", "samples_per_epoch", "tokens_per_sample")
        if self.dtype not in DTYPES:
            raise ConfigError(f"Workload.dtype: expected one of {sorted(DTYPES)}, got {self.dtype!r}")
        if self.optimizer not in ("sgd", "adam"):
            raise ConfigError(f"Workload.optimizer: expected 'sgd' or 'adam', got {self.optimizer!r}")
        names = [name for name, _ in self.parameters()]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"Workload {self.name!r}: expected parameters with different names, got {len(names)}")
        if not sum(layer.weight for layer in self.layers) > 0:
            raise ConfigError(f"Workload {self.name!r}: expected a layer with a positive weight, got none")
        unknown = {name for layer in self.layers for name in layer.tied} - set(names)
        if unknown:
            raise ConfigError(f"Workload {self.name!r}: tied parameters that no layer has: {sorted(unknown)}")

    @property
    def numel(self) -> int:
        """Number of elements of the parameters."""
        return sum(layer.numel for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters."""
        return self.numel * DTYPES[self.dtype].itemsize

    @property
    def step_s(self) -> float:
        """Seconds of a step without communication."""
        return self.forward_s + self.backward_s + self.optimizer_s

    def parameters(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the full name and the shape of each parameter, in the order of registration."""
        return [(f"{layer.name}.{name}", shape) for layer in self.layers for name, shape in layer.shapes]

    def ready_s(self) -> list[float]:
        """Return when each gradient is ready, in seconds from the start of backward, in the order of `parameters`.

        The parameters of a layer are ready when its backward ends. A tied parameter is ready when the backward of the
        last layer that uses it ends.
        """
        total = sum(layer.weight for layer in self.layers)
        at: dict[str, float] = {}
        done = 0.0
        for layer in reversed(self.layers):
            done += layer.weight
            for name in [*(f"{layer.name}.{name}" for name, _ in layer.shapes), *layer.tied]:
                at[name] = done / total * self.backward_s
        return [at[name] for name, _ in self.parameters()]


def _check_counts(owner: Any, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{type(owner).__name__}.{name}: expected a whole number of 1 or more, got {value!r}")


def _check_numbers(owner: Any, *names: str, above_zero: bool = False) -> None:
    for name in names:
        value = getattr(owner, name)
        is_number = isinstance(value, (int, float)) and math.isfinite(value)
        if not is_number or value < 0 or (above_zero and value == 0):
            expected = "a number above 0" if above_zero else "a number of 0 or more"
            raise ConfigError(f"{type(owner).__name__}.{name}: expected {expected}, got {value!r}")
