"""Wrapped models that are stages of torch's pipelines: one round a step, as with DDP.

[Note: stages] A schedule of `torch.distributed.pipelining` calls a stage's model forward and backward once for each
micro-batch, and knows which backward is the last one of a step. It tells the stage, which has a place for data
parallelism: `backward_maybe_with_nosync`. Forwards that come from a stage therefore announce nothing. All backwards but
the last stay local; that one is synchronised, with the sum of all micro-batches.

Schedules that split a backward compute gradients of inputs first and of weights later, by `torch.autograd.grad`, so
that no hook sees them: after the last one they are communicated as they are.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

_FORWARD, _BACKWARD = "forward_maybe_with_nosync", "backward_maybe_with_nosync"
#: How many frames above a forward a stage is looked for.
_NUM_FRAMES = 12


class Synchronised(Protocol):
    """A wrapped model, as a stage uses it.

    Attributes:
        require_sync: Whether the next backwards are synchronised.
    """

    @property
    def require_sync(self) -> bool:
        """See above."""
        ...

    @require_sync.setter
    def require_sync(self, value: bool) -> None: ...

    def expect_backward(self) -> None:
        """The next backward is a synchronised one."""
        ...

    def communicate(self) -> None:
        """Communicate the gradients as they are."""
        ...


def is_from_stage(replica: Synchronised) -> bool:
    """Return whether the forward that begins comes from a stage of a pipeline, whose backwards are followed then."""
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
    """Have the stage's backwards made by `_backward`."""
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
    """Make a backward of a stage: synchronised if it is the last one of a step, else local."""
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
