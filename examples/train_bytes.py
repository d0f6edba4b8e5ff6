"""Train a GPT on the bytes of the Python standard library's sources, data-parallel.

Run it with: torchrun --standalone --nproc_per_node 2 THIS_FILE --size 1m
"""

import argparse
import json
import math
import os
import time

import checkpoint
import corpus
import torch
import torch.distributed as dist
from gpt import GPT, SIZES, next_byte_loss
from torch import Tensor, nn

import commlib


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="allreduce", help="a commlib algorithm (plain DDP has no choice)")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="windows per rank and step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--every", type=int, default=50, help="steps between validations (and checkpoints)")
    parser.add_argument("--checkpoint", help="directory: resume from it if it has one, save to it at every validation")
    parser.add_argument("--losses", help="file: one JSON row per step, written by rank 0")
    return parser.parse_args()


@torch.no_grad()
def bits_per_byte(model: nn.Module, text: Tensor, batch: int, context: int, device: torch.device) -> float:
    """Return the mean validation loss over fixed windows, divided among the ranks."""
    batches = [corpus.batch(text, (idx, dist.get_rank()), batch, context) for idx in range(4)]
    model.eval()
    loss = torch.stack([next_byte_loss(model(x.to(device)), y.to(device)) for x, y in batches]).mean()
    model.train()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size() / math.log(2)


def main() -> None:
    args = parse_args()
    device = torch.device(args.device, int(os.environ["LOCAL_RANK"]) if args.device == "cuda" else None)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(args.seed)
    size = SIZES[args.size]
    model = GPT(size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model = commlib.wrap(model, algorithm=args.algorithm, optimizer=optimizer)

    train_text, validation_text = corpus.standard_library()
    steps_done = checkpoint.load(args.checkpoint, model, optimizer) if args.checkpoint else 0

    start = time.perf_counter()
    for step in range(steps_done, args.steps):
        text, target = corpus.batch(train_text, (args.seed, step, rank), args.batch, size.context)
        loss = next_byte_loss(model(text.to(device)), target.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if args.losses and rank == 0:
            with open(args.losses, "a") as file:
                file.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")
        if (step + 1) % args.every == 0 or step + 1 == args.steps:
            bits = bits_per_byte(model, validation_text, args.batch, size.context, device)
            if args.checkpoint:
                checkpoint.save(args.checkpoint, model, optimizer, step + 1)
            if rank == 0:
                seconds = time.perf_counter() - start
                print(f"step {step + 1:5d}  loss {loss:.4f}  validation {bits:.3f} bits  {seconds:.1f} s", flush=True)
    del model  # before its group: DDP could deadlock with Gloo if it held the last reference to the group
    dist.barrier()  # let Gloo's threads release the last tensors before the interpreter exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
