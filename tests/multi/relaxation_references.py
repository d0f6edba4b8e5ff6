"""Relaxed averaging of gradients in plain NumPy, all ranks in one process: only the equations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from commlib.kernels import reference, reference_ops

Floats = npt.NDArray[np.float32]
ByName = dict[str, Floats]


def flat_gradients(model: nn.Module) -> ByName:
    """Return copies of the gradients by name, each [numel]."""
    found = {name: p.grad for name, p in model.named_parameters()}
    return {name: g.detach().numpy().reshape(-1).copy() for name, g in found.items() if g is not None}


class Uniforms:
    """Given random numbers in the place of a stream."""

    def __init__(self, values: Floats) -> None:
        self._values = values

    def uniforms(self, start: int, count: int) -> Floats:
        return self._values[start : start + count]


class QuantizedReference:
    """Two-stage quantized averaging, with or without error feedback on both sides and stochastic rounding.

    Args:
        codec: The reference codec.
        world_size: The number of ranks.
        numels: Elements of each parameter, in the model's order.
        feedback: Whether errors are fed back.
        seed: Of the random numbers; None rounds to nearest.
        divisor: Of the sum.
        averaging: How much of an old residual stays.
    """

    def __init__(
        self,
        codec: reference.BlockCodec,
        world_size: int,
        numels: dict[str, int],
        *,
        feedback: bool = False,
        seed: int | None = None,
        divisor: float | None = None,
        averaging: float = 0.0,
    ) -> None:
        self.codec, self.world_size, self.feedback, self.seed = codec, world_size, feedback, seed
        self.divisor = world_size if divisor is None else divisor
        self.averaging = averaging
        self.numels = numels
        self.offsets = dict(zip(numels, np.cumsum([0, *numels.values()])[:-1].tolist(), strict=True))
        self.worker = [{name: np.zeros(n, np.float32) for name, n in numels.items()} for _ in range(world_size)]
        # The errors of each rank's encodings of sums: zero wherever another rank owns the element.
        self.owner = [{name: np.zeros(n, np.float32) for name, n in numels.items()} for _ in range(world_size)]

    def step(self, step: int, by_rank: Sequence[ByName], buckets: Sequence[Sequence[str]], beta: float = 1.0) -> ByName:
        """Return the averaged gradients of one step, for buckets that hold these parameters."""
        result: ByName = {}
        for names in buckets:
            joined = [np.concatenate([own[name] for name in names]) for own in by_rank]
            mean = self._bucket(step, joined, names, beta)
            ends = np.cumsum([self.numels[name] for name in names])
            result |= dict(zip(names, np.split(mean, ends[:-1]), strict=True))
        return result

    def _bucket(self, step: int, values: Sequence[Floats], names: Sequence[str], beta: float) -> Floats:
        numel = len(values[0])
        chunk = -(-numel // (self.world_size * 16)) * 16
        starts = [min(rank * chunk, numel) for rank in range(self.world_size + 1)]
        workers = [self._take(self.worker[rank], names) for rank in range(self.world_size)]
        owners = [self._take(self.owner[rank], names) for rank in range(self.world_size)]
        for rank in range(self.world_size):  # after a new plan: errors of chunks of other ranks go to the worker
            foreign = owners[rank].copy()
            foreign[starts[rank] : starts[rank + 1]] = 0
            if foreign.any():
                workers[rank] = workers[rank] + foreign * np.float32(self.divisor)
                owners[rank] = owners[rank] - foreign
        decoded = []
        for rank in range(self.world_size):
            pieces = []
            for owner in range(self.world_size):
                part = slice(starts[owner], starts[owner + 1])
                got, workers[rank][part] = self._encode(
                    values[rank][part], workers[rank][part], self._stream(step, rank, 0, names, part), beta
                )
                pieces.append(got)
            decoded.append(np.concatenate(pieces))
        mean = np.zeros(numel, np.float32)
        for rank in range(self.world_size):
            part = slice(starts[rank], starts[rank + 1])
            total = reference_ops.decode_sum([d[part] for d in decoded], self.divisor)
            mean[part], owners[rank][part] = self._encode(
                total, owners[rank][part], self._stream(step, rank, 1, names, part), beta
            )
        for rank in range(self.world_size):
            self._put(self.worker[rank], names, workers[rank])
            self._put(self.owner[rank], names, owners[rank])
        return mean

    def _encode(self, x: Floats, e: Floats, stream: Uniforms | None, beta: float) -> tuple[Floats, Floats]:
        if not self.feedback:
            return self.codec.decode(self.codec.encode(x, stream), len(x)), e  # type: ignore[arg-type]
        payload, lost = reference_ops.encode_with_feedback(self.codec, x, e, beta, 1.0, stream)  # type: ignore[arg-type]
        if self.averaging:
            lost = e - (e - lost) * np.float32(1 - self.averaging)
        return self.codec.decode(payload, len(x)), lost

    def _stream(self, step: int, rank: int, stage: int, names: Sequence[str], part: slice) -> Uniforms | None:
        if self.seed is None:
            return None
        stream = reference.Stream(self.seed, step, rank, stage)
        parts = [stream.uniforms(self.offsets[name], self.numels[name]) for name in names]
        return Uniforms(np.concatenate(parts)[part])

    def _take(self, by_name: ByName, names: Sequence[str]) -> Floats:
        return np.concatenate([by_name[name] for name in names])

    def _put(self, by_name: ByName, names: Sequence[str], values: Floats) -> None:
        ends = np.cumsum([self.numels[name] for name in names])
        by_name.update({name: v.copy() for name, v in zip(names, np.split(values, ends[:-1]), strict=True)})


class SparseReference:
    """Error feedback with a few elements of each bucket; DGC's momentum where `momentum` is given.

    Args:
        choose: Maps (values [numel], step, bucket) to the indices that are sent, ascending.
        world_size: The number of ranks.
        numels: Elements of each parameter.
        momentum: m of DGC; None is plain error feedback.
        clip: DGC's local clipping: the norm for the whole model.
    """

    def __init__(
        self,
        choose: Callable[[Floats, int, int], npt.NDArray[np.int64]],
        world_size: int,
        numels: dict[str, int],
        *,
        momentum: float | None = None,
        clip: float | None = None,
    ) -> None:
        self.choose, self.world_size, self.momentum, self.clip = choose, world_size, momentum, clip
        self.numels = numels
        self.residual = [{name: np.zeros(n, np.float32) for name, n in numels.items()} for _ in range(world_size)]
        self.velocity = [{name: np.zeros(n, np.float32) for name, n in numels.items()} for _ in range(world_size)]

    def step(self, step: int, by_rank: Sequence[ByName], buckets: Sequence[Sequence[str]]) -> ByName:
        """Return the averaged gradients of one step, for buckets that hold these parameters."""
        result: ByName = {}
        for index, names in enumerate(buckets):
            ends = np.cumsum([self.numels[name] for name in names])
            sums = []
            for rank in range(self.world_size):
                values = [np.concatenate([d[name] for name in names]) for d in self._state(by_rank, rank)]
                sent, *states = self._send(step, index, *values)
                sums.append(sent)
                for state, new in zip((self.residual[rank], self.velocity[rank]), states, strict=True):
                    state.update(zip(names, np.split(new, ends[:-1]), strict=True))
            mean = reference_ops.decode_sum(sums, self.world_size)
            result |= dict(zip(names, np.split(mean, ends[:-1]), strict=True))
        return result

    def _state(self, by_rank: Sequence[ByName], rank: int) -> tuple[ByName, ByName, ByName]:
        return by_rank[rank], self.residual[rank], self.velocity[rank]

    def _accumulate(self, g: Floats, e: Floats, u: Floats) -> tuple[Floats, Floats]:
        """Return what there is to be sent, and the new momentum."""
        if self.momentum is not None:
            if self.clip is not None:
                limit = self.clip * np.sqrt(len(g) / sum(self.numels.values()) / self.world_size)
                norm = np.linalg.norm(g.astype(np.float64))
                g = (g * np.float32(min(1.0, limit / (norm + 1e-12)))).astype(np.float32)
            u = (u * np.float32(self.momentum) + g).astype(np.float32)
        return (u if self.momentum is not None else g) + e, u

    def _send(self, step: int, index: int, g: Floats, e: Floats, u: Floats) -> tuple[Floats, Floats, Floats]:
        v, u = self._accumulate(g, e, u)
        chosen = self.choose(v, step, index)
        sent = np.zeros_like(v)
        sent[chosen] = v[chosen]
        if self.momentum is not None:
            u = u.copy()
            u[chosen] = 0
        return sent, v - sent, u


class BalancedExchange:
    """Ok-Topk's sum: the tensor is cut into regions, of which the largest choices are summed, the largest sums kept."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.regions: dict[tuple[str, ...], list[int]] = {}  # by the names in a bucket

    def __call__(
        self, names: tuple[str, ...], values: Sequence[Floats], chosen: Sequence[npt.NDArray[np.int64]]
    ) -> tuple[Floats, list[npt.NDArray[np.int64]]]:
        """Return the mean of the chosen values of the bucket of these names, and the elements of each rank in it."""
        size, numel, count = self.world_size, len(values[0]), len(chosen[0])
        regions = self.regions.setdefault(names, [numel * owner // size for owner in range(size + 1)])
        fitting: list[list[int]] = [[] for _ in range(size)]
        mean = np.zeros(numel, np.float32)
        for begin, end in itertools.pairwise(regions):
            sent = []
            for rank, (v, own) in enumerate(zip(values, chosen, strict=True)):
                inside = sorted((idx for idx in own.tolist() if begin <= idx < end), key=lambda i, v=v: (-abs(v[i]), i))
                fits = inside[: -(-2 * count // size)]
                fitting[rank] += fits
                sent.append(np.zeros(numel, np.float32))
                sent[-1][fits] = v[fits]
            total = reference_ops.decode_sum(sent, 1.0)
            largest = np.argsort(-np.abs(total), kind="stable")[: -(-count // size)]
            mean[largest] += total[largest]
        mean = mean / np.float32(size)
        cuts = [sum(int(own[count * owner // size]) for own in chosen) // size for owner in range(1, size)]
        self.regions[names] = [0, *cuts, numel]
        return mean, [np.array([i for i in fits if mean[i] != 0], np.int64) for fits in fitting]


class BalancedReference(SparseReference):
    """Ok-Topk, with DGC's momentum where `momentum` is given: choices are summed by regions, the largest sums kept."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.exchange = BalancedExchange(self.world_size)

    def step(self, step: int, by_rank: Sequence[ByName], buckets: Sequence[Sequence[str]]) -> ByName:
        """Return the averaged gradients of one step, for buckets that hold these parameters."""
        result: ByName = {}
        for index, names in enumerate(buckets):
            ends = np.cumsum([self.numels[name] for name in names])[:-1]
            pairs = [
                self._accumulate(*(np.concatenate([d[name] for name in names]) for d in self._state(by_rank, rank)))
                for rank in range(self.world_size)
            ]
            chosen = [self.choose(v, step, index) for v, _ in pairs]
            mean, applied = self.exchange(tuple(names), [v for v, _ in pairs], chosen)
            for rank, (v, u) in enumerate(pairs):
                v[applied[rank]] = 0
                if self.momentum is not None:
                    u[applied[rank]] = 0
                self.residual[rank].update(zip(names, np.split(v, ends), strict=True))
                self.velocity[rank].update(zip(names, np.split(u, ends), strict=True))
            result |= dict(zip(names, np.split(mean, ends), strict=True))
        return result


class EF21Reference:
    """EF21-SGDM as in its paper, with each rank's part of the estimate stored separately.

    Args:
        compress: Maps (values [numel], step, bucket) to the values that arrive.
        world_size: The number of ranks.
        numels: Elements of each parameter.
        weight: The weight of a new gradient in the momentum.
        is_sent: Whether the parameters of these names are compressed; the others get the momentum of their mean.
    """

    def __init__(
        self,
        compress: Callable[[Floats, int, int], Floats],
        world_size: int,
        numels: dict[str, int],
        *,
        weight: float,
        is_sent: Callable[[Sequence[str]], bool] = lambda names: True,
    ) -> None:
        self.compress, self.weight, self.is_sent = compress, weight, is_sent
        self.momentum = [{name: np.zeros(n) for name, n in numels.items()} for _ in range(world_size)]
        self.sent = [{name: np.zeros(n) for name, n in numels.items()} for _ in range(world_size)]
        self.estimate = {name: np.zeros(n) for name, n in numels.items()}

    def step(self, step: int, by_rank: Sequence[ByName], buckets: Sequence[Sequence[str]]) -> ByName:
        """Return the estimate after one step, for buckets that hold these parameters."""
        for momentum, gradients in zip(self.momentum, by_rank, strict=True):
            for name, gradient in gradients.items():
                momentum[name] += self.weight * (gradient - momentum[name])
        for index, names in enumerate(buckets):
            if not self.is_sent(names):
                self.estimate |= {name: np.mean([own[name] for own in self.momentum], axis=0) for name in names}
                continue
            for momentum, sent in zip(self.momentum, self.sent, strict=True):
                self._send(momentum, sent, names, step, index)
            self.estimate |= {name: np.mean([own[name] for own in self.sent], axis=0) for name in names}
        return {name: value.astype(np.float32) for name, value in self.estimate.items()}

    def _send(self, target: dict[str, Any], sent: dict[str, Any], names: Sequence[str], step: int, index: int) -> None:
        lacks = np.concatenate([target[name] - sent[name] for name in names]).astype(np.float32)
        ends = np.cumsum([len(target[name]) for name in names])
        for name, piece in zip(names, np.split(self.compress(lacks, step, index), ends[:-1]), strict=True):
            sent[name] = sent[name] + piece


class QuantizedEF21Reference:
    """EF21-SGDM that also compresses the means: error feedback on both sides, for the changes of the momenta.

    Args:
        average: Averages the changes, with feedback.
        weight: The weight of a new gradient in the momentum.
    """

    def __init__(self, average: QuantizedReference, weight: float) -> None:
        self.average, self.weight = average, np.float32(weight)
        self.momentum = [{name: np.zeros(n, np.float32) for name, n in average.numels.items()} for _ in average.worker]
        self.estimate = {name: np.zeros(n, np.float32) for name, n in average.numels.items()}

    def step(self, step: int, by_rank: Sequence[ByName], buckets: Sequence[Sequence[str]]) -> ByName:
        """Return the estimate after one step, and check its invariant from the paper."""
        changes = []
        for momentum, gradients in zip(self.momentum, by_rank, strict=True):
            changes.append({name: (gradients[name] - momentum[name]) * self.weight for name in momentum})
            momentum.update({name: momentum[name] + change for name, change in changes[-1].items()})
        for name, change in self.average.step(step, changes, buckets).items():
            self.estimate[name] = self.estimate[name] + change
            sent = [v[name] - e[name] for v, e in zip(self.momentum, self.average.worker, strict=True)]
            lacks = sum(own[name] for own in self.average.owner)
            assert np.allclose(np.mean(sent, axis=0), self.estimate[name] + lacks, rtol=0, atol=1e-5), (step, name)
        return self.estimate


class PowerSGDReference:
    """PowerSGD in float64, one matrix after the other; parameters whose name is not in `first_q` are averaged.

    Args:
        world_size: The number of ranks.
        shapes: Rows and columns by name.
        first_q: The first Q by name, [columns, rank].
    """

    def __init__(self, world_size: int, shapes: dict[str, tuple[int, int]], first_q: dict[str, npt.NDArray]) -> None:
        self.world_size, self.shapes = world_size, shapes
        self.q = {name: q.astype(np.float64) for name, q in first_q.items()}
        self.errors = [{name: np.zeros(shapes[name]) for name in first_q} for _ in range(world_size)]

    def step(self, step: int, by_rank: Sequence[ByName], buckets: Sequence[Sequence[str]]) -> ByName:
        """Return the averaged gradients of one step."""
        result: ByName = {}
        for name in by_rank[0]:
            gradients = [own[name].astype(np.float64) for own in by_rank]
            if name not in self.q:
                result[name] = np.mean(gradients, axis=0).astype(np.float32)
                continue
            matrices = [g.reshape(self.shapes[name]) + e[name] for g, e in zip(gradients, self.errors, strict=True)]
            p = np.linalg.qr(np.sum([m @ self.q[name] for m in matrices], axis=0))[0]
            self.q[name] = np.mean([m.T @ p for m in matrices], axis=0)
            approximation = p @ self.q[name].T
            for rank, matrix in enumerate(matrices):
                self.errors[rank][name] = matrix - approximation
            result[name] = approximation.reshape(-1).astype(np.float32)
        return result


def majority(by_rank: Sequence[ByName]) -> ByName:
    """Return the sign of the sum of signs; a tie, and zero, count as plus."""
    votes = {name: sum(np.where(np.signbit(own[name]), -1, 1) for own in by_rank) for name in by_rank[0]}
    return {name: np.where(total < 0, -1, 1).astype(np.float32) for name, total in votes.items()}


class FrozenVarianceAdamReference:
    """AdamW with averaged gradients, then with a frozen variance and an averaged, quantized momentum, in NumPy.

    Args:
        average: Averages the momentum of all ranks.
        values: The first values of the parameters, by name.
        settings: By name: lr, betas, eps, weight_decay.
        warmup_steps: Steps before the freeze.
    """

    def __init__(
        self, average: QuantizedReference, values: ByName, settings: dict[str, dict[str, Any]], warmup_steps: int
    ) -> None:
        self.average, self.settings, self.warmup_steps = average, settings, warmup_steps
        self.values = {name: value.astype(np.float64) for name, value in values.items()}
        self.m = {name: np.zeros(len(value), np.float32) for name, value in values.items()}
        self.v = {name: np.zeros(len(value)) for name, value in values.items()}

    def step(self, step: int, by_rank: Sequence[ByName], buckets: Sequence[Sequence[str]]) -> None:
        """Make optimizer step number `step`, counted from 0."""
        beta = {name: s["betas"] for name, s in self.settings.items()}
        if step < self.warmup_steps:
            for name in self.values:
                g = np.mean([own[name] for own in by_rank], axis=0, dtype=np.float64)
                b1, b2 = beta[name]
                self.m[name] = (b1 * self.m[name] + (1 - b1) * g).astype(np.float32)
                self.v[name] = b2 * self.v[name] + (1 - b2) * g**2
        else:
            own = [
                {
                    name: g[name] * np.float32(1 - beta[name][0]) + np.float32(beta[name][0]) * self.m[name]
                    for name in self.values
                }
                for g in by_rank
            ]
            self.m = self.average.step(step, own, buckets)
        for name, s in self.settings.items():
            b1, b2 = s["betas"]
            m = self.m[name].astype(np.float64) / (1 - b1 ** (step + 1))
            v = self.v[name] / (1 - b2 ** min(step + 1, self.warmup_steps))
            x = self.values[name] * (1 - s["lr"] * s["weight_decay"])
            u = m / (np.sqrt(v) + s["eps"])
            if step >= self.warmup_steps:
                bound = max(1.0, (1 - b1) / np.sqrt(1 - b2))
                u = np.clip(u, -bound, bound)
            self.values[name] = x - s["lr"] * u
