"""Train a GPT on one GPU, with one or several ranks that share it, and compare the step times of all systems.

python benchmarks/gpu_train.py --ranks 1 --seconds 32 --out results

Forward and loss run under autocast to bf16; the systems take turns in blocks of a few steps. One rank measures the
cost of wrapping (compared with `none`, the bare model); several ranks compare each system with DDP. Ranks that share
a device communicate over loopback by NCCL, each as if on a host of its own, or by Gloo if NCCL refuses. Their times
say nothing about a network. For some systems a step is traced: begin and end of encoding, collectives and decoding.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

import gpu_trace
import harness
import launch
import numpy as np
import torch
import torch.distributed as dist
from intervals import median_interval, rotation
from models import OPTIMIZERS, gpt
from systems import System, block_of, install, parse, parse_list, shard
from torch import Tensor

import commlib

_BARE, _DDP = "none", "ddp(gradient_as_bucket_view=True)@25"
_CAP = "@25"
_WARM_UP = 3
_LEAST_BLOCK, _MOST_BLOCK, _BLOCK_S = 2, 20, 0.15
_PERIOD = 4
_NUM_BATCHES = 4
#: Which part of the time is kept for blocks and traces when systems are made.
_RACE_PART = 0.35
#: Seconds that a further repetition, the next block and the next trace need to be left, and what all traces need.
_REPETITION_S, _BLOCK_LEFT_S, _TRACE_S, _TRACES_S = 3.0, 2.0, 1.5, 5.0
#: Most that a wrapped step may take, as parts of the step of another system, by the number of ranks.
_GOALS = {1: (_BARE, 1.03), 2: (_DDP, 1.05)}
#: The traced systems, in this order; the others are not traced.
_TRACED = ("bytegrad", "topk", "allreduce", "powersgd")
_SOURCES = ("_pydecimal.py", "typing.py", "argparse.py", "turtle.py", "tarfile.py", "doctest.py", "inspect.py")


def systems_of(ranks: int) -> list[str]:
    """Return the systems that are timed by default."""
    algorithms = ["allreduce", "bytegrad", f"diloco(period={_PERIOD})", "topk", "ef_quantized", "powersgd"]
    sharded = ["fsdp", "shard(weights=int8,gradients=int8)"] if ranks > 1 else []
    return [*([_BARE] if ranks == 1 else []), _DDP, *(f"commlib:{name}{_CAP}" for name in algorithms), *sharded]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--backend", choices=("nccl", "gloo"), help="nccl, then gloo, on CUDA by default")
    parser.add_argument("--seconds", type=float, default=60, help="for everything")
    parser.add_argument("--repetitions", type=int, default=1000, help="at most; else as many as there is time for")
    parser.add_argument("--size", default="100m", choices=sorted(gpt.SIZES))
    parser.add_argument("--batch", type=int, help="texts per rank and step; 16, with several ranks 4")
    parser.add_argument("--systems", help="as in systems.py, comma-separated")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"), help="folder for the results")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.batch = args.batch or (16 if args.ranks == 1 else 4)
    try:
        args.names = [each.name for each in parse_list(args.systems)] if args.systems else systems_of(args.ranks)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.until is not None:
        return run_rank(args)
    until = time.monotonic() + args.seconds
    own = [*(sys.argv[1:] if argv is None else argv), "--until", str(until)]
    backends = [args.backend] if args.backend else ["gloo"] if args.device == "cpu" else ["nccl", "gloo"]
    for backend in backends:
        env = {"OMP_NUM_THREADS": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "WARN", "LOCAL_RANK": "0"}
        env |= {"NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0", "NCCL_RAS_ENABLE": "0"}
        env |= {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}  # ranks take turns on the device, see several_ranks.py
        try:
            command = [*own, "--backend", backend]
            launch.run_local(args.ranks, pathlib.Path(__file__).resolve(), command, env, until - time.monotonic() + 5)
            return 0
        except launch.WorkerError as error:
            print(error, file=sys.stderr)
            if backend == backends[-1] or _works(args, backend):
                harness.note(f"training, {args.ranks} ranks, {backend}", has_failed=True, text=str(error)[-3000:])
                return 1
            harness.note(f"NCCL, {args.ranks} ranks", answer=_answer_in(str(error)))
    return 1


def _mark_of(args: argparse.Namespace) -> pathlib.Path:
    """Return the file that names the backend that worked."""
    return args.out / f"backend-r{args.ranks}.txt"


def _works(args: argparse.Namespace, backend: str) -> bool:
    return _mark_of(args).exists() and _mark_of(args).read_text() == backend


def _answer_in(text: str) -> str:
    said = [line for line in text.splitlines() if "NCCL" in line and "INFO" not in line]
    return " | ".join(said[-2:])[:400]


class Racer:
    """One system with its own model and optimizer."""

    def __init__(self, system: System, bench: Bench) -> None:
        self.system = system
        torch.manual_seed(0)
        with torch.device(bench.device):
            model = gpt.GPT(gpt.SIZES[bench.args.size])
        model = shard(system, model)
        self.model, self.optimizer = install(system, model, OPTIMIZERS["adamw"](model.parameters(), 3e-4))
        self.blocks_s: list[float] = []
        self.peak_bytes = 0
        self.block = _LEAST_BLOCK

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Take one training step; returns the loss."""
        inputs, target = batch
        with torch.autocast(inputs.device.type, dtype=torch.bfloat16):
            loss = gpt.next_byte_loss(self.model(inputs), target)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class Bench:
    """State shared by the systems: the group, the data, and the time."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device, 0 if args.device == "cuda" else None)
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        os.environ["NCCL_HOSTID"] = f"commlib-rank-{self.rank}"
        if args.device == "cuda":
            torch.cuda.set_device(self.device)
        torch.set_num_threads(1)
        backend = "cpu:gloo,cuda:nccl" if args.backend == "nccl" else "gloo"
        patience_s = 20 if args.device == "cuda" else 120  # a machine without a GPU may be busy with other things
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=patience_s))
        self.batches = [self._draw(idx) for idx in range(_NUM_BATCHES)]
        self.racers: dict[str, Racer] = {}

    def _draw(self, step: int) -> tuple[Tensor, Tensor]:
        import corpus

        inputs, target = corpus.batch(_text(), (step, self.rank), self.args.batch, gpt.SIZES[self.args.size].context)
        return inputs.to(self.device), target.to(self.device)

    def try_backend(self) -> None:
        """Reduce on the device, and note that it went well; raises where several ranks cannot share it."""
        x = torch.ones(1000, device=self.device)
        try:
            dist.all_reduce(x)
            self.synchronize()
            assert float(x[0]) == self.world_size
        except Exception as error:
            if self.args.backend != "nccl":
                raise
            print(f"NCCL: {error}", flush=True)
            os._exit(1)  # an aborted NCCL must not hold the process up
        if self.rank == 0:
            self.args.out.mkdir(parents=True, exist_ok=True)
            _mark_of(self.args).write_text(self.args.backend)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def everyones(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value)
        return gathered

    def has_time(self, seconds: float) -> bool:
        """Return whether all ranks have so many left."""
        return all(self.everyones(time.monotonic() + seconds < self.args.until))

    def add(self, name: str) -> None:
        """Make a system, take its first steps and measure its memory; one that fails is noted and left out."""
        gc.collect()
        before, words, racer = self._reset_peak(), None, None
        try:
            racer = Racer(parse(name), self)
            took_s = [self._timed_steps(racer, 1) for _ in range(_WARM_UP)][-1]
            racer.peak_bytes = self._peak() - before
            wanted = int(_BLOCK_S / max(*self.everyones(took_s), 1e-6))
            racer.block = block_of(racer.system, min(_MOST_BLOCK, max(_LEAST_BLOCK, wanted)))
        except Exception as error:
            traceback.print_exc()
            words = f"{type(error).__name__}: {error}"
        failed = [each for each in self.everyones(words) if each is not None]
        if failed and self.rank == 0:
            harness.note(f"{name}, {self.world_size} ranks", has_failed=True, text="\n".join(failed)[:2000])
        if racer is not None and not failed:
            self.racers[name] = racer

    def _reset_peak(self) -> int:
        if self.device.type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0

    def _timed_steps(self, racer: Racer, count: int) -> float:
        self.synchronize()
        start = time.perf_counter()
        for idx in range(count):
            racer.step(self.batches[idx % _NUM_BATCHES])
        self.synchronize()
        return (time.perf_counter() - start) / count

    def time_block(self, racer: Racer) -> None:
        """Time one block, the slowest rank's; a step before it is not timed."""
        racer.step(self.batches[0])
        self.synchronize()
        dist.barrier()
        racer.blocks_s.append(max(self.everyones(self._timed_steps(racer, racer.block))))


