"""Time real training processes on emulated hosts and compare with the simulator: `commlib compare --emulate`.

The workload is shrunk (`emulation.synthetic`). Parameters, gradients, codecs, optimizers and messages are real. The
layers do not compute: they wait as for an accelerator, which leaves the processor to communication. The link rate is
scaled so that the ratio of communication time to computation time is that of the reference network: with B bytes of
parameters, C seconds of computation, p ranks and w bytes per second out of each node,

    (2 (p-1)/p B / w) / C   of the reference   =   (2 (h-1)/h B' / w') / C'   of h emulated hosts.

C' is measured first, on all hosts concurrently. All systems then run in the same processes, one after the other.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commlib.algorithms.auto import Auto
from commlib.algorithms.base import EXACTNESS, Algorithm
from commlib.emulation.cluster import EmulatedCluster, parse_rate
from commlib.emulation.netns import temporary_folder
from commlib.emulation.silence import await_silence
from commlib.emulation.synthetic import SyntheticModel, shrink
from commlib.errors import ConfigError
from commlib.network import presets, workloads
from commlib.network.model import Network, Workload
from commlib.reports import tables
from commlib.reports.comparison import Selection
from commlib.reports.progress import status
from commlib.reports.tables import Column
from commlib.simulation import compare
from commlib.simulation.probe import Probe, beside_nothing, probe, scaled, work_factor
from commlib.simulation.simulator import Options, simulate
from commlib.simulation.training import parameters_of
from commlib.transport.torch_dist import TorchTransport
from commlib.wrap import stats, wrap

#: Systems that are not commlib algorithms: no communication, and `DistributedDataParallel`.
BASELINES = ("none", "ddp")

_WARM_UP_STEPS = 4
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Setting:
    """Settings of an emulation.

    Attributes:
        hosts: Number of emulated hosts, one rank each.
        max_numel: Maximum number of elements of the shrunk workload.
        compute_s: Duration of forward plus backward, in seconds; ranks wait for it as for an accelerator.
        bucket_cap_mb: Size of all buckets, in MiB, for both the measurement and the simulation.
        reps: Number of timed blocks per system.
        block: Steps per block, rounded up to whole periods of the algorithm.
        timeout_s: Time limit for all systems at one rate, in seconds.
        latency_us: One-way latency added between the hosts, in microseconds. Unlike the rate, it is not scaled.
    """

    hosts: int = 4
    max_numel: int = 4_000_000
    compute_s: float = 0.25
    bucket_cap_mb: float = 4.0
    reps: int = 3
    block: int = 3
    timeout_s: float = 7200.0
    latency_us: float = 0.0


@dataclass(frozen=True)
class Measurement:
    """The measurement of one system on the emulated hosts.

    Attributes:
        system: An algorithm's name, or one of `BASELINES`.
        step_s: Median over the blocks of the seconds per step, averaged over ranks.
        predicted_s: Simulated seconds per step, from the probe and the step without communication; None for baselines.
        blocks_s: Seconds per step of each block.
        algorithm: The algorithm at the end of the run: for "auto" its choice, otherwise the system.
    """

    system: str
    step_s: float
    predicted_s: float | None
    blocks_s: tuple[float, ...]
    algorithm: str

    @property
    def error(self) -> float | None:
        """`predicted_s / step_s - 1`."""
        return None if self.predicted_s is None else self.predicted_s / self.step_s - 1


@dataclass(frozen=True)
class Emulation:
    """The measurements of all systems at one rate.

    Attributes:
        network: The name of the network that the rate represents, or "".
        rate_bps: Payload rate of each host's link, in bit/s.
        scale: The network's bandwidth divided by the rate; None if the rate was given.
        latency_us: One-way latency added between the hosts, in microseconds; the network's latency is not added.
        rtt_s: Measured round-trip time between the hosts, in seconds.
        links: Description of the emulated cluster.
        compute_s: Duration of a step without communication, on all hosts concurrently, in seconds.
        rows: One measurement per system.
        found: The results of the probe on the hosts.
        refused: Reasons why systems were not run, or not simulated, by name.
    """

    network: str
    rate_bps: float
    scale: float | None
    latency_us: float
    rtt_s: float
    links: str
    compute_s: float
    rows: tuple[Measurement, ...]
    found: dict[str, Any]
    refused: dict[str, str] = field(default_factory=dict)


def emulate(
    workload: Workload,
    targets: Sequence[Network | float],
    systems: Sequence[str],
    setting: Setting = Setting(),
    progress: Callable[[str], None] = lambda _: None,
) -> list[Emulation]:
    """Train on emulated hosts at each rate, and simulate the same configuration.

    Args:
        workload: The workload to shrink and train.
        targets: Networks to represent, or link rates in bit/s.
        systems: Algorithms in the notation of `commlib compare` ("topk(ratio=0.001)"), and `BASELINES`; "none" is
            always measured.
        setting: Settings of the emulation.
        progress: Called with a description of each stage.

    Raises:
        ConfigError: If a name is unknown, or the machine does not meet the requirements of emulated hosts.
        TransportError: If a process fails or exceeds the time limit.
    """
    systems = ["none", *(name for name in dict.fromkeys(systems) if name != "none")]
    for name in systems:
        if name not in BASELINES:
            _create(name)
    small = shrunk(workload, setting)
    results = []
    with EmulatedCluster(setting.hosts, latency_us=setting.latency_us) as cluster, temporary_folder() as folder:
        progress("a step without communication")
        alone = _run(cluster, Path(folder), small, ["none"], setting)
        for target in targets:
            rate_bps = (
                target
                if isinstance(target, float | int)
                else scaled_rate(workload, target, small, alone["rows"][0]["step_s"], setting)
            )
            for rank in range(setting.hosts):
                cluster.set_rate(rank, rate_bps)
            cluster.asked_rate = rate_bps
            cluster.calibrate()
            progress(f"{len(systems)} systems at {rate_bps / 1e6:.0f} Mbit/s")
            found = _run(cluster, Path(folder), small, systems, setting)
            is_rate = isinstance(target, float | int)
            results.append(
                Emulation(
                    network="" if is_rate else target.name,
                    rate_bps=rate_bps,
                    scale=None if is_rate else target.bytes_per_s * 8 / rate_bps,
                    latency_us=cluster.latency_us,
                    rtt_s=cluster.latency_s,
                    links=str(cluster),
                    compute_s=next(row["step_s"] for row in found["rows"] if row["system"] == "none"),
                    rows=tuple(Measurement(**{**row, "blocks_s": tuple(row["blocks_s"])}) for row in found["rows"]),
                    found=found["probe"],
                    refused=found["refused"],
                )
            )
    return results


def shrunk(workload: Workload, setting: Setting) -> Workload:
    """Return the shrunk fp32 workload that the hosts train."""
    small = shrink(workload, setting.max_numel)
    ratio = setting.compute_s / (small.forward_s + small.backward_s)
    return dataclasses.replace(
        small, forward_s=small.forward_s * ratio, backward_s=small.backward_s * ratio, dtype="fp32"
    )


def scaled_rate(workload: Workload, network: Network, small: Workload, compute_s: float, setting: Setting) -> float:
    """Return the rate, in bit/s, that keeps the ratio of communication to computation time on `network`.

    Args:
        workload: The full workload.
        network: The network to represent.
        small: The shrunk workload.
        compute_s: Duration of its step without communication, on all hosts concurrently, in seconds.
        setting: Settings of the emulation.
    """
    wire = 2 * (network.world_size - 1) / network.world_size * workload.nbytes / network.bytes_per_s
    own_bytes = 2 * (setting.hosts - 1) / setting.hosts * small.numel * 4
    return 8 * own_bytes / (wire / workload.step_s * compute_s)


def _run(
    cluster: EmulatedCluster, folder: Path, workload: Workload, systems: Sequence[str], setting: Setting
) -> dict[str, Any]:
    workloads.save(workload, folder / "workload.json")
    spec = {"folder": str(folder), "systems": list(systems), "setting": dataclasses.asdict(setting)}
    (folder / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, "-m", "commlib.emulation.experiment", str(folder / "spec.json")]
    cluster.run(command, env={"OMP_NUM_THREADS": "1"}, timeout=setting.timeout_s)
    return json.loads((folder / "result.json").read_text())


def run(selection: Selection, rates: str | None = None, hosts: int = 4, as_json: bool = False) -> list[Emulation]:
    """Run `commlib compare --emulate` and print the results.

    Args:
        selection: The workload, networks and algorithms to compare.
        rates: Link rates to use instead of the selection's networks, as in "200mbit,1gbit".
        hosts: Number of emulated hosts.
        as_json: Print JSON.

    Raises:
        ConfigError: If a name is unknown or a value is invalid.
    """
    targets = _targets(selection, rates)
    labels = compare.candidates(selection.algorithms, selection.exactness)
    for label, algorithm in labels.items():
        if (
            isinstance(algorithm, Auto)
            and min(algorithm.allow, selection.exactness, key=EXACTNESS.index) != algorithm.allow
        ):
            raise ConfigError(
                f"exactness: {label} may choose {algorithm.allow}; write auto(allow={selection.exactness!r})"
            )
    asked = {
        "bucket_cap_mb": selection.bucket_cap_mb,
        "block": selection.steps,
        "latency_us": selection.overrides.get("latency_us"),
    }
    setting = Setting(hosts=hosts, **{name: value for name, value in asked.items() if value is not None})
    with status("emulated hosts") as progress:
        found = emulate(selection.get_workload(), targets, ["ddp", *labels], setting, progress)
    if as_json:
        print(json.dumps([dataclasses.asdict(each) for each in found], indent=1))
        return found
    console = tables.console()
    for each in found:
        tables.show(table(selection.workload, each, console.width), console)
    return found


def _targets(selection: Selection, rates: str | None) -> list[Network | float]:
    if rates is None:
        return [presets.network(name.strip(), **selection.overrides) for name in selection.networks]
    if any(value is not None for name, value in selection.overrides.items() if name != "latency_us"):
        raise ConfigError("--rate: expected no network options with it, because the rate replaces the network")
    return [parse_rate(rate.strip()) for rate in rates.split(",")]  # pyright: ignore[reportReturnType]


def table(workload: str, emulation: Emulation, width: int) -> list[str]:
    """Format an emulation as the lines of a table."""
    name = f"{workload}, {emulation.network or 'a given rate'}: links of {emulation.rate_bps / 1e6:.1f} Mbit/s"
    scale = "" if emulation.scale is None else f", 1/{emulation.scale:.0f} of the network's"
    ddp_s = next((row.step_s for row in emulation.rows if row.system == "ddp"), math.nan)
    rows = sorted(emulation.rows, key=lambda row: row.step_s)
    names = [row.system if row.algorithm in row.system else f"{row.system}: {row.algorithm}" for row in rows]
    columns = [
        Column("system", names, left=True),
        Column("step ms", [f"{row.step_s * 1e3:.1f}" for row in rows]),
        Column("simulated ms", ["" if row.predicted_s is None else f"{row.predicted_s * 1e3:.1f}" for row in rows]),
        Column("error", ["" if row.error is None else f"{row.error:+.1%}" for row in rows]),
        Column("times DDP", [f"{ddp_s / row.step_s:.2f}" for row in rows]),
    ]
    links = emulation.links
    if emulation.network:
        links += f"; one-way latency {emulation.rtt_s * 5e5:.0f} us, instead of {emulation.network}'s"
    head, caption = tables.wrapped(name + scale, width, "  "), tables.wrapped(links, width, "  ")
    for system, reason in emulation.refused.items():
        caption += tables.wrapped(f"{tables.kept(system)}: {reason}", width, "  ")
    return [*head, *tables.fitted(columns, width, len(columns)), *caption, ""]


# --- on the hosts -----------------------------------------------------------------------------------------------------


class _Racer:
    """One system with its own model and optimizer."""

    def __init__(self, name: str, workload: Workload, setting: Setting) -> None:
        self.name = name
        self.algorithm = None if name in BASELINES else _steady(_create(name))
        self.blocks_s: list[float] = []
        model: torch.nn.Module = SyntheticModel(workload)
        self.optimizer = _make_optimizer(model, self.algorithm, workload)
        if name == "ddp":
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        elif self.algorithm is not None:
            wrap(model, self.algorithm, optimizer=self.optimizer, bucket_cap_mb=setting.bucket_cap_mb)
        self.model = model
        cycle = 1 if self.algorithm is None else self.algorithm.channel.cycle
        self.block = -(-setting.block // cycle) * cycle
        self.parts_s = [0.0, 0.0, 0.0]  # forward, backward, optimizer

    def steps(self, count: int) -> None:
        """Run training steps."""
        for _ in range(count):
            times = [time.perf_counter()]
            loss = self.model()
            times.append(time.perf_counter())
            loss.backward()
            times.append(time.perf_counter())
            self.optimizer.step()
            self.optimizer.zero_grad()
            times.append(time.perf_counter())
            self.parts_s = [part + b - a for part, a, b in zip(self.parts_s, times, times[1:], strict=False)]

    def time_block(self) -> None:
        """Run one untimed step, then a timed block; append the seconds per step, averaged over ranks.

        Wait at the end until background rounds stop sending, so that they do not delay the next system.
        """
        self.steps(1)
        dist.barrier()
        start_s = time.perf_counter()
        self.steps(self.block)
        own = torch.tensor((time.perf_counter() - start_s) / self.block, dtype=torch.float64, device="cpu")
        dist.all_reduce(own)
        self.blocks_s.append(float(own) / dist.get_world_size())
        await_silence()


def _create(label: str) -> Algorithm:
    """Return the algorithm for a label of `commlib compare`."""
    ((_, algorithm),) = compare.candidates(label).items()
    algorithm.optimizer_kind = None  # steps of a preset are measured with the workload's optimizer
    return algorithm


def _steady(algorithm: Algorithm) -> Algorithm:
    """Shorten the warm-up, because only the steps after it are measured."""
    channel = algorithm.channel
    algorithm.channel = dataclasses.replace(channel, warmup_steps=min(channel.warmup_steps, _WARM_UP_STEPS - 2))
    return algorithm


def _make_optimizer(model: torch.nn.Module, algorithm: Algorithm | None, workload: Workload) -> torch.optim.Optimizer:
    """Create the workload's optimizer, or the one that the algorithm requires, with a negligible learning rate."""
    if algorithm is not None and algorithm.optimizer_type is not None:
        return algorithm.optimizer_type(model.parameters(), lr=1e-6)  # pyright: ignore[reportCallIssue]
    if workload.optimizer == "adam":
        return torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    has_momentum = algorithm is not None and algorithm.has_momentum
    return torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.0 if has_momentum else 0.9)


