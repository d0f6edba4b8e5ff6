"""Train a small CNN on scikit-learn's bundled handwritten digits with Hugging Face accelerate.

Run it with: accelerate launch --multi_gpu --num_processes 2 THIS_FILE    (or THIS_FILE --cpu)
or with:     torchrun --standalone --nproc_per_node 2 THIS_FILE
"""

import argparse
import json
import pathlib
import re

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="allreduce", help="a commlib algorithm (plain DDP has no choice)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=16, help="images per rank and forward")
    parser.add_argument("--accumulate", type=int, default=2, help="forwards per step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", default=not torch.cuda.is_available())
    parser.add_argument("--mixed-precision", default="no", choices=["no", "bf16", "fp16"])
    parser.add_argument("--checkpoint", help="directory: resume from it if it has one, save to it after every epoch")
    parser.add_argument("--losses", help="file: one JSON row per forward, written by rank 0")
    return parser.parse_args()


class CNN(nn.Sequential):
    """Classify digits [batch, 1, 8, 8] into scores [batch, 10]; 0.1 M parameters."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(4),
            nn.Flatten(), nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10),
        )  # fmt: skip


def digits(batch: int) -> tuple[DataLoader, DataLoader]:
    """Return training and test batches of images [batch, 1, 8, 8] and labels."""
    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)
    parts = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    train, test = (TensorDataset(*parts[start::2]) for start in range(2))
    return DataLoader(train, batch, shuffle=True), DataLoader(test, 4 * batch)


def train_epoch(accelerator: Accelerator, model, optimizer, scheduler, batches) -> list[float]:
    """Train for one epoch; return the losses."""
    losses = []
    for images, labels in batches:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def accuracy(accelerator: Accelerator, model, batches) -> float:
    """Return the fraction of correct predictions; every rank evaluates a part of the data."""
    model.eval()
    right = [accelerator.gather_for_metrics(model(images).argmax(1) == labels) for images, labels in batches]
    model.train()
    return torch.cat(right).float().mean().item()


def resume(accelerator: Accelerator, directory: str) -> int:
    """Load the latest checkpoint, if any; return the number of completed epochs."""
    found = pathlib.Path(directory, "checkpoints").glob("checkpoint_*")
    done = max((int(re.findall(r"\d+", path.name)[0]) + 1 for path in found), default=0)
    if done:
        accelerator.load_state()
    accelerator.project_configuration.iteration = done
    return done


def main() -> None:
    args = parse_args()
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.accumulate,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),  # the order depends on the epoch only
        project_config=ProjectConfiguration(args.checkpoint, automatic_checkpoint_naming=True, total_limit=2),
    )

    set_seed(args.seed)
    model = CNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    train, test = digits(args.batch)
    model, optimizer, scheduler, train, test = accelerator.prepare(model, optimizer, scheduler, train, test)
    set_seed(args.seed + 1, device_specific=True)  # different dropout on every rank
    epochs_done = resume(accelerator, args.checkpoint) if args.checkpoint else 0

    for epoch in range(epochs_done, args.epochs):
        train.set_epoch(epoch)
        losses = train_epoch(accelerator, model, optimizer, scheduler, train)
        score = accuracy(accelerator, model, test)
        accelerator.print(f"epoch {epoch + 1:3d}  loss {losses[-1]:.4f}  accuracy {score:.2%}", flush=True)
        if args.losses and accelerator.is_main_process:
            with open(args.losses, "a") as file:
                file.writelines(json.dumps({"epoch": epoch, "loss": loss}) + "\n" for loss in losses)
        if args.checkpoint:
            accelerator.save_state()  # last, after all random numbers of the epoch were drawn
    accelerator.wait_for_everyone()  # let Gloo's threads release the last tensors before the interpreter exits
    accelerator.end_training()


if __name__ == "__main__":
    main()
