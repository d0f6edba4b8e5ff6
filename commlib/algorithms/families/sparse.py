"""What the algorithms that send a few elements of each bucket share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from commlib.algorithms.base import BucketView
from commlib.algorithms.families.ef21 import EF21Option
from commlib.codecs.sparse import SparseCodec
from commlib.errors import ConfigError
from commlib.primitives.balanced import BalancedSum
from commlib.primitives.sparse import SparseWorkspace
from commlib.transport.base import Communicator


class Sparse(EF21Option[SparseWorkspace]):
    """Keeps, per bucket, buffers and the residual of what was not sent.

    Args:
        codec: Chooses the elements; the one with the most places that will be used.
        op: "mean" or "sum".
        compress: Which parameters are made sparse; the others are averaged in full precision.
        hierarchical: See `Compressed`.
        exchange: "gathered": every rank gathers everyone's choices; "balanced": they are summed by regions, and the
            largest sums gathered (`BalancedSum`; the codec is `TopK`).
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
    ) -> None:
        super().__init__(op=op, compress=compress, hierarchical=hierarchical)
        if exchange not in ("gathered", "balanced"):
            raise ConfigError(f"{type(self).__name__}.exchange: expected 'gathered' or 'balanced', got {exchange!r}")
        self.codec = codec
        self.exchange = exchange

    @property
    def is_balanced(self) -> bool:
        """Whether choices are summed by regions."""
        return self.exchange == "balanced"

    @override
    def _make_workspace(
        self, bucket: BucketView, numel: int, begin: int, comm: Communicator, device: torch.device
    ) -> SparseWorkspace:
        return SparseWorkspace(
            numel, device, self.codec, comm, begin=begin, gathers=self.gathers, balanced=self.is_balanced
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        if self.is_balanced:
            saved["regions"] = {name: each.save() for name, each in self._balanced().items()}
        return saved

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for name, each in self._balanced().items():
            if name in state.get("regions", {}):
                each.load(state["regions"][name])

    def _balanced(self) -> dict[str, BalancedSum]:
        """Return the sums by regions by the first parameter of their bucket."""
        found = {self._parts[index][0].name: each.balanced for index, each in self._workspaces.items()}
        return {name: each for name, each in found.items() if each is not None}
