"""Train a small network with commlib, step by step as docs/tutorial.md shows.

Run it with: torchrun --standalone --nproc_per_node 2 THIS_FILE
"""

import argparse
import pathlib
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import commlib

parser = argparse.ArgumentParser()
parser.add_argument("--algorithm", default="allreduce")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--checkpoint", type=pathlib.Path)
args = parser.parse_args()

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
teacher = nn.Linear(64, 10)  # provides the labels
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model = commlib.wrap(model, args.algorithm, optimizer=optimizer)

saved = {"app": commlib.Checkpoint(model, optimizer), "step": 0}
if args.checkpoint and args.checkpoint.exists():
    dcp.load(saved, checkpoint_id=args.checkpoint)
    print(f"rank {rank} resumes after step {saved['step']}")

start, first = time.perf_counter(), saved["step"] + 1
for step in range(first, args.steps + 1):
    torch.manual_seed(ranks * step + rank)  # different data in each step and on each rank
    inputs = torch.randn(32, 64)
    loss = nn.functional.cross_entropy(model(inputs), teacher(inputs).argmax(1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
step_ms = 1000 * (time.perf_counter() - start) / (args.steps - first + 1)

if args.checkpoint:
    saved["step"] = args.steps
    dcp.save(saved, checkpoint_id=args.checkpoint)

commlib.synchronize(model)  # averages weights that differ between ranks
torch.manual_seed(1_000_000)
inputs = torch.randn(4096, 64)
with torch.no_grad():
    loss = nn.functional.cross_entropy(model(inputs), teacher(inputs).argmax(1))
if rank == 0:
    print(f"{args.algorithm}: loss {loss:.6f} after {args.steps} steps, {step_ms:.1f} ms each")
    print(commlib.stats(model))
dist.barrier()
dist.destroy_process_group()
