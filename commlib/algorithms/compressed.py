"""Algorithms that average compressed gradients: `Compressed`, composed of an aggregator and a policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from typing_extensions import override

from commlib.algorithms.base import Algorithm
from commlib.algorithms.channels import Gradients
from commlib.algorithms.context import BucketView, Context
from commlib.algorithms.policy import EVERYTHING, Units
from commlib.algorithms.state import State
from commlib.errors import ConfigError
from commlib.primitives.aggregators import EF21, Aggregator, FullPrecision, Round, Smoothed, Stretch
from commlib.primitives.hierarchical import NodeStage, hierarchical
from commlib.primitives.parts import Part, cut, paste
from commlib.transport.base import Communication, Communicator


@dataclasses.dataclass(slots=True)
class _Bucket:
    """One bucket's aggregator, workspace and node stage."""

    aggregator: Aggregator[Any]
    workspace: Any
    stage: NodeStage | None
    parts: Sequence[Part]


class Aggregation(State):
    """Averages buckets of the group "compressed" with one aggregator and the others with another; holds their state.

    With nodes, compressed buckets are summed inside each node in full precision, and each local rank exchanges a
    stretch with its peers of the other nodes.

    Args:
        compressed: Aggregator of compressed buckets; None if no bucket is compressed.
        others: Aggregator of the other buckets; in full precision by default.
        is_mean: Whether results are means over all ranks; sums otherwise.
    """

    def __init__(
        self, compressed: Aggregator[Any] | None, others: Aggregator[Any] | None = None, *, is_mean: bool = True
    ) -> None:
        self.compressed = compressed
        self.others = others or FullPrecision()
        self._is_mean = is_mean
        self._num_terms = 1.0
        self._buckets: dict[int, _Bucket] = {}
        kinds = () if compressed is None else compressed.kinds
        self._kinds = ("owed", *kinds, *self.others.kinds)
        self.same = (*(() if compressed is None else compressed.same), *self.others.same)

    @override
    def setup(self, context: Context) -> None:
        saved = self.save()
        self._num_terms = context.world_size if self._is_mean else 1.0
        model_numel = sum(bucket.flat.numel() for bucket in context.buckets)
        self._buckets = {bucket.index: self._bucket(bucket, context, model_numel) for bucket in context.buckets}
        self.load(saved)

    def _bucket(self, bucket: BucketView, context: Context, model_numel: int) -> _Bucket:
        flat, parts, nodes = bucket.flat, bucket.parts, context.comm.nodes
        stretch = Stretch(parts, 0, flat.numel(), flat.dtype, flat.device, context.comm, model_numel)
        if self.compressed is None or bucket.group != "compressed":
            return _Bucket(self.others, self.others.workspace(stretch), None, parts)
        stage = None
        if nodes is not None:
            stage = NodeStage(flat.numel(), flat.dtype, flat.device, nodes.local, self.compressed.cuts(parts))
            stretch = dataclasses.replace(
                stretch, begin=stage.begin, numel=stage.count, dtype=stage.sum.dtype, comm=nodes.across
            )
        return _Bucket(self.compressed, self.compressed.workspace(stretch), stage, parts)

    def average(
        self, bucket: BucketView, comm: Communicator, *, divisor: float, scale: float = 1.0, decay: float = 1.0
    ) -> Communication:
        """Replace `bucket.flat` by the sum over all ranks, divided; see `Round` for the arguments."""
        own = self._buckets[bucket.index]
        if own.stage is None:
            return own.aggregator.average(
                bucket.flat, own.workspace, Round(comm, comm, bucket.index, divisor, scale, decay)
            )
        assert comm.nodes is not None
        local, across = comm.nodes
        of = Round(comm, across, bucket.index, divisor, scale, decay)
        average, workspace = own.aggregator.average, own.workspace
        return hierarchical(bucket.flat, own.stage, local, lambda part: average(part, workspace, of), scale=scale)

    def has_state(self, bucket: BucketView) -> bool:
        """Return whether averages of a bucket use state, and with it the scale and the decay."""
        return self._buckets[bucket.index].aggregator.has_state

    @override
    def forget(self) -> None:
        for own in self._buckets.values():
            if own.workspace is not None:
                own.workspace.forget()
            if own.stage is not None:
                own.stage.owed = None

    @override
    def save(self) -> dict[str, Any]:
        saved: dict[str, Any] = {kind: {} for kind in self._kinds}
        for own in self._buckets.values():
            if own.workspace is not None:
                for kind, pieces in own.workspace.save(own.parts).items():
                    saved[kind].update(pieces)
            if own.stage is not None and own.stage.owed is not None:
                saved["owed"].update(cut(own.stage.owed, 0, own.parts))
        return saved

    @override
    def load(self, state: dict[str, Any]) -> None:
        state = {**{kind: {} for kind in self._kinds}, **state}
        for own in self._buckets.values():
            if own.workspace is None:
                continue
            rest = own.workspace.load(state, own.parts, self._num_terms)
            if own.stage is not None:
                if rest is None and any(part.name in state["owed"] for part in own.parts):
                    rest = own.stage.sum.new_zeros(max(part.start + part.numel for part in own.parts))
                if rest is not None:
                    paste(state["owed"], rest, own.parts)
                own.stage.owed = rest


