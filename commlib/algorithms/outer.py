"""Outer optimizer steps along the mean of the ranks' outer gradients: local SGD, DiLoCo and their variants."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from commlib.algorithms.base import Algorithm
from commlib.algorithms.channels import Weights
from commlib.algorithms.compressed import Aggregation
from commlib.algorithms.context import BucketView, Context
from commlib.algorithms.state import State
from commlib.codecs.base import BlockCodec
from commlib.codecs.registry import gathered_codec
from commlib.codecs.sparse import SparseCodec
from commlib.errors import ConfigError
from commlib.primitives.aggregators import Aggregator, Gathered, LowPrecision
from commlib.primitives.parts import Part, cut, placed, shaped
from commlib.transport.base import Communication, Communicator

#: Creates an optimizer for a list of parameters, such as a class of `torch.optim`.
MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class OuterStep(State):
    """The global weights x, from which ranks start their local steps, and the outer optimizer, which updates them.

    With g the outer gradient and u the outer momentum:

        u <- m u + g,   x <- x - lr (g + m u)  (Nesterov), or x - lr u

    This is the step of `torch.optim.SGD` with g as the gradient, in the parameters' dtype. Another optimizer can
    replace it. The initial x are the ranks' weights before the first step after the warm-up, as `wrap` broadcast them.

    Args:
        owner: Name of the algorithm, for errors.
        lr: Learning rate of the outer optimizer.
        momentum: Momentum m of the outer optimizer, in [0, 1).
        nesterov: Whether to use Nesterov momentum.
        make: Creates another outer optimizer of x, which replaces `lr`, `momentum` and `nesterov`.
        only_compressed: Whether only buckets of the group "compressed" have global weights.

    Raises:
        ConfigError: An option is out of range.
    """

    def __init__(
        self,
        owner: str,
        *,
        lr: float = 1.0,
        momentum: float = 0.0,
        nesterov: bool = False,
        make: MakeOptimizer | None = None,
        only_compressed: bool = False,
    ) -> None:
        if not (math.isfinite(lr) and lr > 0 and 0 <= momentum < 1):
            raise ConfigError(
                f"{owner}: expected outer_lr > 0 and 0 <= outer_momentum < 1, got outer_lr={lr}, "
                f"outer_momentum={momentum}"
            )
        if nesterov and momentum == 0:
            raise ConfigError(f"{owner}: nesterov=True needs outer_momentum > 0, got outer_momentum=0")
        if make is not None and not callable(make):
            raise ConfigError(
                f"{owner}.outer: expected a callable that returns a torch.optim.Optimizer for a list of parameters, "
                f"got {make!r}"
            )
        self._owner = owner
        self._lr = lr
        self._momentum = momentum
        self._nesterov = nesterov
        self._make = make
        self._only_compressed = only_compressed
        self._optimizers: dict[int, _OuterOptimizer] = {}
        self._common: dict[int, torch.Tensor] = {}
        self._velocity: dict[int, torch.Tensor] = {}
        self._buckets: dict[int, BucketView] = {}
        self._kinds = ("common", "velocity") if make is None else ("common", "outer")
        self._loaded: dict[str, dict[str, Any]] = {kind: {} for kind in self._kinds}  # until `begin` fills the buckets
        self._has_begun = False  # since the weights were last loaded
        self._optimizer_name: str | None = None  # class of the outer optimizer, once it exists
        self.same = self._kinds
        self.shaped = () if only_compressed else ("common", "velocity") if momentum and make is None else ("common",)

    def has(self, bucket: BucketView) -> bool:
        """Return whether there are global weights of a bucket."""
        return bucket.group == "compressed" or not self._only_compressed

    @override
    def setup(self, context: Context) -> None:
        saved = self._pieces()
        self._buckets = {bucket.index: bucket for bucket in context.buckets if self.has(bucket)}
        self._drop()
        self._loaded = {kind: _of(self._buckets.values(), pieces) for kind, pieces in saved.items()}

    @override
    def forget(self) -> None:
        self._drop()
        self._has_begun = False

    def _drop(self) -> None:
        self._common.clear()
        self._velocity.clear()
        self._optimizers.clear()
        self._loaded = {kind: {} for kind in self._kinds}

    @override
    def begin(self, bucket: BucketView) -> None:
        """Copy the weights, except those of parameters whose global weights were loaded."""
        self._has_begun = True
        if not self.has(bucket):
            return
        common = self._common[bucket.index] = bucket.flat.clone()
        self._take_loaded("common", common, bucket)
        if self._make is not None:
            optimizer = _OuterOptimizer(self._make, bucket.parts, common, self._loaded["outer"])
            self._optimizers[bucket.index] = optimizer
            self._optimizer_name = optimizer.name
        elif self._momentum:
            velocity = self._velocity[bucket.index] = torch.zeros_like(common)
            self._take_loaded("velocity", velocity, bucket)

    def _take_loaded(self, kind: str, values: torch.Tensor, bucket: BucketView) -> None:
        for part in bucket.parts:
            piece = self._loaded[kind].pop(part.name, None)
            if piece is not None:
                values[part.start : part.start + part.numel] = placed(piece, part)[1]

    def subtract(self, bucket: BucketView) -> None:
        """Replace the weights in `bucket.flat` by this rank's outer gradient, x minus the weights."""
        torch.sub(self._common[bucket.index], bucket.flat, out=bucket.flat)

    def step(self, bucket: BucketView) -> None:
        """Make a step with g in `bucket.flat`, and replace g by the new x."""
        common, gradient = self._common[bucket.index], bucket.flat
        if self._make is not None:
            self._optimizers[bucket.index].step(gradient)
            bucket.flat.copy_(common)
            return
        if self._momentum:
            velocity = self._velocity[bucket.index].mul_(self._momentum).add_(gradient)
            gradient = gradient.add_(velocity, alpha=self._momentum) if self._nesterov else velocity
        bucket.flat.copy_(common.add_(gradient, alpha=-self._lr))

    @override
    def save(self) -> dict[str, Any]:
        return {**self._pieces(), "begun": self._has_begun, "optimizer": self._optimizer_name}

    @override
    def check(self, state: dict[str, Any]) -> None:
        if not state["begun"]:
            return
        own = None if self._make is None else type(self._make([torch.nn.Parameter(torch.zeros(1))])).__name__
        if state["optimizer"] != own:
            raise ConfigError(f"{self._owner}.outer: expected {state['optimizer']}, as in the saved state, got {own}")
        names = {part.name for bucket in self._buckets.values() for part in bucket.parts if part.numel}
        missing = sorted(names - state["common"].keys())
        if missing:
            raise ConfigError(
                f"{self._owner}: the saved common weights belong to another model or other options: "
                f"{len(missing)} of {len(names)} parameters are missing, the first is {missing[0]!r}"
            )

    @override
    def load(self, state: dict[str, Any]) -> None:
        self._drop()
        self._loaded = {kind: dict(state.get(kind, {})) for kind in self._kinds}
        self._has_begun, self._optimizer_name = state["begun"], state["optimizer"]

    def _pieces(self) -> dict[str, dict[str, Any]]:
        saved = {kind: dict(pieces) for kind, pieces in self._loaded.items()}
        for optimizer in self._optimizers.values():
            saved["outer"].update(optimizer.state_by_name())
        for kind, by_bucket in (("common", self._common), ("velocity", self._velocity)):
            for index, values in by_bucket.items():
                saved[kind].update(cut(values, 0, self._buckets[index].parts))
        return saved


