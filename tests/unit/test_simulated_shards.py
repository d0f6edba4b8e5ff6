"""Simulation of models that FSDP2 shards: groups of ranks, modules, bytes, times and memory."""

import dataclasses
import json
import math

import pytest
from typer.testing import CliRunner

from commlib.algorithms import ByteGrad
from commlib.cli import app
from commlib.codecs.registry import block_codec
from commlib.errors import ConfigError
from commlib.network import presets, workloads
from commlib.network.model import Device, Layer, Network, Workload
from commlib.simulation.collectives import GLOO, Islands
from commlib.simulation.compare import compare
from commlib.simulation.sharded import ShardedModel, Sharding, training_bytes
from commlib.simulation.simulator import Options, simulate

WIDTH, BLOCKS = 256, 4
MATRIX = WIDTH * WIDTH
LAYERS = (
    Layer("embed", (("weight", (WIDTH, WIDTH)),), 0.0),
    *(
        layer
        for idx in range(BLOCKS)
        for layer in (
            Layer(f"blocks.{idx}.norm", (("weight", (WIDTH,)),), 0.0),
            Layer(f"blocks.{idx}.linear", (("weight", (WIDTH, WIDTH)),), 1.0),
        )
    ),
    Layer("head", (("weight", (WIDTH, WIDTH)),), 1.0),
)
SMALL = Workload("small", LAYERS, 2, forward_s=0.05, backward_s=0.1, optimizer_s=0.04, optimizer="adam")
#: Local work takes no time.
FREE = Device("free", 1e15, {"fp32": 1e12}, memory_gbytes=1.0)
ON_HOST = dataclasses.replace(FREE, shares_compute=True, cores=4)
FAST = Network("fast", nodes=2, gpus_per_node=4, bandwidth_gbps=1e6, latency_us=0.0, intra_gbps=1e6, intra_latency_us=0)


def simulated(sharding, network=FAST, workload=SMALL, device=FREE, algorithm="allreduce", **options):
    return simulate(workload, network, device, algorithm, Options(steps=2, sharding=sharding, **options))


@pytest.mark.parametrize(
    ("nodes", "per_node", "ranks", "shards", "replicas", "concurrent"),
    [
        (16, 8, 8, (1, 8), (16, 1), 8),
        (16, 8, 128, (16, 8), (1, 1), 8),
        (16, 8, 32, (4, 8), (4, 1), 8),
        (16, 8, 2, (1, 2), (16, 4), 2),
        (4, 1, 2, (2, 1), (2, 1), 1),
    ],
)
def test_islands_are_parts_of_nodes_or_whole_nodes(nodes, per_node, ranks, shards, replicas, concurrent):
    islands = Islands.of(Network("any", nodes, per_node, bandwidth_gbps=10.0), ranks)
    assert (islands.shards.nodes, islands.shards.gpus_per_node) == shards
    assert (islands.replicas.nodes, islands.replicas.gpus_per_node) == replicas
    assert islands.num_concurrent == concurrent
    assert islands.replicas.bandwidth_gbps == pytest.approx(10.0 / concurrent)
    assert islands.shards.bandwidth_gbps == 10.0
    assert islands.shards.world_size * islands.replicas.world_size == nodes * per_node


@pytest.mark.parametrize("ranks", [3, 12, 24, 256])
def test_other_islands_are_refused(ranks):
    with pytest.raises(ConfigError, match="expected a divisor of 8 ranks per node, or of 16 nodes times 8"):
        Islands.of(Network("any", 16, 8), ranks)


def test_parts_with_a_number_are_blocks():
    def blocks(name):
        model = ShardedModel(workloads.get(name), presets.network("10gbps"), Sharding(8))
        numel = sum(math.prod(shape) for module in (model.root, *model.blocks) for _, shape in module.shapes)
        assert numel == workloads.get(name).numel
        return len(model.blocks), [name for name, _ in model.root.shapes]

    assert blocks("llama3-8b") == (32, ["tok_embeddings.weight", "norm.weight", "output.weight"])
    assert blocks("llama3-70b")[0] == 80
    assert blocks("gpt2") == (12, ["wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias"])
    assert blocks("resnet50")[0] == 16
    assert blocks("vgg16") == (16, [])


