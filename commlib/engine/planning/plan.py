"""A plan: the assignment of parameters to buckets and the order of the buckets. Identical on all ranks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commlib.engine.buckets.bucket import Bucket, EmbeddingBucket, flat_numel, layout_key
from commlib.engine.buckets.memory import Memory
from commlib.engine.buckets.slot import Slot
from commlib.engine.planning import sizes
from commlib.errors import ConfigError
from commlib.sharding.local import communicated, placing_of


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter that the engine communicates.

    Attributes:
        name: The parameter's name in the model.
        param: The parameter.
        sparse: Whether its gradients are sparse.
        group: The value of `Algorithm.group` for it. All parameters of a bucket have the same group.
    """

    name: str
    param: torch.nn.Parameter
    sparse: bool
    group: Hashable = None

    @property
    def part(self) -> Any:
        """The communicated tensor: the parameter or, for a DTensor, this rank's shard."""
        return communicated(self.param)


@dataclass(frozen=True)
class Plan:
    """Buckets as lists of indices into the parameter list, and the origin of the plan.

    Attributes:
        buckets: Indices of each bucket's parameters.
        kind: "initial", "trial" (one of several that are timed), "planned" (the fastest of them), "fixed" (by
            `bucket_cap_mb`), "settled" (by a checkpoint, before it was planned) or "restored" (from a checkpoint).
        ready_s: For each parameter, seconds from the start of backward until its gradient was ready, on rank 0.
        cost: The measured cost of communication, for "trial" and "planned".
    """

    buckets: tuple[tuple[int, ...], ...]
    kind: str
    ready_s: tuple[float, ...] = ()
    cost: sizes.BucketTimes | None = None

    def saved(self, names: Sequence[str]) -> dict[str, Any] | None:
        """Return the plan's entry in a checkpoint, with the parameters' names. None for the initial plan."""
        if self.kind == "initial":
            return None
        return {"buckets": [[names[idx] for idx in members] for members in self.buckets], "ready_s": self.ready_s}


#: Bucket sizes to try in addition to the predicted boundaries. The largest means one bucket.
_TRIAL_CAPS = (1 << 20, 5 << 20, 10 << 20, 25 << 20, 1 << 62)
#: Of plans with equally many buckets whose boundaries differ by at most this fraction of all bytes, only one is tried.
#: Timing both and keeping the faster would select noise.
_LEAST_DIFFERENCE = 0.01
#: Assumed slowdown factors of backward when it overlaps with communication.
_STRETCHES = (1.0, 1.5)

#: Bucket ends for the gradients of one group: maps (ready seconds, bytes) to the ends.
Cut = Callable[[Sequence[float], Sequence[int]], list[int]]


def initial(parameters: Sequence[Parameter], cap_bytes: int) -> Plan:
    """Return the plan before any measurement: parameters joined by size, the last registered bucket first."""
    order = list(range(len(parameters)))  # within a bucket in registration order, as in DDP's first step
    ready_s = [float(len(order) - idx) for idx in range(len(order))]
    return Plan(_cut(parameters, order, ready_s, _by_size(cap_bytes)), "initial")


def by_sizes(parameters: Sequence[Parameter], cap_bytes: int) -> Plan:
    """Return a plan that does not depend on measurements: by size, the last registered parameters first."""
    return dataclasses.replace(initial(parameters, cap_bytes), kind="settled")


def fixed(parameters: Sequence[Parameter], cap_bytes: int, ready_s: Sequence[float]) -> Plan:
    """Return the plan for a given bucket size, in the order in which gradients became ready."""
    order = sorted(range(len(parameters)), key=ready_s.__getitem__)
    buckets = _cut(parameters, order, ready_s, _by_size(cap_bytes))
    return Plan(buckets, "fixed", tuple(ready_s))


def restored(saved: dict[str, Any] | None, parameters: Sequence[Parameter]) -> Plan | None:
    """Return the plan for an entry that `Plan.saved` returned. None for None.

    Raises:
        ConfigError: The plan belongs to other parameters.
    """
    if saved is None:
        return None
    index = {parameter.name: idx for idx, parameter in enumerate(parameters)}
    names = [name for members in saved["buckets"] for name in members]
    if sorted(names) != sorted(index):
        different = sorted(set(names) ^ set(index))
        raise ConfigError(
            f"the saved bucket plan is of another model: {len(names)} parameters, expected {len(index)}; first "
            f"difference {different[:1]}"
        )
    buckets = tuple(tuple(index[name] for name in members) for members in saved["buckets"])
    return Plan(buckets, "restored", tuple(saved["ready_s"]))


