"""One rank of a benchmark: reads its task from a JSON file and trains; rank 0 writes the measurements.

Not for direct use: step.py and convergence.py start it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import datetime
import gc
import hashlib
import json
import math
import os
import pathlib
import re
import sys
import time
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported later, its default arguments hold the group, and with it threads
from intervals import rotation
from models import WORKLOADS, Batch, Workload
from systems import OPTIMIZER_OF, System, block_of, ddp_configurations, install, parse, shard, whole
from torch import Tensor

_NUM_BATCHES = 16
_SEARCH_KEEP = 4
_MOST_TRIAL_STEPS = 2000
_SEARCH_ROUNDS = 3
_SILENCE_BYTES = 10_000  # acknowledgements and similar packets in a tenth of a second
_DIGEST_EVERY = 10


class Racer:
    """One system with its own model and optimizer; all start from the same seed."""

    def __init__(self, system: System, workload: Workload, bench: Bench) -> None:
        self.system = system
        self.loss_of = workload.loss
        model = shard(system, workload.new_model(bench.spec["seed"], bench.device))
        kind = system.optimizer or OPTIMIZER_OF.get(system.variant, bench.spec.get("optimizer"))
        self.model, self.optimizer = install(system, model, workload.make_optimizer(model, kind, system.lr))
        self.num_steps = 0
        self.blocks_s: list[float] = []
        self.wire_bytes: list[float] = []
        self.wire_packets: list[float] = []
        self.exposed_s: list[float] = []
        self.loss = float("nan")

    def step(self, batch: Batch) -> Tensor:
        """Take one training step; returns the loss."""
        inputs, target = batch
        loss = self.loss_of(self.model(inputs), target)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1
        return loss.detach()

    def is_planned(self) -> bool:
        """Return whether the buckets are final: commlib tries several plans in the first steps."""
        return not self.system.is_wrapped or self._stats().get("plan") not in ("initial", "trial")

    def describe(self) -> dict[str, Any]:
        """Return the measurements, ready for JSON."""
        keys = ("blocks_s", "wire_bytes", "wire_packets", "exposed_s", "loss", "num_steps")
        return {"configuration": self.system.name, **{key: getattr(self, key) for key in keys}, **self._stats()}

    def _stats(self) -> dict[str, Any]:
        if not self.system.is_wrapped:
            return {}
        import commlib

        stats = commlib.stats(self.model)
        buckets = [bucket.nbytes for bucket in stats.buckets]
        cost = None if stats.cost is None else dataclasses.asdict(stats.cost)
        sent = stats.wire_bytes_per_step
        return {"plan": stats.plan, "plan_cost": cost, "bucket_bytes": buckets, "reported_wire_bytes": sent}


class Bench:
    """State shared by the modes: the process group, the data, progress and the network's counters."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.device = torch.device(spec["device"], int(os.environ["LOCAL_RANK"]) if spec["device"] == "cuda" else None)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        torch.set_num_threads(spec["threads"])
        timeout = datetime.timedelta(seconds=spec["timeout"])
        dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo", timeout=timeout)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.workload = WORKLOADS[spec["model"]]()
        self.batches = [self.draw(idx) for idx in range(_NUM_BATCHES)]
        self._done = 0

    def draw(self, step: int) -> Batch:
        """Return this rank's batch of a step, on the device."""
        inputs, target = self.workload.draw((self.spec["seed"], step, self.rank))
        return inputs.to(self.device), target.to(self.device)

    def racer(self, system: System) -> Racer:
        """Return a new model of that system."""
        return Racer(system, self.workload, self)

    def progress(self, label: str, steps: int) -> None:
        """Report that `steps` more steps are done."""
        self._done += steps
        if self.rank == 0:
            pathlib.Path(self.spec["progress"]).write_text(json.dumps({"label": label, "done": self._done}))

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def warm_up(self, racer: Racer) -> None:
        """Take the first steps of a system, in which buckets are rebuilt or planned."""
        for idx in range(self.spec["warmup"]):
            racer.step(self.batches[idx % _NUM_BATCHES])
        for _ in range(_MOST_TRIAL_STEPS):
            if racer.is_planned():
                break
            racer.step(self.batches[racer.num_steps % _NUM_BATCHES])
        self.progress(f"warm-up {racer.system.name}", self.spec["warmup"])

    def time_block(self, racer: Racer) -> float:
        """Time one block of steps, whole periods of the system; returns this rank's seconds per step.

        One step before it is not timed: the other systems have emptied the caches.
        """
        steps = block_of(racer.system, self.spec["block"])
        racer.step(self.batches[racer.num_steps % _NUM_BATCHES])
        self.synchronize()
        dist.barrier()
        before, start = _sent(), time.perf_counter()
        for _ in range(steps):
            loss = racer.step(self.batches[racer.num_steps % _NUM_BATCHES])
        self.synchronize()
        elapsed = time.perf_counter() - start
        dist.barrier()
        after, ranks_steps = _sent(), steps * self._ranks_on_interface
        racer.wire_bytes.append((after.nbytes - before.nbytes) / ranks_steps)
        racer.wire_packets.append((after.packets - before.packets) / ranks_steps)
        racer.loss = loss.item()
        self.progress(racer.system.name, steps + 1)
        _await_silence()
        return elapsed / steps

    @property
    def _ranks_on_interface(self) -> int:
        return self.world_size if os.environ.get("GLOO_SOCKET_IFNAME") == "lo" else 1

    def slowest(self, seconds: float) -> float:
        """Return the largest value of all ranks, on every rank."""
        gathered: list[float] = [0.0] * self.world_size
        dist.all_gather_object(gathered, seconds)
        return max(gathered)


