"""The models that the benchmarks train, each with data of its real shape, a loss and an optimizer."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "examples"))

import corpus
import gpt

Batch = tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class Workload:
    """What every system trains alike.

    Attributes:
        build: Makes a model; the seed is set before, so that all copies start equal.
        make_optimizer: Makes its optimizer.
        loss: Maps the model's output and the target to a scalar.
        draw: Maps (seed, step, rank) to a batch.
    """

    build: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], Optimizer]
    loss: Callable[[Tensor, Tensor], Tensor]
    draw: Callable[[tuple[int, int, int]], Batch]

    def new_model(self, seed: int, device: torch.device) -> nn.Module:
        """Return a model whose parameters depend on the seed only."""
        torch.manual_seed(seed)
        return self.build().to(device)


class ConvNet(nn.Sequential):
    """A plain CNN for images [batch, 3, 32, 32], 10 classes; 4.9 M parameters, batch norm buffers."""

    def __init__(self) -> None:
        widths = [(3, 64, 1), (64, 128, 2), (128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
        layers = [self._layer(*shape) for shape in widths]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(2048, 10))

    @staticmethod
    def _layer(inputs: int, outputs: int, stride: int) -> nn.Module:
        conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


class ManySmall(nn.Module):
    """A deep residual chain of 1,000 narrow linear layers: 2,000 parameters of 32 or 1,024 elements."""

    def __init__(self, num_layers: int = 1000, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.scale = num_layers**-0.5

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` [batch, width] to the same shape."""
        for layer in self.layers:
            x = x + self.scale * torch.tanh(layer(x))
        return x


def _sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)


def _adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def _draw_noise(shape: tuple[int, ...], key: tuple[int, int, int]) -> Batch:
    generator = torch.Generator().manual_seed(hash(key) % 2**63)
    return torch.randn(shape, generator=generator), torch.randint(10, shape[:1], generator=generator)


def _byte_gpt(size: gpt.Size, batch: int) -> Workload:
    text, _ = corpus.standard_library()

    def draw(key: tuple[int, int, int]) -> Batch:
        return corpus.batch(text, key, batch, size.context)

    return Workload(functools.partial(gpt.GPT, size), _adamw, gpt.next_byte_loss, draw)


def _noise(build: Callable[[], nn.Module], *shape: int) -> Workload:
    return Workload(build, _sgd, F.cross_entropy, functools.partial(_draw_noise, shape))


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "bytes-gpt": lambda: _byte_gpt(gpt.SIZES["10m"], batch=2),
    "bytes-tiny": lambda: _byte_gpt(gpt.SIZES["tiny"], batch=2),
    "cnn": lambda: _noise(ConvNet, 8, 3, 32, 32),
    "many-small": lambda: _noise(ManySmall, 16, 32),
}