def candidates(
    parameters: Sequence[Parameter], ready_s: Sequence[float], backward_s: float, cost: sizes.BucketTimes
) -> list[Plan]:
    """Return distinct plans to try: by plain sizes, and with the shortest predicted step time."""
    order = sorted(range(len(parameters)), key=ready_s.__getitem__)
    cuts = [*map(_by_size, _TRIAL_CAPS), *(_by_time(cost, backward_s, stretch) for stretch in _STRETCHES)]
    shared = tuple(ready_s)
    found: dict[tuple[int, ...], Plan] = {}
    for cut in cuts:
        buckets = _cut(parameters, order, ready_s, cut)
        ends = tuple(itertools.accumulate(sum(parameters[idx].part.nbytes for idx in bucket) for bucket in buckets))
        if not any(_are_alike(ends, others) for others in found):
            found[ends] = Plan(buckets, "trial", shared, cost)
    return list(found.values())


def _are_alike(ends: Sequence[int], others: Sequence[int]) -> bool:
    """Return whether timing cannot distinguish two plans, given by the bytes up to the end of each bucket."""
    least = _LEAST_DIFFERENCE * ends[-1]
    return len(ends) == len(others) and all(abs(a - b) <= least for a, b in zip(ends, others, strict=True))


def main_group(parameters: Sequence[Parameter]) -> Hashable:
    """Return the group of parameters with the most bytes, for scratch buckets."""
    nbytes: dict[Hashable, int] = {}
    for parameter in parameters:
        if not parameter.sparse:
            nbytes[parameter.group] = nbytes.get(parameter.group, 0) + parameter.part.nbytes
    return max(nbytes, key=nbytes.__getitem__, default=None)


def make_slots(parameters: Sequence[Parameter]) -> list[Slot]:
    """Return a slot for each parameter."""
    found, offset = [], 0
    for idx, parameter in enumerate(parameters):
        found.append(Slot(parameter.name, parameter.param, idx, offset))
        offset += parameter.param.numel() * (2 if parameter.param.dtype.is_complex else 1)
    return found


def build(
    plan: Plan,
    parameters: Sequence[Parameter],
    slots: Sequence[Slot],
    memory: Memory | None = None,
    num_marks: int = 0,
) -> list[Bucket | EmbeddingBucket]:
    """Build the plan's buckets. The last dense one carries the flags, one for each parameter in a dense bucket.

    Args:
        plan: The plan.
        parameters: All parameters.
        slots: The slots of all parameters.
        memory: Provides the memory of the buckets. Allocated separately if not given.
        num_marks: Number of further flags.
    """
    dense = [idx for idx, members in enumerate(plan.buckets) if not parameters[members[0]].sparse]
    num_flags = sum(len(plan.buckets[idx]) for idx in dense) + num_marks
    own_slots = [[slots[member] for member in members] for members in plan.buckets]
    wanted = [
        (layout_key(own_slots[idx][0].param), flat_numel(own_slots[idx]) + (num_flags if idx == dense[-1] else 0))
        for idx in dense
    ]
    payloads = iter((memory or Memory()).take(wanted))
    buckets: list[Bucket | EmbeddingBucket] = []
    for idx, own in enumerate(own_slots):
        first = parameters[plan.buckets[idx][0]]
        buckets.append(EmbeddingBucket(idx, own[0]) if first.sparse else Bucket(idx, own, next(payloads), first.group))
    return buckets


def _by_size(cap_bytes: int) -> Cut:
    return lambda ready_s, nbytes: sizes.by_size(nbytes, cap_bytes)


def _by_time(cost: sizes.BucketTimes, backward_s: float, stretch: float) -> Cut:
    def cut(ready_s: Sequence[float], nbytes: Sequence[int]) -> list[int]:
        return sizes.by_time([at * stretch for at in ready_s], nbytes, cost, backward_s * stretch)

    return cut


def _cut(
    parameters: Sequence[Parameter], order: Sequence[int], ready_s: Sequence[float], cut: Cut
) -> tuple[tuple[int, ...], ...]:
    """Cut each group of similar parameters into buckets, and order all buckets by the time when they are ready."""
    groups: dict[object, list[int]] = {}
    for idx in order:
        parameter = parameters[idx]
        key = idx if parameter.sparse else (layout_key(parameter.part), parameter.group, placing_of(parameter.param))
        groups.setdefault(key, []).append(idx)
    buckets = []
    for members in groups.values():
        start = 0
        for end in cut([ready_s[idx] for idx in members], [parameters[idx].part.nbytes for idx in members]):
            buckets.append(tuple(members[start:end]))
            start = end
    return tuple(sorted(buckets, key=lambda members: max(ready_s[idx] for idx in members)))
