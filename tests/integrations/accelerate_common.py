"""Common code of the accelerate tests: an accelerator on a pooled rank, and a training loop. All runs on the ranks."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 4


def new_accelerator(
    algorithm: Any = None,
    cls: Any = None,
    *,
    use: dict[str, Any] | None = None,
    own_node: bool = False,
    **options: Any,
) -> Any:
    """Make an accelerator on this rank's group, with commlib or (algorithm None) with DDP.

    With `own_node` each rank believes to be on a machine of its own.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    import commlib.integrations.accelerate as integration

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "WORLD_SIZE": size, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"LOCAL_RANK": "0" if own_node else rank, "LOCAL_WORLD_SIZE": "1" if own_node else size}
    accelerator = (cls or Accelerator)(cpu=True, **options)
    if algorithm is not None:
        assert integration.use(accelerator, algorithm, **(use or {})) is accelerator
    return accelerator


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder that all ranks see."""
    with tempfile.TemporaryDirectory() as own:
        names: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(names, own)
        yield Path(names[0])
        dist.barrier()


def dataset(num_samples: int = 40, seed: int = 3) -> TensorDataset:
    """Inputs [n, 8] and targets [n, 4], the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(num_samples, 8, generator=generator), torch.randn(num_samples, 4, generator=generator)
    )


def loader(num_samples: int = 40, **options: Any) -> DataLoader:
    return DataLoader(dataset(num_samples), batch_size=BATCH, **options)


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def epoch(
    accelerator: Any,
    model: nn.Module,
    optimizer: Any,
    batches: Any,
    scheduler: Any = None,
    before_step: Callable[[], object] | None = None,
) -> list[Tensor]:
    """Train as accelerate's documents do; returns the losses."""
    losses = []
    for inputs, targets in batches:
        with accelerator.accumulate(model):
            loss = mse(model(inputs), targets)
            accelerator.backward(loss)
            if before_step is not None and accelerator.sync_gradients:
                before_step()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def values(model: nn.Module) -> dict[str, Tensor]:
    """Copy the state of a model, without the prefixes of DDP and torch.compile."""
    return {
        name.replace("_orig_mod.", "").removeprefix("module."): tensor.detach().clone()
        for name, tensor in model.state_dict().items()
    }


def assert_equal(got: Any, expected: Any) -> None:
    """Compare nested lists and dicts of tensors bit for bit."""
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key in expected:
            assert_equal(got[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected) > 0
        for one, other in zip(got, expected, strict=True):
            assert_equal(one, other)
    else:
        assert torch.equal(got, expected), f"{got} is not {expected}"