class Sent(NamedTuple):
    """Traffic sent by an interface: bytes including headers, and packets including acknowledgements."""

    nbytes: int
    packets: int


def _sent() -> Sent:
    """Return the traffic sent by this host's interface so far."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    table = pathlib.Path("/proc/self/net/dev")
    found = re.search(rf"^\s*{re.escape(name)}:(.*)$", table.read_text(), re.MULTILINE) if table.exists() else None
    return Sent(*map(int, found[1].split()[8:10])) if found else Sent(0, 0)


def _await_silence() -> None:
    """Wait at most 10 s for the end of a background round, so that it does not disturb the next system."""
    before, deadline = -1, time.monotonic() + 10
    while (now := _sent().nbytes) > before + _SILENCE_BYTES and time.monotonic() < deadline:
        before = now
        time.sleep(0.1)


# -- modes ------------------------------------------------------------------------------------------------------------


def measure_times(bench: Bench) -> dict[str, Any]:
    """Race all systems: blocks of a few steps, interleaved, the order rotated each repetition."""
    racers, search = {}, {}
    for system in map(parse, bench.spec["systems"]):
        chosen = system
        if system.is_open:
            search = _search_ddp(bench)
            gc.collect()  # DDP is part of reference cycles; its buckets would stay
            chosen = parse(min(search, key=lambda name: search[name]))
        racers[system.name] = bench.racer(chosen)
        bench.warm_up(racers[system.name])
    names = list(racers)
    for repetition in range(bench.spec["reps"]):
        for idx in rotation(len(names), repetition):
            racer = racers[names[idx]]
            racer.blocks_s.append(bench.slowest(bench.time_block(racer)))
            _note_exposed(racer)
    return {"systems": {name: racer.describe() for name, racer in racers.items()}, "ddp_search": search}


def _note_exposed(racer: Racer) -> None:
    if racer.system.is_wrapped:
        import commlib

        racer.exposed_s.append(float(commlib.stats(racer.model).exposed_s))


def _search_ddp(bench: Bench) -> dict[str, float]:
    """Race DDP's configurations; returns the median step time of those that stayed to the end."""
    racers = [bench.racer(system) for system in ddp_configurations()]
    for racer in racers:
        bench.warm_up(racer)
    for lap in range(_SEARCH_ROUNDS):
        for racer in racers:
            racer.blocks_s.append(bench.slowest(bench.time_block(racer)))
        if lap == 0:
            racers = sorted(racers, key=lambda racer: racer.blocks_s[0])[:_SEARCH_KEEP]
    return {racer.system.name: float(np.median(racer.blocks_s)) for racer in racers}


def search_steps(warmup: int, block: int) -> int:
    """Return how many steps the race of DDP's configurations takes."""
    num_configurations = len(ddp_configurations())
    num_blocks = num_configurations + (_SEARCH_ROUNDS - 1) * _SEARCH_KEEP
    return num_configurations * warmup + num_blocks * (block + 1)


def measure_memory(bench: Bench) -> dict[str, Any]:
    """Return how much the first steps of one system raise the peak of resident memory, the largest of all ranks.

    The bare model trains first and is dropped, so that code pages, thread stacks and library workspaces, which every
    system needs, are in the baseline. The driver makes malloc give large blocks back at once (a fixed mmap threshold),
    so resident means live.
    """
    (system,) = map(parse, bench.spec["systems"])
    if system.is_wrapped:
        from commlib.kernels import native  # first: the memory of this code is not measured

        native.load()
    warm = bench.racer(parse("none"))
    for batch in bench.batches[:2]:
        warm.step(batch)
    del warm
    dist.barrier()
    baseline = _reset_peak(bench.device)
    racer = bench.racer(system)
    for idx in range(bench.spec["memory_steps"]):
        racer.step(bench.batches[idx % _NUM_BATCHES])
        bench.progress(f"memory {system.name}", 1)
    return {"peak_bytes": bench.slowest(_peak(bench.device) - baseline)}


