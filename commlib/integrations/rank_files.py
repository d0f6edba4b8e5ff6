"""Each rank's own part of a checkpoint that is a folder of files: written whole, and found complete or refused.

A trainer writes the common part (weights, optimizer, its own state) once. Beside it, each rank writes
`rank_state-<rank>.pt`, which holds what `commlib.checkpoint.rank_state` returned, the step, and the number of ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from commlib.errors import ConfigError

_T = TypeVar("_T")


def path_of(folder: Path, rank: int) -> Path:
    """Return where a rank's own part lies."""
    return folder / f"rank_state-{rank}.pt"


def save(folder: Path, state: dict[str, Any], step: int) -> None:
    """Write this rank's own part. Local; the file is there as a whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(folder, _rank())
    temporary = path.with_suffix(".part")
    torch.save({"step": step, "world_size": _world_size(), "state": state}, temporary)
    os.replace(temporary, path)


def check(folder: Path, common: Iterable[str], step_file: str) -> None:
    """Refuse a checkpoint of which a part is missing, or of whose parts one is of another step. Collective.

    Args:
        folder: The checkpoint.
        common: Names of the files that all ranks share.
        step_file: The one among them that is written last; JSON with an entry `global_step`.

    Raises:
        ConfigError: On every rank, where a rank misses something.
    """
    _alike(lambda: _check_here(folder, common, step_file))


def load(folder: Path) -> dict[str, Any]:
    """Return this rank's own part; with another number of ranks than wrote it, that of rank 0. Collective.

    Raises:
        ConfigError: On every rank, where it is missing or damaged on one.
    """
    return _alike(lambda: _read(folder)["state"])


def _check_here(folder: Path, common: Iterable[str], step_file: str) -> None:
    missing = [name for name in common if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"the checkpoint {folder} cannot be resumed: it has no {', '.join(missing)}. It was saved without what "
            "resuming needs (save_only_model), or its saving was interrupted; resume from the one before it"
        )
    step = json.loads((folder / step_file).read_text())["global_step"]
    own = _read(folder)
    if own["step"] != step:
        raise ConfigError(
            f"the checkpoint {folder} mixes steps: {step_file} is of step {step}, and the state of rank {_rank()} of "
            f"step {own['step']}. Resume from another checkpoint"
        )


def _read(folder: Path) -> dict[str, Any]:
    """Read this rank's part, or rank 0's where that was written by another number of ranks."""
    first = path_of(folder, 0)
    own = path_of(folder, _rank())
    found = _opened(own if own.is_file() else first)
    return found if found["world_size"] == _world_size() and own.is_file() else _of_other_world(found, first, own)


def _of_other_world(found: dict[str, Any], first: Path, own: Path) -> dict[str, Any]:
    if found["world_size"] == _world_size():
        raise ConfigError(f"{own} is missing. {_REASON}")
    return _opened(first)


_REASON = (
    "Every rank writes such a file beside the checkpoint's common part, and resuming needs it. The checkpoint was "
    "saved by a run without commlib, on another host's disk, or was interrupted. To start the algorithm anew from "
    "its weights, load them into the model and train without resuming"
)


def _opened(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path} is missing. {_REASON}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConfigError(f"{path} is damaged ({type(error).__name__}). Resume from another checkpoint") from error


def _alike(read: Callable[[], _T]) -> _T:
    """Return what `read` returns; an error on one rank is raised on all of them."""
    error, result = None, None
    try:
        result = read()
    except ConfigError as caught:
        error = caught
    texts: list[Any] = [None] * _world_size()
    if _world_size() > 1:
        dist.all_gather_object(texts, None if error is None else str(error))
    if error is not None:
        raise error
    failed = {rank: text for rank, text in enumerate(texts) if text is not None}
    if failed:
        rank, text = min(failed.items())
        raise ConfigError(f"rank {rank}: {text}")
    return result  # type: ignore[return-value]


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _rank() -> int:
    return dist.get_rank() if _is_distributed() else 0


def _world_size() -> int:
    return dist.get_world_size() if _is_distributed() else 1
