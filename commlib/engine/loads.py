"""Detects whether weights that the user loads are kept or only swapped in temporarily.

[Note: swapped weights] Algorithms that keep state of the weights (anchors, outer momentum, background rounds) reset it
when weights are loaded, on all ranks. But some loads are undone: a rank loads an average of its weights, evaluates it,
and loads its own weights again. So loads are evaluated only when the weights are next trained or communicated. If the
weights then equal those before the first load, they were only swapped. Nothing is reset, and other ranks need not do
the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commlib.engine.bits import sums
from commlib.engine.modes import in_plain_mode
from commlib.sharding.local import local_of


class Loads:
    """Loads since the last `settle`. See [Note: swapped weights].

    Args:
        parameters: The model's parameters.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._before: list[int] | None = None
        self._have_differed = False

    def begin(self) -> None:
        """Record the weights before a load."""
        if self._before is None:
            self._before = self._digest()

    def end(self) -> None:
        """Record whether a load has changed the weights."""
        self._have_differed = self._have_differed or self._digest() != self._before

    def settle(self) -> bool:
        """Return whether weights were loaded and are not just swapped back. Resets the record."""
        if self._before is None:
            return False
        were_swapped = self._have_differed and self._digest() == self._before
        self._before, self._have_differed = None, False
        return not were_swapped

    @in_plain_mode
    def _digest(self) -> list[int]:
        """Return the sum of the bits of each parameter."""
        return sums([local_of(parameter.data) for parameter in self._parameters])
