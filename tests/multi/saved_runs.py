"""Runs whose checkpoints and results are recorded: every algorithm, with the options that change its state.

    python -m tests.multi.saved_runs --write [names]    records new runs, or the named runs in their current form

The model's gradients need no sum over more than one element, and optimizers' square roots are rounded correctly
(`ExactSquareRoots`), so a run without matrix products gives the same bits on every processor with fused
multiply-adds. `golden/runs/<name>.pt.gz` holds for each rank the state after `SAVED_AT` steps, and the weights after
`NUM_STEPS`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gzip
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import commlib
from commlib import algorithms, codecs
from commlib.algorithms import Algorithm, CompressionPolicy
from tests.contract.subjects import Subject
from tests.multi.pool import POOL, run_ranks

FOLDER = Path(__file__).parents[1] / "golden" / "runs"
SAVED_AT, NUM_STEPS = 6, 12

MATRICES = CompressionPolicy(min_dims=2)


class Run(NamedTuple):
    """A run.

    Attributes:
        name: The name of the algorithm.
        options: Its options.
        num_ranks: How many ranks; 4 lie in two nodes.
        rescaled: Whether the optimizer is plain SGD, and its learning rate changes.
    """

    name: str
    options: dict[str, Any]
    num_ranks: int = 2
    rescaled: bool = False

    def algorithm(self) -> Algorithm:
        """Make the algorithm."""
        return algorithms.get(self.name)(**self.options)

    @property
    def repeats_itself(self) -> bool:
        """Whether the result of a step does not depend on when messages arrive."""
        return self.algorithm().channel.keeps_step

    @property
    def has_products(self) -> bool:
        """Whether the algorithm multiplies matrices, where the order of sums depends on the kind of processor."""
        return self.name in ("powersgd", "demo")


def _adamax(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adamax(parameters, lr=0.05)


_SPARSE = {"ratio": 0.25, "compress": MATRICES}
_OUTER = {"period": 3, "compress": MATRICES}
_STREAMING = {"period": 4, "fragments": 2, "delay": 1, "compress": MATRICES}

RUNS: dict[str, Run] = {
    "allreduce": Run("allreduce", {}),
    "allreduce-bf16": Run("allreduce", {"wire_dtype": "bf16"}),
    "allreduce-nodes": Run("allreduce", {"hierarchical": True}, 4),
    "async_averaging": Run("async_averaging", {"period": 2}),
    "async_sgd": Run("async_sgd", {"period": 2, "rest": 0.0}),
    "async_sgd-gradients": Run("async_sgd", {"period": 2, "rest": 0.0, "push": "gradients"}),
    "bytegrad": Run("bytegrad", {}),
    "bytegrad-feedback": Run("bytegrad", {"feedback": True, "compress": MATRICES}),
    "bytegrad-nodes": Run("bytegrad", {"feedback": True, "hierarchical": True, "compress": MATRICES}, 4),
    "decentralized": Run("decentralized", {}, 4),
    "decentralized-nodes": Run("decentralized", {"hierarchical": True, "overlap": False}, 4),
    "demo": Run("demo", {"kept": 8, "compress": MATRICES}),
    "demo-sign": Run("demo", {"kept": 8, "sign": True, "compress": MATRICES}),
    "dgc": Run("dgc", {**_SPARSE, "ratio_warmup_steps": 4}),
    "dgc-balanced": Run("dgc", {**_SPARSE, "exchange": "balanced"}),
    "dgc-nodes": Run("dgc", {**_SPARSE, "hierarchical": True}, 4),
    "diloco": Run("diloco", {"period": 3}),
    "diloco-int4": Run("diloco", {**_OUTER, "codec": "int4"}),
    "diloco-topk": Run("diloco", {**_OUTER, "codec": codecs.TopK(0.25), "error_decay": 0.9}),
    "diloco-outer": Run("diloco", {**_OUTER, "outer": _adamax}),
    "ef_quantized": Run("ef_quantized", {"compress": MATRICES}),
    "ef_quantized-ef21": Run("ef_quantized", {"compress": MATRICES, "ef21": 0.5}),
    "ef_quantized-loco": Run("ef_quantized", {"compress": MATRICES, "averaging": 0.5, "reset_every": 4}),
    "ef_quantized-rescaled": Run("ef_quantized", {"compress": MATRICES, "rescale_residuals": True}, rescaled=True),
    "gossip": Run("gossip", {}, 4),
    "gossip-int8": Run("gossip", {"codec": "int8", "period": 2}, 4),
    "hierarchical_local_sgd": Run("hierarchical_local_sgd", {"period": 2, "global_every": 2}, 4),
    "hogwild": Run("hogwild", {}),
    "local_sgd": Run("local_sgd", {"period": 4}),
    "local_sgd-int8": Run("local_sgd", {"period": 4, "codec": "int8", "compress": MATRICES}),
    "low_precision_decentralized": Run("low_precision_decentralized", {}, 4),
    "low_precision_decentralized-dcd": Run("low_precision_decentralized", {"method": "dcd", "overlap": False}, 4),
    "noloco": Run("noloco", {"period": 3}, 4),
    "noloco-overlap": Run("noloco", {"period": 3, "overlap": True}, 4),
    "ok_topk": Run("ok_topk", _SPARSE),
    "onebit_adam": Run("onebit_adam", {"warmup_steps": 3, "compress": MATRICES}),
    "passive_gossip": Run("passive_gossip", {"period": 2}),
    "post_local_sgd": Run("post_local_sgd", {"warmup_steps": 3, "period": 2}),
    "powersgd": Run("powersgd", {"min_compression": 1.0}),
    "powersgd-nodes": Run("powersgd", {"min_compression": 1.0, "hierarchical": True}, 4),
    "qadam": Run("qadam", {"warmup_steps": 3, "feedback": True}),
    "qsgd": Run("qsgd", {}),
    "randomk": Run("randomk", _SPARSE),
    "randomk-ef21": Run("randomk", {**_SPARSE, "ef21": 0.5}),
    "signsgd": Run("signsgd", {"compress": MATRICES}),
    "signsgd-vote": Run("signsgd", {"compress": MATRICES, "feedback": False}),
    "signsgd-ef21": Run("signsgd", {"compress": MATRICES, "ef21": 0.5}),
    "sparse_loco": Run("sparse_loco", {**_OUTER, "kept": 512}),
    "sparse_loco-balanced": Run("sparse_loco", {**_OUTER, "kept": 512, "exchange": "balanced"}),
    "sparse_loco-delay": Run("sparse_loco", {**_OUTER, "kept": 512, "delay": 1}),
    "streaming_diloco": Run("streaming_diloco", _STREAMING),
    "streaming_diloco-int4": Run("streaming_diloco", {**_STREAMING, "codec": "int4"}),
    "topk": Run("topk", _SPARSE),
    "topk-balanced": Run("topk", {**_SPARSE, "exchange": "balanced"}),
    "topk-ef21": Run("topk", {**_SPARSE, "ef21": 0.5}),
    "topk-nodes": Run("topk", {**_SPARSE, "hierarchical": True}, 4),
    "topk-rescaled": Run("topk", {**_SPARSE, "rescale_residuals": True}, rescaled=True),
    "zero_one_adam": Run("zero_one_adam", {"warmup_steps": 2, "compress": MATRICES}),
    "zero_one_adam-local": Run("zero_one_adam", {"warmup_steps": 2, "local_after": 5, "compress": MATRICES}),
}


def values(seed: int, *shape: int) -> Tensor:
    """Return [*shape] fp32 values of a seed, fractions of 2 ** 23."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(*shape, generator=generator, dtype=torch.float64) - 0.5).mul(2**23).round().div(2**23).float()


