"""Gathers of quantized differences to a reference of the weights that all ranks hold (SDP4Bit, Jia et al., 2024).

[Note: the reference] All ranks compute with the reference. A gather after an optimizer step advances it by the decoded
differences of the exact weights to it, so errors do not accumulate. Further gathers return it and communicate nothing.
The first gather is in full precision, and so is one after weights were loaded or edited: differences would be large.

Optimizer steps are counted by hooks, since fused optimizers do not increase the version counters of DTensors. Edits are
changes of these counters outside of steps. All ranks step, load and edit in the same order, so they decide identically.
Changes through `parameter.data` have no counter; they are part of the next difference.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from commlib.sharding import exchanges
from commlib.sharding.collectives import EncodedAllGather, TransportOf
from commlib.sharding.fsdp import ParameterGroup
from commlib.sharding.layout import Layout, Piece
from commlib.sharding.local import local_of
from commlib.sharding.stats import Counts
from commlib.transport.base import Communicator


class DifferenceAllGather(EncodedAllGather):
    """Gathers a module's parameters as differences to a reference; see [Note: the reference].

    Args:
        group: The module.
        transport_of: Returns the communicator of a process group.
        pieces: Returns the pieces of a row.
    """

    def __init__(self, group: ParameterGroup, transport_of: TransportOf, pieces: Callable[[], list[Piece]]) -> None:
        super().__init__(group, transport_of, pieces)
        self._reference: torch.Tensor | None = None  # [number of shards, row_bytes] uint8
        self._restored: torch.Tensor | None = None  # this rank's row of a loaded reference
        self._known = self._versions()  # of the shards, after the last gather or step
        self._is_edited = self._has_stepped = False  # since the last gather

    def begin_step(self) -> None:
        """Note that an optimizer step begins."""
        self._look_for_edits()

    def end_step(self) -> None:
        """Note that an optimizer step has ended."""
        self._known, self._has_stepped = self._versions(), True

    @override
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        began_s = time.perf_counter()
        transport = self.transport_of(group)
        num_shards = self.group.process_group.size()
        times = num_shards // transport.world_size
        layout = self.layout(input_tensor, times)
        rows = output_tensor.view(torch.uint8).view(transport.world_size, -1)
        self.counts += Counts(1, plain_bytes=(num_shards - times) * layout.row_bytes)
        self._look_for_edits()
        if self._restored is not None and times == 1:
            self._restore(layout, input_tensor)
        reference = self._reference
        if reference is not None and (times > 1 or not (self._is_edited or self._has_stepped)):
            layout.arrange(reference, rows)
            self.counts.waited_s += time.perf_counter() - began_s
            return None
        begins = reference is None or self._is_edited
        self._is_edited = self._has_stepped = False
        if begins or reference is None:
            return self._begin(layout, input_tensor.view(torch.uint8), rows, began_s)
        comm = Communicator(transport.rank, transport.world_size)
        row = input_tensor.view(torch.uint8)
        return self.run(transport, exchanges.all_gather_differences(comm, layout, row, reference, rows), began_s)

    def _begin(self, layout: Layout, row: torch.Tensor, rows: torch.Tensor, began_s: float) -> dist.Work | None:
        """Gather the weights in full precision. They are the new reference."""
        self._reference = torch.empty_like(rows)
        transport = self.transport_of(self.group.process_group)
        comm = Communicator(transport.rank, transport.world_size)
        gather = exchanges.all_gather_plain(comm, layout, row, self._reference, rows)
        return self.run(transport, gather, began_s)

    def weights_changed(self) -> None:
        """Begin again with a gather in full precision, as after an edit."""
        self._is_edited = True

    def _look_for_edits(self) -> None:
        versions = self._versions()
        self._is_edited |= versions != self._known
        self._known = versions

    def _versions(self) -> list[int]:
        """Return version counters. Operations on a DTensor count its own, those on its local part the part's."""
        parameters = [each.parameter for each in self.group.shards]
        return [each._version for each in parameters] + [local_of(each)._version for each in parameters]

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """Return this rank's row of the reference, and whether the weights are those of the last gather.

        Returns None if the next gather is in full precision.
        """
        self._look_for_edits()
        if self._reference is None or self._is_edited:
            return None
        own = self._reference[self.transport_of(self.group.process_group).rank]
        return {"reference": own.cpu().clone(), "is_current": not self._has_stepped}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Load a row of the reference; None begins with a gather in full precision."""
        self._reference, self._restored = None, None if state is None else state["reference"]
        self._known, self._is_edited = self._versions(), False
        self._has_stepped = state is not None and not state["is_current"]

    def _restore(self, layout: Layout, row: torch.Tensor) -> None:
        """Gather the loaded reference."""
        restored, self._restored = self._restored, None
        assert restored is not None
        if restored.numel() != row.nbytes:
            return
        num_shards = self.group.process_group.size()
        rows = torch.empty(num_shards, row.nbytes, dtype=torch.uint8, device=row.device)
        work = self._begin(layout, restored.to(row.device), torch.empty_like(rows), time.perf_counter())
        if work is not None:
            work.wait()
