"""What the algorithms that send a few elements of each bucket share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from typing_extensions import override

from commlib.algorithms._policy import Units
from commlib.algorithms.base import Algorithm, BucketView, Context, Part, Traits
from commlib.codecs.sparse import SparseCodec
from commlib.errors import ConfigError
from commlib.primitives.centralized import centralized_full_precision
from commlib.primitives.sparse import SparseExchange
from commlib.transport.base import Communication, Communicator


class Sparse(Algorithm):
    """Keeps, per bucket, buffers and the residual of what was not sent.

    Args:
        codec: Chooses the elements; the one with the most places that will be used.
        op: "mean" or "sum".
        compress: Which parameters are made sparse; the others are averaged in full precision.
    """

    traits = Traits(idle_alone=True)

    def __init__(self, codec: SparseCodec, *, op: str, compress: Callable[[str, torch.Tensor], bool]) -> None:
        if op not in ("mean", "sum"):
            raise ConfigError(f"{type(self).__name__}.op: expected 'mean' or 'sum', got {op!r}")
        self.codec = codec
        self.op = op
        self.compress = compress
        self._exchanges: dict[int, SparseExchange] = {}
        self._parts: dict[int, Sequence[Part]] = {}
        self._units = Units()

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
        compressed = [bucket for bucket in context.buckets if bucket.group == "compressed"]
        self._parts = {bucket.index: bucket.parts for bucket in compressed}
        self._exchanges = {
            bucket.index: SparseExchange(bucket.flat.numel(), context.device, self.codec, context.world_size)
            for bucket in compressed
        }
        self.load_state_dict(saved)

    @override
    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        exchange = self._exchanges.get(bucket.index)
        if exchange is None:
            yield from centralized_full_precision(bucket.flat, comm)
            bucket.flat.div_(self.divisor(comm))
        else:
            yield from self._exchange(bucket, exchange, comm)

    def _exchange(self, bucket: BucketView, exchange: SparseExchange, comm: Communicator) -> Communication:
        """Communicate a bucket that is made sparse."""
        raise NotImplementedError
        yield

    @override
    def state_dict(self) -> dict[str, Any]:
        residuals = {}
        for index, exchange in self._exchanges.items():
            residuals.update(exchange.save(self._parts[index]))
        return {"units": self._units.state_dict(), "residuals": residuals}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._units.load_state_dict(state["units"])
        for index, exchange in self._exchanges.items():
            exchange.load(state["residuals"], self._parts[index])
