"""EF21-SGDM as an option of algorithms that average compressed gradients with error feedback."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from typing_extensions import override

from commlib.algorithms.base import BucketView, Context, Part
from commlib.algorithms.families.compressed import Compressed, Workspace
from commlib.algorithms.families.policy import Units
from commlib.errors import ConfigError
from commlib.primitives.ef21 import Estimate, RestartingWorkspace, ef21
from commlib.transport.base import Communication, Communicator


class FeedbackWorkspace(Workspace, RestartingWorkspace, Protocol):
    """What a workspace must be for EF21."""


F = TypeVar("F", bound=FeedbackWorkspace)


class EF21Option(Compressed[F]):
    """`Compressed` that may estimate the mean gradient in place of plain error feedback; see `primitives.ef21`.

    The gradients of parameters that are not compressed are averaged as ever, and get the same momentum.
    """

    #: The weight of a new gradient in the momentum; None is plain error feedback.
    ef21: float | None = None

    def __init__(
        self,
        *,
        op: str,
        compress: Callable[[str, torch.Tensor], bool],
        hierarchical: bool = False,
        rescale_residuals: bool = False,
    ) -> None:
        super().__init__(op=op, compress=compress, hierarchical=hierarchical, rescale_residuals=rescale_residuals)
        self._gradient_units = Units()
        self._estimates: dict[int, tuple[Sequence[Part], Estimate]] = {}

    def _set_ef21(self, weight: float | None, **others: bool) -> None:
        """Check and keep the option, after the constructor of the bases.

        Args:
            weight: See `ef21`.
            **others: Which other options are given that it does not go with, by what was given.
        """
        if weight is None:
            return
        name = type(self).__name__
        if not 0 < weight <= 1:
            raise ConfigError(f"{name}.ef21: expected None or a number above 0 and at most 1, got {weight}")
        others["hierarchical=True"] = self.channel.wants_nodes
        others["rescale_residuals=True"] = self.rescale_residuals
        given = [option for option, is_given in others.items() if is_given]
        if given:
            raise ConfigError(f"{name}.ef21: expected no other error feedback and no nodes with it, got {given[0]}")
        self.ef21 = weight
        self.made_for = "sgd"
        # What is left is no mean of gradients, and one rank alone has a momentum too.
        self.channel = dataclasses.replace(self.channel, accumulates=False, idle_alone=False)

    @override
    def setup(self, context: Context) -> None:
        if self.ef21 is None:
            super().setup(context)
            return
        saved = self._save_estimates()
        self._gradient_units.follow(None, context.scaler)
        # Errors are in units of gradients: neither a loss scale nor a learning rate applies to them.
        super().setup(dataclasses.replace(context, optimizer=None, scaler=None))
        self._estimates = {bucket.index: (bucket.parts, self._estimate(bucket)) for bucket in context.buckets}
        self._load_estimates(saved)

    def _estimate(self, bucket: BucketView) -> Estimate:
        assert self.ef21 is not None
        flat, is_sent = bucket.flat, bucket.index in self._workspaces
        dtype = torch.float32 if is_sent else torch.promote_types(flat.dtype, torch.float32)
        return Estimate(flat.numel(), flat.device, self.ef21, dtype=dtype, is_sent=is_sent)

    @override
    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        if self.ef21 is None:
            yield from super().communicate(bucket, comm)
            return
        _, state = self._estimates[bucket.index]
        scale = self._gradient_units.scale(comm.step)
        workspace = self._workspaces.get(bucket.index)
        if workspace is None:
            yield from super().communicate(bucket, comm)
            state.smooth(bucket.flat, scale)
            return
        yield from ef21(
            bucket.flat,
            state,
            workspace,
            lambda change: self._average(change, workspace, bucket, comm, comm),
            contributes=comm.contributes,
            scale=scale,
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self._save_estimates()}

    @override
    def check_state_dict(self, state: dict[str, Any]) -> None:
        super().check_state_dict(state)
        if (self.ef21 is None) != ("estimate" not in state):
            got = "without EF21" if self.ef21 is not None else "with EF21"
            raise ConfigError(
                f"{type(self).__name__}: the saved state is of a run {got}; expected one with ef21={self.ef21}"
            )

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._load_estimates(state)

    def _save_estimates(self) -> dict[str, Any]:
        if self.ef21 is None:
            return {}
        saved: dict[str, Any] = {"momentum": {}, "smoothed": {}, "estimate": {}}
        for parts, state in self._estimates.values():
            for kind, pieces in state.save(parts).items():
                saved[kind].update(pieces)
        return saved

    def _load_estimates(self, saved: dict[str, Any]) -> None:
        for parts, state in self._estimates.values():
            state.load(saved, parts)
