"""Shrunk workloads, the models that train like them, and the local work that the probe measures."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from commlib import algorithms
from commlib.algorithms import Algorithm, AllReduce, BucketView, ByteGrad, PowerSGD, TopK
from commlib.emulation import synthetic
from commlib.emulation.synthetic import SyntheticModel, shrink
from commlib.engine.planning.cost import as_square
from commlib.engine.planning.plan import Parameter
from commlib.network import workloads
from commlib.network.model import Device, Layer, Network, Workload
from commlib.simulation import probe
from commlib.simulation.collectives import GLOO, NCCL, Links, TransportProfile
from commlib.simulation.fitting import VerbTimes, fitted
from commlib.simulation.probe import _drawn, _Timer, _times, _Verbs, beside_nothing, scaled, work_factor
from commlib.transport.base import Communication, Communicator, Exchange, Request
from tests.waiting import Clock

SMALL = Workload(
    name="small",
    layers=(
        Layer("first", (("weight", (32, 16)), ("bias", (32,))), 1.0),
        Layer("second", (("weight", (64, 32)),), 3.0),
    ),
    batch_per_rank=4,
    forward_s=0.01,
    backward_s=0.02,
)


@pytest.mark.parametrize("name", ["vgg16", "bert-large", "resnet50"])
def test_a_shrunk_workload_keeps_its_tensors_and_their_proportions(name: str) -> None:
    whole = workloads.get(name)
    small = shrink(whole, 2_000_000)
    assert [n for n, _ in small.parameters()] == [n for n, _ in whole.parameters()]
    assert small.numel == pytest.approx(2_000_000, rel=0.1)
    largest = max(range(len(whole.layers)), key=lambda idx: whole.layers[idx].numel)
    share, own = (w.layers[largest].numel / w.numel for w in (whole, small))
    assert own == pytest.approx(share, rel=0.15)


def test_a_workload_that_is_small_enough_stays_as_it_is() -> None:
    assert shrink(SMALL, 10**9) == SMALL


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Of the models, by which they and the test sleep."""
    made = Clock()
    monkeypatch.setattr(synthetic, "time", made)
    return made


def test_steps_take_the_time_of_the_workload(clock: Clock) -> None:
    timed = dataclasses.replace(SMALL, forward_s=0.04, backward_s=0.12)
    model = SyntheticModel(timed)
    for _ in range(3):
        starts = [clock.now_s]
        loss = model()
        starts.append(clock.now_s)
        loss.backward()
        starts.append(clock.now_s)
        assert [b - a for a, b in itertools.pairwise(starts)] == pytest.approx([0.04, 0.12])
        clock.sleep(0.5)  # the optimizer's


def test_gradients_become_ready_in_the_order_of_the_workload() -> None:
    model = SyntheticModel(SMALL)
    seen: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    model().backward()
    assert seen[0] == "layers.1.weight"
    assert set(seen[1:]) == {"layers.0.weight", "layers.0.bias"}
    assert all(p.grad is not None and torch.equal(p.grad, p) for p in model.parameters())


def test_the_clock_runs_on_whatever_hooks_do(clock: Clock) -> None:
    """The hooks take half of the time of every layer; backward takes no longer for it."""
    layers = tuple(Layer(f"layer{idx}", (("weight", (8, 8)),), 1.0) for idx in range(10))
    model = SyntheticModel(dataclasses.replace(SMALL, layers=layers, forward_s=0.05, backward_s=0.4))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: clock.sleep(0.02))
    for _ in range(3):
        loss = model()
        begin_s = clock.now_s
        loss.backward()
        assert clock.now_s - begin_s == pytest.approx(0.4 + 0.02)  # with the last layer's hook; one by one 0.6


