"""Aggregator of the largest components of a momentum under a discrete cosine transform."""

from __future__ import annotations

import torch
from typing_extensions import override

from commlib.primitives.aggregators.base import Aggregator, Round, Stretch
from commlib.primitives.components import ComponentWorkspace, centralized_components
from commlib.transport.base import Communication


class Components(Aggregator[ComponentWorkspace]):
    """Sends the largest components of each chunk of the momentum; see `centralized_components`.

    Args:
        decay: Decay of the momentum, in [0, 1].
        kept: Number of components of each chunk that are sent.
        chunk: Largest side of a chunk, 1 to `MAX_CHUNK`.
        sign: Whether the result is the sign of the sum.
    """

    kinds = ("momentum",)

    def __init__(self, *, decay: float, kept: int, chunk: int, sign: bool) -> None:
        self.decay = decay
        self.kept = kept
        self.chunk = chunk
        self.sign = sign

    @override
    def workspace(self, stretch: Stretch) -> ComponentWorkspace:
        return ComponentWorkspace(stretch.parts, stretch.device, stretch.comm, chunk=self.chunk, kept=self.kept)

    @override
    def average(self, tensor: torch.Tensor, workspace: ComponentWorkspace, of: Round) -> Communication:
        yield from centralized_components(
            tensor,
            workspace,
            of.peers,
            divisor=of.divisor,
            scale=of.scale,
            decay=self.decay * of.decay,
            sign=self.sign,
        )