class Quadratic(nn.Module):
    """Half the squared distance of the weights from those that a step's data ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(values(1, 20, 16))
        self.small = nn.Parameter(values(2, 6, 8))
        self.vector = nn.Parameter(values(3, 5))

    def forward(self, seed: int) -> Tensor:
        pairs = [(weight, values(seed + idx, *weight.shape)) for idx, weight in enumerate(self.parameters())]
        return sum((0.5 * (weight - target).square().sum() for weight, target in pairs), torch.zeros(()))


class ExactSquareRoots(TorchFunctionMode):
    """Rounds square roots of fp32 tensors correctly, which torch's vector library does on some processors only."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.sqrt, torch.sqrt):
            return args[0].double().sqrt().to(args[0].dtype)
        if func is torch._foreach_sqrt:
            return [each.double().sqrt().to(each.dtype) for each in args[0]]
        assert "sqrt" not in func.__name__, f"{func} is not rounded correctly"
        return func(*args, **(kwargs or {}))


class Training:
    """A run under way on this rank."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.model: Any = Quadratic()
        parameters = list(self.model.parameters())
        own = torch.optim.SGD(parameters, lr=0.05) if run.rescaled else Subject(run.name).optimizer(parameters)
        self.optimizer = own
        commlib.wrap(self.model, run.algorithm(), optimizer=own, bucket_cap_mb=0.001, timeout=60)

    def steps(self, begin: int, end: int) -> None:
        """Make the steps of these numbers."""
        for step in range(begin, end):
            if self.run.rescaled:
                self.optimizer.param_groups[0]["lr"] = 0.05 / (1 + step % 4)
            self.optimizer.zero_grad()
            self.model(100 * step + 10 * dist.get_rank()).backward()
            with ExactSquareRoots():
                self.optimizer.step()

    def save(self) -> dict[str, Any]:
        """Return copies of the states that a user saves."""
        communication = commlib.state_dict(self.model)  # first: it takes results that are under way
        states = (communication, self.model.state_dict(), self.optimizer.state_dict())
        return copy.deepcopy(dict(zip(("communication", "model", "optimizer"), states, strict=True)))

    def load(self, saved: dict[str, Any]) -> None:
        """Take over what `save` returned."""
        saved = copy.deepcopy(saved)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        commlib.load_state_dict(self.model, saved["communication"])

    def weights(self) -> Tensor:
        """Return [numel] a copy of all weights, with results that are under way."""
        self.model.state_dict()
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])


@contextlib.contextmanager
def training(run: Run) -> Iterator[Training]:
    """Start a run on this rank; its end is the block's."""
    if run.num_ranks == 4:
        os.environ["COMMLIB_NODE"] = str(dist.get_rank() // 2)
    try:
        started = Training(run)
        yield started
        commlib.unwrap(started.model)
    finally:
        os.environ.pop("COMMLIB_NODE", None)


def record(names: list[str]) -> list[dict[str, Any]]:
    """Execute each of these runs, and return the records of this rank."""
    found = []
    for name in names:
        with training(RUNS[name]) as run:
            run.steps(0, SAVED_AT)
            saved = run.save()
            run.steps(SAVED_AT, NUM_STEPS)
            found.append({"saved": saved, "weights": run.weights()})
    return found


def path_of(name: str) -> Path:
    """Return the file of a run."""
    return FOLDER / f"{name}.pt.gz"


def write(name: str, by_rank: list[dict[str, Any]]) -> None:
    """Write the record of a run."""
    FOLDER.mkdir(exist_ok=True)
    buffer = io.BytesIO()
    torch.save(by_rank, buffer)
    path_of(name).write_bytes(gzip.compress(buffer.getvalue(), mtime=0))


def read(name: str) -> list[dict[str, Any]]:
    """Return the record of a run, by rank."""
    return torch.load(io.BytesIO(gzip.decompress(path_of(name).read_bytes())), weights_only=True)


def of_ranks(num_ranks: int) -> list[str]:
    """Return the names of runs on so many ranks."""
    return [name for name, run in RUNS.items() if run.num_ranks == num_ranks]


def main() -> None:
    """Record runs."""
    parser = argparse.ArgumentParser(description="Record runs of which there is no record, or those that are named.")
    parser.add_argument("--write", action="store_true", required=True)
    parser.add_argument("names", nargs="*", choices=[[], *RUNS])
    asked = parser.parse_args().names or [name for name in RUNS if not path_of(name).exists()]
    for num_ranks in (2, 4):
        names = [name for name in of_ranks(num_ranks) if name in asked]
        recorded: list[list[dict[str, Any]]] = run_ranks(record, num_ranks, names)
        for name, *by_rank in zip(names, *recorded, strict=True):
            write(name, by_rank)
    POOL.close()


if __name__ == "__main__":
    from tests.multi.saved_runs import main  # whose functions ranks can import

    main()