def test_the_same_seed_gives_the_same_model() -> None:
    first, second = SyntheticModel(SMALL, seed=3), SyntheticModel(SMALL, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    other = SyntheticModel(SMALL, seed=4)
    assert not any(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


DEVICE = Device(name="test", memory_gbytes_s=10.0, tflops={"fp32": 0.1}, launch_us=1.0)


def some_parameters(shapes: list[tuple[int, ...]], algorithm: Algorithm) -> list[Parameter]:
    made = [torch.nn.Parameter(torch.empty(shape)) for shape in shapes]
    return [Parameter(f"p{i}", p, False, algorithm.group(f"p{i}", p)) for i, p in enumerate(made)]


class Operations(TorchDispatchMode):
    """Takes the place of the clock by which local work is measured: an operation of torch's takes a millisecond."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        assert device == torch.device("cpu")
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._count += 1
        return func(*args, **(kwargs or {}))

    def now(self) -> float:
        return 1e-3 * self._count

    def arrive(self, moment: float) -> None: ...

    def seconds(self, start: float, end: float) -> float:
        return end - start


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Measure local work by counting."""
    with contextlib.ExitStack() as modes:
        monkeypatch.setattr(probe, "DeviceTimer", lambda device: modes.enter_context(Operations(device)))
        yield


@pytest.mark.usefixtures("operations")
@pytest.mark.parametrize("algorithm", [ByteGrad(), TopK(ratio=0.01)])
def test_the_factor_of_local_work_is_relative_to_the_device(algorithm: ByteGrad | TopK) -> None:
    """Relative to a device with ten times the speed, the same work is ten times as slow."""
    cpu = torch.device("cpu")
    devices = DEVICE, scaled(DEVICE, 0.1)
    parameters = some_parameters([(1024, 1024)], algorithm)
    slow, fast = (work_factor(algorithm, device, 4, cpu, parameters) for device in devices)
    assert fast == pytest.approx(10 * slow)
    assert scaled(DEVICE, 2.0).memory_gbytes_s == 5.0


class OnlyGathers(Algorithm):
    """Gathers data and does not use it."""

    def communicate(self, bucket: BucketView, comm: Communicator) -> Communication:
        yield comm.all_gather(torch.empty(4 * len(bucket.flat), device=bucket.flat.device), bucket.flat)


def test_echoes_are_no_local_work() -> None:
    algorithm = OnlyGathers()
    parameters = some_parameters([(1024, 1024)], algorithm)
    assert work_factor(algorithm, DEVICE, 4, torch.device("cpu"), parameters) == 1.0


@pytest.mark.parametrize("name", [n for n in algorithms.list() if algorithms.create(n).channel.has_rounds])
def test_every_algorithm_with_rounds_has_a_factor(name: str) -> None:
    algorithm = algorithms.create(name)
    assert work_factor(algorithm, DEVICE, 2, torch.device("cpu"), some_parameters([(64, 64)], algorithm)) > 0


def test_local_work_leaves_the_algorithm_as_it_was() -> None:
    algorithm = AllReduce()
    before = dict(vars(algorithm))
    work_factor(algorithm, DEVICE, 2, torch.device("cpu"), some_parameters([(16, 16)], algorithm))
    assert vars(algorithm) == before


@pytest.mark.usefixtures("operations")
def test_local_work_is_that_of_the_models_shapes() -> None:
    """Launches cost nothing on this device, so many small matrices take longer relative to its estimate."""
    device = Device(name="test", memory_gbytes_s=10.0, tflops={"fp32": 0.1}, launch_us=0.0)
    algorithm = PowerSGD(rank=2)

    def factor(shapes: list[tuple[int, ...]]) -> float:
        return work_factor(algorithm, device, 4, torch.device("cpu"), some_parameters(shapes, algorithm))

    small, large = factor([(32 + idx, 8) for idx in range(100)]), factor([(1024, 1024)])
    assert small > 2 * large


def test_ranks_that_share_cores_work_so_much_slower_beside_a_computation_that_waits() -> None:
    processor = dataclasses.replace(DEVICE, shares_compute=True, cpu_s_per_byte=1e-9, ranks_per_machine=4)
    shared = beside_nothing(dataclasses.replace(processor, cores=2))
    assert shared.memory_gbytes_s == DEVICE.memory_gbytes_s / 2
    assert shared.share >= 2  # and slows down nothing else
    assert shared.cpu_s_per_byte == 0.0
    assert beside_nothing(dataclasses.replace(processor, cores=8)).memory_gbytes_s == DEVICE.memory_gbytes_s


def test_shapes_are_drawn_up_to_four_mebibytes() -> None:
    assert sorted(_drawn([(64, 64), (8,), (3, 5)])) == [(3, 5), (8,), (64, 64)]
    assert _drawn([(4096, 4096)]) == [(256, 4096)]
    drawn = _drawn([(rows, 1000) for rows in range(1, 100)])
    assert (1 << 20) - 1000 < sum(map(math.prod, drawn)) <= 1 << 20
    assert sum(rows < 50 for rows, _ in drawn) > 3 < sum(rows > 50 for rows, _ in drawn)
    assert _drawn([]) == as_square(4 << 20)


# --- the transport ----------------------------------------------------------------------------------------------------


VERBS = ("all_reduce", "all_gather", "all_to_all", "exchange")
FOUR = Network("four", nodes=4, window_mb=math.inf)


class Link(_Timer):
    """Times that follow a formula."""

    def __init__(self, fixed_s: float = 0.0) -> None:
        self._device, self._buffers = torch.device("cpu"), [torch.zeros(0, dtype=torch.uint8) for _ in range(2)]
        self._fixed_s = fixed_s

    def seconds(self, request: Request, count: int = 1) -> float:
        return self._fixed_s + request.wire_bytes() / 25e6


def request_of(verb: str, nbytes: int) -> Request:
    return _Verbs(Communicator(0, 4), Link()).request(verb, nbytes)


def seconds_of(request: Request, network: Network, profile: TransportProfile) -> float:
    """The simulated time: that of the library itself, and that of the collective."""
    return profile.op_us_of[request.verb] * 1e-6 + Links(network, profile, DEVICE).cost(request).seconds


@pytest.mark.parametrize("profile", [GLOO, NCCL], ids=lambda profile: profile.name)
def test_a_transport_is_fitted_whatever_was_measured(profile: TransportProfile) -> None:
    draw = random.Random(0)
    small, whole = ({verb: request_of(verb, nbytes) for verb in VERBS} for nbytes in (64, 16 << 20))
    for _ in range(50):
        times = {}
        for verb in VERBS:
            small_s = draw.uniform(1e-3, 1e-2)
            fixed_s = draw.uniform(0, 1) * small_s
            times[verb] = VerbTimes(small[verb], small_s, whole[verb], fixed_s + draw.uniform(0.02, 0.2), fixed_s)
        network, found = fitted(FOUR, profile, times)
        assert max(found.efficiency_of.values()) == 1.0
        assert min(found.op_us_of.values()) == pytest.approx(0.0, abs=1e-6)
        for verb, of in times.items():
            assert seconds_of(of.small, network, dataclasses.replace(found, hidden_of={})) == pytest.approx(
                of.small_s, rel=0.02
            )
            if 0.0 < found.hidden_of[verb] < 1.0:
                assert seconds_of(of.whole, network, found) == pytest.approx(of.whole_s, rel=0.02)


@pytest.mark.parametrize("latency_us", [50.0, 1000.0, 20_000.0])
def test_the_fit_finds_the_network_and_the_transport_that_made_the_times(latency_us: float) -> None:
    true = dataclasses.replace(FOUR, bandwidth_gbps=1.0, latency_us=latency_us)
    made_by = dataclasses.replace(
        GLOO, efficiency_of={"all_to_all": 0.7}, op_us_of={"all_reduce": 300.0, "exchange": 100.0, "all_to_all": 200.0}
    )
    made_by = dataclasses.replace(made_by, op_us_of={"all_gather": 0.0, **made_by.op_us_of})
    times = {}
    for verb in VERBS:
        small, part, whole = (request_of(verb, nbytes) for nbytes in (64, 8 << 20, 32 << 20))
        small_s, part_s, whole_s = (seconds_of(request, true, made_by) for request in (small, part, whole))
        times[verb] = VerbTimes(small, small_s, whole, whole_s, max(0.0, (4 * part_s - whole_s) / 3))
    network, found = fitted(FOUR, GLOO, times)
    assert network.latency_us == pytest.approx(latency_us, rel=0.01)
    assert network.bandwidth_gbps == pytest.approx(1.0, rel=0.02)
    for verb in VERBS:
        for nbytes in (1 << 20, 4 << 20, 64 << 20):
            request = request_of(verb, nbytes)
            assert seconds_of(request, network, found) == pytest.approx(seconds_of(request, true, made_by), rel=0.05)


@pytest.mark.parametrize(("fixed_s", "found_s"), [(0.0, 0.0), (0.002, 0.002), (0.009, 0.007)])
def test_the_rate_of_a_verb_does_not_depend_on_what_a_small_one_takes(fixed_s: float, found_s: float) -> None:
    link, nbytes = Link(fixed_s), 1 << 20
    verbs = _Verbs(Communicator(2, 4), link)
    # A small one takes 7 ms, behind which all of the latency of a large one may be hidden.
    of = _times(verbs, link, "exchange", nbytes, 2, 0.007)
    assert of.small_s == 0.007
    assert of.fixed_s == pytest.approx(found_s, abs=1e-9)
    assert of.whole_s == pytest.approx(fixed_s + nbytes / 25e6)
    # Whichever rank measures, the requests are those of rank 0: the simulator knows their cost.
    assert isinstance(of.whole, Exchange)
    assert [peer for peer, _ in of.whole.sends] == [1, 3]
