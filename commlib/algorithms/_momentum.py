"""What the algorithms that average a compressed momentum share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from commlib.algorithms._policy import Units
from commlib.algorithms._quantized import Quantized
from commlib.algorithms.base import BucketView, Context
from commlib.codecs.base import BlockCodec
from commlib.errors import ConfigError
from commlib.optim import FrozenVarianceAdam
from commlib.transport.base import Communication, Communicator


class QuantizedMomentum(Quantized):
    """Plain averaging of gradients first; then the variance of Adam is frozen and its momentum averaged, quantized.

    Args:
        codec: What the momentum is encoded with.
        warmup_steps: Steps before the freeze, at least 1.
        feedback: Whether errors are fed back, on both sides.
        hierarchical: See `Compressed`.
        compress: Which parameters are compressed; the momentum of the others is averaged in full precision.
    """

    optimizer_type = FrozenVarianceAdam

    def __init__(
        self,
        codec: BlockCodec | str,
        *,
        warmup_steps: int,
        feedback: bool,
        hierarchical: bool,
        compress: Callable[[str, torch.Tensor], bool],
    ) -> None:
        if warmup_steps < 1:
            raise ConfigError(f"{type(self).__name__}.warmup_steps: expected at least 1, got {warmup_steps}")
        super().__init__(codec, op="mean", feedback=feedback, seed=None, compress=compress, hierarchical=hierarchical)
        self.exactness = "any"  # another optimizer
        self.traits = dataclasses.replace(
            self.traits, warmup_steps=warmup_steps, needs_optimizer=True, idle_alone=False, accumulates=False
        )
        self._gradient_units = Units()
        self._optimizer: FrozenVarianceAdam | None = None
        self._places: dict[int, list[_Place]] = {}

    @override
    def setup(self, context: Context) -> None:
        optimizer = context.optimizer
        if optimizer is not None:
            if not isinstance(optimizer, FrozenVarianceAdam):
                raise ConfigError(
                    f"{type(self).__name__}: expected optimizer=commlib.optim.FrozenVarianceAdam(...), got "
                    f"{type(optimizer).__name__}, which cannot freeze its variance"
                )
            self._optimizer = optimizer
            self._places = {bucket.index: _places(bucket, optimizer) for bucket in context.buckets}
        self._gradient_units.follow(None, context.scaler)
        # What is exchanged is the momentum: without a loss scale, and of no learning rate.
        super().setup(dataclasses.replace(context, optimizer=None, scaler=None))

    @override
    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        scale = self._gradient_units.scale
        self._to_momentum(bucket, scale)
        yield from super().communicate(bucket, comm)
        bucket.flat.mul_(scale)  # the scaler will unscale it
        if self._optimizer is not None:
            self._optimizer.freeze()

    def _to_momentum(self, bucket: BucketView, scale: float) -> None:
        """Replace this rank's gradients g by b1 m + (1 - b1) g, m the common momentum."""
        optimizer = self._optimizer
        if optimizer is None:
            return
        for begin, end, parameter, group in self._places[bucket.index]:
            beta = group["betas"][0]
            momentum = optimizer.momentum(parameter).reshape(-1)
            bucket.flat[begin:end].mul_((1 - beta) / scale).add_(momentum, alpha=beta)


#: Where a parameter begins and ends in its bucket, itself, and its group in the optimizer.
_Place = tuple[int, int, torch.nn.Parameter, dict[str, Any]]


def _places(bucket: BucketView, optimizer: FrozenVarianceAdam) -> list[_Place]:
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    own = zip(bucket.parts, bucket.parameters, strict=False)  # a scratch bucket has no parameters
    return [(part.start, part.start + part.numel, parameter, groups[parameter]) for part, parameter in own]
