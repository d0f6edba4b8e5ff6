"""EF21-SGDM: an aggregator that wraps another one, and the momentum of gradients that are not compressed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from typing_extensions import override

from commlib.primitives.aggregators.base import Aggregator, FullPrecision, Round, Stretch, Workspace
from commlib.primitives.ef21 import Estimate, RestartingWorkspace, ef21
from commlib.primitives.parts import Part
from commlib.transport.base import Communication


class FeedbackWorkspace(Workspace, RestartingWorkspace, Protocol):
    """A workspace with error feedback."""


_F = TypeVar("_F", bound=FeedbackWorkspace)


class EF21Workspace(Generic[_F]):
    """Momentum and estimate of one bucket, and the workspace of the inner aggregator.

    Args:
        estimate: Momentum and estimate.
        inner: Workspace of the inner aggregator.
    """

    def __init__(self, estimate: Estimate, inner: _F) -> None:
        self.estimate = estimate
        self.inner = inner

    def save(self, parts: Sequence[Part]) -> dict[str, Any]:
        """See `Workspace.save`."""
        return {**self.inner.save(parts), **self.estimate.save(parts)}

    def load(self, saved: dict[str, Any], parts: Sequence[Part], num_terms: float) -> None:
        """See `Workspace.load`; the stretch is the whole bucket."""
        self.inner.load(saved, parts, num_terms)
        self.estimate.load(saved, parts)

    def forget(self) -> None:
        """Set residuals, momentum and estimate to zero."""
        self.inner.forget()
        self.estimate.forget()


class EF21(Aggregator[EF21Workspace[_F]]):
    """Averages the changes of a momentum with another aggregator; see `commlib.primitives.ef21.ef21`.

    The stretch must be the whole bucket, so nodes are not supported.

    Args:
        inner: Aggregator with error feedback.
        weight: Weight of a new gradient in the momentum, in (0, 1].
    """

    def __init__(self, inner: Aggregator[_F], weight: float) -> None:
        self.inner = inner
        self.weight = weight
        self.kinds = (*inner.kinds, "momentum", "estimate")
        self.exactness = inner.exactness

    @override
    def workspace(self, stretch: Stretch) -> EF21Workspace[_F]:
        inner = self.inner.workspace(stretch)
        assert inner is not None, "error feedback has state"
        return EF21Workspace(Estimate(stretch.numel, stretch.device, self.weight), inner)

    @override
    def average(self, tensor: torch.Tensor, workspace: EF21Workspace[_F], of: Round) -> Communication:
        unscaled = dataclasses.replace(of, scale=1.0, decay=1.0)
        yield from ef21(
            tensor,
            workspace.estimate,
            workspace.inner,
            lambda change: self.inner.average(change, workspace.inner, unscaled),
            contributes=of.comm.contributes,
            scale=of.scale,
        )


class Smoothed(Aggregator[Estimate]):
    """Averages in full precision and replaces the mean by its momentum: EF21 without compression.

    Args:
        weight: Weight of a new gradient in the momentum, in (0, 1].
    """

    kinds = ("smoothed", "estimate")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self._mean = FullPrecision()

    @override
    def workspace(self, stretch: Stretch) -> Estimate:
        dtype = torch.promote_types(stretch.dtype, torch.float32)
        return Estimate(stretch.numel, stretch.device, self.weight, dtype=dtype, is_sent=False)

    @override
    def average(self, tensor: torch.Tensor, workspace: Estimate, of: Round) -> Communication:
        yield from self._mean.average(tensor, None, of)
        workspace.smooth(tensor, of.scale)
