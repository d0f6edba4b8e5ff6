"""Print how far one backward of a sharded model is from full precision, by codec, and the bytes that it sends.

python benchmarks/shard_errors.py --ranks 3

The model is a byte GPT on text, at its initial weights; with differences, after five steps of AdamW. Errors are L2
distances relative to the gradient in full precision: of the parameter with the largest one, and of all gradients
together. Bytes are relative to those of FSDP2 in fp32.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from models import WORKLOADS
from torch import Tensor
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

import commlib
from commlib.algorithms import CompressionPolicy

_ALL = CompressionPolicy()
#: (weights, gradients, which parameters).
_ROWS: list[tuple[str, str, CompressionPolicy | None]] = [
    *((codec, "fp32", None) for codec in ("bf16", "int8", "fp8_e4m3", "mxfp8", "int4")),
    ("int8", "fp32", _ALL),
    *(("fp32", codec, None) for codec in ("bf16", "int8", "fp8_e4m3", "mxfp8", "int4")),
    ("fp32", "int8", _ALL),
    ("int8", "int8", None),
    ("int4", "int8", None),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--model", choices=[name for name in WORKLOADS if name.startswith("bytes")], default="bytes-1m")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (args, Path(folder, "store")), nprocs=args.ranks)


def run(rank: int, args: argparse.Namespace, store: Path) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.ranks))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    workload = WORKLOADS[args.model]()

    def new_model() -> Any:
        model: Any = workload.new_model(args.seed, torch.device("cpu"))
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)

    def backward(model: Any, step: int) -> dict[str, Tensor]:
        model.zero_grad()
        inputs, target = workload.draw((args.seed, step, rank))
        workload.loss(model(inputs), target).backward()
        return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}

    def gradients(weights: str, gradients: str, policy: CompressionPolicy | None) -> tuple[dict[str, Tensor], Any]:
        model = new_model()
        commlib.shard(model, weights, gradients, **({} if policy is None else {"compress": policy}))
        found = backward(model, 0)
        stats = commlib.stats(model).shard
        commlib.unwrap(model)
        return found, stats

    def with_differences(codec: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the gradients after some steps, and those of the same weights in full precision."""
        model = new_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        commlib.shard(model, codec, difference=True, optimizer=optimizer)
        for step in range(5):
            backward(model, step)
            optimizer.step()
        found = backward(model, 5)
        commlib.unwrap(model)
        return found, backward(model, 5)

    exact, plain = gradients("fp32", "fp32", None)
    if rank == 0:
        print(f"{args.model}, {args.ranks} ranks, torch {torch.__version__}")
        print("| weights | gradients | parameters | worst parameter | all | bytes |\n|---|---|---|--:|--:|--:|")
    for weights, codec, policy in _ROWS:
        found, stats = gradients(weights, codec, policy)
        sent = (stats.gathered_bytes + stats.reduced_bytes) / (plain.gathered_bytes + plain.reduced_bytes)
        which = "matrices" if policy is None else "all"
        if rank == 0:
            print(f"| {weights} | {codec} | {which} | {_far(found, exact)} | {sent:.3f} |", flush=True)
    for codec in ("int8", "int4"):
        found, exact = with_differences(codec)
        if rank == 0:
            print(f"| differences in {codec} | fp32 | matrices | {_far(found, exact)} | |", flush=True)
    dist.destroy_process_group()


def _far(found: dict[str, Tensor], exact: dict[str, Tensor]) -> str:
    """Return the cells of the worst parameter's distance and of that of all."""
    worst = max(float((found[name] - value).norm() / value.norm()) for name, value in exact.items())
    total = _norm({name: found[name] - value for name, value in exact.items()}) / _norm(exact)
    return f"{worst:.2%} | {total:.2%}"


def _norm(tensors: dict[str, Tensor]) -> Tensor:
    return functools.reduce(torch.hypot, [each.norm() for each in tensors.values()])


if __name__ == "__main__":
    main()
