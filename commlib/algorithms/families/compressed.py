"""What all algorithms that average compressed gradients share: groups, nodes, state."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from typing_extensions import override

from commlib.algorithms.base import Algorithm, BucketView, Context, Part
from commlib.algorithms.channels import Gradients
from commlib.algorithms.families.policy import Units
from commlib.errors import ConfigError
from commlib.primitives.centralized import centralized_full_precision
from commlib.primitives.hierarchical import NodeStage, hierarchical
from commlib.primitives.parts import Pieces, cut, paste
from commlib.transport.base import Communication, Communicator


class Workspace(Protocol):
    """What a primitive keeps of one bucket, or of the stretch of it that this rank carries across nodes."""

    def save(self, parts: Sequence[Part]) -> dict[str, Pieces]:
        """Return copies of its state by kind and parameter."""
        ...

    def load(self, saved: dict[str, Pieces], parts: Sequence[Part], num_terms: float) -> torch.Tensor | None:
        """Take state over, also from another plan; return what is owed outside of the stretch."""
        ...


E = TypeVar("E", bound=Workspace)


class Compressed(Algorithm, Generic[E]):
    """Averages the gradients of some parameters compressed, those of the others in full precision.

    Args:
        op: "mean" or "sum".
        compress: Which parameters are compressed.
        hierarchical: Whether gradients are first summed inside each node, in full precision, and compressed only across
            nodes; every local rank carries a part.
        rescale_residuals: Whether residuals are multiplied by lr_then / lr_now (1 where either is 0) when the learning
            rate changes, so that what an earlier step owes the weights is paid at that step's rate (Karimireddy et al.,
            2019, algorithm 1). While the rate falls, residuals and `param.grad` grow: clip with care. Only for
            `torch.optim.SGD`, given to `wrap`; other optimizers do not step in proportion to gradients.
    """

    channel = Gradients(idle_alone=True)
    exactness = "compensated"

    #: The optimizers with which residuals may follow the learning rate.
    rescaled_for: tuple[type, ...] = (torch.optim.SGD,)
    #: The kinds of state that the workspaces keep.
    kinds: tuple[str, ...] = ("worker",)

    def __init__(
        self,
        *,
        op: str,
        compress: Callable[[str, torch.Tensor], bool],
        hierarchical: bool,
        rescale_residuals: bool = False,
    ) -> None:
        if op not in ("mean", "sum"):
            raise ConfigError(f"{type(self).__name__}.op: expected 'mean' or 'sum', got {op!r}")
        self.op = op
        self.compress = compress
        declared = type(self).channel
        assert isinstance(declared, Gradients)
        accumulates = declared.accumulates and op == "mean"
        self.channel = dataclasses.replace(declared, hierarchical=hierarchical, accumulates=accumulates)
        self._workspaces: dict[int, E] = {}
        self._stages: dict[int, NodeStage] = {}
        self._parts: dict[int, Sequence[Part]] = {}
        self.rescale_residuals = rescale_residuals
        self._units = Units(rescale_residuals)
        self._num_terms = 1.0

    @abstractmethod
    def _make_workspace(
        self, bucket: BucketView, numel: int, begin: int, comm: Communicator, device: torch.device
    ) -> E:
        """Make what is kept of `numel` elements from `begin` on, exchanged by the ranks of `comm`."""

    def _cuts(self, bucket: BucketView) -> Sequence[int] | None:
        """Return where the stretch of a local rank may begin in a bucket; None means anywhere."""
        return None

    @abstractmethod
    def _average(
        self, tensor: torch.Tensor, workspace: E, bucket: BucketView, comm: Communicator, peers: Communicator
    ) -> Communication:
        """Communicate `tensor` [numel] among `peers`; `comm` is everyone, by whose number a mean divides."""

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
    def setup(self, context: Context) -> None:
        saved = self.state_dict()
        self._units.follow(context.optimizer, context.scaler)
        self._num_terms = context.world_size if self.op == "mean" else 1.0
        nodes = context.comm.nodes
        self._stages.clear()
        self._workspaces.clear()
        compressed = [bucket for bucket in context.buckets if bucket.group == "compressed"]
        self._parts = {bucket.index: bucket.parts for bucket in compressed}
        for bucket in compressed:
            begin, numel, peers = 0, bucket.flat.numel(), context.comm
            if nodes is not None:
                stage = NodeStage(numel, bucket.flat.dtype, context.device, nodes.local, self._cuts(bucket))
                begin, numel, peers = stage.begin, stage.count, nodes.across
                self._stages[bucket.index] = stage
            self._workspaces[bucket.index] = self._make_workspace(bucket, numel, begin, peers, context.device)
        self.load_state_dict(saved)

    @override
    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        workspace = self._workspaces.get(bucket.index)
        stage = self._stages.get(bucket.index)
        if workspace is None:
            yield from centralized_full_precision(bucket.flat, comm)
            bucket.flat.div_(self.divisor(comm))
        elif stage is None:
            yield from self._average(bucket.flat, workspace, bucket, comm, comm)
        else:
            assert comm.nodes is not None
            local, peers = comm.nodes
            yield from hierarchical(
                bucket.flat,
                stage,
                local,
                lambda own: self._average(own, workspace, bucket, comm, peers),
                scale=self._units.scale(comm.step),
            )

    @override
    def state_dict(self) -> dict[str, Any]:
        saved: dict[str, Any] = {"units": self._units.state_dict(), "owed": {}, **{kind: {} for kind in self.kinds}}
        for index, workspace in self._workspaces.items():
            for kind, pieces in workspace.save(self._parts[index]).items():
                saved[kind].update(pieces)
        for index, stage in self._stages.items():
            if stage.owed is not None:
                saved["owed"].update(cut(stage.owed, 0, self._parts[index]))
        return saved

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._units.load_state_dict(state["units"])
        for index, workspace in self._workspaces.items():
            parts = self._parts[index]
            rest = workspace.load(state, parts, self._num_terms)
            if index in self._stages:
                if rest is None and any(part.name in state["owed"] for part in parts):
                    rest = self._stages[index].sum.new_zeros(max(part.start + part.numel for part in parts))
                if rest is not None:
                    paste(state["owed"], rest, parts)
                self._stages[index].owed = rest
