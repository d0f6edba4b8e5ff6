"""0/1 Adam: one bit per element on the wire or none, and a variance that is updated ever more rarely."""

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

#: Simulations begin where updates of the variance are 2 ** 10 steps apart.
_STEADY_DOUBLINGS = 10


class ZeroOneAdam(AveragedMomentum):
    """Adam whose variance is updated at growing intervals; at all other steps what moved is averaged in one bit.

    With lr_t the learning rate, t' the last step with a round, and C the one-bit codec with error feedback on both
    sides, as in `OneBitAdam`, in every step t:

        m_r <- b1 m_r + (1 - b1) g_r,   s_r <- s_r + lr_t m_r,   x_r <- x_r - lr_t m_r / sqrt(v)

    and in a step with a round (T_u in the paper), with S the sum of the learning rates since t':

        s = C(1/N sum_r C(s_r)),   m_r = s / S,   x_r = x_t' - s / sqrt(v),   s_r = 0

    The variance v is updated, with the mean gradient in full precision, in step 0 and then `warmup_steps` times after 1
    step each, as often after 2 steps each, after 4, and so on (T_v in the paper). Every step has a round until
    `local_after`; from one step before on v is frozen. Then rounds are 2 steps apart for `interval_doubling` steps,
    then 4, up to `longest_interval`. Steps in between communicate nothing, and the replicas are identical after every
    round.

    It requires `optimizer=commlib.optim.FrozenVarianceAdam(...)`.

    Args:
        warmup_steps: The updates of the variance after which their interval doubles (kappa).
        local_after: Steps until local steps begin, more than `warmup_steps`: the paper's end of the learning rate's
            warm-up. None: every step has a round, and replicas are always identical.
        interval_doubling: Steps after which the interval of rounds doubles: in which the learning rate halves.
        longest_interval: The longest interval of rounds (H), a power of two.
        hierarchical: Whether momentum is summed inside each node first, in full precision.
        compress: Which parameters are compressed; matrices of 1,024 elements and more by default. The momentum of the
            others is averaged in full precision.

    Paper: Lu et al., "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam" (ICLR 2023),
    algorithm 1, with the policies of its section 6.
    Deviations: where the variance is updated, the momentum is made of the mean gradient that all ranks have then, and
    nothing is sent in one bit (as in the authors' code). What is encoded is s / S, and residuals are multiplied by
    S_then / S_now: the same in exact arithmetic for one group of parameters, and representable in 16 bits. A scale for
    512 elements instead of one per tensor. Bias corrections, decoupled weight decay and the bound of an element's step
    as in `FrozenVarianceAdam`, which decays x_t' as well. No local steps with a GradScaler, whose skipped steps are
    each rank's own.
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
        """Return whether the variance is updated in a step, from 0 on."""
        if self.local_after is not None and step >= self.local_after - 1:
            return False
        doublings = (step // self.doubling + 1).bit_length() - 1
        return (step - self.doubling * ((1 << doublings) - 1)) % (1 << doublings) == 0

    @override
    def setup(self, context: Context) -> None:
        if self.local_after is not None and context.scaler is not None and context.scaler.is_enabled():
            raise ConfigError(
                "ZeroOneAdam: expected no enabled GradScaler with local_after, got one: in local steps each rank would "
                "skip steps by itself. Train in bf16, or with local_after=None"
            )
        super().setup(context)
        self.units.follow(context.optimizer, None)

    @override
    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        optimizer = self._optimizer
        # A rank that has joined early counts the rounds, not the steps of others.
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
    """Residuals go with the learning rates of all steps since the round before."""

    @override
    def _lr_of(self, group: dict[str, Any]) -> float:
        return float(group["lr"]) + float(group.get("passed_lr", 0.0))
