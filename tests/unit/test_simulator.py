"""The simulator against cases that can be worked out by hand, and against itself."""

import dataclasses
import inspect
import math
import re
from pathlib import Path

import pytest
import torch

from commlib import algorithms
from commlib.algorithms import Algorithm, Gradients, Weights
from commlib.algorithms.allreduce import AllReduce
from commlib.algorithms.bytegrad import ByteGrad
from commlib.algorithms.demo import DeMo
from commlib.algorithms.powersgd import PowerSGD
from commlib.errors import CodecError, ConfigError
from commlib.kernels import meta_codecs, meta_sparse, native_codecs, native_sparse
from commlib.network import presets, workloads
from commlib.network.model import Device, Layer, Network, Workload
from commlib.simulation.calibration import MeasuredStep, calibrate, predict
from commlib.simulation.collectives import GLOO, NCCL, Links, TransportProfile
from commlib.simulation.meter import Meter
from commlib.simulation.simulator import Result, simulate
from commlib.simulation.training import Options
from commlib.transport.base import Communicator, Nodes
from tests.waiting import num_calls

#: Local work costs nothing, and a gigabyte a second leaves each of four nodes.
FREE = Device("free", memory_gbytes_s=1e15, tflops={"fp32": 1e12})
FOUR = Network("four", nodes=4, gpus_per_node=1, bandwidth_gbps=8.0, latency_us=100.0)
NODES = Network("nodes", nodes=4, gpus_per_node=2, bandwidth_gbps=8.0, latency_us=100.0, intra_gbps=80.0)
RING = TransportProfile("ring")
ALL = [name for name in algorithms.list() if algorithms.create(name).channel.has_rounds]