def test_a_shard_is_ready_with_its_module():
    model = ShardedModel(SMALL, FAST, Sharding(4))
    shard = model.shard
    assert shard.optimizer_s == 0.01
    assert sum(layer.weight for layer in shard.layers) == sum(layer.weight for layer in LAYERS)
    assert dict(shard.parameters()) == {name: (shape[0] // 4, *shape[1:]) for name, shape in SMALL.parameters()}, (
        "every parameter, divided along its first dimension"
    )
    ready = dict(zip((name for name, _ in shard.parameters()), shard.ready_s(), strict=True))
    assert ready["head.weight"] == ready["embed.weight"] == pytest.approx(0.1), "the root module is reduced last"
    assert ready["blocks.3.norm.weight"] == ready["blocks.3.linear.weight"] == pytest.approx(0.1 * 2 / 5)


def test_a_workload_without_blocks_is_refused():
    layers = (Layer("one", (("weight", (8, 8)),), 1.0),)
    with pytest.raises(ConfigError, match="has no blocks"):
        simulated(Sharding(2), workload=dataclasses.replace(SMALL, layers=layers))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 1}, "expected 2 or more ranks, got 1"),
        ({"ranks": 2, "weights": "int9"}, "int9"),
        ({"ranks": 2, "difference": True}, "differences require a codec of the weights"),
        ({"ranks": 2, "param_dtype": "int8"}, "expected param_dtype of"),
    ],
)
def test_invalid_shardings_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Sharding(**options)


def test_ranks_that_differ_are_refused():
    with pytest.raises(ConfigError, match="stragglers and jitter are not simulated for sharded models"):
        simulated(Sharding(8), jitter=0.1)


# --- bytes ------------------------------------------------------------------------------------------------------------


