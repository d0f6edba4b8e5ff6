"""Names in a profile: what each bucket does and when, while a profiler is active; nothing at all otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch.autograd import profiler

_NOTHING = contextlib.nullcontext()


def phase(name: str, of: Callable[[], str]) -> contextlib.AbstractContextManager[Any]:
    """Name a block of this thread: "gather", "encode", "decode" or "wait", of a bucket (`of` describes it)."""
    return profiler.record_function(f"commlib: {name}: {of()}") if profiler._is_profiler_enabled else _NOTHING


def begin(verb: str, of: Callable[[], str]) -> Any:
    """Name a collective from now until `end`, which may come on another thread; return what `end` takes."""
    if not profiler._is_profiler_enabled:
        return None
    span = profiler.record_function(f"commlib: {verb}: {of()}")
    span.__enter__()
    return span


def end(span: Any) -> None:
    """End what `begin` began, if there was a profiler."""
    if span is not None:
        span.__exit__(None, None, None)
