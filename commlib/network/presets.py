"""Preset networks and devices with their sources. Every field can be overridden."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from commlib.errors import ConfigError
from commlib.network.model import Device, Network

_BAGUA = (
    "16 servers with 8 V100s, NVLink inside, TCP between: Gan et al., BAGUA (VLDB 2021), with bandwidths set by "
    "traffic control"
)
# A V100 has 6 NVLinks of 25 GB/s in each direction.
_NVLINK2 = "NVLink 2: 150 GB/s of a V100 in each direction (NVIDIA V100 data sheet)"
# TCP over Ethernet frames of 1,500 bytes: 1,448 bytes of data in 1,538 on the wire.
_TCP_EFFICIENCY = 1448 / 1538
_NCCL_TCP_GBPS = 23.0
_TCP_LATENCY = "25 us: a message through two kernels' TCP and a switch"


def _v100_cluster(name: str, bandwidth_gbps: float) -> Network:
    return Network(
        name=name,
        nodes=16,
        gpus_per_node=8,
        bandwidth_gbps=bandwidth_gbps,
        latency_us=25.0,
        intra_gbps=1200.0,
        intra_latency_us=5.0,
        efficiency=_TCP_EFFICIENCY,
        ceiling_gbps=_NCCL_TCP_GBPS,
        device="v100",
        source=f"{_BAGUA}; {_NVLINK2}; {_TCP_LATENCY}; efficiency: the data in a frame of 1,500 bytes; ceiling: the "
        "rate of NCCL over TCP, fitted to BAGUA's figures (commlib/simulation/bagua.py)",
    )


NETWORKS: dict[str, Network] = {
    network.name: network
    for network in (
        _v100_cluster("1gbps", 1.0),
        _v100_cluster("10gbps", 10.0),
        _v100_cluster("25gbps", 25.0),
        _v100_cluster("100gbps", 100.0),
        Network(
            name="wan",
            nodes=4,
            gpus_per_node=8,
            bandwidth_gbps=0.5,
            latency_us=50_000.0,
            intra_gbps=3600.0,
            intra_latency_us=3.0,
            efficiency=_TCP_EFFICIENCY,
            device="h100",
            source="sites on several continents: 127 to 935 Mbit/s and round trips of about 100 ms, as measured by "
            "Jaghouar et al., INTELLECT-1 (2024); one server with 8 H100s at each",
        ),
        Network(
            name="h100-400g",
            nodes=16,
            gpus_per_node=8,
            bandwidth_gbps=3200.0,
            latency_us=5.0,
            intra_gbps=3600.0,
            intra_latency_us=3.0,
            efficiency=0.92,
            window_mb=math.inf,
            device="h100",
            source="DGX H100: 8 adapters of 400 Gbit/s with RDMA, one for each GPU; NVLink 4, 450 GB/s of a GPU in "
            "each direction (NVIDIA DGX H100 user guide); RDMA typically reaches 92 % of the line rate in NCCL's tests",
        ),
    )
}  # fmt: skip

DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device(
            name="v100",
            memory_gbytes_s=790.0,
            tflops={"fp32": 14.0, "fp16": 90.0},
            launch_us=5.0,
            codec_fractions={"": 0.85},
            contention=0.0,
            memory_gbytes=32.0,
            source="V100 SXM2 32 GB: 900 GB/s, 15.7 TFLOP/s in fp32, 125 in fp16 (NVIDIA data sheet); a copy reaches "
            "about 790 GB/s and matrix products about 90 and 70 % of it (Jia et al., Dissecting Volta, 2018)",
        ),
        Device(
            name="cpu",
            memory_gbytes_s=32.0,
            tflops={"fp32": 0.1},
            launch_us=5.0,
            codec_fractions={"": 1.0},
            source="one core of an AMD EPYC (Zen 5): 64 MiB copied in 4.2 ms, codecs near that "
            "(docs/explanation/kernels.md); about half of a core's peak of 0.2 TFLOP/s. The processor time of sockets "
            "is not included",
        ),
        Device(
            name="h100",
            memory_gbytes_s=3000.0,
            tflops={"fp32": 50.0, "fp16": 650.0, "bf16": 650.0},
            launch_us=4.0,
            codec_fractions={"": 0.85},
            memory_gbytes=80.0,
            source="H100 SXM5: 80 GB, 3.35 TB/s, 67 TFLOP/s in fp32, 989 in bf16 (NVIDIA data sheet); a copy was "
            "measured at 3.0 TB/s; large matrix products reach about two thirds of the peak rates",
        ),
    )
}

_Preset = TypeVar("_Preset", Network, Device)


def network(name: str, **overrides: Any) -> Network:
    """Return a preset network. Values of `overrides` that are not None replace its fields.

    A preset that is named after its rate, as "25gbps", has the name of the rate that replaces it.

    Raises:
        ConfigError: The preset or a field does not exist, or a value is invalid.
    """
    made = _get("network", NETWORKS, name, overrides)
    is_named_after_rate = name == f"{NETWORKS[name].bandwidth_gbps:g}gbps"
    return dataclasses.replace(made, name=f"{made.bandwidth_gbps:g}gbps") if is_named_after_rate else made


def device(name: str, **overrides: Any) -> Device:
    """Return a preset device; see `network`."""
    return _get("device", DEVICES, name, overrides)


def _get(kind: str, known: Mapping[str, _Preset], name: str, overrides: dict[str, Any]) -> _Preset:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        if kind == "network" and re.fullmatch(r"[\d.]+ ?g(bps|bit|b)?", name, re.IGNORECASE):
            hint = "For another rate, override that of one of these: bandwidth_gbps, --bandwidth-gbps. "
        raise ConfigError(f"{kind}: {name!r} is not known. {hint}Known: {', '.join(known)}")
    preset = known[name]
    changed = {field: value for field, value in overrides.items() if value is not None}
    unknown = sorted(changed.keys() - {field.name for field in dataclasses.fields(preset)})
    if unknown:
        raise ConfigError(f"{kind}: no such field: {', '.join(unknown)}")
    return dataclasses.replace(preset, **changed)
