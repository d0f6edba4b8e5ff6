"""The models that the benchmarks train, each with data of its real shape, a loss and learning rates."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "examples"))

import corpus
import gpt

Batch = tuple[Tensor, Tensor]

#: Standard deviation of the noise on pixels of 0 to 1. Without it the loss goes to zero, and a ratio of two losses has
#: little meaning; with it no model recognizes all digits.
_DIGIT_NOISE = 0.7


def _frozen_variance_adam(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    from commlib.optim import FrozenVarianceAdam  # lazily: the other systems are measured without it

    return FrozenVarianceAdam(parameters, lr=lr, weight_decay=0.01)


class Together:
    """Several optimizers of one model, stepped as one."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = list(optimizers)
        self.param_groups = [group for each in optimizers for group in each.param_groups]

    def step(self) -> None:
        """Step all."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def _muon(parameters: Iterable[nn.Parameter], lr: float) -> Together:
    """Muon for the hidden matrices, AdamW for the rest: embeddings, the first matrices of a model here, and vectors."""
    own = list(parameters)
    hidden = [param for param in own[2:] if param.ndim == 2]
    known = {id(param) for param in hidden}
    rest = [param for param in own if id(param) not in known]
    muon = torch.optim.Muon(hidden, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return Together(muon, torch.optim.AdamW(rest, lr=lr, fused=True))


def _demo(parameters: Iterable[nn.Parameter], lr: float) -> Optimizer:
    from commlib.optim import DeMo

    return DeMo(parameters, lr=lr, weight_decay=0.01)


#: Optimizers by name: functions of the parameters and a learning rate. Some algorithms require the last two in place of
#: the two before, whose learning rates they use (`systems.OPTIMIZER_OF`).
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter], float], Any]] = {
    "adamw": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, fused=True),
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9, fused=True),
    "frozen-variance-adam": _frozen_variance_adam,
    "plain-sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, fused=True),
    "muon": _muon,
    "demo": _demo,
}
_RATE_OF = {"frozen-variance-adam": "adamw", "plain-sgd": "sgd", "muon": "adamw", "demo": "adamw"}


@dataclasses.dataclass(frozen=True)
class Workload:
    """A training task, identical for all systems.

    Attributes:
        build: Makes a model; the seed is set before, so that all copies start equal.
        loss: Maps the model's output and the target to a scalar.
        draw: Maps (seed, step, rank) to a batch.
        rates: The learning rates by optimizer, "adamw" and "sgd"; the first is its usual one.
        validation: Returns batches that are never trained on.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    draw: Callable[[tuple[int, int, int]], Batch]
    rates: Mapping[str, float]
    validation: Callable[[], list[Batch]] | None = None

    def make_optimizer(self, model: nn.Module, kind: str | None = None, lr: float | None = None) -> Any:
        """Return an optimizer (of `OPTIMIZERS`; None is the usual one) of the model's parameters."""
        kind = kind or next(iter(self.rates))
        return OPTIMIZERS[kind](model.parameters(), self.rates[_RATE_OF.get(kind, kind)] if lr is None else lr)

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


def _draw_noise(shape: tuple[int, ...], key: tuple[int, int, int]) -> Batch:
    generator = torch.Generator().manual_seed(hash(key) % 2**63)
    return torch.randn(shape, generator=generator), torch.randint(10, shape[:1], generator=generator)


def _byte_gpt(size: gpt.Size, batch: int, adamw: float = 1e-3) -> Workload:
    text, unseen = corpus.standard_library()

    def draw(key: tuple[int, int, int]) -> Batch:
        return corpus.batch(text, key, batch, size.context)

    def validation() -> list[Batch]:
        return [corpus.batch(unseen, (idx,), 16, size.context) for idx in range(16)]

    rates = {"adamw": adamw, "sgd": 0.1}
    return Workload(functools.partial(gpt.GPT, size), gpt.next_byte_loss, draw, rates, validation)


def _digits(batch: int) -> Workload:
    from train_digits import CNN, digits

    train_x, test_x, train_y, test_y = digits(torch.device("cpu"))

    def blurred(images: Tensor, random: np.random.Generator) -> Tensor:
        return images + _DIGIT_NOISE * torch.from_numpy(random.standard_normal(images.shape, np.float32))

    def draw(key: tuple[int, int, int]) -> Batch:
        random = np.random.default_rng(key)
        picks = torch.from_numpy(random.integers(0, len(train_x), batch))
        return blurred(train_x[picks], random), train_y[picks]

    def validation() -> list[Batch]:
        return [(blurred(test_x, np.random.default_rng(idx)), test_y) for idx in range(4)]

    return Workload(CNN, F.cross_entropy, draw, {"sgd": 0.02, "adamw": 1e-3}, validation)


def _noise(build: Callable[[], nn.Module], *shape: int) -> Workload:
    rates = {"sgd": 0.01, "adamw": 1e-3}
    return Workload(build, F.cross_entropy, functools.partial(_draw_noise, shape), rates)


def _shrunk(name: str) -> Workload:
    import shrunk  # lazily: the other systems are measured without commlib

    rates = dict.fromkeys((shrunk.usual_optimizer(name), "adamw", "sgd"), 1e-6)  # the usual one first
    return Workload(lambda: shrunk.Shrunk(name), lambda loss, _: loss, functools.partial(_draw_noise, (1,)), rates)


def _slept_gpt() -> Workload:
    """The parameters of the GPT with 10 million of them, in layers that wait for 1 s a step instead of computing."""
    import shrunk  # lazily: the other systems are measured without commlib

    blocks = {name: tuple(each.shape) for name, each in gpt.Block(384, 6).named_parameters()}
    rest = {"token": (256, 384), "position": (128, 384)}
    build = lambda: shrunk.Waiting([rest, *[blocks] * gpt.SIZES["10m"].num_layers])  # noqa: E731
    return Workload(build, lambda loss, _: loss, functools.partial(_draw_noise, (1,)), {"adamw": 1e-6, "sgd": 1e-6})


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "bytes-gpt": lambda: _byte_gpt(gpt.SIZES["10m"], batch=2),
    "bytes-1m": lambda: _byte_gpt(gpt.SIZES["1m"], batch=8),
    "bytes-2m": lambda: _byte_gpt(gpt.Size(num_layers=5, width=192, num_heads=4, context=128), batch=8),
    "bytes-1m-b16": lambda: _byte_gpt(gpt.SIZES["1m"], batch=16),
    "bytes-tiny": lambda: _byte_gpt(gpt.SIZES["tiny"], batch=2),
    "cnn": lambda: _noise(ConvNet, 8, 3, 32, 32),
    "digits": lambda: _digits(batch=8),
    "many-small": lambda: _noise(ManySmall, 16, 32),
    "slept-gpt": _slept_gpt,
    "shrunk-vgg16": lambda: _shrunk("vgg16"),
    "shrunk-bert-large": lambda: _shrunk("bert-large"),
}
