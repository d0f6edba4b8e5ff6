"""commlib's files in a checkpoint of accelerate: one per rank, and a summary that records whether they are complete.

[Note: whole or refused] accelerate writes its files one by one into the final folder. `commlib.json` marks the folder
as incomplete before the first file is written, and as complete once all ranks have written theirs. A folder without
`commlib.json` was saved by accelerate alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from commlib import formats
from commlib.algorithms import Algorithm, Auto
from commlib.errors import CommlibError, ConfigError
from commlib.integrations.agreement import together

_SUMMARY = "commlib.json"
_FORMAT = 1

#: The advice that applies to every error.
_ALONE = f"or remove {_SUMMARY} there to continue from its weights alone"


class Folder:
    """A checkpoint folder. All methods except `summary` are collective.

    Args:
        accelerator: The accelerator whose ranks share the folder.
        path: The folder's path.
    """

    def __init__(self, accelerator: Accelerator, path: str | os.PathLike[str]) -> None:
        self._accelerator = accelerator
        self._path = Path(path)

    def begin(self) -> None:
        """Mark the folder as incomplete, and remove the ranks' old files."""
        with together("save_state", CommlibError):
            if self._is_writer:
                self._write_summary({"complete": False})
                for old in self._path.glob("commlib_*.pt"):
                    old.unlink()

    def end(self, states: Sequence[Any], algorithm: str) -> None:
        """Write the state of each model on this rank. Once all ranks have written, mark the folder as complete."""
        with together("save_state", CommlibError):
            _write(self._rank_file(self._accelerator.process_index), lambda file: torch.save(list(states), file))
        with together("save_state", CommlibError):
            if self._is_writer:
                size = self._accelerator.num_processes
                self._write_summary({"complete": True, "world_size": size, "algorithm": algorithm})

    def fail(self, error: Exception) -> None:
        """Raise the error on this rank and, by `together`, on the other ranks, which wait in `end`."""
        with together("save_state", CommlibError):
            raise error

    def read(self, num_models: int, algorithm: Algorithm) -> list[Any] | None:
        """Return this rank's state of each model; None if the folder was saved without commlib.

        Raises:
            ConfigError: The folder is incomplete, lacks a file, is of another algorithm or other models, or is of
                another number of ranks and the algorithm's state is not portable.
        """
        with together("load_state", CommlibError):
            summary = self.summary()
            if summary is None:
                return None
            self._check(summary, algorithm)
            states = self._states(int(summary["world_size"]))
            if len(states) != num_models:
                raise ConfigError(
                    f"load_state: {self._path} has {len(states)} models, but {num_models} were prepared. Prepare the "
                    "same models in the same order"
                )
            return states

    def summary(self) -> dict[str, Any] | None:
        """Return the contents of `commlib.json`; None if the file does not exist."""
        path = self._path / _SUMMARY
        return json.loads(path.read_text()) if path.exists() else None

    def _check(self, summary: dict[str, Any], algorithm: Algorithm) -> None:
        if not summary.get("complete"):
            raise ConfigError(
                f"load_state: {self._path} is incomplete: saving it was interrupted. Load an earlier checkpoint"
            )
        formats.check(summary, _FORMAT, f"load_state: {self._path}", _ALONE)
        if summary["algorithm"] != algorithm.name:
            raise ConfigError(
                f"load_state: {self._path} was saved with the algorithm {summary['algorithm']!r}, but this run uses "
                f"{algorithm.name!r}. Use the same algorithm, {_ALONE}"
            )
        size, saved = self._accelerator.num_processes, summary["world_size"]
        if size != saved and not (algorithm.portable or isinstance(algorithm, Auto)):  # the chosen algorithm checks
            raise ConfigError(
                f"load_state: {self._path} was saved by {saved} ranks, but this run has {size}. The state of "
                f"{algorithm.name!r} differs between ranks. Start {saved} ranks, {_ALONE}"
            )

    def _states(self, world_size: int) -> list[Any]:
        """Read this rank's file, or rank 0's if the saved run had fewer ranks."""
        rank = self._accelerator.process_index
        path = self._rank_file(rank if rank < world_size else 0)
        if not path.exists():
            raise ConfigError(
                f"load_state: {path} is missing, the state of one of {world_size} ranks. Copy it from the machine of "
                f"that rank, {_ALONE}"
            )
        return torch.load(path, map_location="cpu", weights_only=True)

    @property
    def _is_writer(self) -> bool:
        """Whether this rank writes the shared files: one rank, or one per machine, as in accelerate."""
        accelerator = self._accelerator
        on_each = accelerator.project_configuration.save_on_each_node
        return accelerator.is_local_main_process if on_each else accelerator.is_main_process

    def _rank_file(self, rank: int) -> Path:
        return self._path / f"commlib_{rank}.pt"

    def _write_summary(self, summary: dict[str, Any]) -> None:
        text = json.dumps({**formats.stamp(_FORMAT), **summary}) + "\n"
        _write(self._path / _SUMMARY, lambda file: file.write(text.encode()))


class Loading:
    """Stands in for a model while accelerate loads it from a safetensors file.

    The loader treats tensors that share memory as copies of one another. This is wrong if an algorithm keeps all
    weights in one block of memory, so `state_dict` here returns tensors in separate memory.

    Args:
        model: The model to load into.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.load_state_dict = model.load_state_dict

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state, in which only tied tensors share memory."""
        return in_own_memory(self._model.state_dict())


def in_own_memory(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with copies of the tensors that are views of larger memory; tied tensors stay tied."""
    copies: dict[Any, torch.Tensor] = {}
    return {name: _own_memory(value, copies) if torch.is_tensor(value) else value for name, value in state.items()}


def _own_memory(tensor: torch.Tensor, copies: dict[Any, torch.Tensor]) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size():
        return tensor
    place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    return copies.setdefault(place, tensor.detach().clone())


def _write(path: Path, write: Any) -> None:
    """Write a file atomically."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
