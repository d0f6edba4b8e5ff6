"""The communication of one module's weights and gradients, as generators of requests like the primitives'.

All tensors are uint8: a row is a rank's shard, a payload its encoding (`Layout`). The same generators run on FSDP2's
tensors and, on meta tensors, in the simulator.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from commlib.sharding.layout import FeedbackOf, Layout
from commlib.transport.base import Communication, Communicator


def all_gather(
    comm: Communicator,
    layout: Layout,
    row: torch.Tensor,
    rows: torch.Tensor,
    keep: Callable[[torch.Tensor], None] | None = None,
) -> Communication:
    """Gather the rows of all ranks, encoded.

    Args:
        comm: The ranks.
        layout: The layout of a row.
        row: [row_bytes] This rank's row.
        rows: [world_size, row_bytes] Written; the own row too is a decoded one.
        keep: Called with the payloads [world_size, payload_bytes] of all ranks.
    """
    payloads = row.new_empty(comm.world_size, layout.payload_bytes)
    layout.encode(row, payloads[comm.rank])
    yield comm.all_gather(payloads.view(-1), payloads[comm.rank])
    if keep is not None:
        keep(payloads)
    layout.decode(payloads, rows)


def all_gather_payloads(comm: Communicator, layout: Layout, own: torch.Tensor, rows: torch.Tensor) -> Communication:
    """Gather rows whose payloads are known, several shards per rank.

    Args:
        comm: The ranks.
        layout: The layout of a row of one shard.
        own: [shards per rank, payload_bytes] The payloads of this rank's shards.
        rows: [world_size, shards per rank * row_bytes] Written.
    """
    payloads = own.new_empty(comm.world_size, *own.shape)
    payloads[comm.rank].copy_(own)
    yield comm.all_gather(payloads.view(-1), payloads[comm.rank].view(-1))
    layout.decode(payloads.flatten(0, 1), rows)


def all_gather_plain(
    comm: Communicator, layout: Layout, row: torch.Tensor, reference: torch.Tensor, rows: torch.Tensor
) -> Communication:
    """Gather the rows of all ranks without a codec, into `reference` and `rows`; shapes as in `all_gather`."""
    own = reference[comm.rank].copy_(row)
    yield comm.all_gather(reference.view(-1), own)
    layout.arrange(reference, rows)


def all_gather_differences(
    comm: Communicator, layout: Layout, row: torch.Tensor, reference: torch.Tensor, rows: torch.Tensor
) -> Communication:
    """Advance a reference by the encoded differences of all ranks' rows to it, and copy it to `rows`.

    Args:
        comm: The ranks.
        layout: The layout of a row.
        row: [row_bytes] This rank's row.
        reference: [world_size, row_bytes] Identical on all ranks; changed in place.
        rows: [world_size, row_bytes] Written.
    """
    payloads = row.new_empty(comm.world_size, layout.payload_bytes)
    layout.encode(row, payloads[comm.rank], reference=reference[comm.rank])
    yield comm.all_gather(payloads.view(-1), payloads[comm.rank])
    layout.add_differences(payloads, reference)
    layout.arrange(reference, rows)


def reduce_scatter(
    comm: Communicator,
    layout: Layout,
    rows: torch.Tensor,
    row: torch.Tensor,
    divisor: float,
    feedback_of: Callable[[int], FeedbackOf] | None = None,
) -> Communication:
    """Send row r, encoded, to rank r, and sum what all ranks sent, in rank order.

    Args:
        comm: The ranks.
        layout: The layout of a row.
        rows: [world_size, row_bytes] This rank's gradients.
        row: [row_bytes] This rank's shard of the sum; written.
        divisor: Divides the sum.
        feedback_of: Returns the error feedback of the row of a rank.
    """
    sent = rows.new_empty(comm.world_size, layout.payload_bytes)
    received = torch.empty_like(sent)
    for rank in range(comm.world_size):
        layout.encode(rows[rank], sent[rank], feedback_of=None if feedback_of is None else feedback_of(rank))
    yield comm.all_to_all(received.view(-1), sent.view(-1))
    layout.decode_sum(received, row, divisor)


def reduce_scatter_by_node(
    comm: Communicator,
    layout: Layout,
    rows: torch.Tensor,
    row: torch.Tensor,
    divisor: float,
    dtype: torch.dtype,
    order: torch.Tensor,
    feedback_of: Callable[[int], FeedbackOf] | None = None,
) -> Communication:
    """Sum the rows of a node in full precision, then as `reduce_scatter` between the nodes.

    A rank sums the rows of all ranks at its position in their node. Each adapter carries the payloads once, not once
    per rank of the node.

    Args:
        comm: The ranks; `comm.nodes` is set.
        layout: The layout of a row.
        rows: [world_size, row_bytes] This rank's gradients.
        row: [row_bytes] This rank's shard of the sum; written.
        divisor: Divides the sum.
        dtype: The dtype of all pieces. Sums within a node are accumulated in fp32 and rounded to it.
        order: [world_size] int64: the ranks by their position in the node, then by node.
        feedback_of: Returns the error feedback of the row of a node.
    """
    assert comm.nodes is not None
    local, across = comm.nodes
    sent = rows.index_select(0, order)
    received = torch.empty_like(sent)
    yield local.all_to_all(received.view(-1), sent.view(-1))
    sums = _sum(received.view(local.world_size, -1), dtype).view(across.world_size, -1)
    yield from reduce_scatter(across, layout, sums, row, divisor, feedback_of)


def _sum(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sum the rows of `parts` [k, n] uint8, whose elements have the dtype, in their order."""
    first, *others = parts.view(dtype)
    total = first.to(torch.promote_types(dtype, torch.float32), copy=True)
    for each in others:
        total += each
    return total.to(dtype).view(torch.uint8)
