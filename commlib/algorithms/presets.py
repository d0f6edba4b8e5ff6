"""Presets: settings of algorithms that were measured together with an optimizer, under a name of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from commlib.algorithms.base import Algorithm
from commlib.algorithms.diloco import DiLoCo
from commlib.algorithms.sparse_loco import SparseLoCo
from commlib.algorithms.streaming_diloco import StreamingDiLoCo


@dataclass(frozen=True)
class Preset:
    """An algorithm with options, and the optimizer with which they were measured.

    Attributes:
        algorithm: The class.
        options: Its arguments.
        optimizer_kind: The kind of optimizer that `wrap` then requires (`Algorithm.optimizer_kind`).
    """

    algorithm: type[Algorithm]
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer_kind: str = "muon"

    def create(self) -> Algorithm:
        """Return the algorithm. It records the options like one that was created with them."""
        created = self.algorithm(**self.options)
        created.optimizer_kind = self.optimizer_kind
        return created

    def __str__(self) -> str:
        """Return the call that creates the algorithm."""
        return f"{self.algorithm.__name__}({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"


_OUTER = {"outer_lr": 1.0, "outer_momentum": 0.5, "codec": "int4"}

#: The presets by name. `wrap(model, "diloco_muon", optimizer=[muon, adamw])` trains with one.
PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "diloco_muon": Preset(DiLoCo, {"period": 30, **_OUTER}),
        "streaming_diloco_muon": Preset(
            StreamingDiLoCo, {"period": 10, "fragments": 2, "delay": 1, "mixing": 0.0, **_OUTER}
        ),
        "sparse_loco_muon": Preset(SparseLoCo, {"period": 10, "kept": 256, "outer_lr": 1.75}),
    }
)
