"""One parameter's place in a bucket, and the hook on its gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from commlib.errors import ConfigError
from commlib.primitives.order import order_of

if TYPE_CHECKING:
    from commlib.engine.backward import Backward
    from commlib.engine.bucket import Run

#: The view of a parameter that is in no bucket.
NO_VIEW = torch.empty(0, dtype=torch.float32, device="cpu")


def _no_backward() -> None:
    return None


class Slot:
    """One parameter's place in a bucket, and the hook on its gradient: a wrapped model has thousands of them.

    Attributes:
        name: The parameter's name in the model.
        param: The parameter.
        idx: Its place among the engine's parameters.
        offset: Its first element among all of theirs.
        order: The order of its elements in buckets ([Note: the order of elements] in `primitives/order.py`): stays
            what it was here, which all ranks have checked to be alike.
        view: The parameter's part of the flat buffer, in the parameter's shape, dtype and, where it is dense, strides.
        run: The run that it is gathered with.
        expected: How often the gradient hook fires in one backward; recorded in the first one.
        left: How often it has yet to fire in this one.
        had_gradient: Whether this rank had a gradient for it in this round.
        graph_gradient: The gradient that `backward(create_graph=True)` made, which must stay the same tensor.
        backward: Whom the hook tells; it does not keep the engine alive.
    """

    __slots__ = (
        *("backward", "expected", "graph_gradient", "had_gradient", "idx"),
        *("left", "name", "offset", "order", "param", "run", "view"),
    )

    def __init__(self, name: str, param: torch.nn.Parameter, idx: int = 0, offset: int = 0) -> None:
        self.name = name
        self.idx = idx
        self.offset = offset
        self.param = param
        self.order = order_of(param)
        self.view = NO_VIEW
        self.run: Run | None = None
        self.expected = 1
        self.left = 1
        self.had_gradient = True
        self.graph_gradient: torch.Tensor | None = None
        self.backward: Callable[[], Backward | None] = _no_backward

    def hook(self, backward: Callable[[], Backward | None]) -> None:
        """Tell `backward` of every gradient from now on. The handle is not kept, only to save its 200 bytes."""
        self.backward = backward
        requires_grad = self.param.requires_grad
        self.param.requires_grad_(True)  # else torch takes no hook
        self.param.register_post_accumulate_grad_hook(self)
        self.param.requires_grad_(requires_grad)

    def unhook(self) -> None:
        """Undo `hook`. Harmless when called twice, or without it."""
        hooks = self.param._post_accumulate_grad_hooks or {}
        for key in [key for key, hook in hooks.items() if hook is self]:
            del hooks[key]

    def __call__(self, _: torch.Tensor) -> None:
        """Run as the hook: the gradient is in `param.grad`."""
        backward = self.backward()
        if backward is not None:
            backward.on_gradient(self)


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
