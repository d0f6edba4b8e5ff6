"""What the algorithms that send a few elements of each bucket share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from typing_extensions import override

from commlib.algorithms.base import BucketView
from commlib.algorithms.families.ef21 import EF21Option
from commlib.codecs.sparse import SparseCodec
from commlib.primitives.sparse import SparseWorkspace
from commlib.transport.base import Communicator


class Sparse(EF21Option[SparseWorkspace]):
    """Keeps, per bucket, buffers and the residual of what was not sent.

    Args:
        codec: Chooses the elements; the one with the most places that will be used.
        op: "mean" or "sum".
        compress: Which parameters are made sparse; the others are averaged in full precision.
        hierarchical: See `Compressed`.
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
    ) -> None:
        super().__init__(op=op, compress=compress, hierarchical=hierarchical)
        self.codec = codec

    @override
    def _make_workspace(
        self, bucket: BucketView, numel: int, begin: int, comm: Communicator, device: torch.device
    ) -> SparseWorkspace:
        return SparseWorkspace(numel, device, self.codec, comm, begin=begin, gathers=self.gathers)
