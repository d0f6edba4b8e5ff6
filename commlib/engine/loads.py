"""Weights that the user loads: for good, or until he has evaluated them.

[Note: swapped weights] Algorithms that keep something of the weights (anchors, outer momentum, rounds in the
background) begin anew from weights that were loaded, on all ranks. But some loads end where they began: a rank loads an
average of its weights, evaluates it, and loads its own again. So what a load means is settled when the weights are next
trained or communicated. Weights that are then what they were before the first load were only swapped, and nothing
begins anew; no other rank has to do the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commlib.engine.bits import sums
from commlib.engine.modes import in_plain_mode
from commlib.sharding.local import local_of


class Loads:
    """What was loaded since the weights were settled last; see [Note: swapped weights].

    Args:
        parameters: The model's.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._before: list[int] | None = None
        self._have_differed = False

    def begin(self) -> None:
        """Weights are about to be loaded."""
        if self._before is None:
            self._before = self._digest()

    def end(self) -> None:
        """They have been."""
        self._have_differed = self._have_differed or self._digest() != self._before

    def settle(self) -> bool:
        """Return whether weights were loaded that are not what they were before, after all loads."""
        if self._before is None:
            return False
        were_swapped = self._have_differed and self._digest() == self._before
        self._before, self._have_differed = None, False
        return not were_swapped

    @in_plain_mode
    def _digest(self) -> list[int]:
        """Return the sum of the bits of each parameter."""
        return sums([local_of(parameter.data) for parameter in self._parameters])
