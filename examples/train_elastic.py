"""Train the CNN of train_digits.py with members that come and go.

Start the service once, then any number of members, on any hosts, at any time:

    commlib rendezvous --fresh --port 29400
    python examples/train_elastic.py --epochs 10
"""

import argparse
import logging
import os
import pathlib

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from train_digits import CNN, accuracy, digits

import commlib


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="127.0.0.1:29400", help="the service's host:port")
    parser.add_argument("--token", default="", help="the secret of the service, as in its token file")
    parser.add_argument("--min-members", type=int, default=1, help="training pauses below this number")
    parser.add_argument("--algorithm", default="allreduce", help="an algorithm on gradients")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32, help="images per member and step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--checkpoint", type=pathlib.Path, help="directory: begin with its newest file, save to it")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(0)
    images, test_images, labels, test_labels = digits(torch.device("cpu"))

    members = commlib.elastic.join(args.address, token=args.token, min_members=args.min_members)
    sampler = commlib.elastic.Sampler(images, args.batch, members)
    loader = members.loader(DataLoader(TensorDataset(images, labels), batch_sampler=sampler, num_workers=1))
    model = CNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    members.share("scheduler", scheduler)
    if args.checkpoint and (saved := sorted(args.checkpoint.glob("*.pt"))):
        members.load_state_dict(torch.load(saved[-1]))
    commlib.wrap(model, args.algorithm, optimizer=optimizer, process_group=members)

    while (epoch := sampler.epoch) < args.epochs:
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        if members.rank == 0:
            correct = accuracy(model, test_images, test_labels)
            print(f"epoch {epoch}: {members.world_size} members, test accuracy {correct:.3f}", flush=True)
            if args.checkpoint:
                save(args.checkpoint, members)
    members.close()


def save(directory: pathlib.Path, members: commlib.elastic.Members) -> None:
    """Write a checkpoint that is named after its round, so that no member replaces a newer one."""
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / f"partial-{members.id}"
    torch.save(members.state_dict(), partial)
    os.replace(partial, directory / f"round-{members.num_rounds:08d}.pt")


if __name__ == "__main__":
    main()
