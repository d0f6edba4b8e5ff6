"""Full-precision gradient averaging, as in DistributedDataParallel."""

from __future__ import annotations

import dataclasses
import math

import torch
from typing_extensions import override

from commlib.algorithms.base import Algorithm
from commlib.algorithms.channels import Gradients
from commlib.algorithms.context import BucketView, Context
from commlib.errors import ConfigError
from commlib.primitives import hierarchical as nodes
from commlib.primitives.centralized import centralized_full_precision
from commlib.primitives.hierarchical import NodeStage
from commlib.transport.base import Communication, Communicator

_WIRE_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_WINDOW, _ALL_IN_FLIGHT = 8, 1 << 30


class AllReduce(Algorithm):
    """Averages (or sums) the gradients over all ranks by one all-reduce per bucket.

    Each parameter's gradient becomes `g = (1/N) sum_r g_r`, with N the number of ranks. The division is split into `g_r
    / predivide` before the sum and `/ (N / predivide)` after it. By default, the gradients are divided by N before the
    sum, while they are copied into the bucket.

    Args:
        wire_dtype: "fp32" sends every bucket in its own dtype. "bf16" and "fp16" cast fp32 and fp64 buckets for
            sending, which reduces the bytes to a half or a quarter; the backend then sums in that dtype.
        op: "mean" or "sum".
        predivide: For "mean": the factor of N by which gradients are divided before the sum, in 1..N; None means N.
            With fp16 a value near sqrt(N) balances overflow against underflow.
        hierarchical: Whether gradients are first summed inside each node, in fp32 or wider. Every local rank then sums
            a part across nodes, sent in `wire_dtype`.

    Paper: for the ring, Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations"
    (2009).
    Deviations: the order of the sum depends on the backend.
    """

    made_for = "any"
    portable = True
    channel = Gradients(reduces_flags=True, idle_alone=True, window=_WINDOW)

    def __init__(
        self, wire_dtype: str = "fp32", op: str = "mean", predivide: float | None = None, hierarchical: bool = False
    ) -> None:
        if wire_dtype not in _WIRE_DTYPES:
            raise ConfigError(f"AllReduce.wire_dtype: expected one of {sorted(_WIRE_DTYPES)}, got {wire_dtype!r}")
        if op not in ("mean", "sum"):
            raise ConfigError(f"AllReduce.op: expected 'mean' or 'sum', got {op!r}")
        if predivide is not None and (op == "sum" or not (math.isfinite(predivide) and predivide > 0)):
            raise ConfigError(
                f"AllReduce.predivide: expected a positive number with op='mean', got {predivide!r}, {op=}"
            )
        self.wire_dtype = wire_dtype
        self.exactness = "exact" if wire_dtype == "fp32" else "8bit"
        self.op = op
        self.predivide = predivide
        self.hierarchical = hierarchical
        is_prompt = wire_dtype == "fp32" and not hierarchical
        self.channel = dataclasses.replace(
            self.channel,
            prompt=is_prompt,
            single=is_prompt,
            hierarchical=hierarchical,
            accumulates=op == "mean",
            window=_ALL_IN_FLIGHT if is_prompt else _WINDOW,
        )
        # Created on first use, as a warm-up without steps communicates nothing.
        self._wires: dict[int, torch.Tensor] = {}
        self._stages: dict[int, NodeStage] = {}

    @override
    def setup(self, context: Context) -> None:
        self._wires, self._stages = {}, {}

    def _stage(self, bucket: BucketView, local: Communicator) -> NodeStage:
        """Return the bucket's stage for reductions inside a node."""
        if bucket.index not in self._stages:
            payload = bucket.payload
            self._stages[bucket.index] = NodeStage(payload.numel(), payload.dtype, payload.device, local)
        return self._stages[bucket.index]

    def _wire(self, bucket: BucketView, summed: torch.Tensor) -> torch.Tensor | None:
        """Return the buffer in which `summed` is sent, or None if the dtype on the wire is that of `summed`."""
        narrow, dtype = _WIRE_DTYPES[self.wire_dtype], bucket.payload.dtype
        wire_dtype = narrow if narrow and dtype in (torch.float32, torch.float64) else dtype
        if wire_dtype != summed.dtype and bucket.index not in self._wires:  # a node's sum of bf16 gradients is fp32
            self._wires[bucket.index] = torch.empty_like(summed, dtype=wire_dtype)
        return self._wires.get(bucket.index)

    @override
    def divisor(self, comm: Communicator) -> float:
        return 1.0 if self.op == "sum" else comm.num_active

    @override
    def predivisor(self, comm: Communicator) -> float:
        return self.divisor(comm) if self.predivide is None else self.predivide

    @override
    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        if comm.nodes is None:
            yield from centralized_full_precision(bucket.payload, comm, wire=self._wire(bucket, bucket.payload))
        else:
            local, peers = comm.nodes
            stage = self._stage(bucket, local)
            wire = self._wire(bucket, stage.sum[: stage.count])
            yield from nodes.hierarchical(
                bucket.payload, stage, local, lambda own: centralized_full_precision(own, peers, wire=wire)
            )
        if self.divisor(comm) != self.predivisor(comm):
            bucket.flat.div_(self.divisor(comm) / self.predivisor(comm))
