"""Buckets for rounds over weights or optimizer state: loads tensors into them, and writes results back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from commlib.algorithms.channels import OptimizerState, Weights
from commlib.engine.buckets.bucket import Bucket, have_moved, tensors_of
from commlib.engine.planning import plan as plans
from commlib.engine.planning.plan import Parameter
from commlib.engine.rounds import marks
from commlib.primitives.replicate import mean_all
from commlib.transport.base import Communication, Communicator

#: Blocking rounds that are fewer steps apart measure how far they move the weights once in this many rounds.
_DISTANCE_EVERY = 10


class WeightBuckets:
    """Buckets over the weights of parameters, or over one entry of their optimizer state.

    A blocking round replaces the tensors by its result. A background round works on a copy made at its start. When it
    is taken, `result - copy` is added to the tensors, which keeps the steps made in the meantime (as in BAGUA's
    asynchronous model averaging). With `Weights.mixing`, a weighted mean is used instead.

    Args:
        parameters: The parameters, in the model's order.
        declared: The channel that the algorithm declares.
        optimizer: The optimizer whose state may be communicated.
        cap_bytes: Maximum size of a bucket in bytes.

    Attributes:
        buckets: Buckets of all parameters except permanently frozen ones.
        holds_weights: Whether the buckets hold weights.
        carried: Buckets of the current round.
    """

    def __init__(self, parameters: Sequence[Parameter], declared: Weights, optimizer: Any, cap_bytes: int) -> None:
        self._parameters = [Parameter(p.name, p.param, sparse=False, group=p.group) for p in parameters]
        self._declared = declared
        self._key = declared.key if isinstance(declared, OptimizerState) else None
        self._optimizer = optimizer
        self._cap_bytes = cap_bytes
        self._left_out: frozenset[str] = frozenset()
        self._build()

    @property
    def holds_weights(self) -> bool:
        """See above."""
        return self._key is None

    def _build(self) -> None:
        """Build the buckets of all parameters except those left out."""
        moving = [p for p in self._parameters if p.name not in self._left_out]
        num_bytes = sum(p.part.nbytes for p in moving)
        cap_bytes = min(self._cap_bytes, -(-num_bytes // self._declared.fragments) or 1)
        built = plans.build(plans.initial(moving, cap_bytes), moving, plans.make_slots(moving))
        self.buckets = [bucket for bucket in built if isinstance(bucket, Bucket)]
        self._copies = [torch.empty_like(b.flat) for b in self.buckets] if self._declared.in_background else []
        self._moved: dict[int, torch.Tensor] = {}  # per bucket, the squared distance of its last round
        self.carried: list[Bucket] = []

    def has_moved(self) -> bool:
        """Return whether parameters were cast or moved to another device since the buckets were made."""
        return have_moved(self.buckets)

    def leave_out(self, names: frozenset[str]) -> list[torch.Tensor] | None:
        """Rebuild the buckets without these parameters.

        All ranks must rebuild in the same round. Buckets do not change if ranks may be a round apart.

        Returns:
            The weights of parameters that were left out before; None if the buckets did not change.
        """
        if names == self._left_out or not self._declared.keeps_step or len(names) == len(self._parameters):
            return None
        back = [p.part.data for p in self._parameters if p.name in self._left_out - names]
        self._left_out = names
        self._build()
        return back

    # --- rounds -----------------------------------------------------------------------------------------------------

    def load(self, bucket: Bucket) -> None:
        """Copy the tensors into a bucket."""
        with marks.phase("gather", bucket.describe):
            bucket.load(self._tensors(bucket))

    def begin_round(self, number: int) -> None:
        """Load the buckets of the round with this number, counted from 0."""
        self.carried = self.buckets[number % self._declared.fragments :: self._declared.fragments]
        for bucket in self.carried:
            self.load(bucket)
            if self._copies:
                self._copies[bucket.index].copy_(bucket.flat)

    def reload(self) -> None:
        """Load the buckets of the current round with the values that they had when it began."""
        for bucket in self.carried:
            if self._copies:
                bucket.flat.copy_(self._copies[bucket.index])
            else:
                self.load(bucket)

    def take_results(self, num_rounds: int, frozen: frozenset[str]) -> None:
        """Write the results of the round to the tensors.

        Args:
            num_rounds: Number of rounds, including this one.
            frozen: Names of parameters that must not change.
        """
        for bucket in self.carried:
            tensors = self._tensors(bucket)
            self._measure(bucket, tensors, num_rounds)
            if self._declared.mixing is None and self._copies:
                bucket.flat.sub_(self._copies[bucket.index])
            pairs = zip(bucket.slots, tensors, strict=True)
            moving = [(tensor, slot.view) for slot, tensor in pairs if slot.name not in frozen]
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
        yield from mean_all([p.part.data for p in self._parameters if p.name in self._left_out], comm)

    # --- consensus distance -----------------------------------------------------------------------------------------

    def _measure(self, bucket: Bucket, tensors: Sequence[torch.Tensor], num_rounds: int) -> None:
        """Record how far the round moved the bucket. Without a copy this costs a pass, so not in every round."""
        if self._copies:
            self._moved[bucket.index] = torch.dist(bucket.flat, self._copies[bucket.index]).float().square()
        elif self._declared.period >= _DISTANCE_EVERY or num_rounds % _DISTANCE_EVERY == 1:
            self._moved[bucket.index] = _distance_squared(tensors, bucket)

    @property
    def consensus_distance(self) -> float | None:
        """The L2 distance between the weights and the result of the last round or mean; None before the first."""
        if not self._moved or not self.holds_weights:
            return None
        return math.sqrt(sum(float(square) for square in self._moved.values()))


def _distance_squared(tensors: Sequence[torch.Tensor], bucket: Bucket) -> torch.Tensor:
    squares = [torch.dist(t, slot.view).float().square() for t, slot in zip(tensors, bucket.slots, strict=True)]
    return torch.stack(squares).sum()