class OuterAveraging(Algorithm):
    """Makes local steps, then an outer step along the mean of the ranks' outer gradients.

    With x the global weights, x_r those of rank r after its local steps, C the codec, e_r and f the error feedback,
    d = `error_decay`:

        v_r = x - x_r + d e_r,   e_r <- v_r - C(v_r),   w = 1/N sum_r C(v_r)
        g = w  where C is sparse,   else   g = C(w + d f),   f <- w + d f - g

    and an `OuterStep` along g. All ranks hold the same x. With lr = 1 and m = 0 the new x of uncompressed parameters is
    the mean of the x_r, and no x is stored.

    Args:
        outer_lr: Learning rate of the outer optimizer.
        outer_momentum: Momentum m of the outer optimizer, in [0, 1).
        nesterov: Whether the outer optimizer uses Nesterov momentum.
        outer: Creates another outer optimizer of x, which replaces `outer_lr`, `outer_momentum` and `nesterov`.
        codec: The codec C. None sends x - x_r in the parameters' dtype.
        aggregator: Averages the outer gradients in place of the codec's own aggregator.
        feedback: Whether to use error feedback; None enables it with a codec. A sparse codec requires it.
        error_decay: Factor of residuals from one round to the next, in [0, 1].
        compress: With a codec, selects the parameters to compress; the others are sent in full precision.
        **channel: The fields of its `Weights`.
    """

    def __init__(
        self,
        *,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        nesterov: bool = False,
        outer: MakeOptimizer | None = None,
        codec: BlockCodec | SparseCodec | str | None,
        aggregator: Aggregator[Any] | None = None,
        feedback: bool | None = None,
        error_decay: float = 1.0,
        compress: Callable[[str, torch.Tensor], bool],
        **channel: Any,
    ) -> None:
        self.codec = None if codec is None else gathered_codec(codec)
        self.feedback = codec is not None if feedback is None else feedback
        self.error_decay = error_decay
        self.compress = compress
        self._check_feedback()
        self.outer_lr = outer_lr
        self.outer_momentum = outer_momentum
        self.nesterov = nesterov
        self.outer = outer
        is_mean = outer is None and outer_lr == 1 and outer_momentum == 0
        self.outer_step = OuterStep(
            type(self).__name__,
            lr=outer_lr,
            momentum=outer_momentum,
            nesterov=nesterov,
            make=outer,
            only_compressed=is_mean,
        )
        self.aggregation = Aggregation(aggregator or self._aggregator())
        self.states = (self.outer_step, self.aggregation)
        self.channel = Weights(**channel)
        self.portable = codec is None and outer is None
        self.keeps_mean = codec is None and is_mean and channel.get("mixing") is None

    def _check_feedback(self) -> None:
        name = type(self).__name__
        if self.feedback and self.codec is None:
            raise ConfigError(f"{name}: feedback=True needs a codec whose errors it feeds back, got codec=None")
        if not self.feedback and isinstance(self.codec, SparseCodec):
            raise ConfigError(
                f"{name}: feedback=False needs a codec that sends all elements, got {self.codec}; a sparse codec "
                "requires error feedback"
            )
        if not 0 <= self.error_decay <= 1:
            raise ConfigError(f"{name}.error_decay: expected 0 <= error_decay <= 1, got {self.error_decay}")
        if self.error_decay != 1 and not self.feedback:
            raise ConfigError(f"{name}: error_decay={self.error_decay} needs a codec with feedback, got none")

    def _aggregator(self) -> Aggregator[Any] | None:
        if self.codec is None:
            return None
        if isinstance(self.codec, SparseCodec):
            return Gathered(self.codec)
        return LowPrecision(self.codec, feedback=self.feedback)

    @override
    def group(self, name: str, parameter: torch.Tensor) -> str:
        is_compressed = self.codec is not None and self.compress(name, parameter)
        return "compressed" if is_compressed else "full precision"

    @override
    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        is_stepped = self.outer_step.has(bucket)
        if is_stepped:
            self.outer_step.subtract(bucket)
        # Residuals are in units of weights, so neither the loss scale nor the learning rate applies to them.
        yield from self.aggregation.average(bucket, comm, divisor=comm.num_active, decay=self.error_decay)
        if is_stepped:
            self.outer_step.step(bucket)


