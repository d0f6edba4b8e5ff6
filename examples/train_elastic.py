"""Train the CNN of train_digits.py with members that come and go.

Start the service once, then any number of members, on any hosts, at any time:

    commlib rendezvous --fresh --port 29400
    python examples/train_elastic.py --steps 400
"""

import argparse
import logging

import torch
import torch.nn.functional as F
from train_digits import CNN, accuracy, digits

import commlib


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="127.0.0.1:29400", help="the service's host:port")
    parser.add_argument("--token", default="", help="the secret of the service, as in its token file")
    parser.add_argument("--min-members", type=int, default=1, help="training pauses below this number")
    parser.add_argument("--algorithm", default="allreduce", help="an algorithm on gradients")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=32, help="images per member and step")
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(0)
    images, test_images, labels, test_labels = digits(torch.device("cpu"))
    members = commlib.elastic.join(args.address, token=args.token, min_members=args.min_members)
    model = CNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    members.share("scheduler", scheduler)
    commlib.wrap(model, args.algorithm, optimizer=optimizer, process_group=members)

    while (step := members.num_rounds) < args.steps:
        draw = torch.Generator().manual_seed(1000 * step + members.id)
        batch = torch.randint(len(images), (args.batch,), generator=draw)
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 50 == 0 and members.rank == 0:
            print(f"step {step}: {members.world_size} members, loss {loss.item():.3f}", flush=True)

    if members.rank == 0:
        print(f"test accuracy {accuracy(model, test_images, test_labels):.3f}")
    members.close()


if __name__ == "__main__":
    main()
