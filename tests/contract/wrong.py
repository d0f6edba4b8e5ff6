"""Algorithms with one deliberate fault each, and the two correct ones that they derive from."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from commlib.algorithms import Algorithm, BucketView, Context, Weights
from commlib.algorithms.policy import Units
from commlib.primitives.parts import cut, paste
from commlib.transport.base import Communication, Communicator


class Careful(Algorithm):
    """Averages coarsely rounded gradients, and remembers the rounding errors. It has no fault."""

    exactness = "compensated"

    def __init__(self) -> None:
        self._units = Units()
        self._parts: dict[int, Any] = {}
        self._residuals: dict[int, Tensor] = {}

    def setup(self, context: Context) -> None:
        saved = self.state_dict()
        self._units.follow(None, context.scaler)
        self._parts = {bucket.index: bucket.parts for bucket in context.buckets}
        self._residuals = {bucket.index: self._make(bucket) for bucket in context.buckets}
        self.load_state_dict(saved)

    def _make(self, bucket: BucketView) -> Tensor:
        return torch.zeros_like(bucket.flat)

    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        residual, scale = self._residuals[bucket.index], self._scale(comm.step)
        value = bucket.flat + residual * scale
        sent = self._rounded(value)
        self._keep(residual, (value - sent) / scale)
        yield comm.all_reduce(sent)
        bucket.flat.copy_(sent / self._divisor(comm))

    def _scale(self, step: int) -> float:
        return self._units.scale(step)

    def _divisor(self, comm: Communicator) -> int:
        return comm.num_active

    def _rounded(self, value: Tensor) -> Tensor:
        step = (value.abs().amax() / 4).clamp_min(torch.finfo(value.dtype).tiny)
        return (value / step).round() * step

    def _keep(self, residual: Tensor, lost: Tensor) -> None:
        if lost.isfinite().all():
            residual.copy_(lost)

    def state_dict(self) -> dict[str, Any]:
        pieces: dict[str, Any] = {}
        for index, residual in self._residuals.items():
            pieces |= cut(residual, 0, self._parts[index])
        return {"worker": pieces}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for index, residual in self._residuals.items():
            residual.zero_()
            paste(state["worker"], residual, self._parts[index])


class CarefulWeights(Algorithm):
    """Averages weights in every second step. It has no fault."""

    channel = Weights(period=2)
    keeps_mean = True

    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        yield comm.all_reduce(bucket.flat)
        bucket.flat.div_(comm.world_size)


class ForgetsItsResidual(Careful):
    """Does not save its residuals."""

    def state_dict(self) -> dict[str, Any]:
        return {"worker": {}}

    def setup(self, context: Context) -> None:
        residuals = self._residuals
        super().setup(context)
        if [r.shape for r in residuals.values()] == [r.shape for r in self._residuals.values()]:
            self._residuals = residuals


class FollowsTheLearningRate(Careful):
    """Rescales its residuals by the learning rate, although not required."""

    def setup(self, context: Context) -> None:
        super().setup(context)
        self._units = Units(rescale=True)
        self._units.follow(context.optimizer, context.scaler)

    def _scale(self, step: int) -> float:
        return super()._scale(step) * self._units.decay(step)


class KeepsWhatIsNotFinite(Careful):
    """Keeps NaN in its residuals."""

    def _keep(self, residual: Tensor, lost: Tensor) -> None:
        residual.copy_(lost)


class DrawsFromTheGlobalGenerator(Careful):
    """Takes the user's random numbers."""

    def _rounded(self, value: Tensor) -> Tensor:
        torch.rand(1)
        return super()._rounded(value)


class AsksOnOneRankOnly(Careful):
    """Makes one more collective on rank 0."""

    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        yield from super().communicate(bucket, comm)
        if comm.rank == 0 and comm.step == 2 and bucket.index == 0:
            yield comm.all_reduce(torch.zeros(7, device=bucket.flat.device))


class DividesByItsFirstGroup(Careful):
    """Divides by the number of ranks that there were at the first set-up."""

    def __init__(self) -> None:
        super().__init__()
        self._first: int | None = None

    def setup(self, context: Context) -> None:
        super().setup(context)
        self._first = self._first or context.world_size

    def _divisor(self, comm: Communicator) -> int:
        return self._first or comm.num_active


