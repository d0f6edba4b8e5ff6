"""Gradient averaging with stochastic rounding: QSGD."""

from __future__ import annotations

from collections.abc import Callable

import torch

from commlib.algorithms.compressed import Compressed
from commlib.algorithms.policy import EVERYTHING
from commlib.codecs.integer import Int2, Int4, Int8
from commlib.errors import ConfigError
from commlib.primitives.aggregators import LowPrecision

_CODECS = {2: Int2, 4: Int4, 8: Int8}


class QSGD(Compressed):
    """Averages gradients with unbiased quantization to 2, 4 or 8 bits: E[g] is their mean, without error feedback.

    With Q_b rounding x / s up or down at random so that its expectation is x / s, where s is the block's scale:

        g = Q_b(1/N sum_r Q_b(g_r))

    Random numbers depend on the seed, the round, the rank and the element's place in the model, not on the buckets.

    Args:
        bits: 2, 4 or 8.
        seed: Seed of the random numbers; the same on all ranks.
        op: "mean" or "sum".
        hierarchical: Whether gradients are first summed inside each node in full precision.
        compress: Selects the parameters to compress; all by default.

    Paper: Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding" (NeurIPS 2017),
    equation 3.1; with 2 bits it is Wen et al., "TernGrad" (NeurIPS 2017), by blocks.
    Deviations: the scale of a block is its largest magnitude (as in the paper's experiments, section 5), rounded up to
    bf16; fixed-width codes instead of Elias coding; the sum is quantized again, with separate random numbers.
    """

    made_for = "any"

    def __init__(
        self,
        bits: int = 8,
        seed: int = 0,
        op: str = "mean",
        hierarchical: bool = False,
        compress: Callable[[str, torch.Tensor], bool] = EVERYTHING,
    ) -> None:
        if bits not in _CODECS:
            raise ConfigError(f"QSGD.bits: expected 2, 4 or 8, got {bits!r}")
        if not 0 <= seed < 1 << 64:
            raise ConfigError(f"QSGD.seed: expected 0..2**64 - 1, got {seed}")
        self.codec = _CODECS[bits]()
        super().__init__(
            LowPrecision(self.codec, feedback=False, seed=seed), op=op, compress=compress, hierarchical=hierarchical
        )
        self.bits = bits
        self.seed = seed
