"""EF21: compress changes of the gradient, and add them to an estimate that all ranks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from commlib.primitives.parts import Part, Pieces, cut, paste
from commlib.transport.base import Communication


class RestartingWorkspace(Protocol):
    """A workspace with error feedback that can reset some elements."""

    def restart(self, keeps: torch.Tensor, values: torch.Tensor) -> None:
        """Set residuals to `values` [numel] where `keeps` [numel] bool is false, as if nothing had been sent yet."""
        ...


class Estimate:
    """The momentum v_r of this rank's gradients and the estimate h of their mean, [numel], unscaled.

    Args:
        numel: Number of elements of the bucket.
        device: Device of the bucket.
        weight: Weight of a new gradient in the momentum, in (0, 1].
        dtype: Type of the state: fp32 or wider.
        is_sent: Whether the changes of the momentum are sent; if false, there is no estimate.
    """

    def __init__(
        self,
        numel: int,
        device: torch.device,
        weight: float,
        *,
        dtype: torch.dtype = torch.float32,
        is_sent: bool = True,
    ) -> None:
        self.weight = weight
        self.momentum = torch.zeros(numel, dtype=dtype, device=device)
        self.estimate = torch.zeros(numel if is_sent else 0, dtype=dtype, device=device)
        self._values = torch.zeros(0, dtype=dtype, device=device)
        # A momentum that is sent differs between ranks; one that is not is equal on all ranks. The keys differ, so that
        # a parameter that switches between the two starts again from zero.
        self._kind = "momentum" if is_sent else "smoothed"

    def advance(self, gradient: torch.Tensor, scale: float) -> torch.Tensor:
        """Move the momentum towards a gradient [numel] and return the change, [numel].

        Elements of the momentum whose change is not finite stay unchanged. The result overwrites `gradient` if that has
        the dtype of the state.
        """
        change = self._values_like(gradient).copy_(gradient)
        change.mul_(1.0 / scale).sub_(self.momentum).mul_(self.weight)
        self.momentum.add_(torch.nan_to_num(change, nan=0.0, posinf=0.0, neginf=0.0))
        return change

    def smooth(self, gradient: torch.Tensor, scale: float) -> None:
        """Replace a gradient [numel] by the momentum; set elements that are not finite to NaN."""
        is_finite = torch.isfinite(self.advance(gradient, scale))
        torch.mul(self.momentum, scale, out=gradient)
        gradient.masked_fill_(~is_finite, torch.nan)

    def nothing(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return zeros where `advance` would return a change."""
        return self._values_like(gradient).zero_()

    def take(self, change: torch.Tensor, gradient: torch.Tensor, scale: float) -> torch.Tensor:
        """Add the mean change of all ranks to the estimate, and copy the estimate to `gradient`; see `ef21`.

        Returns:
            [numel] bool: which elements are finite.
        """
        is_finite = torch.isfinite(change.add_(self.estimate))
        self.estimate.copy_(change.masked_fill_(~is_finite, 0.0))
        torch.mul(self.estimate, scale, out=gradient)
        gradient.masked_fill_(~is_finite, torch.nan)
        return is_finite

    def _values_like(self, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.dtype == self.momentum.dtype:
            return gradient
        if not self._values.numel():
            self._values = torch.zeros_like(self.momentum)
        return self._values

    def forget(self) -> None:
        """Set momentum and estimate to zero."""
        self.momentum.zero_()
        self.estimate.zero_()

    def save(self, parts: Sequence[Part]) -> dict[str, Pieces]:
        """Return copies of the state by kind and parameter."""
        return {self._kind: cut(self.momentum, 0, parts), "estimate": cut(self.estimate, 0, parts)}

    def load(self, saved: dict[str, Pieces], parts: Sequence[Part], num_terms: float = 1.0) -> None:
        """Load state, also of another bucket plan. `num_terms` is not used."""
        paste(saved[self._kind], self.momentum.zero_(), parts)
        if self.estimate.numel():
            paste(saved["estimate"], self.estimate.zero_(), parts)


def ef21(
    gradient: torch.Tensor,
    state: Estimate,
    workspace: RestartingWorkspace,
    average: Callable[[torch.Tensor], Communication],
    *,
    contributes: bool,
    scale: float = 1.0,
) -> Communication:
    """Update the estimate of the mean momentum of all ranks by compressed changes, and copy it to `gradient`.

    With w the weight of a new gradient, C the compression, h_r the contribution of rank r to the estimate h:

        v_r <- v_r + w (g_r - v_r),   c_r = C(v_r - h_r),   h_r <- h_r + c_r,   h <- h + 1/N sum_r c_r,   g = h

    h_r is not stored: v_r - h_r is the residual of error feedback if the changes of v_r are averaged. Therefore any
    average with error feedback can be used, and errors of its second stage are compensated too.

    Elements of the result that are not finite are set to NaN on all ranks, and all ranks restart them: h_r = h = 0.

    Args:
        gradient: [numel] fp32, bf16, fp16 or fp64; changed in place.
        state: The bucket's momentum and estimate.
        workspace: Residuals of `average`.
        average: Averages a tensor in place, with error feedback that neither scales nor decays residuals.
        contributes: Whether this rank has a gradient. If not, its momentum stays unchanged.
        scale: Loss scale of the gradient.
    """
    change = state.advance(gradient, scale) if contributes else state.nothing(gradient)
    yield from average(change)
    workspace.restart(state.take(change, gradient, scale), state.momentum)
