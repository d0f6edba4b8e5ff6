"""commlib's part of a checkpoint that accelerate saves: a file of each rank, and one that says whether all is there.

[Note: whole or refused] accelerate writes its files one by one into the final folder. `commlib.json` says that the
folder is incomplete before the first of them is written, and that it is whole once all ranks have written theirs. A
folder without it is one of accelerate alone.
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

from commlib.algorithms import Algorithm, Auto
from commlib.errors import CommlibError, ConfigError
from commlib.integrations.agreement import together

_SUMMARY = "commlib.json"
_FORMAT = 1

#: What always helps.
_ALONE = f"or remove {_SUMMARY} there to go on from its weights alone"


class Folder:
    """A folder of a checkpoint. Everything but `summary` is collective.

    Args:
        accelerator: Whose ranks share it.
        path: Where it is.
    """

    def __init__(self, accelerator: Accelerator, path: str | os.PathLike[str]) -> None:
        self._accelerator = accelerator
        self._path = Path(path)

    def begin(self) -> None:
        """Mark the folder as incomplete, and remove what ranks wrote there before."""
        with together("save_state", CommlibError):
            if self._is_writer:
                self._write_summary({"complete": False})
                for old in self._path.glob("commlib_*.pt"):
                    old.unlink()

    def end(self, states: Sequence[Any], algorithm: str) -> None:
        """Write the state of each model on this rank; once all ranks have, mark the folder as whole."""
        with together("save_state", CommlibError):
            _write(self._rank_file(self._accelerator.process_index), lambda file: torch.save(list(states), file))
        with together("save_state", CommlibError):
            if self._is_writer:
                size = self._accelerator.num_processes
                self._write_summary({"complete": True, "world_size": size, "algorithm": algorithm})

    def fail(self, error: Exception) -> None:
        """Raise the error on this rank, and tell the others, which come to `end`."""
        with together("save_state", CommlibError):
            raise error

    def read(self, num_models: int, algorithm: Algorithm) -> list[Any] | None:
        """Return this rank's state of each model; None where the folder was saved without commlib.

        Raises:
            ConfigError: The folder is incomplete, lacks a file, or is of another algorithm, of other models, or of
                another number of ranks where that matters.
        """
        with together("load_state", CommlibError):
            summary = self.summary()
            if summary is None:
                return None
            self._check(summary, algorithm)
            states = self._states(int(summary["world_size"]))
            if len(states) != num_models:
                raise ConfigError(
                    f"load_state: {self._path} is of {len(states)} models, and {num_models} were prepared. Prepare the "
                    "same models in the same order"
                )
            return states

    def summary(self) -> dict[str, Any] | None:
        """Return what `commlib.json` says; None where there is none."""
        path = self._path / _SUMMARY
        return json.loads(path.read_text()) if path.exists() else None

    def _check(self, summary: dict[str, Any], algorithm: Algorithm) -> None:
        if not summary.get("complete"):
            raise ConfigError(
                f"load_state: {self._path} is incomplete: saving it was interrupted. Load an earlier checkpoint"
            )
        if summary.get("format") != _FORMAT:
            raise ConfigError(f"load_state: {self._path} was saved by another version of commlib (format {summary})")
        if summary["algorithm"] != algorithm.name:
            raise ConfigError(
                f"load_state: {self._path} was saved with the algorithm {summary['algorithm']!r}, and this run has "
                f"{algorithm.name!r}. Use the same, {_ALONE}"
            )
        size, saved = self._accelerator.num_processes, summary["world_size"]
        if size != saved and not (algorithm.portable or isinstance(algorithm, Auto)):  # what "auto" chose knows
            raise ConfigError(
                f"load_state: {self._path} was saved by {saved} ranks, and this run has {size}. The state of "
                f"{algorithm.name!r} is each rank's own. Start {saved} ranks, {_ALONE}"
            )

    def _states(self, world_size: int) -> list[Any]:
        """Read this rank's file, or rank 0's where there were fewer ranks."""
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
        """Whether this rank writes what is common: as in accelerate, one rank, or one of each machine."""
        accelerator = self._accelerator
        on_each = accelerator.project_configuration.save_on_each_node
        return accelerator.is_local_main_process if on_each else accelerator.is_main_process

    def _rank_file(self, rank: int) -> Path:
        return self._path / f"commlib_{rank}.pt"

    def _write_summary(self, summary: dict[str, Any]) -> None:
        text = json.dumps({"format": _FORMAT, **summary}) + "\n"
        _write(self._path / _SUMMARY, lambda file: file.write(text.encode()))


class Loading:
    """Stands for a model while accelerate loads it from a file of safetensors.

    That reads which tensors of the model share memory, and takes those for copies of one another, also where an
    algorithm keeps all weights in one block of memory.

    Args:
        model: The model; what is loaded is its.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.load_state_dict = model.load_state_dict

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state, in which only what is tied shares memory."""
        return in_own_memory(self._model.state_dict())


def in_own_memory(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict whose tensors that are parts of a larger memory are copied; tied ones stay tied."""
    copies: dict[Any, torch.Tensor] = {}
    return {name: _own_memory(value, copies) if torch.is_tensor(value) else value for name, value in state.items()}


def _own_memory(tensor: torch.Tensor, copies: dict[Any, torch.Tensor]) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size():
        return tensor
    place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    return copies.setdefault(place, tensor.detach().clone())


def _write(path: Path, write: Any) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
