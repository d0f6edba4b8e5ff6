"""Measurement of the machine and the network by the ranks that will use them.

[Note: fitted measurements] Each verb is measured with hardly any bytes, with many, and with a quarter of them, a few in
a row as in training. The simulator's own model of the collectives is then inverted (`fitting`). The processor seconds
per byte are those of the process during the measurement. The number of cores of a rank is the share that two busy
threads of every rank get. Local work is not measured per kernel. Instead, an algorithm's own `communicate` runs on a
scratch bucket with some of the model's shapes, with requests that only echo, and its time is compared with the
simulator's cost model (`work_factor`). As in training, where other buckets come in between, the caches do not contain
the bucket when work on it begins.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from commlib.algorithms.base import Algorithm
from commlib.algorithms.channels import Weights
from commlib.algorithms.context import Context
from commlib.engine.planning.cost import Scratch, as_square, scratch_buckets
from commlib.engine.planning.plan import Parameter, main_group
from commlib.engine.planning.readiness import DeviceTimer
from commlib.errors import ConfigError
from commlib.network.model import Device, Network
from commlib.simulation.collectives import GLOO, NCCL, TransportProfile
from commlib.simulation.fitting import VerbTimes, fitted
from commlib.simulation.meter import Meter
from commlib.transport.base import AllGather, AllToAll, Communicator, Request, Transport

_VERBS = ("all_reduce", "all_gather", "all_to_all", "exchange")
_SMALL_BYTES = 64
_FIRST_BYTES = 256 << 10
_MAX_BYTES = 32 << 20
#: Approximate time limit of one large collective, and of all small ones in a row, in seconds.
_LARGE_S, _SMALL_S = 0.05, 0.04
#: Fraction of the target time that is enough for a large collective, and the maximum growth of its bytes per attempt.
_ENOUGH, _MAX_GROWTH = 0.7, 16.0
#: Number of collectives timed in a row: of large ones, and at most of small ones.
_LARGE_COUNT, _MAX_SMALL_COUNT = 2, 16
_REPETITIONS = 3
_BUSY_S = 0.08
_WORK_BYTES = 4 << 20
_EVICTED_BYTES = 32 << 20


@dataclass(frozen=True)
class Probe:
    """The measurements, identical on all ranks.

    Attributes:
        network: The links. `efficiency` is 1, because the bandwidth is the rate that the transport reached.
        device: The device of a rank.
        profile: The communication library.
    """

    network: Network
    device: Device
    profile: TransportProfile


def probe(transport: Transport, device: torch.device, local: Communicator | None = None) -> Probe:
    """Measure network and device. This takes about two seconds, or more on slow or long links (7 s at 10 Mbit/s).

    Collective: the transport must not be used otherwise meanwhile.

    Args:
        transport: The communicator of the ranks.
        device: The device of the tensors.
        local: The ranks of this node, if several nodes have several ranks each (`Transport.split_by_node`).

    Raises:
        ConfigError: There is only one rank.
        TransportError: A rank did not take part.
    """
    if transport.world_size < 2:
        raise ConfigError(f"probe: expected two ranks or more, got {transport.world_size}")
    timer, size = _Timer(transport, device), transport.world_size
    ranks_per_node = local.world_size if local else 1
    verbs = _Verbs(Communicator(transport.rank, size), timer)
    alone_s = timer.seconds(verbs.request("all_reduce", _SMALL_BYTES))
    count = max(1, min(_MAX_SMALL_COUNT, int(_SMALL_S / alone_s)))
    small_s = {verb: timer.seconds(verbs.request(verb, _SMALL_BYTES), count) for verb in _VERBS}
    nbytes = _large_bytes(lambda n: timer.seconds(verbs.request("all_reduce", n)), alone_s)
    large_count = _LARGE_COUNT if nbytes > _FIRST_BYTES else 1
    times = {verb: _times(verbs, timer, verb, nbytes, large_count, small_s[verb]) for verb in _VERBS}
    cpu_s_per_byte = timer.cpu_s_per_byte
    intra = {} if local is None else _describe_node(_Verbs(local, timer), timer, nbytes, count, large_count)
    timer.barrier()
    share = _share_of_cores()
    memory, tflops, launch_us = _describe_device(device) if transport.rank == 0 else (0.0, 0.0, 0.0)
    share, cpu_s_per_byte = timer.mean(share, cpu_s_per_byte)  # other ranks wait here while rank 0 uses the machine
    memory, tflops, launch_us = transport.gather_objects((memory, tflops, launch_us))[0]
    is_cpu = device.type == "cpu"
    network = Network(
        name="probed",
        nodes=size // ranks_per_node,
        gpus_per_node=ranks_per_node,
        window_mb=math.inf,  # the rates were measured on connections with their windows
        source="measured",
        **intra,
    )
    network, profile = fitted(network, GLOO if is_cpu else NCCL, times)
    return Probe(
        network,
        Device(
            name="probed",
            memory_gbytes_s=memory,
            tflops={"fp32": tflops},
            launch_us=launch_us,
            shares_compute=is_cpu,
            cpu_s_per_byte=cpu_s_per_byte if is_cpu else 0.0,
            cores=max(1, round(min(2.0, share) * size)),
            ranks_per_machine=size,
            source="measured",
        ),
        profile,
    )


def _large_bytes(seconds: Callable[[int], float], small_s: float) -> int:
    """Return the bytes of a large collective, whose transfer takes about as long as its latency or longer.

    Args:
        seconds: Measures a collective of so many bytes.
        small_s: Seconds of a collective with hardly any bytes.
    """
    target_s, nbytes = max(_LARGE_S, 2 * small_s), _FIRST_BYTES
    while nbytes < _MAX_BYTES and (found_s := seconds(nbytes)) < _ENOUGH * target_s:
        of_bytes_s = max(found_s - small_s, target_s / _MAX_GROWTH)
        growth = min(_MAX_GROWTH, max(2.0, (target_s - small_s) / of_bytes_s))
        nbytes = min(_MAX_BYTES, int(nbytes * growth))
    return nbytes


def work_factor(
    algorithm: Algorithm, found: Device, world_size: int, device: torch.device, parameters: Sequence[Parameter]
) -> float:
    """Return the ratio of the measured time of an algorithm's local work to the simulator's cost model.

    Local: the algorithm's `communicate` runs on a scratch bucket of up to 4 MiB, with requests that only echo. The
        other ranks of the machine should wait meanwhile, because the device's `share` already accounts for shared
        cores.

    Args:
        algorithm: The algorithm before its first `setup`; copied.
        found: The device as probed.
        world_size: Number of ranks of the group.
        device: The device of the tensors.
        parameters: The model's parameters with their groups. The bucket has the shapes of some of them, drawn at
            random, because many small matrices are different work from a large one.
    """
    group = main_group(parameters)
    shapes = _drawn([tuple(p.param.shape) for p in parameters if p.group == group and not p.sparse])
    (said_of,) = scratch_buckets(1, shapes, torch.device("meta"), group)
    (measured,) = scratch_buckets(1, shapes, device, group)
    meter = Meter(found)
    with meter.active():
        said_s = _local_work(algorithm, world_size, said_of, _MeterTimer(meter))()
    run = _local_work(algorithm, world_size, measured, DeviceTimer(device))
    run()
    seconds = median(run() for _ in range(_REPETITIONS))
    return max(seconds / said_s, 1e-3) if said_s > 0 else 1.0


def beside_nothing(device: Device) -> Device:
    """Return a device whose processor is free for communication, because the computation uses an accelerator or waits.

    A rank whose share of the cores is below one does its local work slower by that factor. The measured rates already
    include the processor time per byte.
    """
    own = scaled(device, 1.0 / min(1.0, device.share))
    return dataclasses.replace(own, cores=2 * device.ranks_per_machine, cpu_s_per_byte=0.0)


def scaled(device: Device, factor: float) -> Device:
    """Return a device on which local work takes `factor` times as long."""
    return dataclasses.replace(
        device,
        memory_gbytes_s=device.memory_gbytes_s / factor,
        tflops={dtype: rate / factor for dtype, rate in device.tflops.items()},
        launch_us=device.launch_us * factor,
    )


def _drawn(shapes: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return shapes in random order, `_WORK_BYTES` in total. The last one gets fewer rows to fit."""
    found, room = [], _WORK_BYTES // 4
    for shape in random.Random(0).sample(shapes, len(shapes)):
        if math.prod(shape) > room:
            shape = (room * shape[0] // math.prod(shape), *shape[1:])
        room -= math.prod(shape)
        if math.prod(shape):
            found.append(shape)
        if not room:
            break
    return found or as_square(_WORK_BYTES)


class _MeterTimer(DeviceTimer):
    """A timer of the seconds that a meter has counted."""

    def __init__(self, meter: Meter) -> None:
        super().__init__(torch.device("meta"))
        self._meter = meter

    def now(self) -> float:
        return float(self._meter.seconds()[0])


def _local_work(algorithm: Algorithm, world_size: int, bucket: Scratch, timer: DeviceTimer) -> Callable[[], float]:
    """Return a function that communicates the scratch bucket with echoing requests, and returns the seconds.

    The seconds exclude the echoes and everything else between two pieces of work.
    """
    device, comm = bucket.flat.device, Communicator(0, world_size)
    algorithm = copy.deepcopy(algorithm)
    with torch.no_grad():
        algorithm.setup(Context(comm, [bucket], device))
        if isinstance(algorithm.channel, Weights):
            algorithm.begin(bucket)
    other = torch.zeros(_EVICTED_BYTES // 4, dtype=torch.float32, device=device)
    values = _normal_like(bucket.flat)

    @torch.no_grad()
    def run() -> float:
        bucket.flat.copy_(values)
        spans, generator = [], algorithm.communicate(bucket, comm)
        while True:
            other.add_(1.0)
            start = timer.now()
            request = next(generator, None)
            spans.append((start, timer.now()))
            if request is None:
                timer.arrive(spans[-1][1])
                return sum(timer.seconds(*span) for span in spans)
            _echo(request)

    return run


def _normal_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return normal random values without changing the state of the user's generators."""
    if tensor.device.type == "meta":
        return torch.empty_like(tensor)
    generator = torch.Generator(tensor.device).manual_seed(0)
    return torch.empty_like(tensor).normal_(generator=generator)


def _echo(request: Request) -> None:
    """Return the sent values as if every rank had sent the same."""
    match request:
        case AllGather(output=output, input=input):
            output.view(-1, input.numel()).copy_(input)
        case AllToAll(output=output, input=input):
            output.copy_(input)
        case _:
            pass


def _describe_node(verbs: _Verbs, timer: _Timer, nbytes: int, count: int, large_count: int) -> dict[str, Any]:
    """Return the bandwidth and the latency inside a node, measured with an all-reduce."""
    small_s = timer.seconds(verbs.request("all_reduce", _SMALL_BYTES), count)
    of = _times(verbs, timer, "all_reduce", nbytes, large_count, small_s)
    rate = of.whole.wire_bytes() / (of.whole_s - of.fixed_s)
    return {"intra_gbps": rate * 8 / 1e9, "intra_latency_us": 1e6 * small_s / (2 * (of.whole.size - 1))}


def _times(verbs: _Verbs, timer: _Timer, verb: str, nbytes: int, count: int, small_s: float) -> VerbTimes:
    """Measure a verb. The fixed time is the intercept of the line through two sizes."""
    part_s, whole_s = (timer.seconds(verbs.request(verb, n), count) for n in (nbytes // 4, nbytes))
    fixed_s = min(max(0.0, (4 * part_s - whole_s) / 3), small_s, whole_s / 2)
    of_rank_0 = verbs.of_rank_0()
    return VerbTimes(of_rank_0.request(verb, _SMALL_BYTES), small_s, of_rank_0.request(verb, nbytes), whole_s, fixed_s)


class _Verbs:
    """Requests of each verb with a given size."""

    def __init__(self, comm: Communicator, timer: _Timer) -> None:
        self._comm = comm
        self._timer = timer

    def of_rank_0(self) -> _Verbs:
        """Return the requests of rank 0, whose costs the simulator knows."""
        return _Verbs(Communicator(0, self._comm.world_size), self._timer)

    def request(self, verb: str, nbytes: int) -> Request:
        """Return a request whose tensor has about `nbytes` on each rank."""
        comm, size = self._comm, self._comm.world_size
        nbytes = -(-nbytes // (64 * size)) * 64 * size
        whole, other = self._timer.buffer(nbytes), self._timer.buffer(nbytes, place=1)
        own = len(whole) // size
        match verb:
            case "all_reduce":
                return comm.all_reduce(whole)
            case "all_gather":
                return comm.all_gather(whole, other[:own])
            case "all_to_all":
                return comm.all_to_all(whole, other)
        peers = sorted({(comm.rank + 1) % size, (comm.rank - 1) % size})
        half = len(whole) // 2
        parts = [(peer, slice(place * half, (place + 1) * half)) for place, peer in enumerate(peers)]
        return comm.exchange([(p, whole[at]) for p, at in parts], [(p, other[at]) for p, at in parts])


class _Timer:
    """Times collectives on all ranks at once.

    Attributes:
        cpu_s_per_byte: Processor seconds of this process per byte sent in the last measurement.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport = transport
        self._device = device
        self._buffers = [torch.zeros(0, dtype=torch.uint8, device=device) for _ in range(2)]
        self.cpu_s_per_byte = 0.0

    def buffer(self, nbytes: int, place: int = 0) -> torch.Tensor:
        """Return one of two buffers, [nbytes // 4] fp32."""
        if self._buffers[place].numel() < nbytes:
            self._buffers[place] = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        return self._buffers[place][:nbytes].view(torch.float32)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._transport.gather_objects(None)

    def seconds(self, request: Request, count: int = 1) -> float:
        """Return the seconds of one of `count` requests in a row: median over repetitions, on the slowest rank."""
        self._transport.complete(request, "measuring the network")
        found, cpu_s = [], []
        for _ in range(_REPETITIONS):
            self.barrier()
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            for _ in range(count):
                self._transport.complete(request, "measuring the network")
            _wait_for(self._device)
            found.append((time.perf_counter() - start_s) / count)
            cpu_s.append((time.process_time() - start_cpu_s) / count)
        self.cpu_s_per_byte = median(cpu_s) / max(1.0, request.wire_bytes())
        return max(self._transport.gather_objects(median(found)))

    def mean(self, *values: float) -> list[float]:
        """Return the mean of each value over the ranks."""
        columns = zip(*self._transport.gather_objects(values), strict=True)
        return [sum(column) / len(column) for column in columns]


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _share_of_cores() -> float:
    """Return the number of cores of this rank while two threads of every rank are busy: at most 2."""
    tensor = torch.zeros(1 << 14, dtype=torch.float32, device="cpu")
    end_s = time.perf_counter() + _BUSY_S

    def work() -> None:
        out = torch.empty_like(tensor)
        while time.perf_counter() < end_s:
            torch.sin(tensor, out=out)

    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    thread = threading.Thread(target=work, name="commlib-probe", daemon=True)
    thread.start()
    work()
    thread.join(10 * _BUSY_S)
    return (time.process_time() - start_cpu_s) / (time.perf_counter() - start_s)


def _rate(run: Callable[[], object], amount: float, timer: DeviceTimer) -> float:
    """Return `amount` over the least seconds of a few runs, which approximates a rank that runs alone."""
    run()
    found = []
    for _ in range(_REPETITIONS):
        start = timer.now()
        run()
        end = timer.now()
        timer.arrive(end)
        found.append(timer.seconds(start, end))
    return amount / min(found)


def _describe_device(device: torch.device) -> tuple[float, float, float]:
    """Return the copy rate in GB/s, the TFLOP/s of matrix products in fp32, and the microseconds of a small operation.

    On CUDA, the last is the time in which the host queues the operation.
    """
    nbytes, width = (32 << 20, 512) if device.type == "cpu" else (256 << 20, 4096)  # exceeds caches and launch times
    source = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    target, square, small = torch.empty_like(source), source.new_ones(width, width), source.new_ones(16)
    product = torch.empty_like(square)
    copied = _rate(lambda: target.copy_(source), 2 * nbytes, DeviceTimer(device))
    multiplied = _rate(lambda: torch.mm(square, square, out=product), 2 * width**3, DeviceTimer(device))

    def launches() -> None:
        for _ in range(100):
            small.add_(1.0)

    return copied / 1e9, multiplied / 1e12, 1e6 / _rate(launches, 100, DeviceTimer(torch.device("cpu")))
