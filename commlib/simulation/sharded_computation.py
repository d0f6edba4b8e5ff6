"""Forward and backward of a sharded model on virtual clocks.

[Note: FSDP2's schedule] Weights are gathered before a module computes, in forward and, if they were resharded, in
backward; the root's once per step. Gradients are reduced after a module's backward.

On an accelerator, a gather may begin when the computation of the second module before begins in forward, and of the
previous module in backward; a reduction ends before the next one begins. On a processor that runs the collectives, the
next module is prefetched in forward and in backward, encoding and decoding interrupt the computation, and backward
waits for every reduction.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from typing_extensions import override

from commlib.engine.rounds.task import Round, Task
from commlib.network.model import DTYPES, Device
from commlib.sharding import exchanges
from commlib.sharding.layout import FULL_PRECISION, Layout
from commlib.simulation.clock import VirtualDriver
from commlib.simulation.collectives import SHARDS, ReduceScatter
from commlib.simulation.computation import Computation
from commlib.simulation.meter import Meter
from commlib.simulation.sharded import META, Module, ShardedModel
from commlib.transport.base import Communication, Communicator, Nodes, Request
from commlib.transport.simulated import SimulatedTransport


@dataclass(frozen=True)
class _Exchange:
    """The communication of a module.

    Attributes:
        requests: The requests, and the seconds of local work before each: encoding, FSDP2's copy into its buffer.
        after_s: Seconds of decoding.
        copied_s: Seconds in which the computation copies the result, after it has waited.
    """

    requests: Sequence[tuple[float, Request]]
    after_s: float
    copied_s: float


class ShardedComputation(Computation):
    """The computation of a sharded model, with its gathers and reductions; see [Note: FSDP2's schedule].

    Args:
        model: The model.
        driver: The virtual clocks.
        device: The device of each rank.
        meter: The driver's.
    """

    def __init__(self, model: ShardedModel, driver: VirtualDriver, device: Device, meter: Meter) -> None:
        super().__init__(model.shard, driver)
        self._model = model
        self._meter = meter
        self._device = device
        self._is_on_host = device.shares_compute
        self._comm = _communicator(model)
        self._gathers, self._reductions = (SimulatedTransport(0, model.sharding.ranks) for _ in range(2))
        self._known: dict[tuple[object, ...], _Exchange] = {}
        modules = [model.root, *model.blocks]
        self._gathered = [self._exchange(self._gather, module) for module in modules]
        self._reduced = [self._exchange(self._reduce, module) for module in modules]
        self._ends_s = self._ends_of_layers()
        self._first = len(self._ends_s) - 1 - len(model.blocks)  # index of the first block's layer
        self._next = -1  # index of the next layer in backward
        self._pending: dict[int, Round | None] = {}  # gathers by module; the root module is 0
        self._reducing: Round | None = None

    @property
    @override
    def bytes_sent(self) -> float:
        return self._gathers.bytes_sent + self._reductions.bytes_sent

    def _ends_of_layers(self) -> list[float]:
        """Return the ends of the layers' backwards, as in `Workload.ready_s`; rounding does not exceed the whole."""
        weights, backward_s = [layer.weight for layer in self.workload.layers], self.workload.backward_s
        done = [*itertools.accumulate(reversed(weights))]
        return [min(each / sum(weights) * backward_s, backward_s) for each in reversed(done)]

    # --- forward and backward -----------------------------------------------------------------------------------------

    @override
    def forward(self, pace: np.ndarray) -> None:
        before, *blocks, after = self.workload.layers[self._first - 1 :]
        num_ahead = 1 if self._is_on_host else 2
        total = sum(layer.weight for layer in self.workload.layers)
        self._launch_gather(0)
        for number, layer in enumerate((before, *blocks)):
            if not self._is_on_host:
                self._launch_gather(number + 1)
            self._wait_for_gather(number)
            self._launch_gather(number + num_ahead)
            self.driver.compute(layer.weight / total * self.workload.forward_s * pace, "forward")
        self.driver.compute(after.weight / total * self.workload.forward_s * pace, "forward")
        self._at_s, self._next = 0.0, len(self._ends_s) - 1

    @override
    def backward(self, pace: np.ndarray, until_s: float) -> None:
        while self._next >= 0 and self._ends_s[self._next] <= until_s:
            number, end_s = self._next - self._first + 1, self._ends_s[self._next]
            is_block = 1 <= number <= len(self._model.blocks)
            if is_block and self._model.sharding.reshard_after_forward:
                self._launch_gather(number, again=True)
                self._wait_for_gather(number, again=True)
                if number > 1:
                    self._launch_gather(number - 1, again=True)
            super().backward(pace, end_s)
            self._next -= 1
            if is_block:
                self._launch_reduction(number)
            elif self._next < 0:
                self._launch_reduction(0)

    @override
    def end_backward(self, pace: np.ndarray) -> None:
        super().end_backward(pace)
        self._wait_for_reduction()

    # --- gathers and reductions ---------------------------------------------------------------------------------------

    def _launch_gather(self, number: int, again: bool = False) -> None:
        if number < len(self._gathered) and number not in self._pending:
            exchange = self._gather_of(number, again)
            self._pending[number] = self._launch(self._gathers, exchange, "the gathering of weights")

    def _wait_for_gather(self, number: int, again: bool = False) -> None:
        self._finish(self._pending.pop(number), self._gather_of(number, again))

    def _gather_of(self, number: int, again: bool) -> _Exchange:
        exchange = self._gathered[number]
        if again and self._model.sharding.difference:
            return dataclasses.replace(exchange, requests=(), after_s=0.0)
        return exchange

    def _launch_reduction(self, number: int) -> None:
        """Reduce a module's gradients, of which buckets then consist, after the reduction before."""
        self._wait_for_reduction()
        exchange = self._reduced[number]
        self._reducing = self._launch(self._reductions, exchange, "the reduction of gradients")
        if self._is_on_host:
            self._wait_for_reduction()
            self._meter.add(exchange.after_s)
            self.driver.flush("decode")
        self.driver.inputs_after = self._reducing

    def _wait_for_reduction(self) -> None:
        if self._reducing is not None:
            self.driver.wait(self._reducing)
        self._reducing = self.driver.inputs_after = None

    def _launch(self, transport: SimulatedTransport, exchange: _Exchange, what: str) -> Round | None:
        if not exchange.requests:
            return None
        if self._is_on_host:
            self._meter.add(exchange.requests[0][0])
            self.driver.flush("encode")
        round_ = Round(transport, [Task(lambda: what, lambda: self._communicate(exchange))], 1)
        self.driver.launch(round_)
        return round_

    def _communicate(self, exchange: _Exchange) -> Communication:
        for idx, (before_s, request) in enumerate(exchange.requests):
            if idx or not self._is_on_host:
                self._meter.add(before_s)
            yield request
        if not self._is_on_host:
            self._meter.add(exchange.after_s)

    def _finish(self, round_: Round | None, exchange: _Exchange) -> None:
        """Wait for a gather, and copy its result to the parameters."""
        if round_ is not None:
            self.driver.wait(round_)
        self._meter.add(exchange.copied_s + (exchange.after_s if self._is_on_host else 0.0))
        self.driver.flush("copy")

    # --- costs --------------------------------------------------------------------------------------------------------

    def _exchange(self, make: Callable[[Module, Meter], Communication], module: Module) -> _Exchange:
        """Run a module's communication on meta tensors, once for modules with equal shapes."""
        key = (make.__name__, *(shape for _, shape in module.shapes))
        if key not in self._known:
            meter = Meter(self._device)
            with meter.active():
                requests = [(float(meter.take()[0]), request) for request in make(module, meter)]
                after_s = float(meter.take()[0])
                meter.count(2 * self._comm.world_size * self._model.weights_of(module).row_bytes)
                copied_s = float(meter.take()[0])
            self._known[key] = _Exchange(requests, after_s, copied_s)
        return self._known[key]

    def _gather(self, module: Module, meter: Meter) -> Communication:
        layout = self._model.weights_of(module)
        if not layout.row_bytes:
            return
        row, rows = _rows(self._comm.world_size, layout)
        meter.count(2 * layout.row_bytes)  # FSDP2's copy into its buffer
        if self._model.sharding.difference:
            yield from exchanges.all_gather_differences(self._comm, layout, row, torch.empty_like(rows), rows)
        elif self._is_own_to_torch(self._model.sharding.weights):
            yield self._comm.all_gather(rows.view(-1), row)
        else:
            yield from exchanges.all_gather(self._comm, layout, row, rows)

    def _reduce(self, module: Module, meter: Meter) -> Communication:
        layout = self._model.gradients_of(module)
        if not layout.row_bytes:
            return
        row, rows = _rows(self._comm.world_size, layout)
        meter.count(2 * self._comm.world_size * layout.row_bytes)  # FSDP2's copy into its buffer
        if self._is_own_to_torch(self._model.sharding.gradients):
            yield ReduceScatter(rows.view(-1), size=self._comm.world_size, group=SHARDS)
        else:
            divisor = float(self._comm.world_size)
            if self._comm.nodes is None:
                yield from exchanges.reduce_scatter(self._comm, layout, rows, row, divisor)
            else:
                dtype = DTYPES[self._model.sharding.reduce_dtype or self.workload.dtype]
                order = torch.empty(self._comm.world_size, dtype=torch.int64, device=META)
                yield from exchanges.reduce_scatter_by_node(self._comm, layout, rows, row, divisor, dtype, order)
        meter.count(2 * layout.row_bytes)

    def _is_own_to_torch(self, codec: str) -> bool:
        """Return whether FSDP2's own collective is used."""
        return codec == FULL_PRECISION and not self._is_on_host


def _communicator(model: ShardedModel) -> Communicator:
    """Return the communicator of an island, with its nodes if gradients are summed within them first."""
    shards = model.islands.shards
    comm = Communicator(0, shards.world_size, SHARDS)
    if model.sharding.hierarchical and min(shards.nodes, shards.gpus_per_node) > 1:
        local = Communicator(0, shards.gpus_per_node, f"{SHARDS} local")
        across = Communicator(0, shards.nodes, f"{SHARDS} across")
        comm.nodes = Nodes(local, across)
    return comm


def _rows(num_ranks: int, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    row = torch.empty(layout.row_bytes, dtype=torch.uint8, device=META)
    return row, row.new_empty(num_ranks, layout.row_bytes)
