"""A model that trains like a workload: the shapes of its parameters, its arithmetic by layer, no data.

Each matrix multiplies inputs of its own, as many as give the layer its part of the arithmetic, and one number runs from
layer to layer, so gradients become ready in the order in which the workload's do.
"""

from __future__ import annotations

import math
from dataclasses import replace

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


#: A layer of more inputs than these is passed several times.
_MAX_ROWS = 4096


class SyntheticModel(nn.Module):
    """See above. The loss is its output, [] fp32.

    Args:
        workload: Its layers; matrices of at most two dimensions.
        flops: Floating-point operations of the matrix products of one forward; backward takes twice as many.
        seed: Of the parameters, the same on all ranks, and of the inputs.
    """

    def __init__(self, workload: Workload, flops: float, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        total = sum(layer.weight for layer in workload.layers)
        self.layers = nn.ModuleList(
            SyntheticLayer(layer, flops * layer.weight / total, generator) for layer in workload.layers
        )

    def forward(self) -> Tensor:
        """Return the loss."""
        signal = torch.ones(())
        for layer in self.layers:
            signal = layer(signal)
        return (signal - 1.0).square()


class SyntheticLayer(nn.Module):
    """One layer: its matrices times inputs of their own."""

    def __init__(self, layer: Layer, flops: float, generator: torch.Generator) -> None:
        super().__init__()
        self._inputs: dict[str, Tensor] = {}
        self._passes: dict[str, int] = {}
        numel = sum(math.prod(shape) for _, shape in layer.shapes if len(shape) == 2)
        for name, shape in layer.shapes:
            own = name.replace(".", "_")
            scale = shape[-1] ** -0.5
            self.register_parameter(own, nn.Parameter(scale * torch.randn(shape, generator=generator)))
            if len(shape) == 2:
                rows = max(1, round(flops / (2 * numel)))
                self._passes[own] = -(-rows // _MAX_ROWS)
                self._inputs[own] = torch.randn(rows // self._passes[own], shape[1], generator=generator)

    def forward(self, signal: Tensor) -> Tensor:
        """Return the signal for the next layer."""
        for name, parameter in self.named_parameters():
            if (inputs := self._inputs.get(name)) is None:
                signal = signal + 1e-3 * parameter.mean()
                continue
            for _ in range(self._passes[name]):
                signal = 0.5 * signal + 0.5 + 0.1 * torch.mm(inputs + signal, parameter.t()).mean()
        return signal
