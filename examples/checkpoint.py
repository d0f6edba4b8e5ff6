"""Checkpoints for the training examples: written completely or not at all, and resumed bit for bit.

Every rank writes its own file, because relaxed algorithms keep state per rank (error feedback, random numbers) and some
let the replicas differ between synchronisations. All ranks must see the same directory.
"""

import os
import pathlib
import shutil

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


def save(directory: str, model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Write `directory`/step-XXXXXXXX, replacing older steps. Collective: every rank calls it.

    The files are written to `directory`/partial, which is renamed when all ranks have finished. An interrupted run
    leaves the previous checkpoint unchanged.
    """
    root = pathlib.Path(directory)
    partial, final = root / "partial", root / f"step-{step:08d}"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    save_rank(partial, model, optimizer, step)
    dist.barrier()
    if dist.get_rank() == 0:
        older = list(root.glob("step-*"))
        os.replace(partial, final)
        for path in older:
            shutil.rmtree(path)
    dist.barrier()


def load(directory: str, model: nn.Module, optimizer: Optimizer) -> int:
    """Restore the latest checkpoint in place, on every rank.

    Returns:
        The number of completed steps, 0 without a checkpoint.
    """
    found = sorted(pathlib.Path(directory).glob("step-*"))
    if not found:
        return 0
    return load_rank(found[-1], model, optimizer)


def save_rank(folder: pathlib.Path, model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Write the file of this rank into the existing `folder`."""
    _write(folder / f"rank{dist.get_rank()}.pt", _state(model, optimizer, step))


def load_rank(folder: pathlib.Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Restore this rank in place from the files of all ranks in `folder`; return the number of completed steps."""
    num_files = len(list(folder.glob("rank*.pt")))
    if num_files != dist.get_world_size():
        raise SystemExit(f"{folder} was saved by {num_files} ranks, this run has {dist.get_world_size()}")
    state = torch.load(folder / f"rank{dist.get_rank()}.pt", map_location="cpu")
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if not isinstance(model, DistributedDataParallel):
        import commlib

        commlib.load_state_dict(model, state["algorithm"])
    torch.set_rng_state(state["rng"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda_rng"])
    return state["step"]


def _state(model: nn.Module, optimizer: Optimizer, step: int) -> dict:
    return {
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "algorithm": _algorithm_state(model),
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "step": step,
    }


def _algorithm_state(model: nn.Module) -> dict:
    if isinstance(model, DistributedDataParallel):
        return {}
    import commlib  # local, so that the DDP versions of the examples run without commlib

    return commlib.state_dict(model)


def _write(path: pathlib.Path, state: dict) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
