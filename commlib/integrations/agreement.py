"""What all ranks do, or none of them: an error on one rank is one on all, so that nobody waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist

from commlib.errors import CommlibError, ConfigError

_T = TypeVar("_T")


@contextlib.contextmanager
def together(what: str = "", other: type[CommlibError] = ConfigError) -> Iterator[None]:
    """Let ranks go on when the block has ended on all of them. Collective, where there are several.

    Args:
        what: Stands before what other ranks are told.
        other: What other ranks raise where the error was no `ConfigError`.

    Raises:
        ConfigError: It raised one on another rank, which the message names; or `other`.
        Exception: What it raised here.
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


def alike(act: Callable[[], _T]) -> _T:
    """Return what `act` returns on this rank, once it has ended on all ranks; see `together`."""
    with together():
        result = act()
    return result


def _of_all(own: Any) -> list[Any]:
    if not (dist.is_available() and dist.is_initialized()):
        return [own]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found