def _text() -> Tensor:
    import inspect

    folder = pathlib.Path(inspect.__file__).parent
    found = b"".join((folder / name).read_bytes() for name in _SOURCES if (folder / name).exists())
    return torch.frombuffer(bytearray(found), dtype=torch.uint8)


def run_rank(args: argparse.Namespace) -> int:
    """Be one of the ranks."""
    bench = Bench(args)
    bench.try_backend()
    for idx, name in enumerate(args.names):
        if idx < 2 or bench.has_time(_RACE_PART * args.seconds):
            bench.add(name)
        elif bench.rank == 0:
            print(f"no time for {name} (--seconds)", flush=True)
    race(bench)
    report(bench)
    trace(bench)
    for racer in bench.racers.values():
        if racer.system.is_wrapped:
            commlib.unwrap(racer.model)
    bench.racers.clear()
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    return 0


def race(bench: Bench) -> None:
    """Time blocks of all systems in turns, until only the time for the remaining work is left."""
    repetition, racers = 0, list(bench.racers.values())
    while racers and repetition < bench.args.repetitions:
        if repetition > 0 and not bench.has_time(_REPETITION_S + _TRACES_S):
            return
        for place in rotation(len(racers), repetition):
            if not bench.has_time(_BLOCK_LEFT_S + (_TRACES_S if repetition else 0.0)):
                return
            bench.time_block(racers[place])
        repetition += 1


