"""The workloads of `commlib compare` as `commlib compare --emulate` trains them: shrunk, with layers that wait."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from commlib.emulation import experiment
from commlib.emulation.synthetic import SyntheticModel
from commlib.network import presets, workloads
from commlib.network.model import Layer, Workload


class Shrunk(SyntheticModel):
    """Takes a batch, and needs none."""

    def __init__(self, name: str) -> None:
        super().__init__(experiment.shrunk(workloads.get(name), experiment.Setting()))

    def forward(self, _: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the loss."""
        return super().forward()


class Waiting(SyntheticModel):
    """Layers of given parameters that wait for 1 s per step, a third of it in forward, in proportion to their sizes.

    Args:
        layers: Shapes by name.
    """

    def __init__(self, layers: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
        numels = [sum(math.prod(shape) for shape in layer.values()) for layer in layers]
        made = [Layer(f"layer{i}", tuple(each.items()), numels[i]) for i, each in enumerate(layers)]
        super().__init__(Workload("waiting", tuple(made), batch_per_rank=1, forward_s=1 / 3, backward_s=2 / 3))

    def forward(self, _: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the loss."""
        return super().forward()


def usual_optimizer(name: str) -> str:
    """Return the optimizer that the workload is trained with."""
    return "adamw" if workloads.get(name).optimizer == "adam" else "sgd"


def equivalent_rate(name: str, network: str, hosts: int) -> float:
    """Return the rate in bit/s that gives the same ratio of communication to layer time as the full model on a network.

    The optimizer's real time is added, so the ratio of communication to the whole step is lower than there.

    Args:
        name: The name of the workload.
        network: The name of a preset.
        hosts: Emulated hosts.

    Raises:
        ConfigError: A name is not known.
    """
    known, setting = workloads.get(name), experiment.Setting(hosts=hosts)
    small = experiment.shrunk(known, setting)
    return experiment.scaled_rate(known, presets.network(network), small, setting.compute_s, setting)
