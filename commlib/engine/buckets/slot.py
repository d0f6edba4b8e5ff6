"""One parameter's place in a bucket, the hook on its gradient, and the segment that it is gathered with.

[Note: what is left] Gradients make slots complete, slots segments, segments buckets, and buckets a round. Each level
has one counter, `left`: how many parts are to come in this backward; 0 once all are there, and TAKEN once the whole has
gone on: a segment into the buffer, a bucket to the driver.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from commlib.errors import ConfigError
from commlib.primitives.order import order_of
from commlib.sharding.local import communicated

#: See [Note: what is left].
TAKEN = -1

_NO_HOOKS: dict[int, Any] = {}

#: The view of a parameter that is in no bucket.
NO_VIEW = torch.empty(0, dtype=torch.float32, device="cpu")


class Listener(Protocol):
    """Who is told of gradients."""

    def on_gradient(self, slot: Slot) -> None:
        """Take note that a parameter has its gradient in `param.grad`."""
        ...


def _nobody() -> None:
    return None


class Slot:
    """One parameter's place in a bucket, and the hook on its gradient: a wrapped model has thousands of them.

    Attributes:
        name: The parameter's name in the model.
        param: The parameter; of one that is a DTensor this rank's part (`LocalPart`).
        whole: The parameter itself.
        idx: Its place among the engine's parameters.
        offset: Its first element among all of theirs, taken whole.
        order: The order of its elements in buckets ([Note: the order of elements] in `primitives/order.py`): stays
            what it was here, which all ranks have checked to be alike.
        view: The parameter's part of the flat buffer, in the parameter's shape, dtype and, where it is dense, strides.
        segment: What it is gathered with.
        expected: How often the gradient hook fires in one backward; recorded in the first one.
        left: How often it has yet to fire in this one; below 0 where it fired more often than expected.
        had_gradient: Whether this rank had a gradient for it in this round.
        graph_gradient: The gradient that `backward(create_graph=True)` made, which must stay the same tensor.
        listener: Whom the hook tells; it does not keep the engine alive.
        hooks: All hooks on its gradient, the user's too, by key; {} before there are any.
    """

    __slots__ = (
        *("expected", "graph_gradient", "had_gradient", "hooks", "idx", "left", "listener"),
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
        self.left = 1
        self.had_gradient = True
        self.graph_gradient: torch.Tensor | None = None
        self.listener: Callable[[], Listener | None] = _nobody
        self.hooks: dict[int, Any] = _NO_HOOKS

    def hook(self, listener: Callable[[], Listener | None]) -> None:
        """Tell the listener of every gradient from now on. The handle is not kept, only to save its 200 bytes."""
        self.listener = listener
        requires_grad = self.whole.requires_grad
        self.whole.requires_grad_(True)  # else torch takes no hook
        self.whole.register_post_accumulate_grad_hook(self)  # of a DTensor FSDP2 calls it after its reduce-scatter
        self.whole.requires_grad_(requires_grad)
        self.hooks = self.whole._post_accumulate_grad_hooks  # pyright: ignore[reportAttributeAccessIssue]

    def unhook(self) -> None:
        """Undo `hook`. Harmless when called twice, or without it."""
        for key in self._own_keys():
            del self.hooks[key]

    def _own_keys(self) -> list[int]:
        return [key for key, hook in self.hooks.items() if hook is self]

    def come_last(self) -> None:
        """Run after hooks that the user has added since, as DDP's does: these may change the gradient."""
        *_, last = self.hooks
        if self.hooks[last] is not self:
            for key in self._own_keys():
                self.hooks[key] = self.hooks.pop(key)

    def check_taken(self) -> None:
        """Refuse a gradient that is gone though the hook has run.

        Raises:
            ConfigError: It is.
        """
        if self.left < self.expected and self.param.grad is None:
            raise ConfigError(
                f"the gradient of {self.name!r} was there and is None now: something in backward took it, such as an "
                "optimizer that steps in a hook. It would be this rank's own step, before anything is communicated. "
                "Make the step after backward"
            )

    @torch._disable_dynamo  # see [Note: hooks and dynamo] in engine/channels/backward.py
    def __call__(self, _: torch.Tensor) -> None:
        """Run as the hook: the gradient is in `param.grad`."""
        listener = self.listener()
        if listener is not None:
            if self.param is not self.whole:
                self.param.place_gradient()  # pyright: ignore[reportAttributeAccessIssue]
            listener.on_gradient(self)


class Holder(Protocol):
    """A bucket, as its segments see it.

    Attributes:
        left: How many segments are not complete; see [Note: what is left].
        predivisor: By what gradients are divided while they are gathered.
    """

    left: int
    predivisor: float


class Segment:
    """Neighbouring parameters of a bucket that are gathered together, as soon as all of them have their gradient.

    Gathering in segments keeps few gradients alive beside the flat buffer, and copies them while they are in the cache.

    Attributes:
        slots: The parameters.
        bucket: The bucket that the segment belongs to.
        left: How many slots have not had their gradient in this backward; see [Note: what is left].
    """

    def __init__(self, bucket: Holder, slots: Sequence[Slot]) -> None:
        self.bucket = bucket
        self.slots = list(slots)
        self.left = len(self.slots)
        self._hooks: list[dict[int, Any]] | None = None  # of each slot's gradient, once there are any
        for slot in self.slots:
            slot.segment = self

    def start_backward(self) -> bool:
        """Expect every gradient anew; return whether gradients have hooks of others, too."""
        self.left = len(self.slots)
        for slot in self.slots:
            slot.left = slot.expected
        self._hooks = self._hooks or [slot.hooks for slot in self.slots]
        if max(map(len, self._hooks)) <= 1:
            return False
        for slot in self.slots:
            if len(slot.hooks) > 1:
                slot.come_last()
        return True

    def place(self) -> None:
        """Bring the gradients into the bucket's buffer, if it has one, and count as taken."""
        self.left = TAKEN


def name_some(names: Sequence[str], limit: int = 3) -> str:
    """Return the first names, quoted, and how many more there are."""
    shown = ", ".join(map(repr, names[:limit]))
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


@contextlib.contextmanager
def explaining_sizes(slots: Sequence[Slot]) -> Iterator[None]:
    """Where copying fails because parameters were resized or cast, say so instead.

    Raises:
        ConfigError: Names them.
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
