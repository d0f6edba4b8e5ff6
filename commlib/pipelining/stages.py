"""Wrapped models as stages of torch's pipelines, with one round per step, as with DDP.

[Note: stages] A schedule of `torch.distributed.pipelining` runs forward and backward of a stage's model once for each
micro-batch, and knows which backward is the last one of a step. It passes this to the stage, which has a method for
data parallelism: `backward_maybe_with_nosync`. Forwards called by a stage therefore announce no backward. All backwards
except the last are local; the last one is synchronized, with the sum over all micro-batches.

Schedules that split a backward compute the gradients of inputs first and those of weights later, by
`torch.autograd.grad`, which calls no hooks. Their gradients are communicated as they are after the last backward.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

_FORWARD, _BACKWARD = "forward_maybe_with_nosync", "backward_maybe_with_nosync"
#: Number of frames above a forward that are searched for a stage.
_NUM_FRAMES = 12


class Synchronised(Protocol):
    """The interface of a wrapped model that a stage uses.

    Attributes:
        require_sync: Whether the next backwards are synchronized.
    """

    @property
    def require_sync(self) -> bool:
        """See above."""
        ...

    @require_sync.setter
    def require_sync(self, value: bool) -> None: ...

    def expect_backward(self) -> None:
        """Declare that the next backward is synchronized."""
        ...

    def communicate(self) -> None:
        """Communicate the current gradients."""
        ...


def is_from_stage(replica: Synchronised) -> bool:
    """Return whether the current forward was called by a pipeline stage. If so, its backwards are intercepted."""
    if "torch.distributed.pipelining.stage" not in sys.modules:
        return False
    frame = sys._getframe(1)
    for _ in range(_NUM_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_name == _FORWARD:
            stage = frame.f_locals.get("self")
            if hasattr(type(stage), _BACKWARD):
                _follow(stage, replica)
                return True
        frame = frame.f_back
    return False


def _follow(stage: Any, replica: Synchronised) -> None:
    """Replace the stage's backward method by `_backward`."""
    known = vars(stage).get(_BACKWARD)
    if not (isinstance(known, functools.partial) and known.args[-1]() is replica):
        setattr(stage, _BACKWARD, functools.partial(_backward, weakref.ref(stage), weakref.ref(replica)))


@torch._disable_dynamo
def _backward(
    stage: Callable[[], Any],
    replica: Callable[[], Synchronised | None],
    backward_type: str,
    bwd_kwargs: dict[str, Any],
    last_backward: bool = False,
) -> Any:
    """Run a backward of a stage: synchronized if it is the last one of a step, else local."""
    found, alive = stage(), replica()
    own = functools.partial(
        getattr(type(found), _BACKWARD), found, backward_type, bwd_kwargs, last_backward=last_backward
    )
    if alive is None:
        return own()
    syncs = alive.require_sync and last_backward
    if syncs and backward_type == "full":
        alive.expect_backward()
        return own()
    before, alive.require_sync = alive.require_sync, False
    try:
        result = own()
    finally:
        alive.require_sync = before
    if syncs:
        alive.communicate()
    return result
