"""The memory of a model's buckets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

#: Buckets start at multiples of this many elements, to align with cache lines and vector instructions.
_ALIGNMENT = 64
#: Elements beyond the size of the first plan, for the padding of plans with more buckets.
_SPARE = 64 * _ALIGNMENT

#: The dtype and device of a bucket.
Place = tuple[torch.dtype, torch.device]


class Memory:
    """One allocation for each dtype and device, reused by all plans.

    Several plans are tried. With separate allocations, the heap would fragment: freed buckets would be too small for
    the next plan's, and every change would allocate new pages.
    """

    def __init__(self) -> None:
        self._stretches: dict[Place, torch.Tensor] = {}

    def take(self, wanted: Sequence[tuple[Place, int]]) -> list[torch.Tensor]:
        """Return zeros, [numel] for each (layout, numel). Invalidates all tensors that were returned before."""
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
