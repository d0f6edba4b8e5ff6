"""Spans of each bucket's work in a profile. Has no effect without an active profiler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch.autograd import profiler

_NOTHING = contextlib.nullcontext()


def phase(name: str, of: Callable[[], str]) -> contextlib.AbstractContextManager[Any]:
    """Record a span for a block of this thread: "gather", "encode", "decode" or "wait". `of` describes the bucket."""
    return profiler.record_function(f"commlib: {name}: {of()}") if profiler._is_profiler_enabled else _NOTHING


def begin(verb: str, of: Callable[[], str]) -> Any:
    """Record a span for a collective until `end`, possibly on another thread. Returns the argument of `end`."""
    if not profiler._is_profiler_enabled:
        return None
    span = profiler.record_function(f"commlib: {verb}: {of()}")
    span.__enter__()
    return span


def end(span: Any) -> None:
    """End the span that `begin` returned, if any."""
    if span is not None:
        span.__exit__(None, None, None)
