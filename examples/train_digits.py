"""Train a small CNN on scikit-learn's bundled handwritten digits, data-parallel.

Run it with: torchrun --standalone --nproc_per_node 2 THIS_FILE
"""

import argparse
import json
import os
import time

import checkpoint
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

import commlib


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="allreduce", help="a commlib algorithm (plain DDP has no choice)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checkpoint", help="directory: resume from it if it has one, save to it after every epoch")
    parser.add_argument("--losses", help="file: one JSON row per step, written by rank 0")
    return parser.parse_args()


class CNN(nn.Sequential):
    """Classify digits [batch, 1, 8, 8] into scores [batch, 10]; 0.4 M parameters."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, padding=1, bias=False), nn.BatchNorm2d(128), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(512, 512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, 10),
        )  # fmt: skip


def digits(device: torch.device) -> list[Tensor]:
    """Return train images, test images [n, 1, 8, 8], train labels, test labels [n]."""
    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)
    return [t.to(device) for t in train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)]


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the fraction of correct predictions."""
    model.eval()
    correct = (model(images).argmax(1) == labels).sum()
    model.train()
    return correct.item() / len(labels)


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> list[float]:
    """Run one step per batch, images [steps, batch, 1, 8, 8]; return the losses."""
    losses = []
    for x, y in zip(images, labels, strict=True):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    args = parse_args()
    device = torch.device(args.device, int(os.environ["LOCAL_RANK"]) if args.device == "cuda" else None)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(args.seed)
    model = CNN().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model = commlib.wrap(model, algorithm=args.algorithm, optimizer=optimizer)

    train_x, test_x, train_y, test_y = digits(device)
    sampler = DistributedSampler(range(len(train_x)), seed=args.seed, drop_last=True)
    torch.manual_seed(args.seed + 1 + rank)  # different dropout on every rank
    epochs_done = checkpoint.load(args.checkpoint, model, optimizer) if args.checkpoint else 0

    for epoch in range(epochs_done, args.epochs):
        start = time.perf_counter()
        sampler.set_epoch(epoch)
        num_steps = len(sampler) // args.batch
        order = torch.tensor(list(sampler)[: num_steps * args.batch]).view(num_steps, args.batch)
        losses = train_epoch(model, optimizer, train_x[order], train_y[order])
        seconds = time.perf_counter() - start
        if args.checkpoint:
            checkpoint.save(args.checkpoint, model, optimizer, epoch + 1)
        if rank == 0:
            score = accuracy(model.module, test_x, test_y)  # the unwrapped model: the other ranks do not take part
            print(f"epoch {epoch + 1:3d}  loss {losses[-1]:.4f}  accuracy {score:.2%}  {seconds:.2f} s", flush=True)
            if args.losses:
                with open(args.losses, "a") as file:
                    file.writelines(json.dumps({"epoch": epoch, "loss": loss}) + "\n" for loss in losses)
    del model  # before its group: DDP could deadlock with Gloo if it held the last reference to the group
    dist.barrier()  # let Gloo's threads release the last tensors before the interpreter exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