class _OuterOptimizer:
    """An optimizer of a bucket's common weights, which are stored in one tensor.

    Attributes:
        name: The name of its class.

    Args:
        make: Creates it.
        parts: The bucket's parameters.
        common: [numel] Their common weights; a step changes them in place.
        loaded: The result of `state_by_name` of an earlier instance; entries that are used are removed from it.
    """

    def __init__(
        self, make: MakeOptimizer, parts: Sequence[Part], common: torch.Tensor, loaded: dict[str, Any]
    ) -> None:
        self._parts = [part for part in parts if part.numel]
        self._weights = [torch.nn.Parameter(shaped(common, part)) for part in self._parts]
        optimizer = make(self._weights)
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                f"outer: expected a torch.optim.Optimizer that steps without a closure, got {type(optimizer).__name__}"
            )
        self.name = type(optimizer).__name__
        self._optimizer = optimizer
        for part, weight in zip(self._parts, self._weights, strict=True):
            if part.name in loaded:
                self._optimizer.state[weight] = _copied(loaded.pop(part.name))

    def step(self, gradient: torch.Tensor) -> None:
        """Make a step with the gradient [numel]."""
        for part, weight in zip(self._parts, self._weights, strict=True):
            weight.grad = shaped(gradient, part)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def state_by_name(self) -> dict[str, Any]:
        """Return a copy of the optimizer's state of each parameter, by name."""
        pairs = zip(self._parts, self._weights, strict=True)
        return {part.name: _copied(self._optimizer.state.get(weight, {})) for part, weight in pairs}


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def _of(buckets: Iterable[BucketView], pieces: dict[str, Any]) -> dict[str, Any]:
    """Return the pieces of parameters that are in the buckets. Other parameters lose their state."""
    names = {part.name for bucket in buckets for part in bucket.parts}
    return {name: piece for name, piece in pieces.items() if name in names}
