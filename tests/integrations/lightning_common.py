"""Modules, trainers and comparisons of the tests of commlib in Lightning. Everything here runs on the ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tests

if tests.IS_COLLECTING:  # which would take seconds: everything that needs Lightning runs on ranks
    pl = DDPStrategy = CommlibStrategy = StatsCallback = tests.Placeholder("lightning", (), {})
else:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of its import are not tested
        import lightning.pytorch as pl
        from lightning.pytorch.strategies import DDPStrategy

    from commlib.integrations.lightning import CommlibStrategy, StatsCallback
from tests.multi.common import tensors

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

__all__ = ["CommlibStrategy", "StatsCallback", "pl"]  # for the tests

SMALL_BUCKET_MB = 0.0005
TIMEOUT_S = 40.0
STEPS = 5


@contextlib.contextmanager
def torchruns_environment() -> Iterator[None]:
    """Let this rank look like one that torchrun has started; its default group is there already."""
    before = dict(os.environ)
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "GROUP_RANK": "0"}
    os.environ |= {"LOCAL_WORLD_SIZE": world_size, "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Data(TensorDataset):
    """Inputs `[size, 8]` and targets `[size, 4]`, the same everywhere; the trainer's sampler divides them."""

    def __init__(self, size: int = 40) -> None:
        generator = torch.Generator().manual_seed(3)
        super().__init__(torch.randn(size, 8, generator=generator), torch.randn(size, 4, generator=generator))


def loader(batch: int = 4, size: int = 40) -> DataLoader[Any]:
    return DataLoader(Data(size), batch_size=batch)


def own_loader(batch: int = 4) -> DataLoader[Any]:
    """A loader with a sampler of its own, for `use_distributed_sampler=False`."""
    data = Data()
    return DataLoader(data, batch_size=batch, sampler=DistributedSampler(data, shuffle=False))


class Module(pl.LightningModule):
    """A small network that records the losses and gradients of its steps; ranks begin with different weights.

    Attributes:
        losses: Of each call of `training_step`.
        gradients: All of them, before each optimizer step.
    """

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        seed = 7 + (dist.get_rank() if dist.is_initialized() else 0)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.encoder = nn.Sequential(nn.Linear(8, 24), nn.Tanh())
            self.head = nn.Linear(24, 4)
        self.lr = lr
        self.losses: list[Tensor] = []
        self.gradients: list[dict[str, Tensor | None]] = []
        self.order: list[str] = []

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.encoder(inputs))

    def loss_of(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return (self(inputs) - targets).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        self.losses.append(loss.detach().clone())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss_of(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append({name: None if p.grad is None else p.grad.clone() for name, p in self.named_parameters()})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Submodules(Module):
    """Its `training_step` calls submodules only."""

    def loss_of(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return (self.head(self.encoder(inputs)) - targets).square().mean()


class Warnings(logging.Handler):
    """Collects commlib's warnings."""

    def __enter__(self) -> list[str]:
        self.found: list[str] = []
        logging.getLogger("commlib").addHandler(self)
        return self.found

    def __exit__(self, *_: Any) -> None:
        logging.getLogger("commlib").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def strategy(algorithm: Any = "allreduce", **options: Any) -> CommlibStrategy:
    return CommlibStrategy(algorithm, **{"timeout": TIMEOUT_S, "bucket_cap_mb": SMALL_BUCKET_MB, **options})


def ddp(**options: Any) -> DDPStrategy:
    return DDPStrategy(**options)


def trainer(strategy: Any, folder: Path | str | None = None, **options: Any) -> pl.Trainer:
    """Make a trainer that is quiet and makes 5 steps of 2 ranks' batches of 4."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    default = {"max_epochs": 1, "accelerator": "cpu", "devices": dist.get_world_size(), "num_sanity_val_steps": 0}
    folder = "/nonexistent" if folder is None else str(folder)
    return pl.Trainer(strategy=strategy, default_root_dir=folder, **{**quiet, **default, **options})


@contextlib.contextmanager
def run_on_rank() -> Iterator[None]:
    """The context of every test here: torchrun's environment, and Lightning's hints not as errors."""
    with torchruns_environment(), warnings.catch_warnings():
        for hint in HINTS:
            warnings.filterwarnings("ignore", message=hint)
        yield


#: Lightning's hints that are warnings, and torch's warnings about Lightning's own code.
HINTS = (
    ".*torch.jit.script_method. is deprecated.*",  # at inductor's import
    ".*grad attribute of a Tensor that is not a leaf.*",  # torch.compile looks at it
    ".*this fit will run with no optimizer.*",
    ".*The dirpath has changed.*",
    ".*callbacks used to create the checkpoint need to be provided.*",
    ".*isinstance.treespec, LeafSpec.. is deprecated.*",
    ".*does not have many workers.*",
    ".*`srun` command is available on your system.*",
    ".*smaller than the logging interval.*",
    ".*recommended to use .self.log.*sync_dist=True.*",
    ".*exists and is not empty.*",
    ".*You defined a `validation_step` but have no `val_dataloader`.*",
    ".*Using `DistributedSampler` with the dataloaders.*",
)


def fit(module: Any, strategy: Any, ckpt_path: Any = None, data: Any = None, folder: Any = None, **options: Any) -> Any:
    """Train a module; return it and the trainer."""
    found = trainer(strategy, folder, **options)
    found.fit(module, loader() if data is None else data, ckpt_path=ckpt_path)
    return module, found


def assert_equal_runs(got: Any, expected: Any) -> None:
    """Compare losses, gradients and final values bit for bit."""
    assert len(got.losses) == len(expected.losses) > 0
    assert all(map(torch.equal, got.losses, expected.losses)), (got.losses, expected.losses)
    assert len(got.gradients) == len(expected.gradients) > 0
    for step, (own, other) in enumerate(zip(got.gradients, expected.gradients, strict=True)):
        assert_equal(own, other, f"gradient of step {step}")
    assert_equal(tensors(got), tensors(expected), "final value")


def assert_equal(got: dict[str, Any], expected: dict[str, Any], what: str = "value") -> None:
    assert got.keys() == expected.keys(), f"{what}: {sorted(got)}, expected {sorted(expected)}"
    for name, tensor in expected.items():
        assert (got[name] is None) == (tensor is None), f"{what} of {name}"
        assert tensor is None or same_bits(got[name], tensor), f"{what} of {name}"


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare two tensors, NaN with NaN."""
    return one.dtype == other.dtype and torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (one, other)))
