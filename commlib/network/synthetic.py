"""A model that trains like a workload: its parameters and the times of its layers, but no data.

A layer computes something small with every parameter, and waits for the rest of its time, in forward and again in
backward. An accelerator computes like that, seen from the processor: emulated hosts share the cores of one machine,
and processes that computed there would take them from each other's communication. One number runs from layer to
layer, so gradients become ready in the order in which the workload's do.
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
    """Return the workload with its shapes shrunk alike to about `max_numel` elements in all, at most as many as it has.

    Tensors keep their number and order; those of more than two dimensions become matrices. Times are left as they are.
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
    """See above. The loss is its output, [] fp32.

    Args:
        workload: Its layers and its times, of forward and backward.
        seed: Of the parameters; the same on all ranks.
    """

    def __init__(self, workload: Workload, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        total = sum(layer.weight for layer in workload.layers)
        self.layers = nn.ModuleList(
            SyntheticLayer(
                layer,
                workload.forward_s * layer.weight / total,
                workload.backward_s * layer.weight / total,
                generator,
            )
            for layer in workload.layers
        )

    def forward(self) -> Tensor:
        """Return the loss."""
        signal = torch.ones((), requires_grad=True)
        for layer in self.layers:
            signal = layer(signal)
        return (signal - 1.0).square()


class SyntheticLayer(nn.Module):
    """One layer: the mean of each of its parameters joins the signal."""

    def __init__(self, layer: Layer, forward_s: float, backward_s: float, generator: torch.Generator) -> None:
        super().__init__()
        self._forward_s, self._backward_s = forward_s, backward_s
        for name, shape in layer.shapes:
            values = shape[-1] ** -0.5 * torch.randn(shape, generator=generator)
            self.register_parameter(name.replace(".", "_"), nn.Parameter(values))

    def forward(self, signal: Tensor) -> Tensor:
        """Return the signal for the next layer."""
        begin_s = time.perf_counter()
        for parameter in self.parameters():
            signal = signal + parameter.mean()  # no factor: gradients would vanish through many of them
        _wait_until(begin_s + self._forward_s)
        # The last node of forward is the first of backward: gradients are ready at the end of the layer's time.
        return _WaitInBackward.apply(signal, self._backward_s)  # pyright: ignore[reportReturnType]


class _WaitInBackward(torch.autograd.Function):
    """The identity, whose gradient comes later."""

    @staticmethod
    def forward(ctx: Any, signal: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return signal.view_as(signal)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], None


def _wait_until(at_s: float) -> None:
    left_s = at_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)
