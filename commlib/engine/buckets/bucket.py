"""A bucket: one flat buffer, and the parameters whose tensors are views of it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from typing_extensions import override

from commlib.engine.buckets.slot import NO_VIEW, TAKEN, Segment, Slot, explaining_sizes, name_some
from commlib.errors import ConfigError
from commlib.kernels.native import PackPlan
from commlib.primitives.order import is_dense, order_of, strides_in
from commlib.primitives.parts import Part
from commlib.sharding.local import local_of

_PACKABLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_SEGMENT_BYTES = 512 << 10

_address = torch.Tensor.data_ptr


class FlatSegment(Segment):
    """A segment whose gradients become views of a part of the flat buffer.

    Division multiplies by the reciprocal, as in DDP. With a divisor that is not a power of two, a true division rounds
    differently, and loss curves would then differ from DDP's by more than those of DDP with two bucket sizes.

    Args:
        bucket: The bucket.
        slots: The parameters, with their views set.
        part: [numel] The segment's part of the flat buffer.
        offsets: Index of each parameter's first element in `part`.
    """

    def __init__(self, bucket: Bucket, slots: Sequence[Slot], part: torch.Tensor, offsets: list[int]) -> None:
        super().__init__(bucket, slots)
        self._part = part
        self._offsets = offsets
        self._plan = _pack_plan(part, slots, offsets)
        self.is_plain = True
        self._views = [slot.view for slot in slots]
        self._addresses = list(map(_address, self._views))

    def _restore_views(self) -> None:
        """Rebuild views whose memory the user has replaced with `p.grad.data = ...`, which keeps the tensor object."""
        if self._are_views_in_place():
            return
        for slot, offset in zip(self.slots, self._offsets, strict=True):
            slot.view = _view(self._part, slot, offset)
        self._views = [slot.view for slot in self.slots]

    def _are_views_in_place(self) -> bool:
        if self._plan is not None:
            return self._plan.are_in_place(self._part, self._views)
        return list(map(_address, self._views)) == self._addresses

    @override
    def place(self) -> None:
        """Copy the gradients into the flat buffer, divided by the bucket's predivisor, and make them views of it.

        A gradient that is already a view is divided in place. A missing gradient counts as zeros.

        Raises:
            ConfigError: A gradient is sparse.
        """
        self._restore_views()
        gradients = [slot.param.grad for slot in self.slots]
        with explaining_sizes(self.slots):
            self._place(gradients, self.bucket.predivisor)
        super().place()

    def _place(self, gradients: list[torch.Tensor | None], predivisor: float) -> None:
        if not self._pack_natively(gradients, predivisor):
            self._pack_with_torch(gradients, predivisor)
        self.is_plain = True
        creates_graph = torch.is_grad_enabled()
        for slot, gradient in zip(self.slots, gradients, strict=True):
            slot.had_gradient = True
            if gradient is None:
                slot.check_taken()
                slot.had_gradient = self.is_plain = False
            elif creates_graph and gradient.requires_grad:
                slot.graph_gradient = gradient
                self.is_plain = False
            elif gradient is not slot.view:
                slot.param.grad = slot.view

    def scale(self, factor: float) -> None:
        """Scale the gathered gradients."""
        self._part.mul_(factor)

    def _pack_natively(self, gradients: list[torch.Tensor | None], predivisor: float) -> bool:
        if self._plan is None:
            return False
        try:
            self._plan.pack(self._part, gradients, 1.0 / predivisor)
        except ConfigError:  # an unusual layout, which torch's copy supports
            return False
        return True

    def _pack_with_torch(self, gradients: list[torch.Tensor | None], predivisor: float) -> None:
        views, sources = [], []
        for slot, gradient in zip(self.slots, gradients, strict=True):
            if gradient is None:
                slot.view.zero_()
            elif gradient.layout != torch.strided:
                raise ConfigError(_sparse_message(slot.name))
            elif gradient is not slot.view:
                views.append(slot.view)
                sources.append(gradient.detach())
        if views:
            torch._foreach_copy_(views, sources)
        if predivisor != 1.0:
            self._part.mul_(1.0 / predivisor)


class Bucket:
    """The tensors of some parameters, one after the other in a flat buffer.

    Args:
        index: Position in the plan.
        slots: The parameters, in plan order.
        payload: [flat_numel(slots) + number of flags] Zeros, for the values and the flags.
        group: The algorithm's group of the parameters.

    Attributes:
        index: Position in the plan.
        group: The algorithm's group of the parameters.
        slots: The parameters, in plan order.
        segments: The same parameters, divided into the segments in which gradients are gathered.
        flat: [numel] The values. Complex parameters occupy two real elements per element.
        payload: [numel + num_flags] `flat`, then the flags.
        flags: [num_flags] In the plan's last bucket, one number per parameter of the plan, which is positive after the
            sum if any rank had a gradient; then the marks of the loss scale, if any. Empty in all other buckets.
        num_pending: Number of incomplete segments in this backward. See [Note: pending counts] in `slot.py`.
        predivisor: The divisor applied to gradients when they are gathered.
    """

    def __init__(self, index: int, slots: Sequence[Slot], payload: torch.Tensor, group: Hashable = None) -> None:
        self.index = index
        self.group = group
        self.slots = list(slots)
        offsets, numel = _offsets([slot.param for slot in self.slots])
        self.payload = payload
        self.flat = self.payload[:numel]
        self.flags = self.payload[numel:]
        for slot, offset in zip(self.slots, offsets, strict=True):
            slot.view = _view(self.flat, slot, offset)
        self.segments = self._make_segments([*offsets, numel])
        self.num_pending = len(self.segments)
        self.predivisor = 1.0

    def _make_segments(self, offsets: list[int]) -> list[FlatSegment]:
        segments, start = [], 0
        for end in range(1, len(self.slots) + 1):
            nbytes = (offsets[end] - offsets[start]) * self.flat.element_size()
            if nbytes >= _SEGMENT_BYTES or end == len(self.slots):
                part = self.flat[offsets[start] : offsets[end]]
                own = [offset - offsets[start] for offset in offsets[start:end]]
                segments.append(FlatSegment(self, self.slots[start:end], part, own))
                start = end
        return segments

    @property
    def nbytes(self) -> int:
        """Bytes of the flat buffer."""
        return self.flat.nbytes

    @property
    def parts(self) -> list[Part]:
        """The positions of the parameters, for algorithms."""
        starts, _ = _offsets([slot.param for slot in self.slots])
        numels = [slot.param.numel() * (2 if slot.param.dtype.is_complex else 1) for slot in self.slots]
        return [
            Part(slot.name, tuple(slot.param.shape), start, numel, slot.offset, slot.order)
            for slot, start, numel in zip(self.slots, starts, numels, strict=True)
        ]

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters, for algorithms."""
        return [slot.whole for slot in self.slots]

    @property
    def is_plain(self) -> bool:
        """Whether every gradient of this round is a view of the buffer."""
        return all(segment.is_plain for segment in self.segments)

    def describe(self) -> str:
        """Return the bucket's index and the names of some of its parameters."""
        return f"bucket {self.index} ({name_some([slot.name for slot in self.slots])})"

    def start_backward(self, predivisor: float) -> bool:
        """Reset the counters for a backward. Segments that are gathered early are divided by `predivisor`.

        Returns:
            Whether gradients have hooks of the user as well.
        """
        self.num_pending = len(self.segments)
        self.predivisor = predivisor
        have_hooks = [segment.start_backward() for segment in self.segments]
        return any(have_hooks)

    def gather(self, predivisor: float) -> None:
        """Copy all gradients into the flat buffer, divided by `predivisor`, and mark the bucket as taken.

        Raises:
            ConfigError: A gradient is sparse.
        """
        before, self.predivisor = self.predivisor, predivisor
        for segment in self.segments:
            if segment.num_pending != TAKEN:
                segment.place()
            elif before != predivisor:
                segment.scale(1.0 / (predivisor / before))
        self.num_pending = TAKEN

    def zero(self) -> None:
        """Fill the buffer with zeros, the contribution of a rank that has joined early."""
        self.payload.zero_()
        for segment in self.segments:
            segment.is_plain = False
        for slot in self.slots:
            slot.had_gradient = False
        self.num_pending = TAKEN

    def finish(self, is_used: Sequence[bool]) -> None:
        """Set `param.grad` for communicated gradients that are not views of the buffer yet.

        Args:
            is_used: For each slot, whether any rank had a gradient. A parameter that no rank used keeps `grad=None`.
        """
        for slot, used in zip(self.slots, is_used, strict=True):
            if slot.graph_gradient is not None:
                with torch.no_grad():
                    slot.graph_gradient.copy_(slot.view)
                slot.graph_gradient = None
            elif used:
                slot.param.grad = slot.view

    def adopt_existing(self) -> None:
        """Move existing gradients (views of an earlier plan's buffers) into this bucket's buffer."""
        for slot in self.slots:
            gradient = slot.param.grad
            if gradient is not None and not gradient.requires_grad:
                slot.view.copy_(gradient)
                slot.param.grad = slot.view

    def release(self) -> None:
        """Release the buffer now. Segments and views form a reference cycle, which is collected much later."""
        self.segments.clear()
        self.flat = self.flags = self.payload = NO_VIEW

    def load(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy `tensors` (the weights, or entries of the optimizer's state) into the flat buffer."""
        with explaining_sizes(self.slots):
            torch._foreach_copy_([slot.view for slot in self.slots], list(tensors))

    def store(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the flat buffer into `tensors`."""
        with explaining_sizes(self.slots):
            torch._foreach_copy_(list(tensors), [slot.view for slot in self.slots])


class EmbeddingBucket:
    """An embedding whose gradients are sparse tensors. They are exchanged as rows, whatever the algorithm."""

    def __init__(self, index: int, slot: Slot) -> None:
        self.index = index
        self.slots = [slot]
        self.segments = [Segment(self, self.slots)]
        self.num_pending = 1
        self.predivisor = 1.0  # the whole division follows the sum
        self.result: list[torch.Tensor | None] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the dense parameter."""
        return self.slots[0].param.nbytes

    def describe(self) -> str:
        """Return the bucket's index and the name of its parameter."""
        return f"embedding bucket {self.index} ({self.slots[0].name!r})"

    def start_backward(self, predivisor: float) -> bool:
        """Reset the counter for a backward. See `Bucket`."""
        self.num_pending = 1
        return self.segments[0].start_backward()

    def gather(self, predivisor: float) -> None:
        """Mark the bucket as taken. The gradient is sent without a copy."""
        self.num_pending = TAKEN

    def gradient(self) -> torch.Tensor | None:
        """Return this rank's gradient as a sparse tensor, or None."""
        gradient = self.slots[0].param.grad
        self.slots[0].check_taken()
        if gradient is None or gradient.layout == torch.sparse_coo:
            return gradient
        return gradient.to_sparse(1)

    def finish(self, divisor: float) -> None:
        """Set `param.grad` to the sum, divided by `divisor`."""
        total = self.result.pop()
        if total is not None:
            self.slots[0].param.grad = total if divisor == 1.0 else total / divisor


def flat_numel(slots: Sequence[Slot]) -> int:
    """Return the number of elements that the parameters occupy in a flat buffer."""
    return _offsets([slot.param for slot in slots])[1]


def layout_key(param: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    """Return the dtype and device that all parameters of a bucket share."""
    return (param.dtype.to_real() if param.dtype.is_complex else param.dtype), param.device


def have_moved(buckets: Sequence[Bucket]) -> bool:
    """Return whether parameters have another dtype or device than their buckets."""
    return any(layout_key(b.slots[0].param) != (b.flat.dtype, b.flat.device) for b in buckets)


def _offsets(params: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Return the index of each parameter's first element in the flat buffer, and the buffer's length.

    A complex parameter starts at an even element, as `view_as_complex` requires.
    """
    offsets, end = [], 0
    for param in params:
        if param.dtype.is_complex:
            end += end % 2
        offsets.append(end)
        end += param.numel() * (2 if param.dtype.is_complex else 1)
    return offsets, end


def _view(flat: torch.Tensor, slot: Slot, offset: int) -> torch.Tensor:
    param = slot.param
    if param.dtype.is_complex:
        flat = torch.view_as_complex(flat[offset : offset + 2 * param.numel()].view(-1, 2))
        offset = 0
    has_order = is_dense(param) and order_of(param) == slot.order
    strides = param.stride() if has_order else strides_in(param.shape, slot.order)
    # Detaching halves the view's size: the autograd metadata of a view of `flat` is not needed.
    return flat.as_strided(param.shape, strides, flat.storage_offset() + offset).detach()


def _pack_plan(flat: torch.Tensor, slots: Sequence[Slot], offsets: list[int]) -> PackPlan | None:
    """Return the native gather for this layout, or None if only torch can copy it."""
    params = [slot.param for slot in slots]
    plain = all(not s.order and s.param.is_contiguous() and s.param.dtype == flat.dtype for s in slots)
    if flat.device.type != "cpu" or flat.dtype not in _PACKABLE or not plain:
        return None
    return PackPlan([param.numel() for param in params], flat.dtype, offsets=offsets)


def _sparse_message(name: str) -> str:
    return (
        f"the gradient of {name!r} is sparse, but its module was not recognised as sparse when the model was wrapped. "
        "Use nn.Embedding(..., sparse=True) or nn.EmbeddingBag(..., sparse=True), make the gradient dense, or pass the "
        "parameter in ignored_parameters and reduce it yourself"
    )


def tensors_of(bucket: Bucket, key: str | None = None, optimizer: Any = None) -> list[torch.Tensor]:
    """Return the tensors that a bucket mirrors, one per slot: the weights, or the entries `key` of optimizer state.

    Raises:
        ConfigError: The optimizer has no such state for a parameter.
    """
    if key is None:
        return [slot.param.data for slot in bucket.slots]
    missing = [slot.name for slot in bucket.slots if key not in optimizer.state.get(slot.whole, {})]
    if missing:
        raise ConfigError(f"the optimizer has no state {key!r} for {name_some(missing)}; the algorithm averages it")
    return [local_of(optimizer.state[slot.whole][key]) for slot in bucket.slots]