def _predict(
    workload: Workload, racer: _Racer, found: Probe, setting: Setting, refused: dict[str, str]
) -> float | None:
    """Return the simulated step time in seconds, or None with the reason in `refused`. Involves only this rank."""
    if racer.algorithm is None or isinstance(racer.algorithm, Auto):
        return None
    try:
        return _predicted(workload, racer.name, racer.algorithm, found, setting)
    except Exception as error:  # keep the measurements and the other systems
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        refused[racer.name] = f"not simulated: {kind}{error}"
        return None


def _predicted(workload: Workload, name: str, algorithm: Algorithm, found: Probe, setting: Setting) -> float:
    if (steady_step := algorithm.channel.steady_step) > _WARM_UP_STEPS:
        raise ConfigError(f"timed before step {steady_step}, where its steady state begins")
    device = beside_nothing(found.device)
    if algorithm.channel.has_rounds:
        parameters = parameters_of(workload, algorithm)
        factor = work_factor(_create(name), found.device, dist.get_world_size(), torch.device("cpu"), parameters)
        device = beside_nothing(scaled(found.device, factor))
    options = Options(steps=4, bucket_cap_mb=setting.bucket_cap_mb, transport=found.profile)
    return simulate(workload, found.network, device, algorithm, options).step_s


def _work(spec: dict[str, Any]) -> None:
    """Run as one rank: time all systems; rank 0 writes the results."""
    setting, folder = Setting(**spec["setting"]), Path(spec["folder"])
    workload = workloads.load(folder / "workload.json")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=setting.timeout_s))
    cpu = torch.device("cpu")
    transport = TorchTransport(dist.group.WORLD, cpu, timedelta(seconds=_TIMEOUT_S))  # pyright: ignore[reportArgumentType]
    found = probe(transport, cpu)
    racers, refused = [], {}
    for name in spec["systems"]:
        try:
            racers.append(_Racer(name, workload, setting))
        except ConfigError as error:  # the same on all ranks
            refused[name] = f"not run: {error}"
    for racer in racers:
        racer.steps(_WARM_UP_STEPS * (3 if isinstance(racer.algorithm, Auto) else 1))
        await_silence()
        racer.parts_s = [0.0, 0.0, 0.0]
    for repetition in range(setting.reps):
        for racer in racers if repetition % 2 == 0 else reversed(racers):
            racer.time_block()
    alone = racers[0]
    parts = torch.tensor(alone.parts_s, dtype=torch.float64, device="cpu")
    dist.all_reduce(parts)
    step_s = median(alone.blocks_s)
    forward_s, backward_s, optimizer_s = (parts / parts.sum() * step_s).tolist()
    measured = dataclasses.replace(
        workload, forward_s=forward_s, backward_s=backward_s, optimizer_s=optimizer_s, device="probed"
    )
    dist.barrier()
    if dist.get_rank() == 0:
        rows = [
            {
                "system": racer.name,
                "step_s": median(racer.blocks_s),
                "predicted_s": _predict(measured, racer, found, setting, refused),
                "blocks_s": racer.blocks_s,
                "algorithm": racer.name if racer.algorithm is None else stats(racer.model).algorithm,
            }
            for racer in racers
        ]
        result = {"rows": rows, "probe": dataclasses.asdict(found), "refused": refused}
        (folder / "result.json").write_text(json.dumps(result))
    dist.barrier()
    transport.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    _work(json.loads(Path(sys.argv[1]).read_text()))
