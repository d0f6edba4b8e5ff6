"""Relaxed averaging of gradients in plain NumPy, all ranks in one process: only the equations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
        # What each rank's encodings of sums lost: zero wherever another rank owns the element.
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
        for rank in range(self.world_size):  # a change of the plan: what was another rank's chunk is the worker's now
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


Reference = Callable[[int, Sequence[ByName], Sequence[Sequence[str]]], ByName]
