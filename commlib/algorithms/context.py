"""The views of buckets and of the job that the engine gives to an algorithm."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from commlib.primitives.parts import Part
from commlib.transport.base import Communicator


class BucketView(Protocol):
    """A bucket as an algorithm sees it.

    Attributes:
        index: The bucket's place in the plan; the same on all ranks.
        group: What `Algorithm.group` returned for the parameters in it.
        parts: The parameters' places, in the order in which they lie in `flat`; computed when asked for.
        parameters: The parameters themselves, in that order; none for the scratch buckets of measurements.
        flat: [numel] The bucket's values, one after the other; of the parameters' dtype (complex ones as pairs).
        payload: [numel + num_flags] `flat` and, in the plan's last bucket, the engine's flags behind it; what an
            algorithm sums that reduces in full precision (`Gradients.reduces_flags`).
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
    """What an algorithm is told when its buckets exist.

    Attributes:
        comm: The group, as `communicate` will see it.
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
