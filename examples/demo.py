"""Train a CNN on handwritten digits with DDP and with commlib, side by side, and compare.

All systems start from the same weights and use the same images and dropout. They take turns step by step in the same
processes, so that other load on the machine affects all of them equally.

Run it with: scripts/demo, or torchrun --standalone --nproc_per_node 2 examples/demo.py
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from train_digits import CNN, accuracy, digits

import commlib
from commlib.algorithms import AllReduce

_WARMUP_STEPS = 10  # DDP rebuilds its buckets in these steps, and commlib plans its own: excluded from the step times
_DEFAULT_PLOT = pathlib.Path(__file__).resolve().parent.parent / "out" / "demo.png"
_LOSS_WINDOW = 11

SYSTEMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": DistributedDataParallel,
    "commlib allreduce": lambda model: commlib.wrap(model, algorithm="allreduce"),
    "commlib bf16 wire": lambda model: commlib.wrap(model, algorithm=AllReduce(wire_dtype="bf16")),
    "commlib bytegrad": lambda model: commlib.wrap(model, algorithm="bytegrad"),
}


class Contestant:
    """One system, its own copy of the model, and its measurements."""

    def __init__(self, name: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.name = name
        self.model = SYSTEMS[name](CNN())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.losses: list[float] = []
        self.steps_s: list[float] = []
        self.wire_bytes: list[float] = []
        self.accuracy = float("nan")

    def step(self, images: Tensor, labels: Tensor, noise_seed: int) -> None:
        """Run one training step; the time starts when all ranks are ready."""
        torch.manual_seed(noise_seed)
        dist.barrier()
        sent, start = loopback_bytes(), time.perf_counter()
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps_s.append(time.perf_counter() - start)
        dist.barrier()
        self.wire_bytes.append((loopback_bytes() - sent) / dist.get_world_size())
        self.losses.append(loss.item())

    @property
    def gradient_bytes(self) -> int:
        """Total size of all gradients."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    @property
    def step_ms(self) -> float:
        """Median step time in milliseconds."""
        return statistics.median(self.steps_s[_WARMUP_STEPS:] or self.steps_s or [float("nan")]) * 1e3

    @property
    def wire_mb(self) -> float:
        """Median of the megabytes that one rank sends in a step."""
        return statistics.median(self.wire_bytes or [float("nan")]) / 1e6


def loopback_bytes() -> float:
    """Return the bytes sent over the loopback interface of this machine, including headers; NaN if unknown."""
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/self/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == "lo":
                return float(counters.split()[8])
    return float("nan")


def batches(images: Tensor, labels: Tensor, epochs: int, batch: int, seed: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the epoch and this rank's batch of each step."""
    sampler = DistributedSampler(range(len(images)), seed=seed, drop_last=True)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for picked in torch.tensor(list(sampler)).split(batch):
            if len(picked) == batch:
                yield epoch, images[picked], labels[picked]


class Display:
    """Progress on rank 0: live on a terminal, a line per epoch elsewhere."""

    def __init__(self, contestants: list[Contestant], num_steps: int) -> None:
        self.contestants = contestants
        self.console = Console(quiet=dist.get_rank() != 0)
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeElapsedColumn())
        self.progress = Progress(*columns, console=self.console)
        self.task = self.progress.add_task("", total=num_steps)
        self.is_live = self.console.is_terminal and dist.get_rank() == 0

    def __rich__(self) -> Group:
        """Draw the progress bar and the current results."""
        return Group(self.progress, result_table(self.contestants, title=None))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Keep the live display on the screen while the block runs."""
        with Live(self, console=self.console, transient=True) if self.is_live else contextlib.nullcontext():
            yield

    def end_of_epoch(self, epoch: int) -> None:
        """Print the current losses if there is no live display."""
        if not self.is_live:
            figures = [f"{c.name} {c.losses[-1]:.4f} ({c.accuracy:.1%})" for c in self.contestants]
            self.console.print(f"epoch {epoch + 1}, loss (accuracy):  " + "  ".join(figures), soft_wrap=True)


def train(contestants: list[Contestant], args: argparse.Namespace) -> None:
    """Train all contestants on the same batches in turns."""
    train_x, test_x, train_y, test_y = digits(torch.device("cpu"))
    steps = list(batches(train_x, train_y, args.epochs, args.batch, args.seed))
    display = Display(contestants, len(steps))
    with display.running():
        for idx, (epoch, images, labels) in enumerate(steps):
            turn = idx % len(contestants)
            for contestant in contestants[turn:] + contestants[:turn]:
                contestant.step(images, labels, noise_seed=idx * dist.get_world_size() + dist.get_rank())
            display.progress.advance(display.task)
            if idx + 1 == len(steps) or steps[idx + 1][0] != epoch:
                for contestant in contestants:
                    contestant.accuracy = accuracy(contestant.model.module, test_x, test_y)
                display.end_of_epoch(epoch)


def agreement(contestant: Contestant, reference: Contestant) -> str:
    """Return, on every rank, the first step in which the loss of a rank differs from the reference in any bit."""
    differing = [
        idx for idx, pair in enumerate(zip(contestant.losses, reference.losses, strict=True)) if len({*pair}) > 1
    ]
    first = torch.tensor(differing[0] if differing else len(contestant.losses))
    dist.all_reduce(first, dist.ReduceOp.MIN)
    return "yes" if first == len(contestant.losses) else f"no (step {first.item() + 1})"


def result_table(contestants: list[Contestant], title: str | None, agreements: list[str] | None = None) -> Table:
    """Return a table of the current results."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("system", no_wrap=True)
    for column in ("loss", "accuracy", "step", "sent/step", *(["equal losses"] if agreements else [])):
        table.add_column(column, justify="right", no_wrap=True)
    for idx, c in enumerate(contestants):
        loss = f"{statistics.fmean(c.losses[-_LOSS_WINDOW:]):.4f}" if c.losses else "-"
        cells = [loss, f"{c.accuracy:.2%}", f"{c.step_ms:.1f} ms", f"{c.wire_mb:.2f} MB"]
        table.add_row(c.name, *cells, *([agreements[idx]] if agreements else []))
    return table


