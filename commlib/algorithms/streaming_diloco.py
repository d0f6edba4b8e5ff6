"""Streaming DiLoCo: outer steps of the model's fragments in turn, in the background."""

from __future__ import annotations

from collections.abc import Callable

import torch

from commlib.algorithms.outer import MakeOptimizer, OuterAveraging
from commlib.algorithms.policy import EVERYTHING
from commlib.codecs.base import BlockCodec
from commlib.codecs.sparse import SparseCodec
from commlib.errors import ConfigError


class StreamingDiLoCo(OuterAveraging):
    """Applies DiLoCo to fragments: sends one every `period / fragments` steps, and merges it `delay` steps later.

    With x_p the global weights of fragment p, x_rp those of rank r, C the codec, u_p the outer momentum buffer and m
    the momentum:

        at step t:          g = C(1/N sum_r C(x_p - x_rp)),  u_p <- m u_p + g,  x_p <- x_p - outer_lr (g + m u_p)
        at step t + delay:  x_rp <- mixing x_rp + (1 - mixing) x_p

    Inner steps continue meanwhile, so the peak traffic is `fragments` times lower than DiLoCo's, and no rank waits if a
    fragment is transferred within `delay` steps. If `mixing` is not 0, replicas differ even after a merge; the global
    weights do not.

    Args:
        period: Inner steps between outer steps of a fragment (H); a multiple of `fragments`.
        fragments: Number of fragments of the model (P). Its buckets are assigned to them in turn, with sizes as even as
            whole parameters allow.
        delay: Inner steps for which a fragment is in flight (tau), at most `period / fragments`, so that a fragment is
            merged before the next one is sent. With 0 the step waits.
        mixing: Weight of a rank's own weights at a merge (alpha), in [0, 1). 0 discards the steps made in flight.
        outer_lr: Learning rate of the outer optimizer.
        outer_momentum: Momentum m of the outer optimizer.
        nesterov: Whether the outer optimizer uses Nesterov momentum.
        codec: As in `DiLoCo`; the paper sends 4 bits.
        feedback: As in `DiLoCo`.
        compress: With a codec, selects the parameters to compress; all by default.
        warmup_steps: As in `DiLoCo`.
        outer: As in `DiLoCo`.
        error_decay: As in `DiLoCo`, between outer steps of one fragment.

    Paper: Douillard et al., "Streaming DiLoCo with overlapping communication" (2025), algorithm 2.
    Deviations: fragments consist of every `fragments`-th bucket, where the paper's consist of transformer blocks; this
    is the paper's strided pattern with finer strides. The paper's outer gradients are 4-bit floats.
    """

    made_for = "adam"

    def __init__(
        self,
        period: int = 50,
        fragments: int = 5,
        delay: int = 5,
        mixing: float = 0.5,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        codec: BlockCodec | SparseCodec | str | None = None,
        feedback: bool | None = None,
        compress: Callable[[str, torch.Tensor], bool] = EVERYTHING,
        warmup_steps: int = 0,
        outer: MakeOptimizer | None = None,
        error_decay: float = 1.0,
    ) -> None:
        if fragments < 1 or period < 1 or period % fragments:
            raise ConfigError(
                f"StreamingDiLoCo: expected a period that is a multiple of fragments, got {period=}, {fragments=}"
            )
        if not 0 <= delay <= period // fragments:
            raise ConfigError(
                "StreamingDiLoCo.delay: expected 0 to period / fragments, because a fragment is merged before the next "
                f"one is sent; got {delay=}, {period=}, {fragments=}"
            )
        if not 0 <= mixing < 1:
            raise ConfigError(f"StreamingDiLoCo.mixing: expected 0 <= mixing < 1, got {mixing}")
        super().__init__(
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            nesterov=nesterov,
            outer=outer,
            codec=codec,
            feedback=feedback,
            error_decay=error_decay,
            compress=compress,
            period=period // fragments,
            fragments=fragments,
            delay=delay,
            mixing=mixing,
            warmup_steps=warmup_steps,
        )
