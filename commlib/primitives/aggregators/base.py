"""The interface of aggregators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from typing_extensions import override

from commlib.primitives.centralized import centralized_full_precision
from commlib.primitives.parts import Part
from commlib.transport.base import Communication, Communicator


@dataclass(frozen=True, slots=True)
class Stretch:
    """The elements that a rank exchanges with its peers: a bucket, or with nodes this rank's share of one.

    Attributes:
        parts: Places of the bucket's parameters.
        begin: First element of the stretch in the bucket.
        numel: Number of elements.
        dtype: Type of the bucket.
        device: Device of the bucket.
        comm: The ranks that exchange it.
        model_numel: Number of elements of all buckets.
    """

    parts: Sequence[Part]
    begin: int
    numel: int
    dtype: torch.dtype
    device: torch.device
    comm: Communicator
    model_numel: int


@dataclass(slots=True)
class Round:
    """One round of one bucket.

    Attributes:
        comm: All ranks.
        peers: The ranks that exchange the tensor: all ranks, or with nodes one rank of each node.
        bucket_idx: Index of the bucket.
        divisor: Divisor of the sum: the number of contributing ranks for a mean.
        scale: Loss scale of the tensor; residuals are kept unscaled.
        decay: Factor of residuals before they are added.
    """

    comm: Communicator
    peers: Communicator
    bucket_idx: int
    divisor: float
    scale: float = 1.0
    decay: float = 1.0


class Workspace(Protocol):
    """Buffers and state of one stretch, kept from round to round."""

    def save(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Return copies of the state, by kind and parameter."""
        ...

    def load(self, saved: dict[str, Any], parts: Sequence[Part], num_terms: float) -> torch.Tensor | None:
        """Load state, also of another bucket plan.

        Args:
            saved: State by kind and parameter.
            parts: Places of the bucket's parameters.
            num_terms: Divisor of the sum over all ranks.

        Returns:
            [numel of the bucket] Residuals outside of the stretch, to be added to this rank's next values; None if the
            stretch is the whole bucket.
        """
        ...

    def forget(self) -> None:
        """Set residuals to zero."""
        ...


_W = TypeVar("_W", bound=Workspace)


class Aggregator(ABC, Generic[_W]):
    """Replaces a tensor, in place, by the sum over all ranks, divided. The result is identical on all ranks.

    An aggregator holds options only; the state of each bucket is in a workspace.
    """

    #: The kinds of state that `Workspace.save` returns.
    kinds: tuple[str, ...] = ()
    #: Those of them that are the same on all ranks.
    same: tuple[str, ...] = ()
    #: Whether each rank has its own state, such as residuals. Without state, scale and decay of a round have no effect.
    has_state: bool = True
    #: The `Algorithm.exactness` of gradients averaged with this aggregator.
    exactness: str = "compensated"

    def cuts(self, parts: Sequence[Part]) -> Sequence[int] | None:
        """Return the elements at which a bucket may be cut into stretches; None for any."""
        return None

    @abstractmethod
    def workspace(self, stretch: Stretch) -> _W | None:
        """Create the workspace of a stretch; None if there is no state."""

    @abstractmethod
    def average(self, tensor: torch.Tensor, workspace: _W, of: Round) -> Communication:
        """Replace `tensor` [numel], of the stretch's dtype, by the sum over `of.peers`, divided by `of.divisor`."""


class FullPrecision(Aggregator[Any]):
    """One all-reduce in the tensor's dtype."""

    has_state = False
    exactness = "exact"

    @override
    def workspace(self, stretch: Stretch) -> None:
        return None

    @override
    def average(self, tensor: torch.Tensor, workspace: Any, of: Round) -> Communication:
        yield from centralized_full_precision(tensor, of.peers)
        tensor.div_(of.divisor)
