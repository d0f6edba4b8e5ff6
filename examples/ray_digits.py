"""Train a small CNN on handwritten digits with Ray Train, data-parallel, with checkpoints.

    python THIS_FILE --storage out/ray

If you run it again with more epochs, it resumes from the last checkpoint in the storage.
"""

import argparse
import json
import pathlib
import tempfile

import checkpoint
import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_model
from torch.utils.data import DistributedSampler
from train_digits_ddp import CNN, digits, train_epoch

import commlib


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="allreduce", help="a commlib algorithm (plain Ray has no choice)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32, help="images per worker and step")
    parser.add_argument("--storage", type=pathlib.Path, required=True, help="directory that all workers see")
    parser.add_argument("--losses", type=pathlib.Path, help="file: one JSON row per epoch, written by rank 0")
    return parser.parse_args()


def train(args: argparse.Namespace) -> None:
    """Train on one worker."""
    rank, ranks = ray.train.get_context().get_world_rank(), args.workers
    torch.manual_seed(0)
    model = prepare_model(CNN(), parallel_strategy=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model = commlib.wrap(model, algorithm=args.algorithm, optimizer=optimizer)

    images, _, labels, _ = digits(ray.train.torch.get_device())
    sampler = DistributedSampler(range(len(images)), ranks, rank, drop_last=True)
    torch.manual_seed(1 + rank)
    done, saved = 0, ray.train.get_checkpoint()
    if saved is not None:
        with saved.as_directory() as folder:
            done = checkpoint.load_rank(pathlib.Path(folder), model, optimizer)
    for epoch in range(done, args.epochs):
        sampler.set_epoch(epoch)
        num_steps = len(sampler) // args.batch
        order = torch.tensor(list(sampler)[: num_steps * args.batch]).view(num_steps, args.batch)
        losses = train_epoch(model, optimizer, images[order], labels[order])
        if rank == 0 and args.losses:
            with args.losses.open("a") as file:
                file.write(json.dumps({"epoch": epoch, "losses": losses}) + "\n")
        with tempfile.TemporaryDirectory() as folder:  # Ray merges the files of all workers into one checkpoint
            checkpoint.save_rank(pathlib.Path(folder), model, optimizer, epoch + 1)
            ray.train.report({"loss": losses[-1]}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def main() -> None:
    args = parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config=args,
        scaling_config=ray.train.ScalingConfig(num_workers=args.workers, use_gpu=torch.cuda.is_available()),
        run_config=ray.train.RunConfig(storage_path=str(args.storage.resolve()), name="digits"),
    )
    print(f"loss {trainer.fit().metrics['loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
