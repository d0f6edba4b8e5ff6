"""The parameters whose gradients are communicated, and the buckets of the plan."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch

from commlib.engine.buckets.bucket import Bucket, EmbeddingBucket, have_moved
from commlib.engine.buckets.memory import Memory
from commlib.engine.buckets.slot import Listener, Slot
from commlib.engine.planning import plan as plans
from commlib.engine.planning.plan import Parameter, Plan

_dtype = operator.attrgetter("dtype")


class BucketSet:
    """The slots of parameters, and the buckets that contain them.

    Args:
        parks: Whether gradients are kept in host memory while buckets are rebuilt, so that device memory does not hold
            them twice.

    Attributes:
        slots: One slot per parameter.
        buckets: All buckets of the plan.
        dense: The buckets that have a flat buffer.
    """

    def __init__(self, parks: bool) -> None:
        self._parks = parks
        self._parameters: Sequence[Parameter] = ()
        self._dtypes: list[torch.dtype] = []
        self._params: list[torch.nn.Parameter] = []
        self._memory = Memory()
        self.slots: list[Slot] = []
        self.buckets: list[Bucket | EmbeddingBucket] = []
        self.dense: list[Bucket] = []

    def follow(self, parameters: Sequence[Parameter]) -> list[Slot]:
        """Create slots for these parameters, and return the previous slots. `build` creates the buckets."""
        before, self.slots = self.slots, plans.make_slots(parameters)
        self._parameters = parameters
        self._params = [parameter.param for parameter in parameters]
        self._dtypes = list(map(_dtype, self._params))
        self._memory = Memory()  # gradients of parameters that are now frozen may stay in the old memory
        return before

    def hook(self, listener: Callable[[], Listener | None]) -> None:
        """Notify the listener of every gradient."""
        for slot in self.slots:
            slot.hook(listener)

    def build(self, plan: Plan, num_marks: int = 0) -> tuple[list[Bucket | EmbeddingBucket], list[Bucket]]:
        """Build the buckets of a plan and move existing gradients into them; return all buckets and the dense ones."""
        existing = [slot for slot in self.slots if slot.param.grad is not None]
        parked = {slot: _parked(slot) for slot in existing if self._parks and slot.param.grad is slot.view}
        if len(parked) < len(existing):  # the others may share memory with the old buckets
            self._memory = Memory()
        for slot in parked:
            slot.param.grad = None
        buckets = plans.build(plan, self._parameters, self.slots, self._memory, num_marks)
        for slot, gradient in parked.items():
            slot.param.grad = slot.view.copy_(gradient)
        dense = [bucket for bucket in buckets if isinstance(bucket, Bucket)]
        for bucket in dense:
            bucket.adopt_existing()
        return buckets, dense

    def take(self, buckets: list[Bucket | EmbeddingBucket], dense: list[Bucket]) -> None:
        """Use the buckets that `build` returned, and release the previous buckets."""
        before, self.buckets, self.dense = self.dense, buckets, dense
        for bucket in before:
            bucket.release()

    def leave_gradients(self) -> None:
        """Replace gradients that are views of the buffers by copies, before the buffers are overwritten."""
        with torch.no_grad():
            for slot in self.slots:
                if slot.param.grad is not None and slot.param.grad is slot.view:
                    slot.param.grad = slot.view.clone()

    def has_moved(self) -> bool:
        """Return whether parameters were cast or moved to another device since the buckets were made."""
        return have_moved(self.dense) or list(map(_dtype, self._params)) != self._dtypes

    def close(self) -> None:
        """Remove every hook. Idempotent."""
        for slot in self.slots:
            slot.unhook()


def _parked(slot: Slot) -> torch.Tensor:
    return slot.view.to("cpu", copy=True)
