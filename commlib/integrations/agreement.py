"""Errors that are raised on all ranks if any rank raises one, so that no rank waits for a failed one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist

from commlib.errors import CommlibError, ConfigError

_T = TypeVar("_T")


@contextlib.contextmanager
def together(what: str = "", other: type[CommlibError] = ConfigError) -> Iterator[None]:
    """Wait until the block has ended on all ranks. If it failed on one, raise on all. Collective with several ranks.

    Args:
        what: Prefix of the message on other ranks.
        other: The exception type on other ranks if the error was not a `ConfigError`.

    Raises:
        ConfigError: Another rank, which the message names, raised a `ConfigError`. `other` if it raised another type.
        Exception: The error of this rank.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    told = _of_all(None if error is None else (str(error), isinstance(error, ConfigError)))
    if error is not None:
        raise error
    for rank, (text, is_config) in enumerate(each or ("", False) for each in told):
        if text:
            named = text if text.startswith(f"rank {rank}: ") else f"rank {rank}: {text}"
            raise (ConfigError if is_config else other)(f"{what}: {named}" if what else named)


def on_all_ranks(act: Callable[[], _T]) -> _T:
    """Return the result of `act` on this rank once it has succeeded on all ranks; see `together`."""
    with together():
        result = act()
    return result


def _of_all(own: Any) -> list[Any]:
    if not (dist.is_available() and dist.is_initialized()):
        return [own]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found