def model_of(*numels: int, forward_s: float = 0.010, backward_s: float = 0.020) -> Workload:
    """Layers of one matrix each, which take equal parts of the time."""
    layers = tuple(Layer(f"layer{idx}", (("weight", (numel // 1000, 1000)),), 1.0) for idx, numel in enumerate(numels))
    return Workload("model", layers, 8, forward_s, backward_s, 0.001)


def run(
    model: Workload, network: Network = FOUR, algorithm: str | Algorithm = "allreduce", device: Device = FREE, **options
) -> Result:
    return simulate(model, network, device, algorithm, Options(**{"transport": RING, **options}))


def ring_s(numel: int, num_flags: int = 0) -> float:
    return 2 * 3 / 4 * 4 * (numel + num_flags) / 1e9 + 2 * 3 * 100e-6


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_one_bucket_takes_the_rings_time():
    result = run(model_of(1_000_000), bucket_cap_mb=100)
    assert result.step_s == pytest.approx(0.031 + ring_s(1_000_000, num_flags=1), rel=1e-9)
    assert result.exposed_s == pytest.approx(result.waited_s, rel=1e-6)
    assert result.wire_bytes == 2 * 3 / 4 * 4 * 1_000_001
    assert result.num_buckets == 1


def test_a_bucket_that_is_ready_early_hides_behind_backward():
    # The last layer's gradients are ready after 10 ms of backward and take 3.6 ms, the first layer's at its end.
    result = run(model_of(500_000, 500_000), bucket_cap_mb=1)
    assert result.num_buckets == 2
    assert result.step_s == pytest.approx(0.031 + ring_s(500_000, num_flags=2), rel=1e-9)


def test_collectives_follow_one_another_where_the_network_is_slower_than_backward():
    result = run(model_of(5_000_000, 5_000_000), bucket_cap_mb=1)
    first_s, second_s = ring_s(5_000_000), ring_s(5_000_000, num_flags=2)
    assert result.step_s == pytest.approx(0.031 + first_s - 0.010 + second_s, rel=1e-9)


class TwoStages(Algorithm):
    """Local work, a collective, local work, a collective, local work; for a pipeline worked out by hand."""

    channel = Gradients(window=2, reduces_flags=True)

    def communicate(self, bucket, comm):
        for _ in range(2):
            bucket.flat.mul_(2.0)
            yield comm.all_reduce(bucket.payload)
        bucket.flat.mul_(2.0)


def test_stages_of_two_buckets_are_pipelined():
    # A pass over a bucket of 2 MB reads and writes it: 4 MB at 4 GB/s take 1 ms. Gathering it takes 1 ms of backward.
    numel = 500_000
    device = Device("slow", memory_gbytes_s=4.0, tflops={"fp32": 1.0})
    network = dataclasses.replace(FOUR, latency_us=0.0)  # a collective takes 3 ms
    result = run(model_of(numel, numel), network, TwoStages(), device, bucket_cap_mb=1)
    work, wire = 1e-3, 3e-3
    # Bucket 0 is gathered at 10 ms of backward, bucket 1 at its end (the gather lengthens backward), 21 ms, 22 ms.
    # 0: work 11-12, wire 12-15, work 15-16; its second collective follows the first of bucket 1, gathered at 22.
    # 1: work 22-23, wire 23-26.   0: wire 26-29.   1: work 26-27, wire 29-32, work 32-33 (0: work 29-30).
    expected = 0.010 + 10e-3 + work + 10e-3 + work + work + wire + wire + wire + work + 0.001
    assert result.step_s == pytest.approx(expected, rel=1e-4)


def test_local_work_beside_backward_slows_it_by_the_devices_contention():
    numel = 500_000
    slow = Device("slow", memory_gbytes_s=4.0, tflops={"fp32": 1.0}, contention=0.5)
    network = dataclasses.replace(FOUR, bandwidth_gbps=8e6, latency_us=0.0)
    with_it = run(model_of(numel, numel), network, TwoStages(), slow, bucket_cap_mb=1).step_s
    without = run(
        model_of(numel, numel), network, TwoStages(), dataclasses.replace(slow, contention=0.0), bucket_cap_mb=1
    ).step_s
    # Bucket 0 works 2 ms during backward (its second collective waits for bucket 1's first), each costs half of that.
    assert with_it - without == pytest.approx(0.5 * 2e-3, rel=1e-3)


def test_ranks_of_a_processor_share_its_cores():
    # Four ranks on two cores have half a core each. 1 ms of work takes 4 ms during computation, which loses 2 ms.
    cpu = Device("cpu", 4.0, {"fp32": 1.0}, shares_compute=True, cores=2, ranks_per_machine=4)
    numel = 500_000
    network = dataclasses.replace(FOUR, bandwidth_gbps=8e6, latency_us=0.0)
    result = run(model_of(numel, numel), network, TwoStages(), cpu, bucket_cap_mb=1)
    # Two works of bucket 0 during backward: + 2 * 2 ms. After it: work of bucket 1, of both after their collectives, of
    # bucket 1 again: 4 pieces of 2 ms (nothing computes). Gathers take 1 ms of the computation's own time.
    assert result.step_s == pytest.approx(0.031 + 2 * 1e-3 + 2 * 2e-3 + 4 * 2e-3, rel=1e-3)


def test_the_processors_time_of_a_collective_is_lost_to_the_computation():
    cpu = Device("cpu", 1e15, {"fp32": 1e12}, shares_compute=True, cpu_s_per_byte=1e-9, cores=1)
    result = run(model_of(500_000, 500_000), device=cpu, bucket_cap_mb=1)
    # 3 MB sent by bucket 0 during backward cost 3 ms of it, although the link takes the same time to carry them.
    assert result.step_s == pytest.approx(0.031 + 3e-3 + ring_s(500_000, num_flags=2), rel=1e-3)


# --- collectives ------------------------------------------------------------------------------------------------------


def seconds_of(network: Network, make, profile: TransportProfile = RING) -> float:
    comm = Communicator(0, network.world_size)
    comm.nodes = Nodes(Communicator(0, network.gpus_per_node, "local"), Communicator(0, network.nodes, "across"))
    return Links(network, profile, FREE).cost(make(comm)).seconds


def meta_bytes(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")


def test_a_request_of_another_group_is_refused_also_if_its_bytes_were_priced_before():
    links = Links(FOUR, RING, FREE)
    links.cost(Communicator(0, 4).all_reduce(meta_bytes(4096)))
    with pytest.raises(ConfigError, match="'all' has 2 ranks, expected 4"):
        links.cost(Communicator(0, 2).all_reduce(meta_bytes(4096)))
    with pytest.raises(ConfigError, match="'shard'.*'all', 'local', 'across'"):
        links.cost(Communicator(0, 4, "shard").all_reduce(meta_bytes(4096)))


def test_collectives_cost_what_their_algorithms_cost():
    mega = 1_000_000
    tensor, part = meta_bytes(8 * mega), meta_bytes(mega)
    w, i, L, l = 1e9, 1e10, 100e-6, 5e-6  # noqa: E741

    def of(verb, profile=RING):
        return pytest.approx(seconds_of(NODES, verb, profile), rel=1e-9)

    assert of(lambda c: c.all_reduce(tensor)) == 2 * 7 / 8 * 8e6 / w + 2 * (3 * L + 4 * l)
    assert of(lambda c: c.all_gather(tensor, part)) == 7 / 8 * 8e6 / w + 3 * L + 4 * l
    assert of(lambda c: c.all_to_all(tensor, tensor)) == 2 * 6 / 8 * 8e6 / w + L
    assert of(lambda c: c.broadcast(tensor)) == 8e6 / w + 3 * L + 4 * l
    assert of(lambda c: c.nodes.local.all_reduce(tensor)) == 8e6 / i + 2 * l
    # Two ranks of each node cross at once, and share the adapter.
    assert of(lambda c: c.nodes.across.all_reduce(tensor)) == 2 * 3 / 4 * 8e6 / (w / 2) + 6 * L
    assert of(lambda c: c.nodes.across.all_reduce(tensor), TransportProfile("x", leaders_only=True)) == 12e6 / w + 6 * L
    hierarchical = TransportProfile("h", all_reduce=("hierarchical",))
    assert of(lambda c: c.all_reduce(tensor), hierarchical) == 8e6 / i + 2 * l + 2 * 3 / 4 * 8e6 / w + 6 * L
    leaders = TransportProfile("l", all_reduce=("leaders",))
    assert of(lambda c: c.all_reduce(tensor), leaders) == 16e6 / i + 2 * l + 2 * 3 / 4 * 8e6 / w + 6 * L
    tree = TransportProfile("t", all_reduce=("tree",))
    assert of(lambda c: c.all_reduce(tensor), tree) == 16e6 / w + 2 * (2 * L + l)
    binomial = TransportProfile("b", broadcast=("binomial",))
    assert of(lambda c: c.broadcast(tensor), binomial) == (2 + 1) * 8e6 / w + 2 * L + 8e6 / i + l


def test_the_all_reduce_is_taken_that_the_library_takes_to_be_the_fastest():
    def seconds(nbytes, network, **options):
        profile = dataclasses.replace(NCCL, **options)
        return seconds_of(network, lambda c: c.all_reduce(meta_bytes(nbytes)), profile)

    for nbytes in (64, 1 << 28):
        each = [seconds(nbytes, NODES, all_reduce=(name,), assumed_latency_us=None) for name in NCCL.all_reduce]
        assert seconds(nbytes, NODES, assumed_latency_us=None) == min(each)
    # NCCL assumes 14 us for a hop: at 20 ms it still uses a ring for sizes that suit one at 14 us, which is slower.
    near, far = (dataclasses.replace(FOUR, nodes=32, latency_us=us) for us in (14.0, 20_000.0))
    for nbytes, name in ((1 << 10, "tree"), (1 << 26, "ring")):
        for network in (near, far):
            assert seconds(nbytes, network) == seconds(nbytes, network, all_reduce=(name,))
    assert seconds(1 << 26, far) > 2 * seconds(1 << 26, far, all_reduce=("tree",))


def test_a_connection_carries_a_window_for_each_round_trip():
    far = dataclasses.replace(FOUR, latency_us=20_000.0, window_mb=1.0)  # 1 GB/s links
    nbytes, window, L = 64 << 20, 1 << 20, 0.02

    def of(verb, **options):
        return pytest.approx(seconds_of(far, verb, dataclasses.replace(RING, **options)))

    whole, part = meta_bytes(nbytes), meta_bytes(nbytes // 4)
    windows = nbytes / window * 2 * L  # of all bytes, through one connection
    assert of(lambda c: c.all_reduce(whole)) == 2 * 3 / 4 * windows + 6 * L
    assert of(lambda c: c.all_reduce(whole), connections=4) == 2 * 3 / 4 * windows / 4 + 6 * L
    assert of(lambda c: c.all_gather(whole, part)) == 3 / 4 * windows + 3 * L
    # Pairs have connections of their own, however many a ring has.
    both = [(1, whole), (3, whole)]
    for connections in (1, 4):
        assert of(lambda c: c.all_to_all(whole, whole), connections=connections) == windows / 4 + L
        assert of(lambda c: c.exchange(both, both), connections=connections) == windows + L
    assert of(lambda c: c.all_to_all(whole, whole), all_to_all=("sequential",)) == 3 / 4 * windows + L
    assert of(lambda c: c.all_reduce(whole), all_reduce=("tree",)) == windows + 4 * L
    assert of(lambda c: c.broadcast(whole)) == windows + 3 * L
    assert of(lambda c: c.broadcast(whole), broadcast=("binomial",)) == 2 * windows + 2 * L


def test_a_window_is_shared_by_nobody_and_stays_between_nodes():
    far = dataclasses.replace(NODES, latency_us=20_000.0, window_mb=1.0)
    nbytes = 64 << 20
    windows = nbytes / (1 << 20) * 0.04
    whole = meta_bytes(nbytes)
    seconds = seconds_of(far, lambda c: c.nodes.local.all_reduce(whole))
    assert seconds == seconds_of(NODES, lambda c: c.nodes.local.all_reduce(whole))
    # Each of two ranks of a node has a ring of its own across.
    hierarchical = TransportProfile("h", all_reduce=("hierarchical",))
    inner = nbytes / 1e10 + 2 * 5e-6
    assert seconds_of(far, lambda c: c.all_reduce(whole), hierarchical) == pytest.approx(
        2 * 3 / 4 * windows / 2 + 6 * 0.02 + inner
    )


def test_what_gloo_waits_for():
    w, L, MiB = 1e9, 5e-3, 1 << 20
    far = dataclasses.replace(FOUR, latency_us=L * 1e6, window_mb=math.inf)

    def of(verb):
        return pytest.approx(seconds_of(far, verb, GLOO))

    def waits(pairs, sent):
        """Pairs of segments take a round trip and 0.65 of their bytes, or all of their bytes."""
        return max(sent / w, pairs * 2 * L + 0.65 * sent / w)

    for nbytes, pairs in ((MiB, 6), (8 * MiB, 6), (9 * MiB, 9), (64 * MiB, 48), (4096 * MiB, 3072)):
        assert of(lambda c, n=nbytes: c.all_reduce(meta_bytes(n))) == waits(pairs, 1.5 * nbytes)
    near = dataclasses.replace(far, latency_us=100.0)
    assert seconds_of(near, lambda c: c.all_reduce(meta_bytes(64 * MiB)), GLOO) == pytest.approx(96 * MiB / w)
    assert of(lambda c: c.all_gather(meta_bytes(8 * MiB), meta_bytes(2 * MiB))) == waits(3, 6 * MiB)
    assert of(lambda c: c.all_to_all(meta_bytes(8 * MiB), meta_bytes(8 * MiB))) == 6 * MiB / w + 2 * L
    assert of(lambda c: c.broadcast(meta_bytes(8 * MiB))) == 3 * 8 * MiB / w + 3 * L  # the receivers are waiting
    sides = [(1, meta_bytes(MiB)), (3, meta_bytes(MiB))]
    assert of(lambda c: c.exchange(sides, sides)) == 2 * MiB / w + 2 * L


def test_an_all_gather_doubles_where_every_node_has_one_rank():
    w, L = 1e9, 100e-6
    whole, part = meta_bytes(8000), meta_bytes(2000)
    doubling = TransportProfile("d", all_gather=("ring", "doubling"))
    assert seconds_of(FOUR, lambda c: c.all_gather(whole, part), doubling) == pytest.approx(6000 / w + 2 * L)
    whole, part = meta_bytes(8000), meta_bytes(1000)
    ring_s = seconds_of(NODES, lambda c: c.all_gather(whole, part))
    assert seconds_of(NODES, lambda c: c.all_gather(whole, part), doubling) == ring_s
    with pytest.raises(ConfigError, match="all_gather: .*doubling.* nodes of one rank"):
        seconds_of(NODES, lambda c: c.all_gather(whole, part), TransportProfile("d", all_gather=("doubling",)))


def test_latencies_overlap_where_several_collectives_are_under_way():
    request = Communicator(0, 4).all_reduce(meta_bytes(8))
    at = torch.zeros(1).numpy()
    alone, together = Links(FOUR, RING, FREE), Links(FOUR, dataclasses.replace(RING, in_flight=2), FREE)
    ends = [[links.carry("c", request, at)[1][0] for _ in range(2)] for links in (alone, together)]
    assert ends[0][1] == pytest.approx(2 * ends[0][0])
    assert ends[1][1] < 1.01 * ends[1][0]


def test_a_collective_starts_when_the_first_of_those_under_way_ends():
    request = Communicator(0, 4).all_reduce(meta_bytes(8))
    links = Links(FOUR, dataclasses.replace(RING, in_flight=2), FREE)
    zero = torch.zeros(1).numpy()
    _, first = links.carry("c", request, zero)
    late = first / 2  # the second ends half a collective after the first
    _, second = links.carry("c", request, late)
    start, _ = links.carry("c", request, late)
    assert start[0] == pytest.approx(first[0])
    assert second[0] == pytest.approx(1.5 * first[0])


# --- ranks that differ ------------------------------------------------------------------------------------------------


def test_a_straggler_delays_all_ranks_of_a_synchronous_algorithm():
    model = model_of(1_000_000)
    alike, slowed = (run(model, bucket_cap_mb=100, stragglers=s) for s in (None, {2: 3.0}))
    # All wait for its forward and backward; its optimizer's step is its own, and comes before its next forward.
    assert slowed.step_s == pytest.approx(alike.step_s + 2 * model.step_s, rel=0.01)


class Asynchronous(Algorithm):
    channel = Weights(asynchronous=True)

    def communicate(self, bucket, comm):
        yield comm.all_reduce(bucket.flat)
        bucket.flat.div_(comm.world_size)


def test_a_straggler_delays_nobody_in_an_asynchronous_algorithm():
    model = model_of(1_000_000)
    slowed = run(model, algorithm=Asynchronous(), stragglers={2: 3.0}, steps=40)
    free = (3 / model.step_s + 1 / (3 * model.step_s)) * model.batch_per_rank
    assert slowed.samples_per_s == pytest.approx(free, rel=1e-6)
    assert slowed.waited_s == 0.0
    assert 0 < slowed.wire_bytes <= 2 * 3 / 4 * model.nbytes


def test_asynchronous_ranks_that_are_alike_never_wait():
    model = model_of(1_000_000)
    result = run(model, algorithm=Asynchronous())
    assert result.step_s == pytest.approx(model.step_s, rel=1e-6)


def test_rounds_in_the_background_hide_behind_the_next_step():
    class Delayed(Asynchronous):
        channel = Weights(delay=1)

    class Waiting(Asynchronous):
        channel = Weights()

    model = model_of(1_000_000)
    assert run(model, algorithm=Delayed()).step_s == pytest.approx(model.step_s, rel=1e-6)
    assert run(model, algorithm=Waiting()).step_s == pytest.approx(model.step_s + ring_s(1_000_000), rel=1e-6)


def test_periods_are_simulated_whole():
    class Local(Asynchronous):
        channel = Weights(period=30)

    result = run(model_of(1_000_000), algorithm=Local(), steps=20)
    assert len(result.steps_s) == 16 * 30
    assert result.wire_bytes == pytest.approx(2 * 3 / 4 * 4_000_000 / 30)


@pytest.mark.parametrize(
    "name", [name for name in ALL if not getattr(algorithms.create(name).channel, "varies", False)]
)
def test_what_only_the_start_does_is_not_counted(name):
    """As the first differences of `low_precision_decentralized` in full precision, in a round that lasts longer."""
    cycle = algorithms.create(name).channel.cycle
    result = run(model_of(2_000_000, 2_000_000), algorithm=name, steps=4)
    periods_s = [sum(result.steps_s[begin : begin + cycle]) for begin in range(0, len(result.steps_s), cycle)]
    assert periods_s == pytest.approx([cycle * result.step_s] * len(periods_s), rel=1e-9)


@pytest.mark.parametrize(
    "algorithm", ["gossip", algorithms.Decentralized(topology="one_peer_exponential")], ids=["gossip", "one-peer"]
)
def test_rounds_that_vary_are_simulated_more_than_once(algorithm):
    """With two GPUs in a node, a partner is in the same node or in another one."""
    result = run(model_of(8_000_000, 8_000_000), NODES, algorithm, steps=1)
    assert len(result.steps_s) >= 16
    assert max(result.steps_s) > 1.05 * min(result.steps_s)


def test_jitter_is_drawn_from_the_seed():
    model = model_of(500_000, 500_000)
    first, again, other = (run(model, jitter=0.1, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.step_s != other.step_s
    assert first.step_s > run(model).step_s  # every step waits for the slowest rank


@pytest.mark.parametrize("network", [FOUR, NODES], ids=lambda network: network.name)
@pytest.mark.parametrize("name", ALL)
def test_alike_ranks_are_simulated_once_with_the_same_result(name, network):
    model = model_of(200_000, 300_000)
    device = Device("device", 100.0, {"fp32": 10.0}, launch_us=2.0, contention=0.3)
    one, each = (run(model, network, name, device, stragglers=s, steps=3) for s in (None, {0: 1.0}))
    if not algorithms.create(name).channel.keeps_step:  # another way of simulating it, with simpler costs
        assert each.step_s == pytest.approx(one.step_s, rel=0.05)
        return
    # Where ranks differ, one is the slowest of them and each their mean.
    varies = getattr(algorithms.create(name).channel, "varies", False)
    assert each.step_s == pytest.approx(one.step_s, rel=1e-3 if varies else 1e-12)
    assert (each.wire_bytes, each.adapter_bytes) == (one.wire_bytes, one.adapter_bytes)


# --- any algorithm ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_every_algorithm_can_be_simulated(name):
    model = dataclasses.replace(model_of(200_000, 300_000), optimizer="adam")
    result = run(model, NODES, name, Device("device", 100.0, {"fp32": 10.0}, launch_us=2.0), transport=NCCL, steps=2)
    assert result.step_s >= model.step_s * (1 - 1e-9)
    assert result.wire_bytes > 0
    assert result.memory_bytes >= 0
    assert {span.lane for span in result.spans} >= {"compute", "network"}
    assert ("warm-up" in result.phases) == (algorithms.create(name).channel.warmup_steps > 0)


def test_the_example_of_the_documentation_runs_on_1024_ranks():
    text = (Path(__file__).parents[2] / "docs" / "reference" / "algorithms.md").read_text()
    (source,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "class ScaledSign" in block)
    namespace: dict = {}
    exec(source.partition("\nmodel = ")[0], namespace)
    network = Network("large", nodes=128, gpus_per_node=8)
    model = model_of(500_000)
    result = run(model, network, namespace["ScaledSign"](), transport=NCCL, steps=2, bucket_cap_mb=100)
    # A byte for each element and a scale, to 1,023 others; and the flags.
    assert result.wire_bytes == 1023 * (500_000 + 4) + 2 * 1023 / 1024 * 4
    assert result.memory_bytes >= 1024 * 500_000


@pytest.mark.parametrize("algorithm", [ByteGrad(hierarchical=True), DeMo()])
def test_4096_ranks_are_no_more_work_than_few(algorithm):
    def simulated(nodes):
        run(model_of(500_000, 500_000), Network("huge", nodes=nodes, gpus_per_node=8), algorithm, transport=NCCL)

    simulated(4)  # the first call also loads modules
    assert num_calls(lambda: simulated(512)) < 1.5 * num_calls(lambda: simulated(4))


@pytest.mark.slow
def test_all_algorithms_take_seconds_on_128_ranks():
    """Five million calls take about five; the costliest algorithms make one million."""
    layers = tuple(
        Layer(f"layer{idx}", (("weight", (512, 512)), ("bias", (512,)), ("mlp", (2048, 512)), ("norm", (512,))), 1.0)
        for idx in range(12)
    )
    model = Workload("small", layers, 8, 0.05, 0.1, 0.01, optimizer="adam")
    network = Network("128", nodes=16, gpus_per_node=8)
    calls = {name: num_calls(lambda name=name: run(model, network, name, transport=NCCL, steps=20)) for name in ALL}
    assert {name: count for name, count in calls.items() if count > 5_000_000} == {}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_algorithms_take_a_minute_on_bert_large():
    """73 million calls took a minute and a half of a busy core, the counting of calls among it."""
    network, device = presets.network("100gbps"), presets.device("v100")
    assert network.world_size == 128

    def simulated():
        for name in ALL:
            run(workloads.get("bert-large"), network, name, device, transport=NCCL, steps=20)

    assert num_calls(simulated) < 150_000_000


def test_an_error_of_an_algorithms_own_is_raised_as_it_is():
    class Refusing(AllReduce):
        def communicate(self, bucket, comm):
            raise CodecError("no such bucket")
            yield

    with pytest.raises(CodecError, match=r"^no such bucket$"):
        run(model_of(1000), algorithm=Refusing())


def test_an_algorithm_that_asks_for_values_is_refused():
    class Peeking(AllReduce):
        def communicate(self, bucket, comm):
            if bucket.flat.sum().item() > 0:
                yield comm.all_reduce(bucket.flat)

    with pytest.raises(ConfigError, match=r"Peeking failed on meta tensors"):
        run(model_of(1000), algorithm=Peeking())


def test_hierarchy_sends_less_through_the_adapters():
    network = Network("nodes", nodes=4, gpus_per_node=8, bandwidth_gbps=8.0)
    model = model_of(4_000_000)
    flat, nodes = (run(model, network, ByteGrad(hierarchical=h), transport=NCCL, steps=1) for h in (False, True))
    assert nodes.adapter_bytes < flat.adapter_bytes / 4
    assert nodes.step_s < flat.step_s


@pytest.mark.parametrize(("numel", "shorter_s"), [(1_000_000, 600e-6), (1_000, 6e-6)])
def test_latency_is_hidden_behind_bytes_or_the_other_way_round(numel, shorter_s):
    seconds = []
    for hidden in (0.0, 0.5, 1.0):
        transport = TransportProfile("ring", hidden_of={"all_reduce": hidden})
        seconds.append(run(model_of(numel), transport=transport, bucket_cap_mb=100).step_s)
    apart, half, whole = seconds
    assert apart == pytest.approx(0.031 + ring_s(numel, num_flags=1), rel=1e-9)
    assert apart - whole == pytest.approx(shorter_s, rel=1e-2)
    assert apart - half == pytest.approx(shorter_s / 2, rel=1e-2)


def test_whole_matrices_travel_inside_a_node_without_padding():
    network = Network("nodes", nodes=2, gpus_per_node=8, bandwidth_gbps=8.0)
    model = model_of(4_000_000, 200_000, 100_000, 300_000, 100_000)  # most local ranks have little, some nothing
    result = run(model, network, PowerSGD(hierarchical=True), transport=NCCL, steps=1, bucket_cap_mb=100)
    elements = 4_700_000
    assert result.wire_bytes < 4 * elements * 7 + 1e6  # at most, the others get all of it from this one
    assert result.memory_bytes < 4 * elements * 10  # once from each local rank, the sum, the error; once before


@pytest.mark.parametrize(
    "options",
    [{"steps": 0}, {"jitter": -1.0}, {"bucket_cap_mb": 0.0}, {"stragglers": {9: 2.0}}, {"stragglers": {0: 0.0}}],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ConfigError, match="simulate: expected"):
        run(model_of(1000), **options)


# --- local work -------------------------------------------------------------------------------------------------------


def test_operations_cost_their_traffic_or_their_arithmetic():
    meter = Meter(Device("device", memory_gbytes_s=1.0, tflops={"fp32": 1e-3}, launch_us=0.0))

    def cost(work) -> float:
        work()
        return meter.take()

    with meter.active():
        x, y, narrow = torch.zeros(1000), torch.zeros(1000), torch.zeros(1000, dtype=torch.uint8)
        a, b, c = torch.zeros(100, 100), torch.zeros(100, 100), torch.empty(100, 100)
        meter.take()
        assert cost(lambda: x.add_(y)) == pytest.approx(12_000e-9)
        assert cost(lambda: x + y) == pytest.approx(12_000e-9)
        assert cost(lambda: torch.add(x, y, out=y)) == pytest.approx(12_000e-9)
        assert cost(lambda: x.copy_(y)) == pytest.approx(8_000e-9)
        assert cost(lambda: x.copy_(narrow)) == pytest.approx(5_000e-9)
        assert cost(x.zero_) == pytest.approx(4_000e-9)
        assert cost(lambda: torch._foreach_copy_([x, y], [y, x])) == pytest.approx(16_000e-9)
        assert cost(lambda: torch.empty(1000)) == 0.0
        assert cost(lambda: x.view(10, 100)[2:].t()) == 0.0
        assert cost(lambda: torch.mm(a, b, out=c)) == pytest.approx(2 * 100**3 / 1e9)
        assert cost(lambda: x.index_fill_(0, torch.empty(10, dtype=torch.int64), 0.0)) == pytest.approx(
            (80 + 80) * 1e-9
        )


def test_tensors_are_made_on_the_meta_device_unless_they_have_values_that_can_be_known():
    meter, generator = Meter(FREE), torch.Generator().manual_seed(0)
    drawn = torch.randn(3, generator=torch.Generator().manual_seed(0))
    with meter.active():
        for made in (torch.zeros(3), torch.empty(3, device="cpu"), torch.randn(3), torch.arange(3), torch.Tensor(3)):
            assert made.is_meta
        assert torch.equal(torch.randn(3, generator=generator), drawn)
        assert torch.tensor([1.0, 2.0]).tolist() == [1.0, 2.0]
        known = torch.ones(3).add_(torch.zeros(3))  # whose costs are remembered
    assert known.is_meta
    assert torch.zeros(3).device.type == "cpu"


def test_memory_is_what_is_alive():
    meter = Meter(FREE)
    with meter.active():
        kept = torch.zeros(1000)
        view = kept[:10]
        torch.zeros(500)
        del kept
    assert meter.allocated_bytes == 4000
    del view
    assert meter.allocated_bytes == 0


@pytest.mark.parametrize(
    ("executor", "own"), [(native_codecs, meta_codecs), (native_sparse, meta_sparse)], ids=["block", "sparse"]
)
def test_the_executor_for_meta_tensors_has_the_functions_of_the_others(executor, own):
    names = [n for n, f in inspect.getmembers(executor, inspect.isfunction) if f.__module__ == executor.__name__]
    for name in names:
        if name.startswith("_") or name.endswith("_bytes") or name == "native_random":
            continue
        assert inspect.signature(getattr(own, name)) == inspect.signature(getattr(executor, name)), name


def test_arguments_of_codecs_are_checked_on_meta_tensors_too():
    with pytest.raises(CodecError, match="out"):
        ByteGrad().codec.encode(torch.empty(100, device="meta"), torch.empty(7, dtype=torch.uint8, device="meta"))


def test_codec_kernels_take_their_part_of_the_copy_rate():
    codec = ByteGrad().codec
    seconds = []
    for fraction in (1.0, 0.5):
        meter = Meter(Device("device", 1.0, {"fp32": 1.0}, codec_fractions={"": 0.25, "int8.encode": fraction}))
        with meter.active():
            x, out = torch.empty(1024), torch.empty(codec.payload_bytes(1024), dtype=torch.uint8)
            codec.encode(x, out)
        seconds.append(meter.take())
    assert seconds[0] == pytest.approx((x.nbytes + out.nbytes) * 1e-9)
    assert seconds[1] == pytest.approx(2 * seconds[0])


@pytest.mark.parametrize(
    "make",
    [
        lambda: Network("n", nodes=0),
        lambda: Network("n", 2, efficiency=1.5),
        lambda: Network("n", 2, latency_us=-1.0),
        lambda: Device("d", 0.0, {"fp32": 1.0}),
        lambda: Device("d", 1.0, {"fp16": 1.0}),
        lambda: Device("d", 1.0, {"fp32": 1.0}, codec_fractions={"int8": 1.0}),
        lambda: Workload("w", (), 1, 1.0, 1.0),
        lambda: dataclasses.replace(model_of(1000), dtype="int8"),
        lambda: dataclasses.replace(model_of(1000), forward_s=math.nan),
        lambda: TransportProfile("t", all_reduce=("star",)),
    ],
)
def test_figures_that_make_no_sense_are_refused(make):
    with pytest.raises(ConfigError, match="expected"):
        make()


def test_a_calibration_finds_what_made_the_measurements():
    def cpu(memory: float, per_byte: float, per_message: float) -> Device:
        return Device(
            "cpu", memory, {"fp32": 0.1}, shares_compute=True, cores=2, ranks_per_machine=4,
            cpu_s_per_byte=per_byte, cpu_s_per_message=per_message,
        )  # fmt: skip

    true_device, true_transport = (
        cpu(7.0, 2e-9, 2e-4),
        TransportProfile("true", op_us=60.0, efficiency_of={"all_to_all": 0.6, "all_gather": 0.8}),
    )
    model = model_of(500_000, 500_000)
    cells = []
    for gbps in (0.2, 1.0):
        network = dataclasses.replace(FOUR, bandwidth_gbps=gbps)
        for name in ("allreduce", "bytegrad", "signsgd", "topk"):
            cell = MeasuredStep(model, network, name, 1.0, bucket_cap_mb=1.0)
            cells.append(dataclasses.replace(cell, step_s=predict(cell, true_device, true_transport)))
    start = TransportProfile("start", op_us=50.0)
    found = calibrate(cells, cpu(5.0, 1e-9, 1e-4), start)
    assert max(map(abs, found.errors)) < 0.02
    # It holds where nothing was measured.
    other = MeasuredStep(model, dataclasses.replace(FOUR, bandwidth_gbps=0.5), "ef_quantized", 1.0, bucket_cap_mb=1.0)
    truth = predict(other, true_device, true_transport)
    assert predict(other, found.device, found.transport) == pytest.approx(truth, rel=0.03)


def test_a_calibration_needs_as_many_measurements_as_figures():
    cell = MeasuredStep(model_of(1000), FOUR, "allreduce", 1.0)
    with pytest.raises(ConfigError, match="at least 7 measured steps, got 1"):
        calibrate([cell], FREE, RING)
    with pytest.raises(ConfigError, match="figures above 0"):
        calibrate([cell] * 7, FREE, RING)
