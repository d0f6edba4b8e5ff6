"""The assumptions of a comparison in words: workload, network, device, sharding, prices, versions."""

from __future__ import annotations

import math
import platform

import torch

from commlib.network.model import Network
from commlib.reports.tables import kept
from commlib.simulation.compare import DDP_BUCKET_CAP_MB, Comparison
from commlib.simulation.cost import unit
from commlib.simulation.sharded import Sharding
from commlib.version import __version__


def summary(comparison: Comparison) -> str:
    """Return the workload, the device and the network in one sentence."""
    workload, network = comparison.workload, comparison.network
    return (
        f"{workload.name} ({workload.numel / 1e6:.1f} M parameters, batch {workload.batch_per_rank}, "
        f"{workload.optimizer}, {workload.step_s * 1e3:.1f} ms a step alone on "
        f"{workload.device or comparison.device.name}) on "
        f"{network.name}: {kept(f'{network.nodes} x {network.gpus_per_node} ranks')}, "
        f"{network.bandwidth_gbps:g} Gbit/s, {network.latency_us:g} us"
    )


def ceiling(network: Network) -> str:
    """Return the maximum throughput of the transport if it limits the network; "" otherwise."""
    if network.bytes_per_s * 8e-9 >= network.bandwidth_gbps * network.efficiency:
        return ""
    return f"The transport carries {network.ceiling_gbps:g} Gbit/s at most (docs/explanation/simulator.md)."


def machines(comparison: Comparison) -> str:
    """Return that the workload's times are of another device, or that the network's machines are; "" otherwise."""
    workload, network, device = comparison.workload, comparison.network, comparison.device.name
    texts = []
    if workload.device not in ("", device):
        texts.append(
            f"The time of a step alone is that on {workload.device}: {device} changes only the work of the algorithms "
            "and the memory. Profile the model there (commlib profile) for its own time."
        )
    if network.device not in ("", device):
        texts.append(f"{network.name} describes machines with {network.device}, and is simulated with {device}.")
    return " ".join(texts)


def sharded(sharding: Sharding, network: Network) -> str:
    """Return how the model is sharded."""
    num_islands = network.world_size // sharding.ranks
    islands = "all ranks" if num_islands == 1 else f"{num_islands} islands of {sharding.ranks} ranks"
    codecs = f", weights in {sharding.weights}, gradients in {sharding.gradients}" if num_islands > 1 else ""
    once = "differences of weights, once per step" if sharding.difference else ""
    kept_whole = "" if sharding.reshard_after_forward else "reshard_after_forward=False"
    by_node = "gradients summed within nodes first" if sharding.hierarchical else ""
    more = "".join(f", {each}" for each in (once, kept_whole, by_node) if each)
    return f"Sharded by {islands} (FSDP2, commlib.shard){codecs}{more}."


def assumptions(comparison: Comparison) -> dict[str, str]:
    """Return all assumptions by their subject, as plain sentences."""
    workload, network, device = comparison.workload, comparison.network, comparison.device
    memory = "" if math.isinf(device.memory_gbytes) else f"{device.memory_gbytes:g} GB of memory per rank. "
    tokens = f" of {workload.tokens_per_sample:,} tokens" if workload.tokens_per_sample else ""
    found = {
        "workload": f"{workload.name}: {workload.numel:,} parameters in {workload.dtype}, {workload.optimizer}, "
        f"{workload.batch_per_rank} samples{tokens} per rank and step, {workload.step_s * 1e3:.1f} ms a step without "
        f"communication. {workload.source}",
        "network": f"{network.name}: {network.nodes} nodes of {network.gpus_per_node} ranks, "
        f"{network.bandwidth_gbps:g} Gbit/s per node in each direction, of which messages achieve "
        f"{network.efficiency:.0%}, {network.latency_us:g} us one-way latency. Within a node "
        f"{network.intra_gbps:g} Gbit/s per rank, {network.intra_latency_us:g} us. {network.source}",
        "transport": f"{_limit(network.ceiling_gbps, 'Gbit/s')} in total; "
        f"{_limit(network.window_mb, 'MiB')} in flight per connection between nodes.",
        "device": " ".join(filter(None, [f"{device.name}: {memory}{device.source}", machines(comparison)])),
        "baseline": f"{comparison.baseline}, buckets of {DDP_BUCKET_CAP_MB:g} MiB.",
    }
    if comparison.sharding is not None:
        found["sharding"] = sharded(comparison.sharding, network)
    if comparison.price is not None:
        budget = comparison.price.budget
        found["price"] = (
            f"{comparison.price.per_hour:g} per node and hour, {comparison.price.per_hour * network.nodes:g} per hour "
            f"for {network.nodes} nodes; costs per million {unit(workload)}."
            + ("" if budget is None else f" Budget: {budget:g}.")
        )
    found["versions"] = f"commlib {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return found


#: The classes of algorithms (`Algorithm.exactness`) with the step of each.
CLASSES = {
    "exact": "the mean of all gradients in full precision",
    "8bit": "that mean, rounded to no less than 8 bits per element",
    "compensated": "values not sent now are stored and sent later (error feedback)",
    "any": "everything else: weights that differ between ranks, another optimizer",
}

#: The accuracy of the predictions and their limits, as docs/how-to/choose-a-network.md has them.
ACCURACY = (
    "The simulator predicts 20 of 21 published step times within 13 %, and six step times with 5 ms of latency within "
    "20 % (docs/results.md)."
)
LIMITS = (
    "It does not model the effect of an algorithm on the loss; congestion, jitter, packet loss, and TCP's slow start "
    "after idle periods; the time in which Python launches operations, and caches; the search for a bucket plan in the "
    "first steps (docs/explanation/simulator.md)."
)
UNTRIED = (
    "commlib has not run on a GPU yet: the work of algorithms on a GPU is computed from published rates "
    "(docs/explanation/kernels.md)."
)


def _limit(value: float, of: str) -> str:
    return "no limit" if math.isinf(value) else f"at most {value:g} {of}"
