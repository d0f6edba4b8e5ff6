"""Streaming DiLoCo: the model's fragments take their outer steps in turn, in the background."""

from __future__ import annotations

from collections.abc import Callable

import torch

from commlib.algorithms.outer import MakeOptimizer, OuterAveraging
from commlib.algorithms.policy import EVERYTHING
from commlib.codecs.base import BlockCodec
from commlib.codecs.sparse import SparseCodec
from commlib.errors import ConfigError


class StreamingDiLoCo(OuterAveraging):
    """DiLoCo by fragments: every `period / fragments` steps the next one is sent, and merged `delay` steps later.

    With x_p the global weights of fragment p, x_rp those of rank r, C the codec, u_p the outer momentum m:

        at step t:          g = C(1/N sum_r C(x_p - x_rp)),  u_p <- m u_p + g,  x_p <- x_p - outer_lr (g + m u_p)
        at step t + delay:  x_rp <- mixing x_rp + (1 - mixing) x_p

    Ranks go on with their inner steps meanwhile, so the peak of the traffic is `fragments` times lower than DiLoCo's
    and nobody waits, if a fragment travels within `delay` steps. Where mixing is not 0 the replicas differ even after a
    merge; the global weights do not.

    Args:
        period: Inner steps from one outer step of a fragment to its next (H); a multiple of `fragments`.
        fragments: Parts of the model (P): its buckets, dealt out in turn. Their sizes are as even as whole parameters
            allow.
        delay: Inner steps that a fragment is in flight (tau); at most `period / fragments`, since one fragment has to
            be merged before the next one is sent: what is in flight at once stays one fragment. 0 makes the step wait.
        mixing: What a rank keeps of its own weights at a merge (alpha): 0 forgets the steps made in flight, 1 would
            forget the others.
        outer_lr: The outer learning rate.
        outer_momentum: The outer momentum m.
        nesterov: Whether the outer momentum is Nesterov's.
        codec: As in `DiLoCo`; the paper sends 4 bits.
        feedback: As in `DiLoCo`.
        compress: With a codec: which parameters are compressed; all by default.
        warmup_steps: As in `DiLoCo`.
        outer: As in `DiLoCo`.
        error_decay: As in `DiLoCo`, from one outer step of a fragment to its next.

    Paper: Douillard et al., "Streaming DiLoCo with overlapping communication" (2025), algorithm 2.
    Deviations: fragments consist of buckets, every `fragments`-th one, where the paper's are of transformer blocks;
    that is its strided pattern with finer strides. The outer gradients are 4-bit floats there.
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
                "StreamingDiLoCo.delay: expected 0 to period / fragments, as a fragment is merged before the next one "
                f"is sent; got {delay=}, {period=}, {fragments=}"
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
