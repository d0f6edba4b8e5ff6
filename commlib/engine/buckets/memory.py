"""Where a model's buckets lie in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

#: Buckets begin at multiples of so many elements: at cache lines, and where vector instructions like it.
_ALIGNMENT = 64
#: Elements beyond what the first plan needs, for the gaps of plans with more buckets.
_SPARE = 64 * _ALIGNMENT

#: What the tensors of a bucket share.
Place = tuple[torch.dtype, torch.device]


class Memory:
    """One stretch of memory for each dtype and device, kept from plan to plan.

    Several plans are tried. If each had buckets of its own, the heap would keep holes where the last ones were, too
    small for the next ones, and every change would wait for fresh pages.
    """

    def __init__(self) -> None:
        self._stretches: dict[Place, torch.Tensor] = {}

    def take(self, wanted: Sequence[tuple[Place, int]]) -> list[torch.Tensor]:
        """Return zeros, [numel] for each (layout, numel). What was taken before must not be used any more."""
        ends: Counter[Place] = Counter()
        starts = []
        for layout, numel in wanted:
            starts.append(ends[layout])
            ends[layout] += -(-numel // _ALIGNMENT) * _ALIGNMENT
        for layout, end in ends.items():
            self._clear(layout, end)
        places = zip(wanted, starts, strict=True)
        return [self._stretches[layout][start : start + numel] for (layout, numel), start in places]

    def _clear(self, layout: Place, numel: int) -> None:
        stretch = self._stretches.pop(layout, None)
        if stretch is not None and numel <= stretch.numel():
            self._stretches[layout] = stretch.zero_()
            return
        del stretch  # before the larger one is allocated
        dtype, device = layout
        self._stretches[layout] = torch.zeros(numel + _SPARE, dtype=dtype, device=device)
