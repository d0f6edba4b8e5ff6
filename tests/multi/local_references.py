"""Local SGD and DiLoCo with all ranks in one process: plain torch and NumPy, and only the equations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from commlib.kernels import reference_ops
from tests.multi.common import Mlp, data, seeded, sgd
from tests.multi.relaxation_references import BalancedExchange, ByName, Floats, QuantizedReference

#: Maps the round, the values of each rank by name, and the names in each bucket, to the average.
Average = Callable[[int, Sequence[ByName], Sequence[Sequence[str]]], ByName]


def mean(_: int, by_rank: Sequence[ByName], buckets: Sequence[Sequence[str]]) -> ByName:
    """Average in full precision, in rank order."""
    names = [name for bucket in buckets for name in bucket]
    return {name: reference_ops.decode_sum([own[name] for own in by_rank], len(by_rank)) for name in names}


class OuterReference:
    """Replicas that train independently, and their common weights, which the outer optimizer updates.

    Args:
        world_size: The number of replicas.
        fragments: For each fragment the buckets that it consists of, each a list of names.
        period: Steps from one round to the next.
        outer: Makes the outer optimizer of the common weights; None replaces them by the mean of the replicas' weights.
        average: How differences to the common weights are averaged.
        warm_up: Steps with averaged gradients.
        delay: Steps that a round takes.
        mixing: The share of its own weights that a replica keeps when a delayed result arrives; None adds the
            result's difference to the copy.
        inner: Makes a replica's own optimizer.
    """

    def __init__(
        self,
        world_size: int,
        fragments: Sequence[Sequence[Sequence[str]]],
        *,
        period: int,
        outer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None,
        average: Average = mean,
        warm_up: int = 0,
        delay: int = 0,
        mixing: float | None = None,
        inner: Callable[[nn.Module], Any] = sgd,
    ) -> None:
        self.replicas = [seeded(Mlp) for _ in range(world_size)]
        self.optimizers = [inner(replica) for replica in self.replicas]
        self.fragments, self.period, self.average = fragments, period, average
        self.warm_up, self.delay, self.mixing = warm_up, delay, mixing
        self.common = dict(seeded(Mlp).named_parameters())
        self.make_outer = outer
        self.outer = None if outer is None else [outer(self._common_of(buckets)) for buckets in fragments]
        self.num_rounds = 0
        self._in_flight: tuple[int, int, list[dict[str, Tensor]]] | None = None

    def _common_of(self, buckets: Sequence[Sequence[str]]) -> list[nn.Parameter]:
        return [self.common[name] for names in buckets for name in names]

    def step(self, number: int) -> bool:
        """Make step `number`, counted from 0; return whether replicas took a result at its end."""
        for rank, replica in enumerate(self.replicas):
            self.optimizers[rank].zero_grad()
            replica(data(number, 5, 8, rank=rank)).square().mean().backward()
        if number < self.warm_up:
            self._average_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
        with torch.no_grad():
            return self._end_step(number + 1 - self.warm_up)

    def _average_gradients(self) -> None:
        for same in zip(*[replica.parameters() for replica in self.replicas], strict=True):
            gradients = [p.grad.numpy().reshape(-1) for p in same if p.grad is not None]
            averaged = torch.from_numpy(reference_ops.decode_sum(gradients, len(gradients)))
            for p in same:
                p.grad = averaged.clone().view_as(p)

    def _end_step(self, local_steps: int) -> bool:
        if local_steps <= 0:
            for name, p in self.replicas[0].named_parameters():
                self.common[name].copy_(p)
            return False
        took = self._in_flight is not None and self._in_flight[0] == local_steps
        if took:
            self._take()
        if local_steps % self.period == 0:
            fragment = self.num_rounds % len(self.fragments)
            copies = [{n: p.detach().clone() for n, p in replica.named_parameters()} for replica in self.replicas]
            self._outer_step(fragment, copies)
            self._in_flight = (local_steps + self.delay, fragment, copies)
            self.num_rounds += 1
            if self.delay == 0:
                self._take()
                took = True
        return took

    def _outer_step(self, fragment: int, copies: list[dict[str, Tensor]]) -> None:
        buckets = self.fragments[fragment]
        names = [name for bucket in buckets for name in bucket]
        if self.outer is None:
            sent = [{n: own[n].numpy().reshape(-1) for n in names} for own in copies]
        else:
            sent = [{n: (self.common[n] - own[n]).numpy().reshape(-1) for n in names} for own in copies]
        averaged = self.average(self.num_rounds, sent, buckets)
        for name in names:
            value = torch.from_numpy(np.ascontiguousarray(averaged[name])).view_as(self.common[name])
            if self.outer is None:
                self.common[name].copy_(value)
            else:
                self.common[name].grad = value.clone()
        if self.outer is not None:
            self.outer[fragment].step()

    def _take(self) -> None:
        assert self._in_flight is not None
        _, fragment, copies = self._in_flight
        self._in_flight = None
        for replica, copy in zip(self.replicas, copies, strict=True):
            own = dict(replica.named_parameters())
            for name in [name for bucket in self.fragments[fragment] for name in bucket]:
                common = self.common[name]
                if self.delay == 0:
                    own[name].copy_(common)
                elif self.mixing is None:
                    own[name].add_(common - copy[name])
                else:
                    own[name].copy_(self.mixing * own[name] + (1 - self.mixing) * common)


def block_top_k(kept: int) -> Callable[[Floats], Floats]:
    """Return what arrives of values of which `kept` of each block are sent, in 2 bits."""
    return lambda v: reference_ops.block_top_k_values(reference_ops.block_top_k_payload(v, kept), kept, len(v))


def top_k(ratio: float) -> Callable[[Floats], Floats]:
    """Return what arrives of values of which the largest are sent."""
    return lambda v: _named(v, _largest(v, ratio))


def above(threshold: float, ratio: float) -> Callable[[Floats], Floats]:
    """Return what arrives of values of which the first that reach a threshold are sent."""
    return lambda v: _named(v, np.flatnonzero(np.abs(v) >= threshold)[: max(1, round(ratio * len(v)))])


def _largest(v: Floats, ratio: float) -> Any:
    return reference_ops.top_k(v, max(1, round(ratio * len(v))))


def _named(v: Floats, indices: Any) -> Floats:
    sent = np.zeros_like(v)
    sent[indices] = v[indices]
    return sent


class SparseAverage:
    """The mean of a few elements per rank; error feedback decays, adds the differences and subtracts the sent values.

    Args:
        world_size: The number of replicas.
        compress: Maps values [numel] of a bucket to the values that arrive.
        error_decay: The share of the error feedback that is kept.
    """

    def __init__(self, world_size: int, compress: Callable[[Floats], Floats], error_decay: float) -> None:
        self.compress, self.error_decay = compress, np.float32(error_decay)
        self.errors: list[ByName] = [{} for _ in range(world_size)]

    def __call__(self, _: int, by_rank: Sequence[ByName], buckets: Sequence[Sequence[str]]) -> ByName:
        """Return the mean of the values that all ranks send, bucket by bucket."""
        averaged: ByName = {}
        for names in buckets:
            cuts = np.cumsum([len(by_rank[0][name]) for name in names])[:-1]
            values = [self._values(rank, own, names) for rank, own in enumerate(by_rank)]
            average, sent = self._exchange(tuple(names), values)
            for rank, (value, own) in enumerate(zip(values, sent, strict=True)):
                self.errors[rank] |= dict(zip(names, np.split(value - own, cuts), strict=True))
            averaged |= dict(zip(names, np.split(average, cuts), strict=True))
        return averaged

    def _values(self, rank: int, moved: ByName, names: Sequence[str]) -> Floats:
        errors = [self.errors[rank].get(name, np.zeros_like(moved[name])) for name in names]
        return np.concatenate([moved[name] for name in names]) + self.error_decay * np.concatenate(errors)

    def _exchange(self, _: tuple[str, ...], values: Sequence[Floats]) -> tuple[Floats, list[Floats]]:
        """Return the mean, and what of each rank's values is in it."""
        sent = [self.compress(own) for own in values]
        return reference_ops.decode_sum(sent, len(sent)), sent


class BalancedAverage(SparseAverage):
    """The same by regions: those chosen elements of a rank that are in the mean count as sent.

    Args:
        world_size: The number of replicas.
        ratio: The fraction of a bucket's elements that each rank chooses.
        error_decay: The share of the error feedback that is kept.
    """

    def __init__(self, world_size: int, ratio: float, error_decay: float) -> None:
        super().__init__(world_size, top_k(ratio), error_decay)
        self.ratio, self.sum_up = ratio, BalancedExchange(world_size)

    def _exchange(self, names: tuple[str, ...], values: Sequence[Floats]) -> tuple[Floats, list[Floats]]:
        average, applied = self.sum_up(names, values, [_largest(own, self.ratio) for own in values])
        return average, [_named(own, indices) for own, indices in zip(values, applied, strict=True)]


def quantized(codec: Any, world_size: int, *, feedback: bool, decay: float = 1.0) -> Average:
    """Average with a codec on the wire, as the equations of `QuantizedReference` have it."""
    numels = {name: p.numel() for name, p in Mlp().named_parameters()}
    reference = QuantizedReference(codec, world_size, numels, feedback=feedback)
    return lambda step, by_rank, buckets: reference.step(step, by_rank, buckets, decay)
