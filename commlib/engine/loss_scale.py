"""The loss scale, which ranks that sum gradients must share.

[Note: loss scales] A sum of gradients of losses that were scaled by different factors is wrong, and nothing later shows
it: each rank's `GradScaler` divides by its own factor. So the last bucket carries marks behind its flags, one for each
level of scale: a rank writes 1 at its own level and 0 elsewhere. After the sum more than one level is marked if the
scales differ, on all ranks at once. There is no further collective, and the device is not waited for: the scale is read
where it lies, and on CUDA the marks are looked at when the next backward begins.
"""

from __future__ import annotations

from typing import Any

import torch

from commlib.errors import ConfigError

#: Levels of scale: half an octave each, after which they repeat.
NUM_LEVELS = 64
_PER_OCTAVE = 2


class LossScale:
    """Compares the loss scale of all ranks in each round; see [Note: loss scales].

    Args:
        scaler: The user's `GradScaler`.
        rank: This rank.
    """

    def __init__(self, scaler: Any, rank: int) -> None:
        self._scaler = scaler
        self._rank = rank
        self._sums: torch.Tensor | None = None  # on the host, once `_copied` has passed
        self._copied: torch.cuda.Event | None = None

    def mark(self, marks: torch.Tensor) -> None:
        """Write this rank's level into `marks`, [NUM_LEVELS]. The device is not waited for."""
        with torch.no_grad():
            scale = self._scaler.scale(torch.ones((), dtype=torch.float32, device=marks.device))
            level = (torch.log2(scale) * _PER_OCTAVE).round().remainder(NUM_LEVELS)
            marks.copy_(torch.arange(NUM_LEVELS, device=marks.device) == level)

    def take(self, marks: torch.Tensor) -> None:
        """Take the sum of the marks over the ranks, and check it: at once on the CPU, else in a later `check`.

        Raises:
            ConfigError: See `check`.
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
        """Look at the marks that were taken, if they are here.

        Raises:
            ConfigError: The scales differ; on every rank.
        """
        if self._sums is None or (self._copied is not None and not self._copied.query()):
            return
        sums, self._sums, self._copied = self._sums, None, None
        if int((sums > 0).sum()) > 1:
            raise ConfigError(
                f"rank {self._rank}: the loss scale differs between ranks (here {self._scaler.get_scale():g}), and "
                "they have summed gradients of losses scaled by it. Load the same state into the scaler on all ranks, "
                "and use another scaler for parameters whose gradients are not communicated"
            )
