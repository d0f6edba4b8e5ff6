"""The collectives that replace FSDP2's: an all-gather of encoded weights, and an all-to-all of encoded gradients.

[Note: FSDP2's calls] FSDP2 calls the all-gather of a module before it needs the parameters, and waits for the returned
`Work` when it does. On a CPU this is one that decodes when it is waited for, so prefetched gathers overlap with the
computation of the modules before. FSDP2 ignores the result of a reduce-scatter, so that one always blocks. On an
accelerator everything runs on the stream on which FSDP2 calls, and the order of its streams does not change.

The order of the calls is the order of the modules in the user's program, so it is identical on all ranks.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from commlib.codecs.base import Feedback
from commlib.errors import CommlibError
from commlib.sharding import exchanges
from commlib.sharding.fsdp import ParameterGroup
from commlib.sharding.layout import FeedbackOf, Layout, Piece
from commlib.sharding.stats import Counts
from commlib.transport.base import Communication, Communicator, Nodes
from commlib.transport.torch_dist import TorchTransport

_log = logging.getLogger("commlib")

#: Returns the communicator over the ranks of a process group of FSDP2.
TransportOf = Callable[[dist.ProcessGroup], TorchTransport]


class _Allocating:
    """Allocates the buffers that FSDP2 asks for, as its own collectives do."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a new tensor."""
        return torch.empty(*size, dtype=dtype, device=device)


class EncodedAllGather(_Allocating):
    """Gathers a module's parameters. All ranks, the owner included, compute with the decoded values.

    [Note: the second gather] With an integer `reshard_after_forward`, backward gathers again, between fewer ranks. Each
    of them holds several shards. It keeps their payloads from the first gather and sends these, so backward computes
    with the same weights as forward, bit for bit. Encoding the decoded values again could change them.

    Args:
        group: The module.
        transport_of: Returns the communicator of a process group.
        pieces: Returns the pieces of a row.
    """

    def __init__(self, group: ParameterGroup, transport_of: TransportOf, pieces: Callable[[], list[Piece]]) -> None:
        self.what = f"the gathering of the weights of {group.name!r}"
        self.group = group
        self.transport_of = transport_of
        self._pieces = pieces
        self._layouts: dict[tuple[torch.dtype, int], Layout] = {}
        self._kept: torch.Tensor | None = None  # payloads of this rank's shards in the second gather
        self.counts = Counts()

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Gather `input_tensor` [n] of all ranks into `output_tensor` [number of ranks * n].

        Raises:
            TransportError: A rank did not take part; raised by the returned work on a CPU.
        """
        began_s = time.perf_counter()
        transport = self.transport_of(group)
        times = self.group.process_group.size() // transport.world_size
        layout = self.layout(input_tensor, times)
        comm = Communicator(transport.rank, transport.world_size)
        rows = output_tensor.view(torch.uint8).view(transport.world_size, -1)
        if times == 1:
            gather = exchanges.all_gather(comm, layout, input_tensor.view(torch.uint8), rows, self._keep)
        else:
            gather = exchanges.all_gather_payloads(comm, layout, self._kept_payloads(), rows)
        self.counts += Counts(1, plain_bytes=(comm.world_size - 1) * times * layout.row_bytes)
        return self.run(transport, gather, began_s)

    def run(self, transport: TorchTransport, gather: Communication, began_s: float) -> dist.Work | None:
        """Issue the request of a gather. On a CPU, the returned work decodes when it is waited for."""
        request = next(gather)
        with transport.explaining(self.what):
            work = transport.issue(request)
        self.counts += Counts(sent_bytes=request.wire_bytes(), waited_s=time.perf_counter() - began_s)

        def finish() -> None:
            began_s = time.perf_counter()
            with transport.explaining(self.what):
                work.wait()
            with torch.no_grad():
                next(gather, None)
            self.counts.waited_s += time.perf_counter() - began_s

        if self.group.device.type != "cpu":
            finish()
            return None
        return _Gathering(finish)

    def _keep(self, payloads: torch.Tensor) -> None:
        """Keep this rank's part of the payloads for the second gather, if there is one."""
        second = self.group.second_process_group
        if second is not None:
            times = len(payloads) // second.size()
            self._kept = payloads[second.rank() * times :][:times].clone()

    def _kept_payloads(self) -> torch.Tensor:
        if self._kept is None:
            raise CommlibError(f"{self.what}: a gather between fewer ranks, without one between all before it")
        return self._kept

    def layout(self, row: torch.Tensor, times: int) -> Layout:
        """Return the layout of a rank's row of `times` shards."""
        key = (row.dtype, row.numel() // times)
        if key not in self._layouts:
            layout = Layout(self._pieces())
            if layout.row_bytes * times != row.nbytes:
                raise CommlibError(
                    f"{self.what}: expected {layout.row_bytes * times} bytes per rank, got {row.nbytes}. The module's "
                    "parameters have changed since commlib.shard, or this torch arranges them in another way"
                )
            self._layouts[key] = layout
        return self._layouts[key]


class _Gathering(dist.Work):
    """A gather in progress. FSDP2 ignores objects that are no `torch.distributed.Work`."""

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish: Callable[[], None] | None = finish

    @override
    def wait(self, timeout: Any = None) -> bool:
        """Wait for the payloads, and decode them."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        return True

    @override
    def is_completed(self) -> bool:
        """Return whether the result is there."""
        return self._finish is None


class EncodedReduceScatter(_Allocating):
    """Reduces a module's gradients; each rank receives its shard of the sum. An all-to-all, and a local sum.

    Args:
        group: The module.
        transport_of: Returns the communicator of a process group.
        pieces_of: Returns the pieces of a row for gradients of all parameters that require one.
        feedback: Error feedback; None disables it.
        nodes: Sums within a node first; None if the ranks are on one node, or alone on theirs.
    """

    def __init__(
        self,
        group: ParameterGroup,
        transport_of: TransportOf,
        pieces_of: Callable[[torch.dtype], list[Piece]],
        feedback: GradientFeedback | None = None,
        nodes: Nodes | None = None,
    ) -> None:
        self._nodes = nodes
        self._order: torch.Tensor | None = None  # of the rows, if the ranks of a node sum them first
        self._name = group.name
        self._what = f"the reduction of the gradients of {group.name!r}"
        self._transport_of = transport_of
        self._pieces_of = pieces_of
        self._feedback = feedback
        self._has_warned = False
        self._layouts: dict[tuple[torch.dtype, tuple[bool, ...], int], Layout] = {}
        self._shards = group.shards
        self.counts = Counts()

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Reduce `input_tensor` [world_size * n] of all ranks; row r arrives in the `output_tensor` [n] of rank r.

        Raises:
            TransportError: A rank did not take part.
        """
        began_s = time.perf_counter()
        transport = self._transport_of(group)
        num_ranks = transport.world_size
        key = (input_tensor.dtype, tuple(each.has_gradient for each in self._shards), input_tensor.numel())
        if key not in self._layouts:
            self._layouts[key] = self._layout(input_tensor, num_ranks)
        layout = self._layouts[key]
        rows = input_tensor.view(torch.uint8).view(num_ranks, -1)
        row = output_tensor.view(torch.uint8)
        feedback_of = None if self._feedback is None else self._feedback.begin()
        comm, divisor = Communicator(transport.rank, num_ranks), _divisor(op, num_ranks)
        if self._nodes is None:
            reduction = exchanges.reduce_scatter(comm, layout, rows, row, divisor, feedback_of)
        else:
            comm.nodes, dtype = self._nodes, input_tensor.dtype
            if self._order is None:
                by_position = [rank for ranks in zip(*transport.members_of_nodes, strict=True) for rank in ranks]
                self._order = torch.tensor(by_position, device=rows.device)
            reduction = exchanges.reduce_scatter_by_node(
                comm, layout, rows, row, divisor, dtype, self._order, feedback_of
            )
        sent_bytes = 0.0
        for request in reduction:
            transport.complete(request, self._what)
            sent_bytes += request.wire_bytes()
        waited_s = time.perf_counter() - began_s
        self.counts += Counts(1, sent_bytes, (num_ranks - 1) * layout.row_bytes, waited_s)

    def _layout(self, input_tensor: torch.Tensor, num_ranks: int) -> Layout:
        """Return the layout of a row. FSDP2 leaves out parameters without a gradient, and does not say which.

        No other selection of parameters has as many elements as all of them. Any smaller one is sent in full precision,
        as its pieces are unknown.
        """
        numel = input_tensor.numel() // num_ranks
        pieces = self._pieces_of(input_tensor.dtype)
        if sum(piece.numel for piece in pieces) == numel:
            return Layout(pieces)
        if self._feedback is not None:
            raise CommlibError(
                f"{self._what}: some parameters have no gradient, so the places of the others are unknown, and "
                "feedback=True needs them. Call set_reduce_scatter_unused_params(True) on the module"
            )
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s: some parameters have no gradient. The gradients of %r are then reduced in full precision. Freeze "
                "these parameters, or call set_reduce_scatter_unused_params(True) on the module (torch 2.13)",
                *(self._what, self._name),
            )
        return Layout([Piece("gradients", numel, input_tensor.dtype, None)])


