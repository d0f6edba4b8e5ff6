"""Post-local SGD: gradients are averaged first, weights later."""

from __future__ import annotations

from collections.abc import Callable

import torch

from commlib.algorithms.outer import OuterAveraging
from commlib.algorithms.policy import EVERYTHING
from commlib.codecs.base import BlockCodec
from commlib.codecs.sparse import SparseCodec


class PostLocalSGD(OuterAveraging):
    """Averages gradients in the first `warmup_steps` steps, then switches to `LocalSGD`.

    Args:
        warmup_steps: Optimizer steps with full-precision averages of the gradients. The paper switches at the first
            decrease of the learning rate, halfway through the training.
        period: Optimizer steps between averages of the weights, counted from the switch.
        codec: As in `LocalSGD`.
        feedback: As in `LocalSGD`.
        compress: As in `LocalSGD`.

    Paper: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD" (ICLR 2020): post-local SGD.
    Deviations: the switch is given as a number of steps. The local optimizer is the user's, and its state stays local
    after the switch.
    """

    made_for = "sgd"

    def __init__(
        self,
        warmup_steps: int = 100,
        period: int = 8,
        codec: BlockCodec | SparseCodec | str | None = None,
        feedback: bool | None = None,
        compress: Callable[[str, torch.Tensor], bool] = EVERYTHING,
    ) -> None:
        super().__init__(codec=codec, feedback=feedback, compress=compress, period=period, warmup_steps=warmup_steps)
