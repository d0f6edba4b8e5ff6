"""Train a small CNN on handwritten digits through failures: torchrun restarts all ranks, and they resume.

    torchrun --standalone --nproc_per_node 2 --max-restarts 3 examples/restarts.py --checkpoint out/restarts --fail 1:25

--fail 1:25 kills rank 1 the first time it reaches step 25. The run ends with the same weights as an uninterrupted one,
bit for bit.
"""

import argparse
import os
import pathlib
import shutil
import signal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from train_digits import CNN, accuracy, digits

import commlib
from commlib.integrations import torchrun


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="allreduce", help="a commlib algorithm")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    parser.add_argument("--checkpoint", type=pathlib.Path, required=True, help="directory that all ranks see")
    parser.add_argument("--fail", help="RANK:STEP or RANK:STEP:raise, to see a restart")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def save(root: pathlib.Path, app: commlib.Checkpoint, step: int) -> None:
    """Write `root`/step-XXXXXX completely or not at all, because a rank may die during the write. Collective."""
    partial, final = root / "partial", root / f"step-{step:06d}"
    dcp.save({"app": app}, checkpoint_id=partial)
    if dist.get_rank() == 0:
        older = list(root.glob("step-*"))
        os.replace(partial, final)
        for path in older:
            shutil.rmtree(path)
    dist.barrier()


def load(root: pathlib.Path, app: commlib.Checkpoint) -> int:
    """Restore the latest checkpoint that rank 0 sees; return the number of completed steps. Collective."""
    if dist.get_rank() == 0:
        shutil.rmtree(root / "partial", ignore_errors=True)
    latest = [max(root.glob("step-*"), default=None)]
    dist.broadcast_object_list(latest)
    if latest[0] is None:
        return 0
    dcp.load({"app": app}, checkpoint_id=latest[0])
    return int(latest[0].name.removeprefix("step-"))


def fail_once(how: str | None, step: int) -> None:
    """Fail as specified by --fail, but not after a restart."""
    rank, at, kind = [*(how or "-1:0").split(":"), "kill"][:3]
    if (int(rank), int(at), os.environ["TORCHELASTIC_RESTART_COUNT"]) != (dist.get_rank(), step, "0"):
        return
    if kind == "raise":
        raise RuntimeError(f"rank {rank} fails in step {step}, as specified by --fail")
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    args = parse_args()
    device = torch.device(args.device, int(os.environ["LOCAL_RANK"]) if args.device == "cuda" else None)
    torchrun.init_process_group("nccl" if device.type == "cuda" else "gloo")  # supports restarts, unlike torch's own
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = CNN().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # Fixed bucket sizes make an interrupted run comparable with an uninterrupted one.
    model = commlib.wrap(model, algorithm=args.algorithm, optimizer=optimizer, bucket_cap_mb=25)
    app = commlib.Checkpoint(model, optimizer)
    done = load(args.checkpoint, app)
    print(f"rank {rank} (process {os.getpid()}) resumes after step {done}", flush=True)

    images, test_images, labels, test_labels = digits(device)
    for step in range(done + 1, args.steps + 1):
        torch.manual_seed(ranks * step + rank)  # derived from the step: no random state to save
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(step))
        batch = order[rank * args.batch : (rank + 1) * args.batch]
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        fail_once(args.fail, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % args.every == 0 or step == args.steps:
            save(args.checkpoint, app, step)

    commlib.synchronize(model)  # averages weights that differ between ranks, as in the checkpoint's model
    if rank == 0:
        print(f"accuracy {accuracy(model.module, test_images, test_labels):.2%}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
