"""What all ranks do, or none of them: an error on one rank is one on all, so that nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from commlib.errors import ConfigError

_T = TypeVar("_T")


def alike(act: Callable[[], _T]) -> _T:
    """Return what `act` returns on this rank, once it has ended on all ranks. Collective, where there are several.

    Raises:
        ConfigError: It raised something on another rank, which the message names.
        Exception: What it raised here.
    """
    error: Exception | None = None
    result = None
    try:
        result = act()
    except Exception as caught:
        error = caught
    failed = {rank: text for rank, text in enumerate(_of_all(None if error is None else str(error))) if text}
    if error is not None:
        raise error
    if failed:
        rank, text = min(failed.items())
        raise ConfigError(text if text.startswith(f"rank {rank}: ") else f"rank {rank}: {text}")
    return result  # pyright: ignore[reportReturnType]


def _of_all(own: Any) -> list[Any]:
    if not (dist.is_available() and dist.is_initialized()):
        return [own]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found
