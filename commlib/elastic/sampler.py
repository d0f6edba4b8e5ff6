"""Batches of a dataset for members that come and go: each batch once in an epoch. See `positions.py`."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, Protocol

import torch
import torch.utils.data

from commlib.elastic.positions import Draw, Positions
from commlib.errors import ConfigError


class _Owner(Protocol):
    """The methods of `Members` that a sampler uses."""

    def add_sampler(self, sampler: Sampler) -> None: ...

    def refuse_if_ready(self, what: str) -> None: ...


class Sampler(torch.utils.data.Sampler[list[int]]):
    """Indices of batches for the members of an elastic job. Replaces `DistributedSampler`.

    In an epoch, no index is drawn twice, however members come and go. If a member is lost, its batches since the last
    round are left out. All members make the same number of draws in an epoch; in its last draw, some of them may
    receive a batch of the next one. New members continue at the position of the others.

    Make one before `commlib.wrap`, on every member with the same arguments, and pass it to a `DataLoader` as
    `batch_sampler`, and that to `Members.loader`. Without a `DataLoader`, iterate over it: each pass yields the rest of
    the current epoch. Draw on the training thread.

    Args:
        data_source: The dataset; only its length is used.
        batch_size: Samples per member and batch.
        members: The members of the job.
        shuffle: Whether to draw in a random order, another one in each epoch.
        seed: The seed of that order.
        drop_last: Whether to omit the last batch of an epoch if it is smaller.

    Raises:
        ConfigError: `batch_size` is not positive, the dataset has no batch, or a model was wrapped before.
    """

    def __init__(
        self,
        data_source: Sized,
        batch_size: int,
        members: _Owner,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if not (isinstance(batch_size, int) and batch_size > 0):
            raise ConfigError(f"Sampler: batch_size: expected a positive integer, got {batch_size!r}")
        self.num_samples, self.batch_size = len(data_source), batch_size
        per_epoch = self.num_samples // batch_size if drop_last else -(-self.num_samples // batch_size)
        if not per_epoch:
            raise ConfigError(f"Sampler: {self.num_samples} samples are no batch of {batch_size}")
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.positions = Positions(per_epoch)
        self._ahead: collections.deque[Draw] | None = None
        self._orders: dict[int, torch.Tensor] = {}
        self._members = members
        members.add_sampler(self)

    @property
    def epoch(self) -> int:
        """The epoch of the next draw, counted from 0. It is the same on all members after the same round."""
        return self.positions.next.epoch

    def __len__(self) -> int:
        """Return the number of batches in an epoch, of all members together."""
        return self.positions.per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        return self._live() if self._ahead is None else self._predicted(self._ahead)

    def _live(self) -> Iterator[list[int]]:
        epoch = self.epoch
        while self.epoch == epoch:
            yield self._indices(self.positions.take().position)

    def _predicted(self, ahead: collections.deque[Draw]) -> Iterator[list[int]]:
        for draw in self.positions.predicted():
            ahead.append(draw)
            yield self._indices(draw.position)

    @contextlib.contextmanager
    def predicting(self, ahead: collections.deque[Draw]) -> Iterator[None]:
        """Let iterators that are made in the block yield batches in advance, and append their draws to `ahead`."""
        self._ahead = ahead
        try:
            yield
        finally:
            self._ahead = None

    def _indices(self, position: int) -> list[int]:
        epoch, number = divmod(position, self.positions.per_epoch)
        chosen = slice(number * self.batch_size, (number + 1) * self.batch_size)
        return self._order(epoch)[chosen].tolist() if self.shuffle else list(range(self.num_samples)[chosen])

    def _order(self, epoch: int) -> torch.Tensor:
        if epoch not in self._orders:
            order = torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(self.seed + epoch))
            self._orders = {epoch: order, **{each: self._orders[each] for each in (epoch - 1,) if each in self._orders}}
        return self._orders[epoch]

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments that must be the same on all members."""
        names = ("num_samples", "batch_size", "shuffle", "seed", "drop_last")
        return {name: getattr(self, name) for name in names}

    def state_dict(self) -> dict[str, Any]:
        """Return the settings, and the position up to which the members have drawn."""
        return {**self.settings, "position": self.positions.end}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of `state_dict`. Before `commlib.wrap`; `Members.load_state_dict` does it.

        Raises:
            ConfigError: The state is of a sampler with other arguments, or a model was wrapped before.
        """
        self._members.refuse_if_ready("Sampler.load_state_dict")
        for name, value in self.settings.items():
            if state.get(name) != value:
                raise ConfigError(f"Sampler: the state has {name} {state.get(name)!r}, expected {value!r}")
        self.positions.restart(int(state["position"]))


class Loader:
    """The batches of a `DataLoader` for one epoch per iteration. Made by `Members.loader`.

    A `DataLoader` with workers draws batches in advance. If the members change, those are dropped and drawn again.

    Args:
        loader: The `DataLoader`.

    Raises:
        ConfigError: Its `batch_sampler` is not a `Sampler`, or it does not keep the order of batches.
    """

    def __init__(self, loader: torch.utils.data.DataLoader[Any]) -> None:
        sampler = getattr(loader, "batch_sampler", None)
        if not isinstance(sampler, Sampler):
            raise ConfigError("loader: expected a DataLoader(dataset, batch_sampler=commlib.elastic.Sampler(...))")
        if not getattr(loader, "in_order", True):
            raise ConfigError("loader: in_order=False is not supported")
        self._loader: Iterable[Any] = loader
        self._sampler = sampler

    def __len__(self) -> int:
        """Return the number of batches in an epoch, of all members together."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        positions, epoch = self._sampler.positions, self._sampler.epoch
        while positions.next.epoch == epoch:
            ahead: collections.deque[Draw] = collections.deque()
            with self._sampler.predicting(ahead):
                batches = iter(self._loader)
            for batch in batches:
                if positions.next != ahead.popleft():
                    break  # the members have changed
                positions.take()
                yield batch
