"""Algorithms that average the quantized momentum of Adam: `AveragedMomentum`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from commlib.algorithms.compressed import Compressed
from commlib.algorithms.context import BucketView, Context
from commlib.algorithms.policy import Units
from commlib.codecs.base import BlockCodec
from commlib.codecs.registry import block_codec
from commlib.errors import ConfigError
from commlib.optim import FrozenVarianceAdam
from commlib.optim.groups import Groups
from commlib.primitives.aggregators import LowPrecision
from commlib.primitives.order import flattened
from commlib.primitives.parts import Part
from commlib.sharding.local import local_of
from commlib.transport.base import Communication, Communicator


class AveragedMomentum(Compressed):
    """Averages gradients during a warm-up, then freezes the variance of Adam and averages the quantized momentum.

    Args:
        codec: Codec of the momentum, or its name.
        warmup_steps: Steps before the variance is frozen, at least 1.
        feedback: Whether error feedback is used in both stages.
        hierarchical: See `Compressed`.
        compress: Selects the parameters to compress. The momentum of the others is averaged in full precision.
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
        self.codec = block_codec(codec)
        super().__init__(LowPrecision(self.codec, feedback=feedback), compress=compress, hierarchical=hierarchical)
        self.feedback = feedback
        self.exactness = "any"  # another optimizer
        self.channel = dataclasses.replace(
            self.channel, warmup_steps=warmup_steps, reads_optimizer=True, idle_alone=False, accumulates=False
        )
        self._gradient_units = Units()
        self._optimizer: FrozenVarianceAdam | None = None
        self._groups: Groups | None = None
        self._own: dict[int, list[tuple[Part, torch.nn.Parameter]]] = {}  # by bucket

    @override
    def check_optimizer(self, optimizer: Any, is_warming_up: bool) -> None:
        if optimizer is None:  # only its rounds are used
            return
        own = self._expected(optimizer)
        if not is_warming_up and not all(group["frozen"] for group in own.param_groups):
            raise ConfigError(
                f"{type(self).__name__}: the warm-up has ended and gradients now hold momentum, but the variance of "
                "the new optimizer is not frozen. Load the old optimizer's state into it: "
                "new.load_state_dict(old.state_dict())"
            )

    def _expected(self, optimizer: Any) -> FrozenVarianceAdam:
        if not isinstance(optimizer, FrozenVarianceAdam):
            raise ConfigError(
                f"{type(self).__name__}: expected optimizer=commlib.optim.FrozenVarianceAdam(...), got "
                f"{type(optimizer).__name__}, which cannot freeze its variance"
            )
        return optimizer

    @override
    def setup(self, context: Context) -> None:
        optimizer = context.optimizer
        if optimizer is not None:
            self._optimizer = optimizer = self._expected(optimizer)
            self._groups = Groups(optimizer)
            self._own = {bucket.index: _own(bucket) for bucket in context.buckets}
        self._gradient_units.follow(None, context.scaler)
        # The momentum is exchanged. It has no loss scale and does not depend on the learning rate.
        super().setup(dataclasses.replace(context, optimizer=None, scaler=None))

    @override
    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        scale = self._gradient_units.scale(comm.step)
        self._to_momentum(bucket, scale)
        yield from super().communicate(bucket, comm)
        bucket.flat.mul_(scale)  # the scaler will unscale it
        if self._optimizer is not None:
            self._optimizer.freeze()

    def _to_momentum(self, bucket: BucketView, scale: float) -> None:
        """Replace this rank's gradients g by b1 m + (1 - b1) g with momentum m, or by its mean since the last round."""
        optimizer, groups = self._optimizer, self._groups
        if optimizer is None or groups is None:
            return
        for part, parameter in self._own[bucket.index]:
            group = groups.find(parameter)
            if group is None:
                raise ConfigError(
                    f"{type(self).__name__}: {part.name!r} is no longer in a group of the optimizer, which stores the "
                    "averaged momentum. Unwrap the model, change the optimizer, and wrap it again on all ranks"
                )
            beta = group["betas"][0]
            momentum = flattened(local_of(optimizer.momentum(parameter)), part.order)
            values = bucket.flat[part.start : part.start + part.numel]
            values.mul_((1 - beta) / scale).add_(momentum, alpha=beta)
            moved, passed_lr = optimizer.moved(parameter), group.get("passed_lr", 0.0)
            if moved is not None and (span := passed_lr + float(group["lr"])):  # the mean over steps, by learning rate
                values.mul_(float(group["lr"]) / span).add_(flattened(local_of(moved), part.order), alpha=1 / span)


def _own(bucket: BucketView) -> list[tuple[Part, torch.nn.Parameter]]:
    return list(zip(bucket.parts, bucket.parameters, strict=False))  # a scratch bucket has no parameters