def notes(contestants: list[Contestant]) -> str:
    """Return an explanation of the columns."""
    world_size, gradient_mb = dist.get_world_size(), contestants[0].gradient_bytes / 1e6
    return (
        f"loss: training loss, mean of the last {_LOSS_WINDOW} steps of rank 0; accuracy: on the test images;\n"
        f"step: median on rank 0; sent: per rank, median, measured on the loopback interface, including headers\n"
        f"(by formula a full-precision ring all-reduce sends 2(N-1)/N of the gradients' {gradient_mb:.2f} MB, "
        f"{2 * (world_size - 1) / world_size * gradient_mb:.2f} MB);\n"
        f"equal losses: whether the loss of every step on every rank equals DDP's, bit for bit;\n"
        f"loopback is too fast for fewer bytes to matter: `commlib compare` predicts their gain on a network"
    )


def plot(contestants: list[Contestant], path: pathlib.Path) -> None:
    """Plot loss curves and step times to a PNG file."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", width_ratios=[3, 2])
    styles = [("0.7", 5, "-"), ("tab:blue", 1.8, "-"), ("tab:orange", 1.8, "--"), ("tab:green", 1.8, ":")]
    for c, (color, width, line) in zip(contestants, styles, strict=False):
        smooth = torch.tensor(c.losses).unfold(0, min(_LOSS_WINDOW, len(c.losses)), 1).mean(1)
        steps = range(len(c.losses) - len(smooth) + 1, len(c.losses) + 1)
        left.plot(steps, smooth.tolist(), color=color, linewidth=width, linestyle=line, label=c.name)
    left.set(yscale="log", xlabel="step", ylabel=f"training loss (mean of {_LOSS_WINDOW} steps)", title="Loss")
    left.legend(frameon=False)
    times = [[1e3 * seconds for seconds in c.steps_s[_WARMUP_STEPS:] or c.steps_s] for c in contestants]
    boxes = right.boxplot(
        times, orientation="horizontal", showfliers=False, widths=0.5, patch_artist=True, medianprops={"color": "black"}
    )
    for patch, (color, *_) in zip(boxes["boxes"], styles, strict=False):
        patch.set_facecolor(color)
    right.set_yticks(range(1, len(times) + 1), [c.name.replace(" ", "\n", 1) for c in contestants])
    right.invert_yaxis()
    right.set(xlabel="milliseconds", title="Step time: median, quartiles", xlim=(0, None))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def compare(args: argparse.Namespace) -> None:
    """Train all systems; print and plot the comparison."""
    contestants = [Contestant(name, args.seed) for name in SYSTEMS]
    train(contestants, args)
    agreements = ["-", *(agreement(c, contestants[0]) for c in contestants[1:])]
    if dist.get_rank() == 0:
        title = f"CNN of {sum(p.numel() for p in contestants[0].model.parameters()):,} parameters, handwritten digits, "
        console = Console()
        console.print(result_table(contestants, f"{title}{dist.get_world_size()} ranks over Gloo", agreements))
        console.print(notes(contestants), highlight=False, soft_wrap=True)
        plot(contestants, args.plot)
        console.print(f"plot: {args.plot}", soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=pathlib.Path, default=_DEFAULT_PLOT, help="file for the plot (PNG)")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)

    compare(args)
    gc.collect()  # free DDP before the group: it could deadlock with Gloo's thread if it held the last reference
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
