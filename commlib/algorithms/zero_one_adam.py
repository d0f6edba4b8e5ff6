"""0/1 Adam: at most one bit per element on the wire, and variance updates at growing intervals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from commlib.algorithms.channels import LocalSteps
from commlib.algorithms.context import BucketView, Context
from commlib.algorithms.momentum import AveragedMomentum
from commlib.algorithms.policy import MATRICES, Units
from commlib.codecs.floats import OneBit
from commlib.errors import ConfigError
from commlib.primitives.centralized import centralized_full_precision
from commlib.transport.base import Communication, Communicator

#: Simulations begin at the step where variance updates are 2 ** 10 steps apart.
_STEADY_DOUBLINGS = 10


class ZeroOneAdam(AveragedMomentum):
    """Adam with one-bit averages of its updates, optional local steps, and variance updates at growing intervals.

    With lr_t the learning rate, t' the last step with a round, and C the one-bit codec with error feedback in both
    stages, as in `OneBitAdam`, in every step t:

        m_r <- b1 m_r + (1 - b1) g_r,   s_r <- s_r + lr_t m_r,   x_r <- x_r - lr_t m_r / sqrt(v)

    and in a step with a round (T_u in the paper), with S the sum of the learning rates since t':

        s = C(1/N sum_r C(s_r)),   m_r = s / S,   x_r = x_t' - s / sqrt(v),   s_r = 0

    The variance v is updated with the mean gradient in full precision: in step 0, then `warmup_steps` times at an
    interval of 1 step, as often at an interval of 2 steps, of 4, and so on (T_v in the paper). Every step has a round
    until `local_after`; v is frozen from the step before it. Then rounds are 2 steps apart for `interval_doubling`
    steps, then 4, up to `longest_interval`. There is no communication in the steps in between, and the replicas are
    identical after every round.

    It requires `optimizer=commlib.optim.FrozenVarianceAdam(...)`.

    Args:
        warmup_steps: Number of variance updates after which their interval doubles (kappa).
        local_after: Steps before local steps begin, more than `warmup_steps`: the end of the learning rate's warm-up in
            the paper. With None, every step has a round, and replicas are always identical.
        interval_doubling: Steps after which the interval of rounds doubles; in the paper, those in which the learning
            rate halves.
        longest_interval: The longest interval of rounds (H), a power of two.
        hierarchical: Whether momentum is first summed inside each node in full precision.
        compress: Selects the parameters to compress; by default matrices of 1,024 elements or more. The momentum of the
            others is averaged in full precision.

    Paper: Lu et al., "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam" (ICLR 2023), algorithm
    1, with the policies of its section 6.
    Deviations: in a step that updates the variance, the momentum is computed from the mean gradient, which all ranks
    then have, and nothing is sent in one bit (as in the authors' code). s / S is encoded, and residuals are multiplied
    by S_then / S_now; this is the same in exact arithmetic for one parameter group, and representable in 16 bits. There
    is one scale per 512 elements instead of one per tensor. Bias corrections, decoupled weight decay and the bound of
    an element's step are as in `FrozenVarianceAdam`, which applies the weight decay to x_t' as well. Local steps are
    not supported with a GradScaler, since each rank would skip steps independently.
    """

    made_for = "adam"

    def __init__(
        self,
        warmup_steps: int = 16,
        local_after: int | None = None,
        interval_doubling: int = 32768,
        longest_interval: int = 16,
        hierarchical: bool = False,
        compress: Callable[[str, torch.Tensor], bool] = MATRICES,
    ) -> None:
        super().__init__(
            OneBit(), warmup_steps=warmup_steps, feedback=True, hierarchical=hierarchical, compress=compress
        )
        if local_after is not None and local_after <= warmup_steps:
            raise ConfigError(
                f"ZeroOneAdam.local_after: expected more than warmup_steps={warmup_steps}, or None, got {local_after}"
            )
        self.doubling = warmup_steps
        self.local_after = local_after
        local = None
        if local_after is not None:
            local = LocalSteps(after=local_after, doubling_every=interval_doubling, longest=longest_interval)
        varies_until = warmup_steps * ((1 << _STEADY_DOUBLINGS) - 1) + 1 if local is None else 0
        self.channel = dataclasses.replace(self.channel, local=local, varies_until=varies_until)
        self.units = _RoundUnits(rescale=True)
        self.states = (self.units, self.aggregation)

    def updates_variance(self, step: int) -> bool:
        """Return whether the variance is updated in a step, counted from 0."""
        if self.local_after is not None and step >= self.local_after - 1:
            return False
        doublings = (step // self.doubling + 1).bit_length() - 1
        return (step - self.doubling * ((1 << doublings) - 1)) % (1 << doublings) == 0

    @override
    def setup(self, context: Context) -> None:
        if self.local_after is not None and context.scaler is not None and context.scaler.is_enabled():
            raise ConfigError(
                "ZeroOneAdam: expected no enabled GradScaler with local_after, got one: in local steps each rank would "
                "skip steps independently. Train in bf16, or with local_after=None"
            )
        super().setup(context)
        self.units.follow(context.optimizer, None)

    @override
    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        optimizer = self._optimizer
        # Without local steps, count rounds, which a rank that has joined early also counts.
        step = comm.step if self.local_after is None else comm.optimizer_step
        if optimizer is not None and self.updates_variance(step):
            optimizer.freeze(False)
            yield from centralized_full_precision(bucket.flat, comm)
            bucket.flat.div_(self.divisor(comm))
            return
        if optimizer is not None and self.local_after is not None:
            optimizer.expect_local_steps()
        yield from super().communicate(bucket, comm)

    @override
    def forget(self) -> None:
        if self._optimizer is not None and self.local_after is not None:
            self._optimizer.forget_local_steps()


class _RoundUnits(Units):
    """Rescales residuals with the sum of the learning rates of all steps since the previous round."""

    @override
    def _lr_of(self, group: dict[str, Any]) -> float:
        return float(group["lr"]) + float(group.get("passed_lr", 0.0))
