"""A parameter's slot in a bucket, its gradient hook, and the segment that it is gathered with.

[Note: pending counts] Gradients complete slots, slots complete segments, segments buckets, and buckets a round. Each
level has one counter, `num_pending`: the number of pending parts in this backward. It is 0 when all parts are complete,
and TAKEN once the whole was passed on: a segment to the buffer, a bucket to the driver.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from commlib.errors import ConfigError
from commlib.primitives.order import order_of
from commlib.sharding.local import communicated

#: See [Note: pending counts].
TAKEN = -1

_NO_HOOKS: dict[int, Any] = {}

#: The view of a parameter that is in no bucket.
NO_VIEW = torch.empty(0, dtype=torch.float32, device="cpu")


class Listener(Protocol):
    """Is notified of gradients."""

    def on_gradient(self, slot: Slot) -> None:
        """Process the gradient of a parameter, which is in `param.grad`."""
        ...


def _nobody() -> None:
    return None


class Slot:
    """A parameter's slot in a bucket, and its gradient hook. A wrapped model has thousands of slots.

    Attributes:
        name: The parameter's name in the model.
        param: The parameter or, for a DTensor, this rank's shard (`LocalPart`).
        whole: The parameter itself.
        idx: Index among the engine's parameters.
        offset: Index of its first element among those of all parameters, which count as unsharded.
        order: The order of its elements in buckets ([Note: the order of elements] in `primitives/order.py`). Fixed at
            construction. All ranks have checked that it is identical.
        view: The parameter's part of the flat buffer, in the parameter's shape, dtype and, if it is dense, strides.
        segment: The segment that it is gathered with.
        expected: Number of times that the gradient hook fires in one backward, as recorded in the first one.
        num_pending: Number of times that it has yet to fire in this backward. Below 0 if it fired more often than
            expected.
        had_gradient: Whether this rank had a gradient for it in this round.
        graph_gradient: The gradient created by `backward(create_graph=True)`, whose tensor must not be replaced.
        listener: Returns the object to notify. Does not keep the engine alive.
        hooks: All hooks on its gradient by key, including the user's. {} before there are any.
    """

    __slots__ = (
        *("expected", "graph_gradient", "had_gradient", "hooks", "idx", "num_pending", "listener"),
        *("name", "offset", "order", "param", "segment", "view", "whole"),
    )

    def __init__(self, name: str, param: torch.nn.Parameter, idx: int = 0, offset: int = 0) -> None:
        self.name = name
        self.idx = idx
        self.offset = offset
        self.whole = param
        self.param = communicated(param)
        self.order = order_of(self.param)
        self.view = NO_VIEW
        self.segment: Segment | None = None
        self.expected = 1
        self.num_pending = 1
        self.had_gradient = True
        self.graph_gradient: torch.Tensor | None = None
        self.listener: Callable[[], Listener | None] = _nobody
        self.hooks: dict[int, Any] = _NO_HOOKS

    def hook(self, listener: Callable[[], Listener | None]) -> None:
        """Notify the listener of every gradient from now on. The handle is not kept, which saves 200 bytes."""
        self.listener = listener
        requires_grad = self.whole.requires_grad
        self.whole.requires_grad_(True)  # torch refuses the hook otherwise
        self.whole.register_post_accumulate_grad_hook(self)  # for a DTensor, FSDP2 calls it after its reduce-scatter
        self.whole.requires_grad_(requires_grad)
        self.hooks = self.whole._post_accumulate_grad_hooks  # pyright: ignore[reportAttributeAccessIssue]

    def unhook(self) -> None:
        """Undo `hook`. Idempotent, and has no effect without it."""
        for key in self._own_keys():
            del self.hooks[key]

    def _own_keys(self) -> list[int]:
        return [key for key, hook in self.hooks.items() if hook is self]

    def come_last(self) -> None:
        """Move this hook after hooks that the user has added since, as in DDP. They may change the gradient."""
        *_, last = self.hooks
        if self.hooks[last] is not self:
            for key in self._own_keys():
                self.hooks[key] = self.hooks.pop(key)

    def check_taken(self) -> None:
        """Refuse a gradient that was removed after the hook has run.

        Raises:
            ConfigError: It was removed.
        """
        if self.num_pending < self.expected and self.param.grad is None:
            raise ConfigError(
                f"the gradient of {self.name!r} was set, but is now None: something in backward removed it, such as an "
                "optimizer that steps in a hook. It would step with this rank's gradient, before anything is "
                "communicated. Make the step after backward"
            )

    @torch._disable_dynamo  # see [Note: hooks and dynamo] in engine/gradients/backward.py
    def __call__(self, _: torch.Tensor) -> None:
        """Run as the hook, with the gradient in `param.grad`."""
        listener = self.listener()
        if listener is not None:
            if self.param is not self.whole:
                self.param.place_gradient()  # pyright: ignore[reportAttributeAccessIssue]
            listener.on_gradient(self)


class Holder(Protocol):
    """The interface of a bucket to its segments.

    Attributes:
        num_pending: Number of incomplete segments. See [Note: pending counts].
        predivisor: The divisor applied to gradients when they are gathered.
    """

    num_pending: int
    predivisor: float


class Segment:
    """Adjacent parameters of a bucket that are gathered together, as soon as all of them have their gradients.

    Gathering in segments keeps few gradients alive in addition to the flat buffer, and copies them while they are in
    the cache.

    Attributes:
        slots: The parameters.
        bucket: The bucket of the segment.
        num_pending: Number of slots without their gradient in this backward. See [Note: pending counts].
    """

    def __init__(self, bucket: Holder, slots: Sequence[Slot]) -> None:
        self.bucket = bucket
        self.slots = list(slots)
        self.num_pending = len(self.slots)
        self._hooks: list[dict[int, Any]] | None = None  # of each slot's gradient, once there are any
        for slot in self.slots:
            slot.segment = self

    def start_backward(self) -> bool:
        """Reset the counters for a backward. Returns whether gradients have other hooks as well."""
        self.num_pending = len(self.slots)
        for slot in self.slots:
            slot.num_pending = slot.expected
        self._hooks = self._hooks or [slot.hooks for slot in self.slots]
        if max(map(len, self._hooks)) <= 1:
            return False
        for slot in self.slots:
            if len(slot.hooks) > 1:
                slot.come_last()
        return True

    def place(self) -> None:
        """Gather the gradients into the bucket's buffer, if it has one, and mark the segment as taken."""
        self.num_pending = TAKEN


def name_some(names: Sequence[str], limit: int = 3) -> str:
    """Return the first names, quoted, and the number of further ones."""
    shown = ", ".join(map(repr, names[:limit]))
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


@contextlib.contextmanager
def explaining_sizes(slots: Sequence[Slot]) -> Iterator[None]:
    """Raise a specific error if copying fails because parameters were resized or cast.

    Raises:
        ConfigError: Names the parameters.
    """
    try:
        yield
    except RuntimeError as error:
        changed = [s for s in slots if (s.param.shape, s.param.dtype) != (s.view.shape, s.view.dtype)]
        if not changed:
            raise
        first = changed[0]
        raise ConfigError(
            f"parameters were resized or cast after wrapping: {name_some([slot.name for slot in changed])}; the first "
            f"from {tuple(first.view.shape)} {first.view.dtype} to {tuple(first.param.shape)} {first.param.dtype}. "
            "Call commlib.unwrap(model) first, and wrap the changed model again on all ranks"
        ) from error