def payload_bytes(codec, ranks, itemsize=4):
    """Bytes of a rank's payload: of a block, and of the root module."""

    def of(numel):
        return numel * itemsize if codec is None else block_codec(codec).payload_bytes(numel)

    matrix = -(-of(MATRIX // ranks) // 16) * 16
    norm = -(-WIDTH // ranks * itemsize // 16) * 16  # in full precision
    return matrix + norm, 2 * matrix


def test_nodes_send_their_sums_once():
    """Within a node, each rank sends its gradients but one row; between nodes, the payloads of one row."""
    network = Network("nodes", nodes=2, gpus_per_node=4, bandwidth_gbps=1.0)
    sharding = Sharding(8, "int8", "int8", hierarchical=True)
    model = ShardedModel(SMALL, network, sharding)
    gathered = [model.weights_of(module).payload_bytes for module in (model.root, *model.blocks * 2)]
    reduced = [model.gradients_of(module) for module in (model.root, *model.blocks)]
    result = simulated(sharding, network)
    local = sum(3 / 4 * 8 * each.row_bytes for each in reduced)
    across = sum(each.payload_bytes for each in reduced)
    assert result.wire_bytes == 7 * sum(gathered) + local + across
    assert result.adapter_bytes == pytest.approx(7 * sum(gathered) + 4 * across)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    ("weights", "gradients", "reshards", "difference"),
    [
        ("fp32", "fp32", True, False),
        ("int8", "int8", True, False),
        ("int4", "int8", False, False),
        ("int4", "bf16", False, True),
        ("int4", "int8", True, True),
    ],
)
def test_bytes_are_those_of_the_payloads(ranks, weights, gradients, reshards, difference):
    """Blocks are gathered twice if they are resharded and once otherwise, the root module once."""
    network = Network("one island", nodes=1, gpus_per_node=ranks, intra_gbps=100.0)
    sharding = Sharding(ranks, weights, gradients, difference, reshards)
    block, root = payload_bytes(None if weights == "fp32" else weights, ranks)
    block_gradients, root_gradients = payload_bytes(None if gradients == "fp32" else gradients, ranks)
    num_gathers = 2 if reshards and not difference else 1
    expected = BLOCKS * (num_gathers * block + block_gradients) + root + root_gradients
    assert simulated(sharding, network, device=ON_HOST).wire_bytes == (ranks - 1) * expected
    if weights != "fp32" != gradients:
        assert simulated(sharding, network).wire_bytes == (ranks - 1) * expected


@pytest.mark.parametrize("weight", [0.1, 0.3, 1 / 7, 1e12 / 3])
def test_every_module_is_reduced_however_its_share_of_the_time_rounds(weight):
    """Sums of the layers' weights from the first and from the last layer can differ in the last bit."""
    layers = [dataclasses.replace(layer, weight=weight * (1 + idx / 3)) for idx, layer in enumerate(LAYERS)]
    network = Network("one island", nodes=1, gpus_per_node=4)
    for backward_s in (0.1, 0.7, 1 / 3):
        workload = dataclasses.replace(SMALL, layers=tuple(layers), backward_s=backward_s)
        sharding = Sharding(4, "int8", "int8")
        expected = simulated(sharding, network).wire_bytes
        assert simulated(sharding, network, workload).wire_bytes == expected


def test_dtypes_of_gathers_and_reductions():
    network = Network("one island", nodes=1, gpus_per_node=4)
    block, root = payload_bytes(None, 4)
    sharding = Sharding(4, param_dtype="bf16", reduce_dtype="fp32")
    expected = 3 * (BLOCKS * (2 * block / 2 + block) + root / 2 + root)
    assert simulated(sharding, network, device=ON_HOST).wire_bytes == expected


def test_islands_send_what_the_algorithm_sends_for_the_shards():
    network = Network("islands", nodes=2, gpus_per_node=4, bandwidth_gbps=10.0)
    sharding = Sharding(4, "int8", "int8")
    model = ShardedModel(SMALL, network, sharding)
    alone = simulated(sharding, model.islands.shards).wire_bytes
    options = Options(steps=2, bucket_cap_mb=25.0)
    across = simulate(model.shard, model.islands.replicas, FREE, "bytegrad", options).wire_bytes
    result = simulated(sharding, network, algorithm=ByteGrad(), bucket_cap_mb=25.0)
    assert result.wire_bytes == pytest.approx(alone + across)
    assert result.adapter_bytes == pytest.approx(4 * across), "the four shards of a node leave it, and nothing else"
    assert result.world_size == 8
    assert result.samples_per_s == pytest.approx(8 * 2 / result.step_s)


# --- times ------------------------------------------------------------------------------------------------------------


def test_without_communication_time_a_step_is_its_computation():
    for device in (FREE, ON_HOST):
        result = simulated(Sharding(8, "int8", "int8"), device=device)
        assert result.step_s == pytest.approx(0.05 + 0.1 + 0.04 / 8, rel=1e-3)
        assert result.exposed_s == pytest.approx(0.0, abs=1e-3)


def test_a_slow_network_takes_the_time_of_the_bytes():
    """Between nodes of one rank, gathers and reductions follow one another on the adapter."""
    network = Network("slow", nodes=4, bandwidth_gbps=0.01, latency_us=0.0)
    for device, transport in ((FREE, Options().transport), (ON_HOST, GLOO)):
        sharding = Sharding(4, "int8", "int8")
        instant = dataclasses.replace(SMALL, forward_s=1e-9, backward_s=1e-9, optimizer_s=0.0)
        result = simulated(sharding, network, instant, device, transport=transport)
        assert result.step_s == pytest.approx(result.wire_bytes / network.bytes_per_s, rel=0.01)
        assert result.adapter_bytes == pytest.approx(result.wire_bytes)


def test_accelerators_overlap_and_processors_wait_for_reductions():
    """Computation hides all but the first gathers of a pass and the last reductions; on a processor, no reduction."""
    network = Network("pair", nodes=2, bandwidth_gbps=1.0, latency_us=0.0)
    sharding = Sharding(2, "int8", "int8")
    at_once = dataclasses.replace(Options().transport, op_us=0.0)
    model = ShardedModel(SMALL, network, sharding)
    rate = network.bytes_per_s
    root, block = (layout.payload_bytes / rate for layout in map(model.weights_of, (model.root, model.blocks[0])))
    assert block < 0.01, "shorter than the computation of a block"

    def exposed_s(device, how=sharding):
        return simulated(how, network, device=device, transport=at_once).exposed_s

    # Forward waits for the root module and the first block, backward for the last block; the last reductions are the
    # first block's and the root module's, since no computation follows the first block's.
    assert exposed_s(FREE) == pytest.approx(root + block + block + block + root, rel=1e-3)
    assert exposed_s(ON_HOST) == pytest.approx(root + block + block + BLOCKS * block + root, rel=1e-3)
    kept = dataclasses.replace(sharding, reshard_after_forward=False)
    assert exposed_s(FREE, kept) == pytest.approx(root + block + block + root, rel=1e-3)


def test_buckets_follow_the_reductions_of_their_gradients():
    network = Network("islands", nodes=2, gpus_per_node=2, bandwidth_gbps=0.1, intra_gbps=0.1, latency_us=0.0)
    sharding = Sharding(2, "int8", "int8")
    spans = simulated(sharding, network, bucket_cap_mb=0.01).spans
    of = {verb: [span for span in spans if span.name == verb] for verb in ("all_to_all", "all_reduce")}
    steps = len(of["all_to_all"]) / (BLOCKS + 1)
    assert steps == int(steps) > 1
    assert min(span.start_s for span in of["all_reduce"]) >= min(span.end_s for span in of["all_to_all"])
    last = [max(span.end_s for span in of[verb]) for verb in of]
    assert last[1] > last[0], "the root module's gradients are averaged after their reduction"


def test_codecs_take_time_on_the_device():
    slow = dataclasses.replace(FREE, memory_gbytes_s=0.01)
    plain = simulated(Sharding(8), device=slow).step_s
    assert simulated(Sharding(8, "int8", "int8"), device=slow).step_s > 1.2 * plain


def test_codecs_of_gradients_cost_bandwidth_between_nodes_of_several_ranks():
    """All ranks of a node send their all-to-all through one adapter; torch's ring sends once per node."""
    network = presets.network("10gbps")
    workload, device = workloads.get("llama3-8b"), presets.device("h100")
    plain = simulated(Sharding(128, "int8"), network, workload, device)
    encoded = simulated(Sharding(128, "int8", "int8"), network, workload, device)
    assert encoded.wire_bytes < plain.wire_bytes
    assert encoded.adapter_bytes > 2 * plain.adapter_bytes
    by_node = simulated(Sharding(128, "int8", "int8", hierarchical=True), network, workload, device)
    assert by_node.adapter_bytes < 0.8 * plain.adapter_bytes
    assert by_node.step_s < 0.8 * plain.step_s


# --- memory -----------------------------------------------------------------------------------------------------------


def test_total_memory_without_sharding_is_that_of_the_training_and_the_algorithm():
    result = simulate(SMALL, FAST, FREE, "topk", Options(steps=1))
    assert result.total_bytes == 4 * SMALL.nbytes + result.memory_bytes
    assert training_bytes(dataclasses.replace(SMALL, optimizer="sgd")) == 3 * SMALL.nbytes


def test_total_memory_with_sharding():
    block, root = 4 * (MATRIX + WIDTH), 4 * 2 * MATRIX
    sharding = Sharding(8)
    expected = 4 * SMALL.nbytes / 8 + 2 * block + root + 2 * root
    assert simulated(sharding).total_bytes == expected
    kept = dataclasses.replace(sharding, reshard_after_forward=False)
    assert simulated(kept).total_bytes == expected + 2 * block
    reference = dataclasses.replace(sharding, weights="int8", difference=True)
    encoded = dataclasses.replace(sharding, weights="int8")
    assert simulated(reference).total_bytes == simulated(encoded).total_bytes + SMALL.nbytes


# --- compare ----------------------------------------------------------------------------------------------------------


def run(*arguments):
    return CliRunner().invoke(app, ["compare", "--steps", "1", *arguments])


def test_rows_that_do_not_fit_are_marked_and_not_advised():
    printed = run("--workload", "llama3-8b", "--network", "10gbps", "--algorithms", "ef_quantized,allreduce", "--wide")
    assert printed.exit_code == 0
    assert "ef_quantized!" in printed.output
    assert "! more than the 80 GB of h100" in printed.output
    assert "ef_quantized, " not in printed.output.split("Use ")[-1]
    nothing = run("--workload", "llama3-70b", "--network", "10gbps", "--algorithms", "allreduce").output
    assert "None of these fits in the 80 GB of h100. Shard the model (--shard RANKS)." in " ".join(nothing.split())


def test_the_baseline_of_a_sharded_model_has_no_codec():
    options = Options(steps=1, sharding=Sharding(4, "int8", "int8"))
    network = Network("islands", nodes=2, gpus_per_node=4, bandwidth_gbps=1.0)
    comparison = compare(SMALL, network, FREE, {"bytegrad": ByteGrad()}, options)
    assert comparison.baseline == "FSDP2 and all-reduce"
    plain = simulate(
        SMALL, network, FREE, "allreduce", dataclasses.replace(options, sharding=Sharding(4), bucket_cap_mb=25)
    )
    assert comparison.ddp.step_s == plain.step_s
    [row] = comparison.rows
    assert row.fits
    assert row.exactness == "8bit"
    assert comparison.as_dict()["sharding"]["weights"] == "int8"


def test_one_island_compares_codecs():
    network = ["--workload", "gpt2", "--network", "10gbps", "--shard", "128"]
    printed = run(*network, "--weights", "fp32,int8", "--gradients", "fp32,int4", "--json", "--reduce-dtype", "fp32")
    [comparison] = json.loads(printed.stdout)
    rows = {row["algorithm"]: row for row in comparison["rows"]}
    assert sorted(rows) == [f"{w} weights, {g} gradients" for w in ("fp32", "int8") for g in ("fp32", "int4")]
    assert rows["fp32 weights, fp32 gradients"]["speedup"] == pytest.approx(1.0)
    assert rows["int8 weights, int4 gradients"]["exactness"] == "any"
    assert rows["int8 weights, fp32 gradients"]["wire_bytes"] < rows["fp32 weights, fp32 gradients"]["wire_bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weights", "int8"], "without --shard there is no --weights"),
        (["--difference"], "without --shard there is no --difference"),
        (["--no-reshard-after-forward"], "without --shard there is no --reshard-after-forward"),
        (["--shard", "8", "--weights", "int8,bf16"], "expected one codec each with several islands"),
        (["--shard", "3"], "expected a divisor of 8 ranks per node"),
        (["--shard", "8", "--emulate"], "--emulate does not support --shard"),
    ],
)
def test_options_of_sharding_are_checked(arguments, message):
    printed = run("--workload", "gpt2", "--network", "10gbps", "--algorithms", "allreduce", *arguments)
    assert printed.exit_code == 2
    assert message in " ".join(printed.output.replace("│", " ").split())
