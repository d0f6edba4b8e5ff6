"""Views of buckets and of the process group that the engine passes to an algorithm."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from commlib.primitives.parts import Part
from commlib.transport.base import Communicator


class BucketView(Protocol):
    """An algorithm's view of a bucket.

    Attributes:
        index: The bucket's place in the plan; the same on all ranks.
        group: The result of `Algorithm.group` for its parameters.
        parts: The parameters' places, in the order of `flat`. Computed on access.
        parameters: The parameters, in the same order; empty for the scratch buckets of measurements.
        flat: [numel] The bucket's values, contiguous, in the parameters' dtype (complex values as pairs).
        payload: [numel + num_flags] `flat`, followed by the engine's flags in the plan's last bucket. Algorithms that
            reduce in full precision sum it (`Gradients.reduces_flags`).
    """

    index: int
    group: Hashable
    flat: torch.Tensor
    payload: torch.Tensor

    @property
    def parts(self) -> Sequence[Part]:
        """See above."""
        ...

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """See above."""
        ...


@dataclass(frozen=True)
class Context:
    """Arguments of `Algorithm.setup`.

    Attributes:
        comm: The group that `communicate` will receive.
        buckets: The buckets, in plan order.
        device: The device of the buckets.
        optimizer: The user's optimizer, or None.
        scaler: The user's GradScaler, or None.
    """

    comm: Communicator
    buckets: Sequence[BucketView]
    device: torch.device
    optimizer: torch.optim.Optimizer | None = None
    scaler: Any = None

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self.comm.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.comm.world_size