def _reset_peak(device: torch.device) -> int:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else _memory("VmHWM")


def _memory(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def measure_losses(bench: Bench) -> dict[str, Any]:
    """Train every system on the same batches; returns each rank's losses and whether the replicas stayed identical."""
    return {"systems": {system.name: _losses(bench, system) for system in map(parse, bench.spec["systems"])}}


def _losses(bench: Bench, system: System) -> dict[str, Any]:
    racer = bench.racer(system)
    losses, digests = [], []
    for step in range(bench.spec["steps"]):
        losses.append(racer.step(bench.draw(step)).item())
        if (step + 1) % _DIGEST_EVERY == 0 or step + 1 == bench.spec["steps"]:
            digests.append(_digest(racer))
        bench.progress(system.name, 1)
    gathered: list[Any] = [None] * bench.world_size
    dist.all_gather_object(gathered, (losses, digests))
    identical = all(digests == gathered[0][1] for _, digests in gathered)
    return {"losses": [losses for losses, _ in gathered], "identical": identical, "digest": gathered[0][1][-1]}


def _digest(racer: Racer) -> str:
    digest = hashlib.sha256()
    for parameter in racer.model.parameters():
        digest.update(whole(parameter.detach()).cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def measure_final(bench: Bench) -> dict[str, Any]:
    """Train every system to the end of its schedule; return the quality of the consensus model on unseen data."""
    return {"systems": {system.name: _final(bench, system) for system in map(parse, bench.spec["systems"])}}


def _final(bench: Bench, system: System) -> dict[str, Any]:
    racer, steps = bench.racer(system), bench.spec["steps"]
    rounds_before, bytes_before = _communicated(racer)
    torch.manual_seed(bench.spec["seed"] * bench.world_size + bench.rank)  # every rank drops out its own units
    base = [group["lr"] for group in racer.optimizer.param_groups]
    for step in range(steps):
        for group, lr in zip(racer.optimizer.param_groups, base, strict=True):
            group["lr"] = lr * schedule(step, steps)
        racer.step(bench.draw(step))
        bench.progress(system.name, 1)
    digests: list[Any] = [None] * bench.world_size
    dist.all_gather_object(digests, _digest(racer))
    rounds, sent = _communicated(racer)
    if system.is_wrapped:
        import commlib

        commlib.synchronize(racer.model)
    return {
        **_validate(bench, racer),
        "identical": len(set(digests)) == 1,
        "rounds": None if rounds is None else rounds - rounds_before,
        "sent_bytes": None if sent is None else sent - bytes_before,
    }


def _communicated(racer: Racer) -> tuple[Any, Any]:
    """Return the rounds so far and the bytes that this rank has sent, where commlib counts them."""
    if not racer.system.is_wrapped:
        return None, None
    import commlib

    stats = commlib.stats(racer.model)
    return stats.rounds, stats.wire_bytes


def schedule(step: int, steps: int) -> float:
    """Return the factor of the learning rate: a linear rise over the first twentieth, then a cosine down to a tenth."""
    rise = max(1, steps // 20)
    if step < rise:
        return (step + 1) / rise
    return 0.55 + 0.45 * math.cos(math.pi * (step - rise) / max(1, steps - rise))


@torch.no_grad()
def _validate(bench: Bench, racer: Racer) -> dict[str, float]:
    """Return the mean loss and accuracy over the validation batches, each evaluated by one rank."""
    assert bench.workload.validation is not None
    # The bare model: a rank without a batch does not take part in a forward, nor in its broadcast of buffers.
    model = getattr(racer.model, "module", racer.model)
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)
    for inputs, target in bench.workload.validation()[bench.rank :: bench.world_size]:
        scores, target = model(inputs.to(bench.device)), target.to(bench.device)
        correct = (scores.argmax(-1) == target).sum().item()
        count = target.numel()
        totals += torch.tensor([count * racer.loss_of(scores, target).item(), correct, count])
    dist.all_reduce(totals)
    return {"loss": float(totals[0] / totals[2]), "accuracy": float(totals[1] / totals[2])}


def record_trials(bench: Bench) -> dict[str, Any]:
    """Time all plans that commlib would try, to the end."""
    import trials  # needs commlib, which other modes do without

    return trials.record(bench)


_MODES = {
    "time": measure_times,
    "memory": measure_memory,
    "losses": measure_losses,
    "final": measure_final,
    "trials": record_trials,
}


def main() -> None:
    spec = json.loads(pathlib.Path(sys.argv[1]).read_text())
    bench = Bench(spec)
    result = _MODES[spec["mode"]](bench)
    if bench.rank == 0:
        pathlib.Path(spec["result"]).write_text(json.dumps(result))
    del bench  # DDP holds the group: its threads would be alive when the interpreter ends, which may abort the process
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