def rows_of(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield a row per system, with ratios of the medians of paired blocks."""
    for name, racer in bench.racers.items():
        if not racer.blocks_s:
            continue
        row: dict[str, Any] = {"system": name, "ranks": bench.world_size, "backend": bench.args.backend}
        row |= {"ms": float(np.median(racer.blocks_s)) * 1e3, "steps_per_block": racer.block}
        for other in (_BARE, _DDP):
            base = bench.racers[other].blocks_s if other in bench.racers else []
            pairs = [a / b for a, b in zip(racer.blocks_s, base, strict=False)]
            if pairs and other != name:
                ratio = median_interval(pairs)
                row[f"to_{other.partition('(')[0]}"] = [ratio.median, ratio.lo, ratio.hi]
        yield {**row, "peak_mb": racer.peak_bytes / 1e6, "blocks_s": racer.blocks_s}


def report(bench: Bench) -> None:
    """Write and report the measurements; the loss must be finite."""
    losses = {name: float(racer.step(bench.batches[0])) for name, racer in bench.racers.items()}
    if bench.rank:
        return
    rows = list(rows_of(bench))
    for row in rows:
        facts = {key: value for key, value in row.items() if key not in ("system", "blocks_s", "ranks")}
        base, goal = _GOALS.get(bench.world_size, (_BARE, 0.0))
        ratio = row.get(f"to_{base.partition('(')[0]}")
        if row["system"].startswith("commlib:allreduce") and goal and ratio:
            facts |= {"goal": goal, "is": "met" if ratio[0] <= goal else "MISSED"}
        facts |= {"loss": losses[row["system"]], "blocks": len(row["blocks_s"])}
        harness.note(f"{row['system']}, {bench.world_size} ranks", not np.isfinite(facts["loss"]), **facts)
    settings = {"model": bench.args.size, "batch": bench.args.batch, "losses": losses}
    path = bench.args.out / f"train-{bench.args.device}-r{bench.world_size}.json"
    harness.write_json(str(path), {"header": harness.header(), **settings, "rows": rows})


def trace(bench: Bench) -> None:
    """Trace a step of some systems, as long as there is time; rank 0 notes where its parts lie."""
    traced = [racer for kind in _TRACED for racer in bench.racers.values() if racer.system.variant == kind]
    for racer in traced:
        name = racer.system.name
        if not bench.has_time(_TRACE_S):
            return
        racer.step(bench.batches[0])
        bench.synchronize()
        dist.barrier()
        path = bench.args.out / f"trace-r{bench.world_size}-{gpu_trace.file_name(name)}.json.gz"
        found = gpu_trace.trace_step(
            lambda racer=racer: racer.step(bench.batches[1]), path if bench.rank == 0 else None
        )
        if bench.rank == 0:
            harness.note(f"trace of {name}, {bench.world_size} ranks", **found)
            print(json.dumps({"system": name, **found}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
