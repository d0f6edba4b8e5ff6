"""Sum of the elements that all ranks chose, by regions of equal load instead of by gathering all payloads."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from functools import partial
from typing import Any

import torch

from commlib.codecs.sparse import TopK
from commlib.kernels import meta
from commlib.transport.base import Communicator, Request

#: Capacity of the payload for one region, as a multiple of the number of elements per region under equal load.
_SLACK = 2
#: Bytes that follow every payload: the end of a region (int64), and padding to the codecs' alignment.
_HEADER_BYTES = 16


class BalancedSum:
    """Sums the sparse payloads of one bucket as in Ok-Topk: split and reduce, then balance and all-gather.

    The tensor is cut into one region per rank, identical on all ranks; rank i owns region i. Each rank chooses k
    elements and sends the 2k/N largest of each region to the owner, which adds them in rank order. The k/N largest sums
    of each region are gathered. Every rank therefore sends 2k(N-1)/N, then k(N-1)/N pairs of index and value:
    6k(N-1)/N numbers of 4 bytes, plus rounding up and 32 bytes for each other rank.

    In the next round, region i ends at the position below which (i+1)/N of a rank's chosen elements lay in this round,
    averaged over the ranks. These positions are sent behind the payloads, so balancing needs no collective of its own
    and no host synchronization.

    Payload sizes are fixed and equal on all ranks. An element that exceeds the capacity of its region, or is not among
    the largest sums, stays a residual of the rank that chose it. A region that overflows is narrower in the next round.

    Args:
        numel: Number of elements of the tensor.
        device: Device of the tensor.
        codec: Chooses the elements; the codec with the largest payload if it changes from round to round.
        comm: The ranks that exchange the tensor.
    """

    def __init__(self, numel: int, device: torch.device, codec: TopK, comm: Communicator) -> None:
        self._numel = numel
        self._size = size = comm.world_size
        self._ranks = torch.arange(size + 1, device=device)
        self.regions = self._ranks * numel // size  # [ranks + 1] int64: first element of each region, then numel
        nbytes = self._codecs(codec)[0].payload_bytes(numel) + _HEADER_BYTES
        self._sent = torch.zeros((size + 1) * nbytes, dtype=torch.uint8, device=device)  # last row: overflow
        self._received = torch.zeros(size * nbytes, dtype=torch.uint8, device=device)

    def save(self) -> dict[str, Any]:
        """Return a copy of the regions."""
        return {"numel": self._numel, "regions": self.regions.clone()}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Load regions. Those of another world size or number of elements are ignored; any regions are valid."""
        if saved["numel"] == self._numel and saved["regions"].shape == self.regions.shape:
            self.regions.copy_(saved["regions"])

    def _codecs(self, codec: TopK) -> tuple[TopK, TopK]:
        """Return the codecs of the payloads to the owner of a region, and of the sums that the owners gather."""
        numel, places = max(self._numel, 1), codec.places(self._numel)
        counts = [-(-slack * places // self._size) for slack in (_SLACK, 1)]
        of_choices, of_sums = (TopK(min(max(count, 1) / numel, 1.0)) for count in counts)
        return of_choices, of_sums

    def sum_up(
        self, codec: TopK, own: torch.Tensor, total: torch.Tensor, comm: Communicator, divisor: float
    ) -> Generator[Request, None, torch.Tensor]:
        """Write the largest sums of the ranks' chosen elements, divided by `divisor`, to `total` on all ranks.

        The result is identical on all ranks.

        Args:
            codec: Codec of `own`.
            own: The payload of this rank's chosen elements.
            total: [numel] fp32; all other elements are set to 0.
            comm: The ranks that exchange the tensor.
            divisor: Divisor of the sum (a true division).

        Returns:
            [codec.places(numel)] bool: which of this rank's chosen elements are in the sum.
        """
        if not self._numel:  # an empty stretch of a bucket: the same number of collectives as on other ranks
            yield comm.all_to_all(total, total)
            yield comm.all_gather(total, total)
            return total.bool()
        choices, sums = self._codecs(codec)
        nbytes = choices.payload_bytes(self._numel)
        row_bytes = nbytes + _HEADER_BYTES
        indices = codec.indices(own, self._numel).long() & 0xFFFFFFFF
        sent = self._sent[: (self._size + 1) * row_bytes]
        fits, places = torch.empty_like(indices, dtype=torch.bool), choices.places(self._numel)
        split = partial(self._split, indices, codec.values(own, self._numel), places, sent.view(torch.int32), fits)
        if sent.is_meta:
            meta.repeated(split, "BalancedSum", indices.shape, places, sent.shape)
        else:
            split()
        rows, received = (buffer[: self._size * row_bytes] for buffer in (sent, self._received))
        self._header(rows).copy_(self._proposal(indices) if comm.contributes else self.regions[1:])
        yield comm.all_to_all(received, rows)

        end = self._header(received).sum() // self._size
        choices.decode_sum(received.view(self._size, -1)[:, :nbytes].contiguous(), total)
        nbytes = sums.payload_bytes(self._numel)
        sums.encode(total, self._sent[:nbytes])
        row = self._sent[: nbytes + _HEADER_BYTES]
        row[nbytes:].view(torch.int64)[0].copy_(end)
        gathered = self._received[: self._size * row.numel()]
        yield comm.all_gather(gathered, row)

        self.regions[1:].copy_(self._header(gathered))
        sums.decode_sum(gathered.view(self._size, -1)[:, :nbytes].contiguous(), total, divisor=divisor)
        return fits & (total[indices] != 0)

    def _header(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a view of the number that follows each rank's payload, [ranks] int64."""
        return rows.view(torch.int64).view(self._size, -1)[:, -(_HEADER_BYTES // 8)]

    def _proposal(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the ends of regions that would each contain equally many of these elements, [ranks] int64."""
        ends = self.regions[1:].clone()
        ends[:-1] = indices[self._ranks[1:-1] * indices.numel() // self._size]
        return ends

    def _split(
        self, indices: torch.Tensor, values: torch.Tensor, places: int, out: torch.Tensor, fits: torch.Tensor
    ) -> None:
        """Write a payload for the owner of each region, and to `fits` which elements are in one.

        Args:
            indices: [count] int64, ascending.
            values: [count] fp32; the largest of each region take precedence, then those of lower index.
            places: Capacity of a payload.
            out: [(ranks + 1) * words of a row] int32: one row per region; the last row is scratch.
            fits: [count] bool; whether the element is in a payload.
        """
        counter = torch.arange(indices.numel(), device=indices.device)
        owner = torch.searchsorted(self.regions[1:-1], indices, right=True)
        first = torch.searchsorted(owner, self._ranks[:-1])  # the first choice in each region
        words = values.view(torch.int32)
        by_size = (owner << 32 | 0x7FFFFFFF - (words & 0x7FFFFFFF).long()).argsort(stable=True)
        torch.lt(torch.empty_like(counter).scatter_(0, by_size, counter) - first[owner], places, out=fits)

        rows = out.zero_().view(self._size + 1, -1)
        rows[:, :places] = -1
        num_words = rows.shape[1]
        until = fits.cumsum(0)
        before = (until - fits.long())[first[owner]]  # number of elements in the payloads of the regions before
        at = torch.where(fits, owner * num_words + until - 1 - before, self._size * num_words)
        out.scatter_(0, at, indices.to(torch.int32))
        out.scatter_(0, at + (num_words - _HEADER_BYTES // 4) // 2, words)