class Compressed(Algorithm):
    """Averages the gradients of some parameters in compressed form, and those of the others in full precision.

    Args:
        aggregator: Averages compressed buckets.
        others: Averages the other buckets; in full precision by default.
        op: "mean" or "sum".
        compress: Selects the parameters to compress.
        hierarchical: Whether gradients are first summed inside each node in full precision, and compressed only across
            nodes; every local rank exchanges a part.
        rescale_residuals: Whether residuals are multiplied by lr_then / lr_now (1 if either is 0) when the learning
            rate changes. The residual of an earlier step is then applied with that step's learning rate (Karimireddy et
            al., 2019, algorithm 1). While the learning rate decreases, residuals and `param.grad` grow, which affects
            gradient clipping. Requires `torch.optim.SGD`, given to `wrap`; other optimizers do not step in proportion
            to gradients.
        ef21: Weight of a new gradient in each rank's momentum, in (0, 1] (EF21-SGDM, `aggregators.EF21`); None is plain
            error feedback. Uncompressed gradients get the same momentum.
        ef21_excludes: The subclass's options that are incompatible with `ef21`: the text of each, and whether it is
            set.
    """

    channel = Gradients(idle_alone=True)

    #: The optimizers that work with `rescale_residuals`.
    rescaled_for: tuple[type, ...] = (torch.optim.SGD,)

    def __init__(
        self,
        aggregator: Aggregator[Any],
        *,
        others: Aggregator[Any] | None = None,
        op: str = "mean",
        compress: Callable[[str, torch.Tensor], bool] = EVERYTHING,
        hierarchical: bool = False,
        rescale_residuals: bool = False,
        ef21: float | None = None,
        ef21_excludes: Mapping[str, bool] = MappingProxyType({}),
    ) -> None:
        if op not in ("mean", "sum"):
            raise ConfigError(f"{type(self).__name__}.op: expected 'mean' or 'sum', got {op!r}")
        if rescale_residuals and not aggregator.has_state:
            raise ConfigError(f"{type(self).__name__}.rescale_residuals: expected error feedback with it, got none")
        self.exactness = aggregator.exactness
        self.portable = not aggregator.has_state and not hierarchical
        declared = type(self).channel
        assert isinstance(declared, Gradients)
        accumulates = declared.accumulates and op == "mean"
        self.channel = dataclasses.replace(declared, hierarchical=hierarchical, accumulates=accumulates)
        self.op = op
        self.compress = compress
        self.hierarchical = hierarchical
        self.rescale_residuals = rescale_residuals
        self.ef21 = ef21
        if ef21 is not None:
            self._check_ef21(ef21, ef21_excludes)
            aggregator, others = EF21(aggregator, ef21), Smoothed(ef21)
            self.can_repeat = False  # the estimate is a sum over the ranks
            self.made_for = "sgd"
            # The result is not a mean of gradients, and a single rank has momentum too.
            self.channel = dataclasses.replace(self.channel, accumulates=False, idle_alone=False)
        self.units = Units(rescale_residuals)
        self.aggregation = Aggregation(aggregator, others, is_mean=op == "mean")
        self.states = (self.units, self.aggregation)

    def _check_ef21(self, weight: float, excluded: Mapping[str, bool]) -> None:
        name = type(self).__name__
        if not 0 < weight <= 1:
            raise ConfigError(f"{name}.ef21: expected None or a number above 0 and at most 1, got {weight}")
        set_options = {
            **excluded,
            "hierarchical=True": self.hierarchical,
            "rescale_residuals=True": self.rescale_residuals,
        }
        given = [option for option, is_given in set_options.items() if is_given]
        if given:
            raise ConfigError(f"{name}.ef21: expected no other error feedback and no nodes with it, got {given[0]}")

    @override
    def group(self, name: str, parameter: torch.Tensor) -> str:
        return "compressed" if self.compress(name, parameter) else "full precision"

    @override
    def divisor(self, comm: Communicator) -> float:
        return 1.0 if self.op == "sum" else comm.num_active

    @override
    def check_optimizer(self, optimizer: Any, is_warming_up: bool) -> None:
        own = [] if optimizer is None else list(getattr(optimizer, "optimizers", [optimizer]))
        if self.rescale_residuals and not (own and all(isinstance(each, self.rescaled_for) for each in own)):
            got = ", ".join(type(each).__name__ for each in own) or "none"
            expected = " or ".join(
                f"{each.__module__.partition('.')[0]}.optim.{each.__name__}" for each in self.rescaled_for
            )
            raise ConfigError(
                f"{type(self).__name__}.rescale_residuals: expected optimizer={expected}(...), got {got}; leave the "
                "option out with other optimizers, which do not step in proportion to gradients"
            )

    @override
    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        scale = decay = 1.0
        if self.aggregation.has_state(bucket):  # on CUDA the host waits for the loss scale
            scale, decay = self.units.scale(comm.step), self.units.decay(comm.step)
        yield from self.aggregation.average(bucket, comm, divisor=self.divisor(comm), scale=scale, decay=decay)

    @override
    def forget(self) -> None:
        """Keep residuals: they are gradients, which also apply to other weights."""

    @override
    def check_state_dict(self, state: dict[str, Any]) -> None:
        super().check_state_dict(state)
        if (self.ef21 is None) != ("estimate" not in state):
            got = "without EF21" if self.ef21 is not None else "with EF21"
            raise ConfigError(
                f"{type(self).__name__}: the state was saved by a run {got}; expected one with ef21={self.ef21}"
            )
