"""Train a GPT that FSDP2 shards inside islands of ranks; any algorithm communicates between the islands.

An island is a group of ranks with a fast network: one host or one site. Run two islands of two ranks with:

    torchrun --standalone --nproc_per_node 4 THIS_FILE --islands 2 --algorithm diloco --size 1m

For comparison, `--algorithm hsdp` lets torch average between the islands in full precision. `--weights int8
--gradients int8` encodes what FSDP2 communicates inside an island.
"""

import argparse
import json
import os
import pathlib
import shutil
import time

import corpus
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import GPT, SIZES, next_byte_loss
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from train_bytes import bits_per_byte

import commlib


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="diloco", help="a commlib algorithm, or hsdp")
    parser.add_argument("--period", type=int, help="steps between the averages of an algorithm that has a period")
    parser.add_argument("--islands", type=int, default=2, help="number of islands; must divide the number of ranks")
    parser.add_argument("--weights", default="fp32", help="codec of the weights that an island gathers, such as int8")
    parser.add_argument("--gradients", default="fp32", help="codec of the gradients that an island reduces")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="windows per rank and step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--every", type=int, default=50, help="steps between validations (and checkpoints)")
    parser.add_argument("--checkpoint", help="directory: resume from it if it has one, save to it at every validation")
    parser.add_argument("--losses", help="file: one JSON row per validation, written by rank 0")
    args = parser.parse_args()
    if args.algorithm == "hsdp" and args.checkpoint:
        parser.error("--checkpoint: commlib does not wrap this model; save it with torch's own tools")
    return args


def shard(model: GPT, mesh: DeviceMesh) -> GPT:
    """Shard each block, and the rest, over the ranks of a mesh; replicate over the first dimension of a 2-D mesh."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def algorithm_of(args: argparse.Namespace) -> commlib.algorithms.Algorithm:
    cls = type(commlib.algorithms.create(args.algorithm))
    return cls(**({} if args.period is None else {"period": args.period}))


class Checkpoints:
    """The latest checkpoint of a run, in `directory`/step-XXXXXXXX, written by torch.distributed.checkpoint."""

    def __init__(self, directory: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.root = pathlib.Path(directory)
        self.state = {"app": commlib.Checkpoint(model, optimizer)}

    def load(self) -> int:
        """Load the latest checkpoint; return the number of completed steps."""
        found = sorted(self.root.glob("step-*"))
        if found:
            dcp.load(self.state, checkpoint_id=found[-1])
        return int(found[-1].name.removeprefix("step-")) if found else 0

    def save(self, step: int) -> None:
        """Write a new checkpoint, then remove the earlier one."""
        older = list(self.root.glob("step-*"))
        partial = self.root / "partial"
        dcp.save(self.state, checkpoint_id=partial)
        if dist.get_rank() == 0:
            os.replace(partial, self.root / f"step-{step:08d}")
            for path in older:
                shutil.rmtree(path)
        dist.barrier()


def main() -> None:
    args = parse_args()
    device = torch.device(args.device, int(os.environ["LOCAL_RANK"]) if args.device == "cuda" else None)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = (args.islands, world_size // args.islands)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard"))

    torch.manual_seed(args.seed)
    size = SIZES[args.size]
    model = shard(GPT(size).to(device), mesh if args.algorithm == "hsdp" else mesh["shard"])
    if (args.weights, args.gradients) != ("fp32", "fp32"):
        commlib.shard(model, args.weights, args.gradients)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    if args.algorithm != "hsdp":
        commlib.wrap(model, algorithm_of(args), optimizer=optimizer, process_group=mesh["replicate"])

    train_text, validation_text = corpus.standard_library()
    checkpoints = Checkpoints(args.checkpoint, model, optimizer) if args.checkpoint else None
    steps_done = checkpoints.load() if checkpoints else 0
    start = time.perf_counter()
    for step in range(steps_done, args.steps):
        text, target = corpus.batch(train_text, (args.seed, step, rank), args.batch, size.context)
        loss = next_byte_loss(model(text.to(device)), target.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % args.every == 0 or step + 1 == args.steps:
            seconds = time.perf_counter() - start
            if checkpoints:
                checkpoints.save(step + 1)
            # Each rank evaluates its part of the text with the weights of its island.
            bits = bits_per_byte(model, validation_text, args.batch, size.context, device)
            if rank == 0:
                print(f"step {step + 1:5d}  loss {loss:.4f}  validation {bits:.3f} bits  {seconds:.1f} s", flush=True)
                if args.losses:
                    with open(args.losses, "a") as file:
                        file.write(json.dumps({"step": step + 1, "loss": loss.item(), "bits": bits}) + "\n")
    dist.barrier()  # let Gloo's threads release the last tensors before the interpreter exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