class GradientFeedback:
    """Error feedback of a module's gradients: residuals for the rows that a rank encodes, of all encoded parameters.

    Args:
        num_rows: Number of these rows: one per rank, or per node if the ranks of a node sum their gradients first.
        device: Device of the gradients.
        scale: Returns the loss scale of the gradients. Called once per reduction; residuals do not contain it.

    Attributes:
        num_rows: The number of rows.
        residuals: [num_rows, elements of a padded shard] fp32 by the parameter's name.
    """

    def __init__(self, num_rows: int, device: torch.device, scale: Callable[[], float]) -> None:
        self.residuals: dict[str, torch.Tensor] = {}
        self.num_rows = num_rows
        self._device = device
        self._scale = scale

    def begin(self) -> Callable[[int], FeedbackOf]:
        """Begin a reduction; return a function that returns the feedback of a row."""
        scale = self._scale()

        def of(row: int, piece: Piece) -> Feedback:
            if piece.name not in self.residuals:
                self.residuals[piece.name] = torch.zeros(self.num_rows, piece.numel, device=self._device)
            return Feedback(self.residuals[piece.name][row], scale, 1.0 / scale)

        return lambda row: functools.partial(of, row)


def _divisor(op: Any, num_ranks: int) -> float:
    """Return the divisor of the sum for a reduce operation of FSDP2.

    Raises:
        CommlibError: It is another operation than AVG, SUM or PREMUL_SUM.
    """
    if op == dist.ReduceOp.AVG:
        return float(num_ranks)
    if op == dist.ReduceOp.SUM:
        return 1.0
    state = op.__getstate__() if hasattr(op, "__getstate__") else None
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], float):
        return 1.0 / state[1]
    raise CommlibError(f"the reduction of gradients: expected AVG, SUM or PREMUL_SUM, got {op}")
