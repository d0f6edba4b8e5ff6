"""Correct algorithms of each class, changed to give wrong values: a name for each pair of change and algorithm.

`Tenfold` and `AllReduce` make `TenfoldAllReduce`, an attribute of this module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from commlib.algorithms import (
    DGC,
    Algorithm,
    AllReduce,
    BucketView,
    ByteGrad,
    Context,
    DiLoCo,
    Gradients,
    PassiveGossip,
)
from commlib.algorithms.base import Attachment, Runner
from commlib.transport.base import Communication, Communicator
from tests.contract.wrong import Careful, CarefulWeights

#: A correct algorithm of each class, and the contract that catches the changed ones.
CLASSES: dict[type[Algorithm], str] = {
    AllReduce: "mean_of_gradients",
    ByteGrad: "mean_within_8_bits",
    Careful: "nothing_is_lost",
    DGC: "steady_gradients",
    CarefulWeights: "mean_of_weights",
    DiLoCo: "steady_training",
    PassiveGossip: "learns_from_all",
}


def _changed(runner: Runner, attachment: Attachment, change: Callable[[Tensor], Tensor]) -> Runner:
    """Let a runner see steps of which `change` has made others."""
    parameters = [parameter for _, parameter in attachment.parameters]
    inner_before, inner_after, before = runner.before_step, runner.after_step, list[Tensor]()

    def before_step() -> None:
        before[:] = [parameter.detach().clone() for parameter in parameters]
        inner_before()

    def after_step() -> None:
        for parameter, old in zip(parameters, before, strict=True):
            parameter.data.copy_(old + change(parameter.data - old))
        inner_after()

    runner.before_step, runner.after_step = before_step, after_step  # type: ignore[method-assign]
    return runner


class RankZero(Algorithm):
    """Gives all ranks the values of rank 0."""

    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        bucket.flat.mul_(0 if comm.rank else comm.world_size)  # so that the mean is rank 0's
        yield from super().communicate(bucket, comm)

    def attach(self, attachment: Attachment) -> Runner:
        return _changed(super().attach(attachment), attachment, lambda step: step * (attachment.comm.rank == 0))


class Negated(Algorithm):
    """Makes everyone's the mean with the other sign."""

    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        yield from super().communicate(bucket, comm)
        bucket.flat.neg_()

    def attach(self, attachment: Attachment) -> Runner:
        return _changed(super().attach(attachment), attachment, lambda step: -step)


class Tenfold(Algorithm):
    """Makes everyone's ten times the mean."""

    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        yield from super().communicate(bucket, comm)
        bucket.flat.mul_(10)

    def attach(self, attachment: Attachment) -> Runner:
        return _changed(super().attach(attachment), attachment, lambda step: 10 * step)


class Hasty(Algorithm):
    """Adds an undeclared momentum."""

    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        yield from super().communicate(bucket, comm)
        velocities: dict[tuple[int, int], Tensor] = self.__dict__.setdefault("velocities", {})
        key = bucket.index, bucket.flat.numel()  # another plan has other buckets
        velocities[key] = bucket.flat + 0.9 * velocities.get(key, torch.zeros_like(bucket.flat))
        bucket.flat.copy_(velocities[key])


class HidesItsMomentum(DGC):
    """Declares that its gradients have no momentum, and lets an optimizer add its own."""

    has_momentum = False

    def setup(self, context: Context) -> None:
        super().setup(dataclasses.replace(context, optimizer=None))


class AccumulatesItsMomentum(HidesItsMomentum):
    """Also declares that it accumulates gradients."""

    channel = Gradients()


#: By name, the contract that catches it. DGC and DiLoCo already have a momentum; asynchronous exchange has no means.
CAUGHT_BY: dict[str, str] = {
    "HidesItsMomentum": "steady_gradients",
    "AccumulatesItsMomentum": "nothing_is_lost",
    **{
        kind.__name__ + right.__name__: contract
        for right, contract in CLASSES.items()
        for kind in (RankZero, Negated, Tenfold, Hasty)
        if not (kind is Hasty and right in (DGC, DiLoCo, PassiveGossip))
    },
}
_KINDS = {kind.__name__: kind for kind in (RankZero, Negated, Tenfold, Hasty)}


def __getattr__(name: str) -> type[Algorithm]:
    """Return the wrong algorithm of a name."""
    for right in CLASSES:
        kind = _KINDS.get(name.removesuffix(right.__name__))
        if kind is not None and name.endswith(right.__name__):
            return type(name, (kind, right), {"__module__": __name__, "__doc__": kind.__doc__})
    raise AttributeError(name)
