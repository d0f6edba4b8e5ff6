"""A model that trains like a workload: it has the workload's parameters and layer times, but no data.

Each layer waits for its time in forward and in backward. A clock measures the time independently of other work in the
process, so the processor sees the layer as it sees an accelerator. Emulated hosts share the cores of one machine; real
computation would take them from other hosts' communication. The gradient of a parameter is the parameter itself, so
that codecs get values with a realistic distribution. A scalar passes from layer to layer, so gradients become ready in
the workload's order.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from commlib.network.model import Layer, Workload


def shrink(workload: Workload, max_numel: int) -> Workload:
    """Return the workload with its shapes scaled down by one factor to about `max_numel` elements in total.

    Smaller workloads keep their size. The number and order of tensors and all times are unchanged; tensors of more than
    two dimensions become matrices.
    """
    factor = min(1.0, math.sqrt(max_numel / workload.numel))
    layers = tuple(
        replace(layer, shapes=tuple((name, _shrink(shape, factor)) for name, shape in layer.shapes))
        for layer in workload.layers
    )
    return replace(workload, layers=layers)


def _shrink(shape: tuple[int, ...], factor: float) -> tuple[int, ...]:
    flat = shape if len(shape) < 2 else (shape[0], math.prod(shape[1:]))
    return tuple(max(1, round(size * factor)) for size in flat)


class SyntheticModel(nn.Module):
    """A model of waiting layers, as described above. Its output is the loss, [] fp32.

    Args:
        workload: Specifies the layers and the times of forward and backward.
        seed: Seed of the parameters; the same on all ranks.
    """

    def __init__(self, workload: Workload, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        total = sum(layer.weight for layer in workload.layers)
        self._clock = _Clock()
        self.layers = nn.ModuleList(
            SyntheticLayer(
                layer,
                workload.forward_s * layer.weight / total,
                workload.backward_s * layer.weight / total,
                generator,
                self._clock,
            )
            for layer in workload.layers
        )

    def forward(self) -> Tensor:
        """Return the loss."""
        self._clock.start()
        signal = torch.ones((), dtype=torch.float32, device="cpu", requires_grad=True)
        for layer in self.layers:
            signal = layer(signal)
        return _StartOfBackward.apply(signal, self._clock)  # pyright: ignore[reportReturnType]


class SyntheticLayer(nn.Module):
    """One layer."""

    def __init__(
        self, layer: Layer, forward_s: float, backward_s: float, generator: torch.Generator, clock: _Clock
    ) -> None:
        super().__init__()
        self._forward_s, self._backward_s, self._clock = forward_s, backward_s, clock
        for name, shape in layer.shapes:
            values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
            self.register_parameter(name.replace(".", "_"), nn.Parameter(shape[-1] ** -0.5 * values))

    def forward(self, signal: Tensor) -> Tensor:
        """Return the signal for the next layer."""
        times = (self._clock, self._forward_s, self._backward_s)
        return _Layer.apply(signal, *times, *self.parameters())  # pyright: ignore[reportReturnType]


class _Clock:
    """The time at which an accelerator would have finished its queued work, independent of the processor's load."""

    def __init__(self) -> None:
        self._free_at_s = 0.0

    def start(self) -> None:
        """Start new work now, or when the queued work is finished."""
        self._free_at_s = max(self._free_at_s, time.perf_counter())

    def wait(self, seconds: float) -> None:
        """Queue `seconds` of work and wait until it is finished."""
        self._free_at_s += seconds
        left_s = self._free_at_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)


class _StartOfBackward(torch.autograd.Function):
    """Identity whose backward starts the clock."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, clock: _Clock) -> Tensor:
        ctx.clock = clock
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.clock.start()
        return grads[0], None


class _Layer(torch.autograd.Function):
    """Identity of the signal. Backward waits for the layer's time, then creates the gradients of its parameters."""

    @staticmethod
    def forward(
        ctx: Any, signal: Tensor, clock: _Clock, forward_s: float, backward_s: float, *parameters: Tensor
    ) -> Tensor:
        ctx.clock, ctx.seconds = clock, backward_s
        ctx.save_for_backward(*parameters)
        clock.wait(forward_s)
        return signal.view_as(signal)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.clock.wait(ctx.seconds)
        return grads[0], None, None, None, *(parameter * grads[0] for parameter in ctx.saved_tensors)
