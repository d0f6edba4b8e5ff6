"""What local SGD, DiLoCo and their like share: ranks that move on their own, and steps along the mean of their ways."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from typing_extensions import override

from commlib.algorithms.base import Algorithm, BucketView, Context
from commlib.algorithms.channels import Weights
from commlib.algorithms.families.compressed import Compressed, Workspace
from commlib.algorithms.families.policy import CompressionPolicy
from commlib.codecs.base import BlockCodec
from commlib.codecs.integer import Int8
from commlib.codecs.registry import gathered_codec
from commlib.codecs.sparse import SparseCodec
from commlib.errors import ConfigError
from commlib.primitives.low_precision import LowPrecisionWorkspace, centralized_low_precision
from commlib.primitives.parts import Part, cut, placed, shaped
from commlib.primitives.sparse import SparseWorkspace, centralized_sparse
from commlib.transport.base import Communication, Communicator

#: What makes an optimizer of a list of parameters, such as a class of `torch.optim`.
MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

_NOTHING = CompressionPolicy(skip=("*",))


class ForgetfulWorkspace(Workspace, Protocol):
    """A workspace that can begin anew."""

    def forget(self) -> None:
        """Drop the residuals."""
        ...


W = TypeVar("W", bound=ForgetfulWorkspace)


class OuterStep(Algorithm):
    """Keeps the weights from which ranks set out, and at the end of a period makes a step of SGD with them.

    With x these weights, g what a subclass makes of the ways that the ranks went from them, u the outer momentum:

        u <- m u + g,   x <- x - lr (g + m u)  (Nesterov), or x - lr u

    which is what `torch.optim.SGD` does with g as the gradient, in the parameters' dtype. Any other optimizer may take
    its place. The first x is what the ranks hold before the first step after the warm-up: what `wrap` broadcast.

    It comes first among the bases; `_set_outer` follows the other one's constructor.
    """

    def _set_outer(
        self, *, lr: float, momentum: float = 0.0, nesterov: bool = False, outer: MakeOptimizer | None = None
    ) -> None:
        """Check and keep the options.

        Args:
            lr: The outer learning rate.
            momentum: The outer momentum m, in [0, 1).
            nesterov: Whether it is Nesterov's.
            outer: Makes another optimizer of x, in place of these three.
        """
        name = type(self).__name__
        if not (math.isfinite(lr) and lr > 0 and 0 <= momentum < 1):
            raise ConfigError(
                f"{name}: expected outer_lr > 0 and 0 <= outer_momentum < 1, got outer_lr={lr}, "
                f"outer_momentum={momentum}"
            )
        if nesterov and momentum == 0:
            raise ConfigError(f"{name}: nesterov=True needs outer_momentum > 0, got outer_momentum=0")
        self.exactness = "any"  # ranks move apart between rounds
        if outer is not None and not callable(outer):
            raise ConfigError(
                f"{name}.outer: expected what makes a torch.optim.Optimizer of a list of parameters, got {outer!r}"
            )
        self.outer_lr = lr
        self.outer_momentum = momentum
        self.nesterov = nesterov
        self.outer = outer
        self._outer_steps: dict[int, _OuterOptimizer] = {}
        self._common: dict[int, torch.Tensor] = {}
        self._velocity: dict[int, torch.Tensor] = {}
        self._buckets: dict[int, BucketView] = {}
        self._loaded: dict[str, dict[str, Any]] = {}  # until `begin` puts them into buckets
        self._has_begun = False  # since the weights were last loaded
        self._outer_name: str | None = None  # the class of the outer optimizer, once one was made
        self._drop_outer()

    @override
    def setup(self, context: Context) -> None:
        saved = self._save_outer()
        self._buckets = {bucket.index: bucket for bucket in context.buckets if self._has_common(bucket)}
        self._drop_outer()
        super().setup(context)
        self._loaded = {kind: _of(self._buckets.values(), pieces) for kind, pieces in saved.items()}

    @override
    def forget(self) -> None:
        self._drop_outer()
        self._has_begun = False

    def _drop_outer(self) -> None:
        self._common.clear()
        self._velocity.clear()
        self._outer_steps.clear()
        kinds = ("common", "velocity") if self.outer is None else ("common", "outer")
        self._loaded = {kind: {} for kind in kinds}

    def _has_common(self, bucket: BucketView) -> bool:
        """Return whether steps are made with the weights of a bucket."""
        return True

    @override
    def begin(self, bucket: BucketView) -> None:
        """Keep the weights as those, but for parameters of which an earlier plan or a checkpoint has them."""
        self._has_begun = True
        if not self._has_common(bucket):
            return
        common = self._common[bucket.index] = bucket.flat.clone()
        self._take_loaded("common", common, bucket)
        if self.outer is not None:
            steps = _OuterOptimizer(self.outer, bucket.parts, common, self._loaded["outer"])
            self._outer_steps[bucket.index] = steps
            self._outer_name = steps.name
        elif self.outer_momentum:
            velocity = self._velocity[bucket.index] = torch.zeros_like(common)
            self._take_loaded("velocity", velocity, bucket)

    def _take_loaded(self, kind: str, values: torch.Tensor, bucket: BucketView) -> None:
        for part in bucket.parts:
            piece = self._loaded[kind].pop(part.name, None)
            if piece is not None:
                values[part.start : part.start + part.numel] = placed(piece, part)[1]

    def _step(self, bucket: BucketView) -> None:
        """Step along g in `bucket.flat`, and leave the new x there."""
        common, gradient = self._common[bucket.index], bucket.flat
        if self.outer is not None:
            self._outer_steps[bucket.index].step(gradient)
            bucket.flat.copy_(common)
            return
        if self.outer_momentum:
            velocity = self._velocity[bucket.index].mul_(self.outer_momentum).add_(gradient)
            gradient = gradient.add_(velocity, alpha=self.outer_momentum) if self.nesterov else velocity
        bucket.flat.copy_(common.add_(gradient, alpha=-self.outer_lr))

    @property
    @override
    def shaped_state(self) -> tuple[str, ...]:
        return ("common", "velocity") if self.outer_momentum and self.outer is None else ("common",)

    @override
    def state_dict(self) -> dict[str, Any]:
        own = {"begun": self._has_begun, "optimizer": self._outer_name}
        return {**super().state_dict(), **self._save_outer(), **own}

    @override
    def check_state_dict(self, state: dict[str, Any]) -> None:
        super().check_state_dict(state)
        if not state["begun"]:
            return
        own = None if self.outer is None else type(self.outer([torch.nn.Parameter(torch.zeros(1))])).__name__
        if state["optimizer"] != own:
            raise ConfigError(
                f"{type(self).__name__}.outer: expected {state['optimizer']}, with which the state was saved, got {own}"
            )
        names = {part.name for bucket in self._buckets.values() for part in bucket.parts if part.numel}
        missing = sorted(names - state["common"].keys())
        if missing:
            raise ConfigError(
                f"{type(self).__name__}: the saved common weights are of another model or other options: "
                f"{len(missing)} of {len(names)} parameters are missing, the first is {missing[0]!r}"
            )

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._drop_outer()
        self._loaded = {kind: dict(state.get(kind, {})) for kind in self._loaded}
        self._has_begun, self._outer_name = state["begun"], state["optimizer"]
        super().load_state_dict(state)

    def _save_outer(self) -> dict[str, dict[str, Any]]:
        saved = {kind: dict(pieces) for kind, pieces in self._loaded.items()}
        for steps in self._outer_steps.values():
            saved["outer"].update(steps.state_by_name())
        for kind, by_bucket in (("common", self._common), ("velocity", self._velocity)):
            for index, values in by_bucket.items():
                saved[kind].update(cut(values, 0, self._buckets[index].parts))
        return saved


class Outer(OuterStep, Compressed[W]):
    """An `OuterStep` whose g is what `_average` makes of all x - x_r, with x_r the weights that rank r came to.

    All ranks hold the same x and u at all times. With lr = 1 and m = 0 the new x of what is not compressed is the mean
    of the x_r, and neither x nor u is kept.
    """

    @override
    def setup(self, context: Context) -> None:
        # Residuals are in units of weights: neither a loss scale nor a learning rate applies to them.
        super().setup(dataclasses.replace(context, optimizer=None, scaler=None))

    @override
    def forget(self) -> None:
        super().forget()
        for workspace in self._workspaces.values():
            workspace.forget()
        for stage in self._stages.values():
            stage.owed = None

    @override
    def _has_common(self, bucket: BucketView) -> bool:
        return bucket.group == "compressed" or not self._is_mean

    @property
    def _is_mean(self) -> bool:
        return self.outer is None and self.outer_lr == 1 and self.outer_momentum == 0

    @override
    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        if not self._has_common(bucket):
            yield from super().communicate(bucket, comm)
            return
        torch.sub(self._common[bucket.index], bucket.flat, out=bucket.flat)
        yield from super().communicate(bucket, comm)
        self._step(bucket)

    @property
    @override
    def shaped_state(self) -> tuple[str, ...]:
        return () if self._is_mean else super().shaped_state


class OuterSGD(Outer[LowPrecisionWorkspace | SparseWorkspace]):
    """`Outer` with a codec C, or nothing, on the wire.

    A block codec encodes what each rank moved and then the mean, a sparse one what each rank moved; with e_r and f the
    error feedback, d = `error_decay`:

        v_r = x - x_r + d e_r,   e_r <- v_r - C(v_r),   w = 1/N sum_r C(v_r)
        g = w  where C is sparse,   else   g = C(w + d f),   f <- w + d f - g

    Args:
        lr: The outer learning rate.
        momentum: The outer momentum m, in [0, 1).
        nesterov: Whether it is Nesterov's.
        outer: Makes another optimizer of x, in place of these three.
        codec: See above; None sends x - x_r in the parameters' dtype.
        feedback: Whether errors of the codec are fed back; None does where there is a codec. A sparse one needs it.
        error_decay: What error feedback keeps from one round to the next, from 0 to 1.
        compress: With a codec: which parameters are compressed; the others travel in full precision.
        **channel: The fields of its `Weights`.
    """

    def __init__(
        self,
        *,
        lr: float = 1.0,
        momentum: float = 0.0,
        nesterov: bool = False,
        outer: MakeOptimizer | None = None,
        codec: BlockCodec | SparseCodec | str | None,
        feedback: bool | None = None,
        error_decay: float = 1.0,
        compress: Callable[[str, torch.Tensor], bool],
        **channel: Any,
    ) -> None:
        super().__init__(op="mean", compress=_NOTHING if codec is None else compress, hierarchical=False)
        self.codec = Int8() if codec is None else gathered_codec(codec)  # which compresses nothing where there is none
        self.feedback = codec is not None if feedback is None else feedback
        self.error_decay = error_decay
        self._check_feedback(codec is not None)
        self.kinds = ("worker",) if isinstance(self.codec, SparseCodec) else ("worker", "owner")
        self._set_outer(lr=lr, momentum=momentum, nesterov=nesterov, outer=outer)
        self.channel = Weights(**channel)
        self.portable = codec is None and outer is None
        self.keeps_mean = codec is None and self._is_mean and channel.get("mixing") is None

    def _check_feedback(self, has_codec: bool) -> None:
        name = type(self).__name__
        if self.feedback and not has_codec:
            raise ConfigError(f"{name}: feedback=True needs a codec, whose errors it feeds back; got codec=None")
        if not self.feedback and isinstance(self.codec, SparseCodec):
            raise ConfigError(
                f"{name}: feedback=False needs a codec that sends all elements, got {self.codec}; what a sparse one "
                "does not send must be remembered"
            )
        if not 0 <= self.error_decay <= 1:
            raise ConfigError(f"{name}.error_decay: expected 0 <= error_decay <= 1, got {self.error_decay}")
        if self.error_decay != 1 and not self.feedback:
            raise ConfigError(f"{name}: error_decay={self.error_decay} needs a codec with feedback, got none")

    @override
    def _make_workspace(
        self, bucket: BucketView, numel: int, begin: int, comm: Communicator, device: torch.device
    ) -> LowPrecisionWorkspace | SparseWorkspace:
        if isinstance(self.codec, SparseCodec):
            return SparseWorkspace(numel, device, self.codec, comm, begin=begin)
        return LowPrecisionWorkspace(numel, device, self.codec, comm, begin=begin, feedback=self.feedback)

    @override
    def _average(
        self,
        tensor: torch.Tensor,
        workspace: LowPrecisionWorkspace | SparseWorkspace,
        bucket: BucketView,
        comm: Communicator,
        peers: Communicator,
    ) -> Communication:
        divisor, decay = self.divisor(comm), self.error_decay
        if isinstance(workspace, LowPrecisionWorkspace):
            yield from centralized_low_precision(tensor, workspace, peers, divisor=divisor, decay=decay)
        else:
            assert isinstance(self.codec, SparseCodec)
            yield from centralized_sparse(tensor, workspace, self.codec, peers, divisor=divisor, decay=decay)


class _OuterOptimizer:
    """An optimizer of a bucket's common weights, which lie in one tensor.

    Attributes:
        name: Its class.

    Args:
        make: Makes it.
        parts: The bucket's parameters.
        common: [numel] Their common weights; changed in place by a step.
        loaded: What `state_by_name` returned of an earlier one; what is taken is removed.
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
        """Return a copy of what the optimizer knows of each parameter."""
        pairs = zip(self._parts, self._weights, strict=True)
        return {part.name: _copied(self._optimizer.state.get(weight, {})) for part, weight in pairs}


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def _of(buckets: Iterable[BucketView], pieces: dict[str, Any]) -> dict[str, Any]:
    """Return the pieces of parameters that are in the buckets: others begin anew when they come back."""
    names = {part.name for bucket in buckets for part in bucket.parts}
    return {name: piece for name, piece in pieces.items() if name in names}
