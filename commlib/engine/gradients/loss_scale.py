"""Checks that ranks that sum gradients use the same loss scale.

[Note: loss scales] The sum of gradients of losses with different scales is wrong, and the error is not visible later:
each rank's `GradScaler` divides by its own scale. So the last bucket carries marks after its flags, one for each level
of scale. A rank writes 1 at its own level and 0 elsewhere. If the scales differ, more than one level is marked after
the sum, on all ranks at once. This needs no further collective and no wait for the device: the scale is read on its own
device, and on CUDA the marks are checked when the next backward begins.
"""

from __future__ import annotations

from typing import Any

import torch

from commlib.errors import ConfigError

#: Levels of scale, half an octave each. They repeat after the last one.
NUM_LEVELS = 64
_PER_OCTAVE = 2


class LossScale:
    """Compares the loss scale of all ranks in each round. See [Note: loss scales].

    Args:
        scaler: The user's `GradScaler`.
        rank: This rank.
    """

    def __init__(self, scaler: Any, rank: int) -> None:
        self._scaler = scaler
        self._rank = rank
        self._sums: torch.Tensor | None = None  # on the host, once `_copied` has completed
        self._copied: torch.cuda.Event | None = None

    def mark(self, marks: torch.Tensor) -> None:
        """Write this rank's level into `marks`, [NUM_LEVELS], without waiting for the device."""
        with torch.no_grad():
            scale = self._scaler.scale(torch.ones((), dtype=torch.float32, device=marks.device))
            level = (torch.log2(scale) * _PER_OCTAVE).round().remainder(NUM_LEVELS)
            marks.copy_(torch.arange(NUM_LEVELS, device=marks.device) == level)

    def take(self, marks: torch.Tensor) -> None:
        """Store the sum of the marks over the ranks, and check it: at once on the CPU, else in a later `check`.

        Raises:
            ConfigError: As in `check`.
        """
        if marks.device.type == "cuda":
            host = torch.empty(NUM_LEVELS, dtype=marks.dtype, device="cpu", pin_memory=True)
            self._sums = host.copy_(marks, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._sums = marks
            self.check()

    def check(self) -> None:
        """Check the stored marks, if they have arrived on the host.

        Raises:
            ConfigError: The scales differ. Raised on every rank.
        """
        if self._sums is None or (self._copied is not None and not self._copied.query()):
            return
        sums, self._sums, self._copied = self._sums, None, None
        if int((sums > 0).sum()) > 1:
            raise ConfigError(
                f"rank {self._rank}: the loss scale differs between ranks (here {self._scaler.get_scale():g}), and "
                "gradients of losses scaled by it were summed. Load the same state into the scaler on all ranks, and "
                "use another scaler for parameters whose gradients are not communicated"
            )
