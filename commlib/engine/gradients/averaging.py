"""The algorithm that averages gradients now: the model's own, or full-precision all-reduce during its warm-up."""

from __future__ import annotations

import copy
from typing import Any

from commlib.algorithms.allreduce import AllReduce
from commlib.algorithms.base import Algorithm
from commlib.algorithms.channels import Gradients
from commlib.algorithms.context import Context
from commlib.engine.gradients.loss_scale import LossScale
from commlib.engine.rounds.schedule import StepCounter
from commlib.transport.base import Communicator


class Averaging:
    """How the gradients of a model are averaged in each step.

    Args:
        algorithm: The model's algorithm.
        counter: Counts the steps.
        comm: The ranks.
        scaler: The user's GradScaler, if given.
        is_elastic: Whether the ranks may change.

    Attributes:
        algorithm: As above.
        counter: As above.
        is_own: Whether the algorithm averages gradients after its warm-up.
        is_idle: Whether gradients are never averaged: the algorithm does not communicate them and has no warm-up, or
            has nothing to do in a group of one rank that stays alone.
        prototype: A copy of the algorithm that averages gradients, without buffers, for measurements.
        loss_scale: Compares the loss scales of the ranks; None if they need not be equal.
    """

    def __init__(
        self, algorithm: Algorithm, counter: StepCounter, comm: Communicator, scaler: Any, is_elastic: bool = False
    ) -> None:
        declared = algorithm.channel
        self.algorithm = algorithm
        self.counter = counter
        self.is_own = isinstance(declared, Gradients)
        is_alone = comm.world_size == 1 and not is_elastic
        self.is_idle = (is_alone and declared.rests_alone) or not counter.ever_syncs_gradients
        self.prototype = copy.deepcopy(algorithm) if self.is_own else AllReduce()
        self._warm_up = AllReduce()
        shares_scale = scaler is not None and scaler.is_enabled() and declared.keeps_replicas_alike
        self.loss_scale = LossScale(scaler, comm.rank) if shares_scale else None

    @property
    def current(self) -> Algorithm:
        """The algorithm of this step."""
        return self._warm_up if self.counter.is_warming_up or not self.is_own else self.algorithm

    @property
    def is_due(self) -> bool:
        """Whether the backward of this step averages gradients."""
        return not self.is_idle and self.counter.syncs_gradients

    @property
    def keeps_replicas_alike(self) -> bool:
        """Whether the averaged gradients keep the replicas identical."""
        return not self.is_own or self.algorithm.channel.keeps_replicas_alike

    def setup(self, context: Context) -> None:
        """Set up the algorithms with new buckets."""
        self._warm_up.setup(context)
        if self.is_own:
            self.algorithm.setup(context)

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of the algorithm's state before a round."""
        return self.algorithm.state_dict() if self.is_own else {}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Return to the state of a snapshot, before the round is repeated."""
        if self.is_own:
            self.algorithm.load_state_dict(snapshot)

    def forget(self) -> None:
        """Let the algorithm discard state of earlier weights."""
        if self.is_own:
            self.algorithm.forget()
