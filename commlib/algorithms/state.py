"""The state that algorithms are composed of: by bucket in memory, by parameter in checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from commlib.algorithms.context import BucketView, Context
from commlib.primitives.parts import Part, cut, pasted


class State:
    """One component of an algorithm's state. The algorithm calls these methods of all its `states`, in order.

    The keys of `save` differ between the states of one algorithm.

    Attributes:
        shaped: Entries of `save` with one piece for each whole parameter; see `Algorithm.shaped_state`.
        same: Entries of `save` that are the same on all ranks. A new member of an elastic group receives them, and
            begins without the other entries.
        is_shared: Whether other ranks hold parts of the same state, so that it is reset with another group.
    """

    shaped: Sequence[str] = ()
    same: Sequence[str] = ()
    is_shared: bool = False

    def setup(self, context: Context) -> None:
        """Create the state for `context.buckets`. Later calls carry it over to other buckets or another group."""

    def begin(self, bucket: BucketView) -> None:
        """See `Algorithm.begin`."""

    def forget(self) -> None:
        """Drop the state that belongs to other weights; see `Algorithm.forget`."""

    def save(self) -> dict[str, Any]:
        """Return copies of the state."""
        return {}

    def check(self, state: dict[str, Any]) -> None:
        """Check a saved state before it is loaded; changes nothing.

        Raises:
            ConfigError: The state cannot be loaded with these options.
        """

    def load(self, state: dict[str, Any]) -> None:
        """Load the result of `save`, possibly from other buckets or another group."""


class PerElement(State):
    """A `State` with one value for each element of the buckets, initially 0. Indexed by bucket: [numel].

    Values follow their parameters when the buckets change, and are saved by parameter. `forget` sets them to 0.

    Args:
        name: Key in the saved state.
        dtype: The dtype of the values.
    """

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        self._name = name
        self._dtype = dtype
        self._values: dict[int, torch.Tensor] = {}
        self._parts: dict[int, Sequence[Part]] = {}

    def __getitem__(self, bucket: BucketView) -> torch.Tensor:
        """Return the values of a bucket, [numel]."""
        return self._values[bucket.index]

    @override
    def setup(self, context: Context) -> None:
        saved = self.save()
        self._parts = {bucket.index: bucket.parts for bucket in context.buckets}
        self._values = {b.index: torch.zeros_like(b.flat, dtype=self._dtype) for b in context.buckets}
        self.load(saved)

    @override
    def forget(self) -> None:
        for values in self._values.values():
            values.zero_()

    @override
    def save(self) -> dict[str, Any]:
        pieces = {}
        for index, values in self._values.items():
            pieces.update(cut(values, 0, self._parts[index]))
        return {self._name: pieces}

    @override
    def load(self, state: dict[str, Any]) -> None:
        for index, values in self._values.items():
            values.copy_(pasted(state[self._name], self._parts[index], values))
