"""What the algorithms that average quantized gradients share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from typing_extensions import override

from commlib.algorithms._policy import Units
from commlib.algorithms.base import Algorithm, BucketView, Context, Part, Traits
from commlib.codecs.base import BlockCodec, Random
from commlib.errors import ConfigError
from commlib.primitives.centralized import centralized_full_precision
from commlib.primitives.low_precision import LowPrecisionExchange, centralized_low_precision
from commlib.transport.base import Communication, Communicator


class Quantized(Algorithm):
    """Averages gradients with a block codec on the wire, in both directions.

    Args:
        codec: What gradients are encoded with.
        op: "mean" or "sum".
        feedback: Whether each rank, and each chunk's owner, adds what its last encoding lost to the next one.
        seed: For stochastic rounding; None rounds to nearest.
        compress: Which parameters are compressed; the others are averaged in full precision.
        averaging: With feedback: the residual becomes `averaging * e + (1 - averaging) * lost`.
        reset_every: With feedback: residuals are set to zero every so many rounds.
    """

    traits = Traits(idle_alone=True)

    def __init__(
        self,
        codec: BlockCodec,
        *,
        op: str,
        feedback: bool,
        seed: int | None,
        compress: Callable[[str, torch.Tensor], bool],
        averaging: float = 0.0,
        reset_every: int | None = None,
    ) -> None:
        if op not in ("mean", "sum"):
            raise ConfigError(f"{type(self).__name__}.op: expected 'mean' or 'sum', got {op!r}")
        if seed is not None and not 0 <= seed < 1 << 64:
            raise ConfigError(f"{type(self).__name__}.seed: expected 0..2**64 - 1, got {seed}")
        if not 0 <= averaging < 1 or (reset_every is not None and reset_every < 1):
            raise ConfigError(
                f"{type(self).__name__}: expected 0 <= averaging < 1 and reset_every >= 1 or None, got "
                f"{averaging=}, {reset_every=}"
            )
        self.codec = codec
        self.op = op
        self.feedback = feedback
        self.seed = seed
        self.compress = compress
        self.averaging = averaging
        self.reset_every = reset_every
        self._exchanges: dict[int, LowPrecisionExchange] = {}
        self._parts: dict[int, Sequence[Part]] = {}
        self._units = Units()
        self._num_terms = 1.0

    @override
    def group(self, name: str, parameter: torch.Tensor) -> str:
        return "compressed" if self.compress(name, parameter) else "full precision"

    @override
    def divisor(self, comm: Communicator) -> float:
        return 1.0 if self.op == "sum" else comm.num_active

    @override
    def setup(self, context: Context) -> None:
        saved = self.state_dict()
        self._units.follow(context.optimizer, context.scaler)
        self._num_terms = context.world_size if self.op == "mean" else 1.0
        self._exchanges.clear()
        compressed = [bucket for bucket in context.buckets if bucket.group == "compressed"]
        self._parts = {bucket.index: bucket.parts for bucket in compressed}
        for bucket in compressed:
            self._exchanges[bucket.index] = LowPrecisionExchange(
                bucket.flat.numel(),
                context.device,
                self.codec,
                context.rank,
                context.world_size,
                feedback=self.feedback,
                averaging=self.averaging,
            )
        self.load_state_dict(saved)

    @override
    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        exchange = self._exchanges.get(bucket.index)
        if exchange is None:
            yield from centralized_full_precision(bucket.flat, comm)
            bucket.flat.div_(self.divisor(comm))
            return
        if self.reset_every is not None and comm.step % self.reset_every == 0:
            exchange.forget()
        yield from centralized_low_precision(
            bucket.flat,
            exchange,
            comm,
            divisor=self.divisor(comm),
            scale=self._units.scale,
            decay=self._units.decay(comm.step),
            random_of=lambda stage: self._random(bucket, comm, stage),
        )

    def _random(self, bucket: BucketView, comm: Communicator, stage: int) -> Random | None:
        if self.seed is None:
            return None
        segments = [(part.start, part.offset) for part in self._parts[bucket.index]]
        return Random(self.seed, comm.step, comm.rank, stage, segments)

    @override
    def state_dict(self) -> dict[str, Any]:
        saved: dict[str, Any] = {"units": self._units.state_dict(), "worker": {}, "owner": {}}
        for index, exchange in self._exchanges.items():
            for key, pieces in exchange.save(self._parts[index]).items():
                saved[key].update(pieces)
        return saved

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._units.load_state_dict(state["units"])
        for index, exchange in self._exchanges.items():
            exchange.load(state, self._parts[index], self._num_terms)
