"""Train the small CNN of train_digits.py as a LightningModule, data-parallel.

Run it with: python THIS_FILE, or: torchrun --standalone --nproc_per_node 2 THIS_FILE
"""

import argparse
import json
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from train_digits_ddp import CNN, digits


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="allreduce", help="a commlib algorithm (plain DDP has no choice)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--devices", type=int, default=2, help="processes on this machine")
    parser.add_argument("--accelerator", default="gpu" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--checkpoint", type=Path, help="directory: resume from it if it has one, save after every epoch"
    )
    parser.add_argument("--losses", type=Path, help="file: one JSON row per step, written by rank 0")
    return parser.parse_args()


class Digits(pl.LightningModule):
    """Classify digits [batch, 1, 8, 8]; append the losses of rank 0 to a file."""

    def __init__(self, lr: float, seed: int, losses: Path | None) -> None:
        super().__init__()
        self.cnn = CNN()
        self.lr, self.seed, self.losses = lr, seed, losses

    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
        # Different dropout on every rank; a resumed run uses the same dropout as an uninterrupted one.
        torch.manual_seed(self.seed + 1 + self.global_step * self.trainer.world_size + self.global_rank)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.cnn(images), labels)

    def on_train_batch_end(self, outputs: dict[str, Tensor], batch: list[Tensor], batch_idx: int) -> None:
        if self.losses and self.trainer.is_global_zero:
            with self.losses.open("a") as file:
                file.write(json.dumps({"epoch": self.current_epoch, "loss": outputs["loss"].item()}) + "\n")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        correct = (self.cnn(images).argmax(1) == labels).float().mean()
        self.log("accuracy", correct, sync_dist=True, batch_size=len(labels))

    def on_validation_epoch_end(self) -> None:
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            score = self.trainer.callback_metrics["accuracy"].item()
            print(f"epoch {self.current_epoch + 1:3d}  accuracy {score:.2%}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main() -> None:
    args = parse_args()
    pl.seed_everything(args.seed)
    train_x, test_x, train_y, test_y = digits(torch.device("cpu"))
    train = DataLoader(TensorDataset(train_x, train_y), args.batch, shuffle=True, drop_last=True)
    test = DataLoader(TensorDataset(test_x, test_y), args.batch)
    last = args.checkpoint and args.checkpoint / "last.ckpt"
    trainer = pl.Trainer(
        strategy="ddp",
        accelerator=args.accelerator,
        devices=args.devices,
        max_epochs=args.epochs,
        callbacks=[ModelCheckpoint(args.checkpoint, save_last=True)] if args.checkpoint else [],
        enable_checkpointing=args.checkpoint is not None,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(
        Digits(args.lr, args.seed, args.losses), train, test, ckpt_path=last if last and last.exists() else None
    )


if __name__ == "__main__":
    main()
