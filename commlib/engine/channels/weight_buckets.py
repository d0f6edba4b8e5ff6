"""The buckets of rounds over weights or optimizer state: what goes into them, and how results come out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from commlib.algorithms.channels import OptimizerState, Weights
from commlib.engine.buckets.bucket import Bucket, tensors_of
from commlib.engine.channels.bucket_set import have_moved
from commlib.engine.channels.frozen import Frozen
from commlib.engine.planning import plan as plans
from commlib.engine.planning.plan import Parameter
from commlib.engine.rounds import marks
from commlib.primitives.replicate import mean_all
from commlib.transport.base import Communication, Communicator

#: Where steps wait for their round, how far it moved the weights is measured once in this many steps.
_DISTANCE_EVERY = 10


class WeightBuckets:
    """Buckets over the weights, or an entry of the optimizer's state, of some parameters.

    A round that is waited for replaces the tensors by its result. One in the background works on a copy taken at its
    start; its effect, `result - copy`, is added to the tensors when it is taken, so that the steps made meanwhile are
    kept (BAGUA's asynchronous model averaging does the same). `Weights.mixing` asks for a weighted mean instead.

    Args:
        parameters: The parameters, in the model's order.
        declared: What the algorithm communicates.
        optimizer: Whose state may be what is communicated.
        cap_bytes: Size of a bucket.

    Attributes:
        buckets: Those of all parameters but the ones that rest; see [Note: frozen layers] in `frozen.py`.
        holds_weights: Whether they hold weights.
    """

    def __init__(self, parameters: Sequence[Parameter], declared: Weights, optimizer: Any, cap_bytes: int) -> None:
        self._parameters = [Parameter(p.name, p.param, sparse=False, group=p.group) for p in parameters]
        self._declared = declared
        self._key = declared.key if isinstance(declared, OptimizerState) else None
        self._optimizer = optimizer
        self._cap_bytes = cap_bytes
        self._frozen = Frozen([p.param for p in parameters], declared.period)
        self._resting: frozenset[int] = frozenset()
        self._build()

    @property
    def holds_weights(self) -> bool:
        """See above."""
        return self._key is None

    def _build(self) -> None:
        """Make the buckets of all parameters but those that rest."""
        moving = [p for p in self._parameters if id(p.param) not in self._resting]
        num_bytes = sum(p.part.nbytes for p in moving)
        cap_bytes = min(self._cap_bytes, -(-num_bytes // self._declared.fragments) or 1)
        built = plans.build(plans.initial(moving, cap_bytes), moving, plans.make_slots(moving))
        self.buckets = [bucket for bucket in built if isinstance(bucket, Bucket)]
        self._copies = [torch.empty_like(b.flat) for b in self.buckets] if self._declared.in_background else []
        self._moved: dict[int, torch.Tensor] = {}  # per bucket, the square of how far its last round moved it
        self._carried: list[Bucket] = []  # by the round under way

    def has_moved(self) -> bool:
        """Return whether parameters were cast or moved to another device since the buckets were made."""
        return have_moved(self.buckets)

    # --- frozen parameters ------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """Look at which parameters are frozen, at the end of a step."""
        self._frozen.end_step()

    def follow_freezing(self) -> list[torch.Tensor] | None:
        """Leave parameters out that are frozen for good, and take those in that are not any more.

        All ranks alike, so not where they may be a round apart: there buckets stay.

        Returns:
            The weights that came back, in which the ranks may differ; None if all is as it was.
        """
        resting = self._frozen.resting()
        if resting == self._resting or not self._declared.keeps_step or len(resting) == len(self._parameters):
            return None
        back = [p.part.data for p in self._parameters if id(p.param) in self._resting - resting]
        self._resting = resting
        self._build()
        return back

    # --- rounds -----------------------------------------------------------------------------------------------------

    def load(self, bucket: Bucket) -> None:
        """Bring the tensors into a bucket."""
        with marks.phase("gather", bucket.describe):
            bucket.load(self._tensors(bucket))

    def begin_round(self, number: int) -> list[Bucket]:
        """Load the buckets that the round of that number, from 0 on, carries, and return them."""
        self._carried = self.buckets[number % self._declared.fragments :: self._declared.fragments]
        for bucket in self._carried:
            self.load(bucket)
            if self._copies:
                self._copies[bucket.index].copy_(bucket.flat)
        return self._carried

    def take_results(self, num_rounds: int) -> None:
        """Bring the results of the round into the tensors; `num_rounds`: how many there were, with this one."""
        resting = self._frozen.resting()
        for bucket in self._carried:
            tensors = self._tensors(bucket)
            self._measure(bucket, tensors, num_rounds)
            if self._declared.mixing is None and self._copies:
                bucket.flat.sub_(self._copies[bucket.index])
            pairs = zip(bucket.slots, tensors, strict=True)
            moving = [(tensor, slot.view) for slot, tensor in pairs if id(slot.whole) not in resting]
            if moving:
                self._apply(*zip(*moving, strict=True))

    def _apply(self, tensors: tuple[torch.Tensor, ...], results: tuple[torch.Tensor, ...]) -> None:
        if self._declared.mixing is not None:
            torch._foreach_lerp_(tensors, results, 1.0 - self._declared.mixing)
        elif self._copies:
            torch._foreach_add_(tensors, results)
        else:
            torch._foreach_copy_(tensors, results)

    def _tensors(self, bucket: Bucket) -> list[torch.Tensor]:
        return tensors_of(bucket, self._key, self._optimizer)

    def mean(self, comm: Communicator) -> Communication:
        """Replace every weight by its mean over the ranks."""
        for bucket in self.buckets:
            weights = tensors_of(bucket)
            bucket.load(weights)
            yield comm.all_reduce(bucket.flat)
            bucket.flat.div_(comm.world_size)
            self._moved[bucket.index] = _distance_squared(weights, bucket)
            bucket.store(weights)
        resting = [p.part.data for p in self._parameters if id(p.param) in self._resting]
        yield from mean_all(resting, comm)

    # --- how far rounds move the weights ----------------------------------------------------------------------------

    def _measure(self, bucket: Bucket, tensors: Sequence[torch.Tensor], num_rounds: int) -> None:
        """Note how far the round moved the bucket: on a copy in every round, else now and then, as it costs a pass."""
        if self._copies:
            self._moved[bucket.index] = torch.dist(bucket.flat, self._copies[bucket.index]).float().square()
        elif self._declared.period >= _DISTANCE_EVERY or num_rounds % _DISTANCE_EVERY == 1:
            self._moved[bucket.index] = _distance_squared(tensors, bucket)

    @property
    def consensus_distance(self) -> float | None:
        """The L2 distance between the weights and what the last round, or mean, made of them; None before."""
        if not self._moved or not self.holds_weights:
            return None
        return math.sqrt(sum(float(square) for square in self._moved.values()))


def _distance_squared(tensors: Sequence[torch.Tensor], bucket: Bucket) -> torch.Tensor:
    squares = [torch.dist(t, slot.view).float().square() for t, slot in zip(tensors, bucket.slots, strict=True)]
    return torch.stack(squares).sum()