class LosesItsResidualWithTheGroup(Careful):
    """Starts again, without saying so, when the number of ranks changes."""

    def __init__(self) -> None:
        super().__init__()
        self._size = 0

    def setup(self, context: Context) -> None:
        super().setup(context)
        if self._size not in (0, context.world_size):
            self.load_state_dict({"worker": {}})
        self._size = context.world_size


class KeepsStateByBucket(Careful):
    """Saves residuals by the bucket's place, which another plan gives to other parameters."""

    def state_dict(self) -> dict[str, Any]:
        return {"worker": {str(index): (0, residual.clone()) for index, residual in self._residuals.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for index, residual in self._residuals.items():
            _, saved = state["worker"].get(str(index), (0, residual))
            if saved.shape == residual.shape:
                residual.copy_(saved)


class LivesInItsState(Careful):
    """Gives its live tensors out as saved ones."""

    def state_dict(self) -> dict[str, Any]:
        return {"worker": {}, "live": dict(self._residuals)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for index, residual in self._residuals.items():
            saved = state.get("live", {}).get(index, residual)
            if saved.shape == residual.shape:
                residual.copy_(saved)


class _Memo:
    """Something that only Python can read."""

    note = "mine"


class SavesAnObject(Careful):
    """Saves objects that only pickle can load."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "memo": _Memo()}


class TrustsTheDefaultDtype(Careful):
    """Makes its residuals in whatever dtype the user likes best."""

    def _make(self, bucket: BucketView) -> Tensor:
        return torch.zeros(bucket.flat.numel(), device=bucket.flat.device)

    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        assert self._residuals[bucket.index].dtype == torch.float32
        yield from super().communicate(bucket, comm)


class IgnoresTheScaler(Careful):
    """Remembers rounding errors in the units of a loss scale that changes."""

    def _scale(self, step: int) -> float:
        return 1.0


class LooksAtTheClock(Careful):
    """Rounds differently from moment to moment."""

    def _rounded(self, value: Tensor) -> Tensor:
        return super()._rounded(value) * (1 + time.perf_counter_ns() % 997 / 1e5)


class SharesNothing(Careful):
    """Leaves each rank its own gradient."""

    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        yield comm.all_reduce(bucket.flat.clone())


class CountsTwoRanks(Algorithm):
    """Declares itself exact, and divides by two for any number of ranks."""

    exactness = "exact"

    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        yield comm.all_reduce(bucket.flat)
        bucket.flat.div_(2)


class FillsGradients(Careful):
    """Gives every parameter a gradient, including unused ones."""

    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        yield from super().communicate(bucket, comm)
        for parameter in bucket.parameters:
            parameter.requires_grad_(False)
            parameter.add_(0.01)
            parameter.requires_grad_(True)


class LeavesAHook(Careful):
    """Hangs something at the user's optimizer and forgets it there."""

    def setup(self, context: Context) -> None:
        super().setup(context)
        if context.optimizer is not None:
            context.optimizer.register_step_post_hook(lambda *_: None)


class WaitsForData(Careful):
    """Makes no collective on a rank that has joined early."""

    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        if comm.contributes:
            yield from super().communicate(bucket, comm)


class MovesWhatIsFrozen(CarefulWeights):
    """Pulls the parameters that it was shown first towards zero, frozen or not."""

    def __init__(self) -> None:
        self._first: list[torch.nn.Parameter] = []

    def setup(self, context: Context) -> None:
        self._first = self._first or [p for bucket in context.buckets for p in bucket.parameters]

    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        yield from super().communicate(bucket, comm)
        for parameter in self._first:
            parameter.data.mul_(0.99)


class ComesBackToItsAnchor(CarefulWeights):
    """Keeps earlier weights, and does not let go of them when others are loaded."""

    def __init__(self) -> None:
        self._anchors: dict[int, Tensor] = {}

    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        yield from super().communicate(bucket, comm)
        anchor = self._anchors.setdefault(bucket.index, bucket.flat.clone())
        bucket.flat.lerp_(anchor, 0.5)
        anchor.copy_(bucket.flat)
