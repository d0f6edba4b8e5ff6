"""What the algorithms that send a few elements of each bucket share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from typing_extensions import override

from commlib.algorithms.base import BucketView
from commlib.algorithms.families.ef21 import EF21Option
from commlib.codecs.sparse import SparseCodec
from commlib.errors import ConfigError
from commlib.primitives.sparse import SparseWorkspace
from commlib.transport.base import Communicator


def is_balanced(name: str, exchange: str) -> bool:
    """Return whether the option `exchange` of the algorithm of this name is "balanced", the other being "gathered"."""
    if exchange not in ("gathered", "balanced"):
        raise ConfigError(f"{name}.exchange: expected 'gathered' or 'balanced', got {exchange!r}")
    return exchange == "balanced"


class Sparse(EF21Option[SparseWorkspace]):
    """Keeps, per bucket, buffers and the residual of what was not sent.

    Args:
        codec: Chooses the elements; the one with the most places that will be used.
        op: "mean" or "sum".
        compress: Which parameters are made sparse; the others are averaged in full precision.
        hierarchical: See `Compressed`.
        exchange: "gathered": every rank gathers everyone's choices; "balanced": they are summed by regions, and the
            largest sums gathered (`BalancedSum`; the codec is `TopK`).
        rescale_residuals: See `Compressed`.
    """

    #: Whether a rank gathers everyone's payloads.
    gathers = True

    def __init__(
        self,
        codec: SparseCodec,
        *,
        op: str,
        compress: Callable[[str, torch.Tensor], bool],
        hierarchical: bool = False,
        exchange: str = "gathered",
        rescale_residuals: bool = False,
    ) -> None:
        super().__init__(op=op, compress=compress, hierarchical=hierarchical, rescale_residuals=rescale_residuals)
        self.codec = codec
        self.exchange = exchange
        self.is_balanced = is_balanced(type(self).__name__, exchange)
        if self.is_balanced:
            self.kinds = (*self.kinds, "regions")

    @override
    def _make_workspace(
        self, bucket: BucketView, numel: int, begin: int, comm: Communicator, device: torch.device
    ) -> SparseWorkspace:
        return SparseWorkspace(
            numel, device, self.codec, comm, begin=begin, gathers=self.gathers, balanced=self.is_balanced
        )
